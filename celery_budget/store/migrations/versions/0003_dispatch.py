"""Whole chains, priorities, orders, brokers, quarantine, untold results, relays and backlog."""

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

#: Tables of which most rows come and go: dead ones are cleared away while they are few, and an
#: update finds room on its own page.
CHURN = ("budget_outbox", "budget_balances", "budget_attempts", "budget_reservations")
STORAGE = {
    "fillfactor": "80",
    "autovacuum_vacuum_scale_factor": "0.02",
    "autovacuum_vacuum_threshold": "1000",
    "autovacuum_vacuum_insert_scale_factor": "0.1",
    "autovacuum_analyze_scale_factor": "0.05",
}

#: The columns of a message that outbox, parked work and quarantine share.
WHERETO = ("rank", "order_key", "broker")


def upgrade() -> None:
    op.add_column("budget_reservations", sa.Column("plan_id", sa.Uuid))
    op.add_column("budget_reservations", sa.Column("step", sa.SmallInteger))
    _index("plan", "budget_reservations", ["root", "plan_id"], "state = 'planned'")
    for table in ("budget_outbox", "budget_parked"):
        op.add_column(table, sa.Column("rank", sa.SmallInteger, nullable=False, server_default="5"))
        op.add_column(table, sa.Column("order_key", sa.String(255)))
        op.add_column(table, sa.Column("broker", sa.String(255), nullable=False, server_default=""))
    op.add_column("budget_outbox", sa.Column("taken_by", sa.Uuid))
    behind = sa.Column("behind", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("budget_outbox", behind)
    nexts = ["root", "broker", "rank", "due_us", "outbox_id"]
    _index("next", "budget_outbox", nexts, "state = 'due' AND NOT behind")
    order = ["root", "order_key", "created_us", "outbox_id"]
    unpublished = "order_key IS NOT NULL AND state <> 'published'"
    _index("order", "budget_outbox", order, unpublished)
    kept = "state = 'published' AND reservation_id IS NULL"
    _index("kept", "budget_outbox", ["root", "outbox_id"], kept)
    _create_quarantine()
    _create_untold()
    op.create_table(
        "budget_relays",
        sa.Column("root", sa.String(255)),
        sa.Column("relay_id", sa.Uuid),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("started_us", sa.BigInteger, nullable=False),
        sa.Column("seen_us", sa.BigInteger, nullable=False),
        sa.Column("sleeping", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("root", "relay_id", name="pk_budget_relays"),
    )
    op.create_table(
        "budget_backlog",
        sa.Column("root", sa.String(255)),
        sa.Column("messages", sa.BigInteger, nullable=False),
        sa.Column("counted_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("root", name="pk_budget_backlog"),
    )
    if op.get_bind().dialect.name == "postgresql":
        _store(STORAGE)
        op.execute("DROP FUNCTION budget_reserve")
        _run("wake_3.sql", "backlog_3.sql", "reserve_3.sql")


def _create_quarantine() -> None:
    op.create_table(
        "budget_quarantine",
        sa.Column("root", sa.String(255)),
        sa.Column("quarantine_id", sa.Uuid),
        sa.Column("request", sa.Text),
        sa.Column("reservation_id", sa.Uuid),
        sa.Column("parent_id", sa.Uuid),
        sa.Column("task_id", sa.Text, nullable=False),
        sa.Column("task_name", sa.Text, nullable=False),
        sa.Column("reason", sa.String(16), nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("quarantined_us", sa.BigInteger, nullable=False),
        sa.Column("due_us", sa.BigInteger, nullable=False),
        sa.Column("expires_us", sa.BigInteger),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("envelope", sa.Text, nullable=False),
        sa.Column("rank", sa.SmallInteger, nullable=False),
        sa.Column("order_key", sa.String(255)),
        sa.Column("broker", sa.String(255), nullable=False),
        sa.PrimaryKeyConstraint("root", "quarantine_id", name="pk_budget_quarantine"),
    )
    _index("task", "budget_quarantine", ["root", "task_id"])


def _create_untold() -> None:
    op.create_table(
        "budget_untold",
        sa.Column("root", sa.String(255)),
        sa.Column("untold_id", sa.Uuid),
        sa.Column("task_id", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("reservation_id", sa.Uuid),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("due_us", sa.BigInteger, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("root", "untold_id", name="pk_budget_untold"),
    )
    _index("due", "budget_untold", ["root", "due_us"])
    _index("task", "budget_untold", ["root", "task_id"])


def _store(parameters: dict[str, str]) -> None:
    written = ", ".join(f"{name} = {value}" for name, value in parameters.items())
    for table in CHURN:
        op.execute(f"ALTER TABLE {table} SET ({written})")


def _run(*files: str) -> None:
    for name in files:
        op.get_bind().exec_driver_sql(Path(__file__).with_name(name).read_text("utf-8"))


def _index(name: str, table: str, columns: list[str], where: str | None = None) -> None:
    condition: Any = None if where is None else sa.text(where)
    op.create_index(
        f"ix_{table}_{name}", table, columns, postgresql_where=condition, sqlite_where=condition
    )


def downgrade() -> None:
    """Go back to the second release. What it does not know is lost: quarantine, untold results.

    Not where messages would go to another broker there, or planned steps would be held for ever.
    """
    bind = op.get_bind()
    planned = bind.scalar(
        sa.text("SELECT count(*) FROM budget_reservations WHERE state = 'planned'")
    )
    elsewhere = sum(
        int(bind.scalar(sa.text(f"SELECT count(*) FROM {table} WHERE broker <> ''")) or 0)  # noqa: S608
        for table in ("budget_outbox", "budget_parked")
    )
    if planned or elsewhere:
        raise ValueError(
            "the ledger has chains that were reserved whole, or messages for other brokers, which "
            "version 0002 does not know; nothing was changed"
        )
    postgresql = bind.dialect.name == "postgresql"
    if postgresql:
        for function in ("budget_reserve", "budget_backlog", "budget_wake"):
            op.execute(f"DROP FUNCTION {function}")
        for table in CHURN:
            op.execute(f"ALTER TABLE {table} RESET ({', '.join(STORAGE)})")
    for table in ("quarantine", "untold", "relays", "backlog"):
        op.drop_table(f"budget_{table}")
    for name in ("next", "order", "kept"):
        op.drop_index(f"ix_budget_outbox_{name}", "budget_outbox")
    op.drop_index("ix_budget_reservations_plan", "budget_reservations")
    for column in ("plan_id", "step"):
        op.drop_column("budget_reservations", column)
    for column in ("taken_by", "behind"):
        op.drop_column("budget_outbox", column)
    for table in ("budget_outbox", "budget_parked"):
        for column in WHERETO:
            op.drop_column(table, column)
    if postgresql:
        _run("reserve_2.sql")
