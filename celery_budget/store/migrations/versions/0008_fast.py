"""Budgets over several rows, and what a worker says in one statement."""

from pathlib import Path

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _say_at_once()
    _lock_by_functions()


def downgrade() -> None:
    _lock_by_statements()
    _say_no_more()


#: Each calls what comes before it.
AT_ONCE = ("close", "claim", "record", "end")


def _say_at_once() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for name in AT_ONCE:
            _run(f"{name}_8.sql")


def _say_no_more() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for name in reversed(AT_ONCE):
            op.execute(f"DROP FUNCTION budget_{name}")


def _lock_by_functions() -> None:
    if op.get_bind().dialect.name == "postgresql":
        _run("lock_8.sql")


def _lock_by_statements() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_try_lock")
        op.execute("DROP FUNCTION budget_lock")


def _run(name: str) -> None:
    op.get_bind().exec_driver_sql(Path(__file__).with_name(name).read_text("utf-8"))
