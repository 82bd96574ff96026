"""A budget over several rows is admitted by the short way too, where one of its rows has room."""

from pathlib import Path

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _replace("reserve_10.sql")


def downgrade() -> None:
    _replace("reserve_8.sql")


def _replace(name: str) -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_reserve")
        op.get_bind().exec_driver_sql(Path(__file__).with_name(name).read_text("utf-8"))
        # As of revision 0008, with which it goes.
        op.execute("ALTER FUNCTION budget_reserve SET enable_seqscan = off")
