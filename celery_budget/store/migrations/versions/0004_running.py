"""Effects, what usage was read from, and by which prices estimates were made."""

from pathlib import Path

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("budget_usage", sa.Column("details", sa.Text))
    op.add_column("budget_usage", sa.Column("assumed", sa.BigInteger))
    op.add_column("budget_reservations", sa.Column("prices", sa.Text))
    op.add_column("budget_reservations", sa.Column("cancelled_us", sa.BigInteger))
    op.add_column("budget_quarantine", sa.Column("attempts", sa.Integer))
    op.add_column("budget_quarantine", sa.Column("used", sa.Text))
    op.create_table(
        "budget_effects",
        sa.Column("root", sa.String(255)),
        sa.Column("reservation_id", sa.Uuid),
        sa.Column("key", sa.String(255)),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("value", sa.Text),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("root", "reservation_id", "key", name="pk_budget_effects"),
    )
    op.create_index("ix_budget_effects_created", "budget_effects", ["root", "created_us"])
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_reserve")
        _run("reserve_4.sql")


def _run(name: str) -> None:
    op.get_bind().exec_driver_sql(Path(__file__).with_name(name).read_text("utf-8"))


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_reserve")
        _run("reserve_3.sql")
    op.drop_table("budget_effects")
    for column in ("used", "attempts"):
        op.drop_column("budget_quarantine", column)
    for column in ("cancelled_us", "prices"):
        op.drop_column("budget_reservations", column)
    for column in ("details", "assumed"):
        op.drop_column("budget_usage", column)
