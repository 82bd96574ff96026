"""Lanes: what a message weighs and whose share it counts to; deadlines; shadow estimates."""

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

#: Of a lane, none for no limit.
LIMITS = (
    "max_queued_jobs",
    "max_queued_units",
    "max_running_jobs",
    "max_running_units",
    "burst_units",
    "max_waiting_jobs",
    "max_waiting_units",
    "max_wait_us",
)
HELD = "state = 'held'"
#: Of the outbox: the columns and the condition of each.
INDEXES = {
    "waits": (["root", "lane", "due_us"], HELD),
    "held": (["root", "lane", "behind", "tenant", "due_us", "outbox_id"], HELD),
    "light": (["root", "lane", "behind", "tenant", "weight", "outbox_id"], HELD),
    "ends": (["root", "expires_us"], f"{HELD} AND expires_us IS NOT NULL"),
    "released": (["root", "lane"], "lane IS NOT NULL AND state IN ('due', 'published')"),
}


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
    op.add_column(
        "budget_budgets", sa.Column("weight", sa.Integer, nullable=False, server_default="1")
    )
    op.add_column(
        "budget_lines", sa.Column("earlier", sa.BigInteger, nullable=False, server_default="0")
    )
    _create_lanes()
    measured = sa.text("state = 'settled' AND NOT unmetered")
    op.create_index(
        "ix_budget_reservations_measured",
        "budget_reservations",
        ["root", "stage", "ended_us"],
        postgresql_where=measured,
        sqlite_where=measured,
    )
    _park()
    if op.get_bind().dialect.name == "postgresql":
        for function in ("budget_reserve", "budget_backlog"):
            op.execute(f"DROP FUNCTION {function}")
        for name in ("backlog_6.sql", "lane_full_6.sql", "reserve_6.sql", "pace_6.sql"):
            _run(name)


def _create_lanes() -> None:
    op.create_table(
        "budget_lanes",
        sa.Column("root", sa.String(255)),
        sa.Column("name", sa.String(255)),
        *(sa.Column(name, sa.BigInteger) for name in LIMITS),
        sa.Column("paused", sa.Boolean, nullable=False),
        sa.Column("preflight", sa.Boolean, nullable=False),
        sa.Column("ageing", sa.BigInteger, nullable=False),
        sa.Column("budgets", sa.Text, nullable=False, server_default="[]"),
        sa.Column("deleted", sa.Boolean, nullable=False),
        sa.Column("ticked_us", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("after_tenant", sa.String(255), nullable=False, server_default=""),
        sa.Column("awake", sa.Boolean),
        sa.Column("checked_us", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("asleep_reason", sa.Text),
        sa.PrimaryKeyConstraint("root", "name", name="pk_budget_lanes"),
    )
    op.create_table(
        "budget_lane_queues",
        sa.Column("root", sa.String(255)),
        sa.Column("queue", sa.String(255)),
        sa.Column("lane", sa.String(255), nullable=False),
        sa.PrimaryKeyConstraint("root", "queue", name="pk_budget_lane_queues"),
    )
    op.create_index("ix_budget_lane_queues_lane", "budget_lane_queues", ["root", "lane"])
    op.create_table(
        "budget_lane_tallies",
        sa.Column("root", sa.String(255)),
        sa.Column("lane", sa.String(255)),
        sa.Column("jobs", sa.BigInteger, nullable=False),
        sa.Column("units", sa.BigInteger, nullable=False),
        sa.Column("counted_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("root", "lane", name="pk_budget_lane_tallies"),
    )
    op.create_table(
        "budget_shares",
        sa.Column("root", sa.String(255)),
        sa.Column("lane", sa.String(255)),
        sa.Column("name", sa.String(255)),
        sa.Column("own", sa.Boolean),
        *(
            sa.Column(name, sa.BigInteger, nullable=False)
            for name in ("finish", "rest", "floor", "served_us")
        ),
        sa.PrimaryKeyConstraint("root", "lane", "name", "own", name="pk_budget_shares"),
    )
    op.create_index("ix_budget_shares_served", "budget_shares", ["root", "lane", "served_us"])
    op.create_table(
        "budget_share_returns",
        sa.Column("root", sa.String(255)),
        sa.Column("lane", sa.String(255)),
        sa.Column("outbox_id", sa.Uuid),
        sa.Column("tenant", sa.String(255), nullable=False),
        sa.Column("units", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("root", "lane", "outbox_id", name="pk_budget_share_returns"),
    )
    for name, (columns, where) in INDEXES.items():
        condition: Any = sa.text(where)
        op.create_index(
            f"ix_budget_outbox_{name}",
            "budget_outbox",
            columns,
            postgresql_where=condition,
            sqlite_where=condition,
        )


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
    for name in ("ahead_us", "window_us"):
        op.add_column("budget_parked", sa.Column(name, sa.BigInteger))
    # Which one was short is not known; the first it draws on is as good.
    op.execute("UPDATE budget_parked SET budget = owner")
    op.execute("UPDATE budget_parked SET deadline_us = expires_us WHERE expires_us < deadline_us")
    op.drop_index("ix_budget_parked_checked", "budget_parked")
    for name, columns in PARKED.items():
        op.create_index(f"ix_budget_parked_{name}", "budget_parked", ["root", *columns])
    for name, columns in (("ahead", []), ("window", ["window_us"])):
        given = sa.text(f"{name}_us IS NOT NULL")
        op.create_index(
            f"ix_budget_parked_{name}",
            "budget_parked",
            ["root", "budget", *columns],
            postgresql_where=given,
            sqlite_where=given,
        )


def _run(name: str) -> None:
    op.get_bind().exec_driver_sql(Path(__file__).with_name(name).read_text("utf-8"))


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for function in ("reserve", "lane_full", "lane_waiting", "pace", "backlog"):
            op.execute(f"DROP FUNCTION budget_{function}")
        _run("backlog_3.sql")
        _run("reserve_4.sql")
    op.drop_table("budget_reuse")
    for name in ("ahead", "window", *PARKED):
        op.drop_index(f"ix_budget_parked_{name}", "budget_parked")
    op.create_index("ix_budget_parked_checked", "budget_parked", ["root", "checked_us"])
    for column in ("window_us", "ahead_us", "turn", "amount", "reason", "budget"):
        op.drop_column("budget_parked", column)
    op.drop_index("ix_budget_reservations_measured", "budget_reservations")
    # What a lane holds is published.
    op.execute("UPDATE budget_outbox SET state = 'due' WHERE state = 'held'")
    for name in INDEXES:
        op.drop_index(f"ix_budget_outbox_{name}", "budget_outbox")
    for table in ("share_returns", "shares", "lane_tallies", "lane_queues", "lanes"):
        op.drop_table(f"budget_{table}")
    op.drop_column("budget_lines", "earlier")
    op.drop_column("budget_budgets", "weight")
    for column in ("weight", "tenant", "lane"):
        op.drop_column("budget_outbox", column)
    for column in ("shadows", "deadline_us", "lane"):
        op.drop_column("budget_reservations", column)
