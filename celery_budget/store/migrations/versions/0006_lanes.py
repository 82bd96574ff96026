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
    _park()
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_reserve")
        _run("reserve_6.sql")


#: Of parked work: by what it is found.
PARKED = {
    "deadline": ["deadline_us"],
    "turn": ["budget", "turn", "created_us"],
    "owner": ["budget", "owner", "turn"],
    "amount": ["budget", "amount"],
    "oldest": ["budget", "created_us"],
}


def _park() -> None:
    """Parked work waits in the queue of the budget that is short."""
    for name, kind, default in (
        ("budget", sa.String(255), ""),
        ("reason", sa.String(16), "held"),
        ("amount", sa.BigInteger, "0"),
        ("turn", sa.BigInteger, "0"),
    ):
        column = sa.Column(name, kind, nullable=False, server_default=default)
        op.add_column("budget_parked", column)
    op.add_column("budget_parked", sa.Column("ahead_us", sa.BigInteger))
    # Which one was short is not known; the first it draws on is as good.
    op.execute("UPDATE budget_parked SET budget = owner")
    op.execute("UPDATE budget_parked SET deadline_us = expires_us WHERE expires_us < deadline_us")
    op.drop_index("ix_budget_parked_checked", "budget_parked")
    for name, columns in PARKED.items():
        op.create_index(f"ix_budget_parked_{name}", "budget_parked", ["root", *columns])
    op.create_index(
        "ix_budget_parked_ahead",
        "budget_parked",
        ["root", "budget"],
        postgresql_where=sa.text("ahead_us IS NOT NULL"),
        sqlite_where=sa.text("ahead_us IS NOT NULL"),
    )


def _run(name: str) -> None:
    op.get_bind().exec_driver_sql(Path(__file__).with_name(name).read_text("utf-8"))


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_reserve")
        _run("reserve_4.sql")
    for name in ("ahead", *PARKED):
        op.drop_index(f"ix_budget_parked_{name}", "budget_parked")
    op.create_index("ix_budget_parked_checked", "budget_parked", ["root", "checked_us"])
    for column in ("ahead_us", "turn", "amount", "reason", "budget"):
        op.drop_column("budget_parked", column)
    for column in ("weight", "tenant", "lane"):
        op.drop_column("budget_outbox", column)
    for column in ("shadows", "deadline_us", "lane"):
        op.drop_column("budget_reservations", column)
