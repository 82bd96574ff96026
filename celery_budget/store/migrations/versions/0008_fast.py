"""Budgets over several rows, and what a worker says in one statement."""

from pathlib import Path

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _wake_once()


def downgrade() -> None:
    _wake_each_time()


def _wake_once() -> None:
    """Of all that commit while a relay sleeps one tells it."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_wake")
        _run("wake_8.sql")


def _wake_each_time() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_wake")
        _run("wake_3.sql")


def _run(name: str) -> None:
    op.get_bind().exec_driver_sql(Path(__file__).with_name(name).read_text("utf-8"))
