"""What reports are counted from, which alerts were given, and what is told of one request."""

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

UNTALLIED = "ended_us IS NOT NULL AND NOT tallied"
#: Whole numbers of any size.
EXACT = sa.Numeric().with_variant(sa.Text(), "sqlite")
#: What is told of one request, beyond what its work needs.
TOLD: tuple[tuple[str, str, Any], ...] = (
    ("attempts", "error", sa.String(255)),
    ("attempts", "queue", sa.Text),
    ("attempts", "publishes", sa.Integer),
    ("attempts", "published_us", sa.BigInteger),
    ("reservations", "parked_us", sa.BigInteger),
    ("reservations", "unparked_us", sa.BigInteger),
    ("reservations", "parked_budget", sa.String(255)),
    ("reservations", "parked_reason", sa.String(16)),
)
#: And what it is found by.
FOUND_BY = (("journal", "reservation", "reservation_id"), ("reservations", "parent", "parent_id"))


def upgrade() -> None:
    _tell()
    _upgrade_tallies()
    _create_alerts()
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_reserve")
        _run("reserve_7.sql")


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_reserve")
        _run("reserve_6.sql")
    _drop_alerts()
    _downgrade_tallies()
    _tell_no_more()


def _upgrade_tallies() -> None:
    """What has ended is tallied by the sweep, all of it."""
    op.add_column("budget_reservations", sa.Column("due_us", sa.BigInteger))
    for name, default in (("admitted", sa.true()), ("tallied", sa.false())):
        op.add_column(
            "budget_reservations",
            sa.Column(name, sa.Boolean, nullable=False, server_default=default),
        )
    # What was parked and never admitted was written when it ended, by one statement, and did
    # nothing to a balance.
    op.execute(
        "UPDATE budget_reservations SET admitted = false"
        " WHERE state = 'released' AND attempts = 0 AND ended_us - created_us < 100"
        " AND NOT EXISTS (SELECT 1 FROM budget_journal j WHERE j.root = budget_reservations.root"
        " AND j.reservation_id = budget_reservations.reservation_id)"
    )
    # Why it ended is told from now on by the end itself.
    op.execute(
        "UPDATE budget_reservations SET reason = (SELECT min(q.reason) FROM budget_quarantine q"
        " WHERE q.root = budget_reservations.root"
        " AND q.reservation_id = budget_reservations.reservation_id)"
        " WHERE state = 'settled' AND reason IS NULL AND EXISTS (SELECT 1 FROM budget_quarantine q"
        " WHERE q.root = budget_reservations.root"
        " AND q.reservation_id = budget_reservations.reservation_id"
        " AND q.reason IN ('max_attempts', 'retry_within'))"
    )
    op.create_index(
        "ix_budget_reservations_untallied",
        "budget_reservations",
        ["root", "ended_us"],
        postgresql_where=sa.text(UNTALLIED),
        sqlite_where=sa.text(UNTALLIED),
    )
    op.create_index(
        "ix_budget_reservations_created",
        "budget_reservations",
        ["created_us"],
        postgresql_using="brin",
        postgresql_with={"autosummarize": True, "pages_per_range": 32},
    )
    op.create_table(
        "budget_tallies",
        sa.Column("root", sa.String(255)),
        sa.Column("tally_id", sa.Uuid),
        sa.Column("budget", sa.String(255), nullable=False),
        sa.Column("unit", sa.String(255), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("day", sa.Integer, nullable=False),
        *(
            sa.Column(name, sa.Text, nullable=False)
            for name in ("stage", "task_name", "estimator", "estimator_version")
        ),
        sa.Column("lane", sa.String(255), nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        *(sa.Column(name, EXACT, nullable=False) for name in ("estimated", "charged", "excess")),
        sa.Column("exceeded", sa.BigInteger, nullable=False),
        sa.Column("figures", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("root", "tally_id", name="pk_budget_tallies"),
    )
    op.create_index("ix_budget_tallies_day", "budget_tallies", ["root", "budget", "owner", "day"])
    _keep_refusals(
        "root, 0, budget, '', reason, slot, count, refusal_id, task_name, requested, limit_amount,"
        " reserved, spent, refused_us",
        sa.Column("day", sa.Integer),
        sa.Column("budget", sa.String(255)),
        sa.Column("stage", sa.Text),
        sa.Column("reason", sa.String(16)),
        sa.Column("slot", sa.SmallInteger),
        key=("root", "day", "budget", "stage", "reason", "slot"),
    )
    op.create_index(
        "ix_budget_refusals_slots",
        "budget_refusals",
        ["root", "day"],
        postgresql_where=sa.text("slot > 0"),
        sqlite_where=sa.text("slot > 0"),
    )


def _downgrade_tallies() -> None:
    _keep_refusals(
        "root, budget, reason, slot, n, refusal_id, stage, task_name, requested, limit_amount,"
        " reserved, spent, refused_us",
        sa.Column("budget", sa.String(255)),
        sa.Column("reason", sa.String(16)),
        sa.Column("slot", sa.SmallInteger),
        key=("root", "budget", "reason", "slot"),
        stage=sa.Column("stage", sa.Text, nullable=False),
        source="(SELECT r.*, sum(count) OVER (PARTITION BY root, budget, reason, slot) AS n,"
        " row_number() OVER (PARTITION BY root, budget, reason, slot"
        " ORDER BY refused_us DESC, refusal_id) AS k FROM refusals_before r) AS counted"
        " WHERE k = 1",
    )
    op.drop_table("budget_tallies")
    for name in ("untallied", "created"):
        op.drop_index(f"ix_budget_reservations_{name}", "budget_reservations")
    for name in ("tallied", "admitted", "due_us"):
        op.drop_column("budget_reservations", name)


def _keep_refusals(
    values: str,
    *first: sa.Column[Any],
    key: tuple[str, ...],
    stage: sa.Column[Any] | None = None,
    source: str = "refusals_before",
) -> None:
    """Make the table of refusals with another key, from what the one before has counted."""
    if stage is not None:
        op.drop_index("ix_budget_refusals_slots", "budget_refusals")
    op.rename_table("budget_refusals", "refusals_before")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE refusals_before DROP CONSTRAINT pk_budget_refusals")
    op.create_table(
        "budget_refusals",
        sa.Column("root", sa.String(255)),
        *first,
        sa.Column("count", sa.BigInteger, nullable=False),
        sa.Column("refusal_id", sa.Uuid, nullable=False),
        *(() if stage is None else (stage,)),
        sa.Column("task_name", sa.Text, nullable=False),
        sa.Column("requested", sa.BigInteger, nullable=False),
        sa.Column("limit_amount", sa.BigInteger),
        sa.Column("reserved", sa.BigInteger),
        sa.Column("spent", sa.BigInteger),
        sa.Column("refused_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint(*key, name="pk_budget_refusals"),
    )
    op.execute(f"INSERT INTO budget_refusals SELECT {values} FROM {source}")  # noqa: S608 - constants
    op.drop_table("refusals_before")


def _run(name: str) -> None:
    op.get_bind().exec_driver_sql(Path(__file__).with_name(name).read_text("utf-8"))


def _tell() -> None:
    for table, name, kind in TOLD:
        op.add_column(f"budget_{table}", sa.Column(name, kind))
    for table, name, column in FOUND_BY:
        given = sa.text(f"{column} IS NOT NULL")
        op.create_index(
            f"ix_budget_{table}_{name}",
            f"budget_{table}",
            ["root", column],
            postgresql_where=given,
            sqlite_where=given,
        )


def _tell_no_more() -> None:
    for table, name, _ in FOUND_BY:
        op.drop_index(f"ix_budget_{table}_{name}", f"budget_{table}")
    for table, name, _ in reversed(TOLD):
        op.drop_column(f"budget_{table}", name)


def _create_alerts() -> None:
    op.add_column("budget_budgets", sa.Column("alert_at", sa.String(255)))
    op.create_table(
        "budget_alerts",
        sa.Column("root", sa.String(255)),
        sa.Column("kind", sa.String(32)),
        sa.Column("subject", sa.Text),
        sa.Column("window_us", sa.BigInteger),
        sa.Column("threshold", sa.BigInteger),
        sa.Column("alert_id", sa.Uuid, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("due_us", sa.BigInteger, nullable=False),
        sa.Column("since_us", sa.BigInteger, nullable=False),
        sa.Column("told_us", sa.BigInteger),
        sa.Column("end_us", sa.BigInteger, nullable=False, server_default=str(2**63 - 1)),
        sa.Column("said", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint(
            "root", "kind", "subject", "window_us", "threshold", name="pk_budget_alerts"
        ),
    )
    due = sa.text("state = 'due'")
    op.create_index(
        "ix_budget_alerts_due",
        "budget_alerts",
        ["root", "due_us"],
        postgresql_where=due,
        sqlite_where=due,
    )
    op.create_index("ix_budget_alerts_end", "budget_alerts", ["root", "end_us"])
    op.create_table(
        "budget_alert_looks",
        sa.Column("root", sa.String(255)),
        sa.Column("what", sa.String(32)),
        sa.Column("looked_us", sa.BigInteger, nullable=False),
        sa.Column("after_name", sa.String(255), nullable=False),
        sa.PrimaryKeyConstraint("root", "what", name="pk_budget_alert_looks"),
    )


def _drop_alerts() -> None:
    op.drop_table("budget_alert_looks")
    op.drop_table("budget_alerts")
    op.drop_column("budget_budgets", "alert_at")
