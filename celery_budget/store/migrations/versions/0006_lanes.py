"""Lanes: what a message weighs and whose share it counts to; deadlines; shadow estimates."""

from pathlib import Path

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name, kind in (
        ("lane", sa.String(255)),
        ("deadline_us", sa.BigInteger),
        ("shadows", sa.Text),
    ):
        op.add_column("budget_reservations", sa.Column(name, kind))
    for name in ("lane", "tenant"):
        op.add_column("budget_outbox", sa.Column(name, sa.String(255)))
    op.add_column(
        "budget_outbox", sa.Column("weight", sa.BigInteger, nullable=False, server_default="0")
    )
    op.create_table(
        "budget_reuse",
        sa.Column("root", sa.String(255)),
        sa.Column("owner", sa.String(255)),
        sa.Column("key", sa.String(64)),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("task_id", sa.Text, nullable=False),
        sa.Column("kept_us", sa.BigInteger, nullable=False),
        sa.Column("until_us", sa.BigInteger, nullable=False),
        sa.Column("payload", sa.Text),
        sa.PrimaryKeyConstraint("root", "owner", "key", name="pk_budget_reuse"),
    )
    op.create_index("ix_budget_reuse_task", "budget_reuse", ["root", "task_id"])
    op.create_index("ix_budget_reuse_until", "budget_reuse", ["root", "until_us"])
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_reserve")
        _run("reserve_6.sql")


def _run(name: str) -> None:
    op.get_bind().exec_driver_sql(Path(__file__).with_name(name).read_text("utf-8"))


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_reserve")
        _run("reserve_4.sql")
    op.drop_table("budget_reuse")
    for column in ("weight", "tenant", "lane"):
        op.drop_column("budget_outbox", column)
    for column in ("shadows", "deadline_us", "lane"):
        op.drop_column("budget_reservations", column)
