"""What most requests are is written by one statement."""

from pathlib import Path

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _reserve_by("reserve_9.sql")


def downgrade() -> None:
    _reserve_by("reserve_8.sql")


def _reserve_by(name: str) -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_reserve")
        op.get_bind().exec_driver_sql(Path(__file__).with_name(name).read_text("utf-8"))
        # As 0008 has it: no plan that was made while a table was nearly empty reads all of it.
        op.execute("ALTER FUNCTION budget_reserve SET enable_seqscan = off")
