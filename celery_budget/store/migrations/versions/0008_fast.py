"""Budgets over several rows, and what a worker says in one statement."""

from pathlib import Path

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _upgrade_relay()


def downgrade() -> None:
    _downgrade_relay()


def _upgrade_relay() -> None:
    """What was published is marked by one statement."""
    if op.get_bind().dialect.name == "postgresql":
        _run("mark_8.sql")


def _downgrade_relay() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_mark_published")


def _run(name: str) -> None:
    op.get_bind().exec_driver_sql(Path(__file__).with_name(name).read_text("utf-8"))
