"""A budget over several rows is admitted, and what was used within its hold settled, by less."""

from pathlib import Path

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _replace(10)


def downgrade() -> None:
    _replace(8)


def _replace(since: int) -> None:
    if op.get_bind().dialect.name == "postgresql":
        for name in ("reserve", "end"):
            op.execute(f"DROP FUNCTION budget_{name}")
            file = Path(__file__).with_name(f"{name}_{since}.sql")
            op.get_bind().exec_driver_sql(file.read_text("utf-8"))
            # As of revision 0008, with which it goes.
            op.execute(f"ALTER FUNCTION budget_{name} SET enable_seqscan = off")
