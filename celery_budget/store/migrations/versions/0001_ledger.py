"""The ledger: budgets, balances, reservations, lines, attempts, usage, outbox, parked, refusals."""

from pathlib import Path

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "budget_budgets",
        sa.Column("root", sa.String(255)),
        sa.Column("name", sa.String(255)),
        sa.Column("unit", sa.String(255), nullable=False),
        sa.Column("period", sa.String(16), nullable=False),
        sa.Column("limit_amount", sa.BigInteger),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("updated_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("root", "name", name="pk_budget_budgets"),
        sa.CheckConstraint("limit_amount >= 0", name=op.f("ck_budget_budgets_limit")),
    )
    op.create_table(
        "budget_balances",
        sa.Column("root", sa.String(255)),
        sa.Column("budget", sa.String(255)),
        sa.Column("window_us", sa.BigInteger),
        sa.Column("stripe", sa.SmallInteger),
        sa.Column("reserved", sa.BigInteger, nullable=False),
        sa.Column("spent", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("root", "budget", "window_us", "stripe", name="pk_budget_balances"),
        sa.CheckConstraint("reserved >= 0", name=op.f("ck_budget_balances_reserved")),
        sa.CheckConstraint("spent >= 0", name=op.f("ck_budget_balances_spent")),
    )
    op.create_table(
        "budget_reservations",
        sa.Column("root", sa.String(255)),
        sa.Column("reservation_id", sa.Uuid),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("nesting", sa.Integer, nullable=False),
        sa.Column("task_id", sa.Text, nullable=False),
        sa.Column("task_name", sa.Text, nullable=False),
        sa.Column("stage", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.Text, nullable=False),
        sa.Column("opaque", sa.Boolean, nullable=False),
        sa.Column("estimator", sa.Text, nullable=False),
        sa.Column("estimator_version", sa.Text, nullable=False),
        sa.Column("parent_id", sa.Uuid),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("retries", sa.Integer, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("deliveries", sa.Integer, nullable=False),
        sa.Column("unreserved", sa.Boolean, nullable=False),
        sa.Column("unmetered", sa.Boolean, nullable=False),
        sa.Column("over", sa.Boolean, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("ended_us", sa.BigInteger),
        sa.PrimaryKeyConstraint("root", "reservation_id", name="pk_budget_reservations"),
    )
    _index(
        "ux_budget_reservations_request",
        "budget_reservations",
        ["root", "owner", "request_id", "nesting"],
        where="state <> 'released'",
        unique=True,
    )
    _index("ix_budget_reservations_task", "budget_reservations", ["root", "task_id"])
    _index(
        "ix_budget_reservations_open",
        "budget_reservations",
        ["root", "state"],
        where="ended_us IS NULL",
    )
    op.create_table(
        "budget_lines",
        sa.Column("root", sa.String(255)),
        sa.Column("reservation_id", sa.Uuid),
        sa.Column("line", sa.SmallInteger),
        sa.Column("budget", sa.String(255), nullable=False),
        sa.Column("window_us", sa.BigInteger, nullable=False),
        sa.Column("stripe", sa.SmallInteger, nullable=False),
        sa.Column("charge", sa.String(16), nullable=False),
        sa.Column("estimate", sa.BigInteger, nullable=False),
        sa.Column("reserved", sa.BigInteger, nullable=False),
        sa.Column("used", sa.BigInteger, nullable=False),
        sa.Column("settled", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("root", "reservation_id", "line", name="pk_budget_lines"),
        sa.CheckConstraint(
            "reserved >= 0 AND used >= 0 AND settled >= 0", name=op.f("ck_budget_lines_amounts")
        ),
    )
    _index("ix_budget_lines_balance", "budget_lines", ["root", "budget", "window_us", "stripe"])
    op.create_table(
        "budget_attempts",
        sa.Column("root", sa.String(255)),
        sa.Column("reservation_id", sa.Uuid),
        sa.Column("attempt", sa.Integer),
        sa.Column("claim_id", sa.Uuid, nullable=False),
        sa.Column("retries", sa.Integer, nullable=False),
        sa.Column("worker", sa.Text, nullable=False),
        sa.Column("boot_id", sa.Uuid, nullable=False),
        sa.Column("late_ack", sa.Boolean, nullable=False),
        sa.Column("started_us", sa.BigInteger, nullable=False),
        sa.Column("ended_us", sa.BigInteger),
        sa.Column("outcome", sa.String(16)),
        sa.Column("payload", sa.Text),
        sa.Column("lease_until_us", sa.BigInteger),
        sa.Column("replays", sa.Integer, nullable=False),
        sa.Column("repeated", sa.BigInteger),
        sa.PrimaryKeyConstraint("root", "reservation_id", "attempt", name="pk_budget_attempts"),
    )
    _index(
        "ix_budget_attempts_lease",
        "budget_attempts",
        ["root", "lease_until_us"],
        where="lease_until_us IS NOT NULL",
    )
    op.create_table(
        "budget_usage",
        sa.Column("root", sa.String(255)),
        sa.Column("reservation_id", sa.Uuid),
        sa.Column("key", sa.String(300)),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("late", sa.Boolean, nullable=False),
        sa.Column("recorded_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("root", "reservation_id", "key", name="pk_budget_usage"),
        sa.CheckConstraint("amount >= 0", name=op.f("ck_budget_usage_amount")),
    )
    op.create_table(
        "budget_outbox",
        sa.Column("root", sa.String(255)),
        sa.Column("outbox_id", sa.Uuid),
        sa.Column("reservation_id", sa.Uuid),
        sa.Column("parent_id", sa.Uuid),
        sa.Column("task_id", sa.Text, nullable=False),
        sa.Column("task_name", sa.Text, nullable=False),
        sa.Column("retries", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("after_attempt", sa.Integer),
        sa.Column("due_us", sa.BigInteger, nullable=False),
        sa.Column("expires_us", sa.BigInteger),
        sa.Column("publishes", sa.Integer, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("last_error", sa.Text),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("published_us", sa.BigInteger),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("envelope", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("root", "outbox_id", name="pk_budget_outbox"),
    )
    _index("ix_budget_outbox_due", "budget_outbox", ["root", "state", "due_us"])
    _index(
        "ux_budget_outbox_attempt",
        "budget_outbox",
        ["root", "reservation_id", "retries"],
        where="reservation_id IS NOT NULL",
        unique=True,
    )
    _index(
        "ux_budget_outbox_child",
        "budget_outbox",
        ["root", "parent_id", "task_id"],
        where="parent_id IS NOT NULL",
        unique=True,
    )
    op.create_table(
        "budget_parked",
        sa.Column("root", sa.String(255)),
        sa.Column("parked_id", sa.Uuid),
        sa.Column("reservation_id", sa.Uuid),
        sa.Column("after_attempt", sa.Integer),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("task_id", sa.Text, nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("nesting", sa.Integer, nullable=False),
        sa.Column("retries", sa.Integer, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("deadline_us", sa.BigInteger, nullable=False),
        sa.Column("checked_us", sa.BigInteger, nullable=False),
        sa.Column("task_name", sa.Text, nullable=False),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("due_us", sa.BigInteger, nullable=False),
        sa.Column("expires_us", sa.BigInteger),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("envelope", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("root", "parked_id", name="pk_budget_parked"),
    )
    _index(
        "ux_budget_parked_request",
        "budget_parked",
        ["root", "owner", "task_id", "nesting", "retries"],
        unique=True,
    )
    _index("ix_budget_parked_checked", "budget_parked", ["root", "checked_us"])
    _index(
        "ix_budget_parked_reservation",
        "budget_parked",
        ["root", "reservation_id"],
        where="reservation_id IS NOT NULL",
    )
    op.create_table(
        "budget_refusals",
        sa.Column("root", sa.String(255)),
        sa.Column("refusal_id", sa.Uuid),
        sa.Column("budget", sa.String(255), nullable=False),
        sa.Column("stage", sa.Text, nullable=False),
        sa.Column("task_name", sa.Text, nullable=False),
        sa.Column("requested", sa.BigInteger, nullable=False),
        sa.Column("refused_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("root", "refusal_id", name="pk_budget_refusals"),
    )
    _index("ix_budget_refusals_budget", "budget_refusals", ["root", "budget"])
    if op.get_bind().dialect.name == "postgresql":
        for name in ("short_1.sql", "reserve_1.sql"):
            op.get_bind().exec_driver_sql(Path(__file__).with_name(name).read_text("utf-8"))


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_reserve")
        op.execute("DROP FUNCTION budget_short")
    for table in (
        "refusals",
        "parked",
        "outbox",
        "usage",
        "attempts",
        "lines",
        "reservations",
        "balances",
        "budgets",
    ):
        op.drop_table(f"budget_{table}")


def _index(
    name: str, table: str, columns: list[str], where: str | None = None, unique: bool = False
) -> None:
    condition = None if where is None else sa.text(where)
    op.create_index(
        name,
        table,
        columns,
        unique=unique,
        postgresql_where=condition,
        sqlite_where=condition,
    )
