"""Parents, periods, stops, templates, several units, grants, adjustments and the journal.

What the first release admitted goes on: its balances become windows that never close, with what
they hold as the first entry of their journals.
"""

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

FOREVER = str(2**63 - 1)


def upgrade() -> None:
    _extend_budgets()
    _create_journal()
    _create_grants()
    _add("budget_reservations", sa.Column("charges_start", sa.Boolean, server_default=sa.false()))
    _add("budget_lines", sa.Column("unit", sa.String(255), server_default=""))
    _add("budget_lines", sa.Column("extended", sa.BigInteger, server_default="0"))
    op.execute(
        "UPDATE budget_lines SET unit = coalesce((SELECT b.unit FROM budget_budgets b"
        " WHERE b.root = budget_lines.root AND b.name = budget_lines.budget), '')"
    )
    op.create_table(
        "budget_extensions",
        sa.Column("root", sa.String(255)),
        sa.Column("reservation_id", sa.Uuid),
        sa.Column("attempt", sa.Integer),
        sa.Column("key", sa.String(300)),
        sa.Column("unit", sa.String(255)),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("extended_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint(
            "root", "reservation_id", "attempt", "key", "unit", name="pk_budget_extensions"
        ),
        sa.CheckConstraint("amount >= 0", name=op.f("ck_budget_extensions_amount")),
    )
    _rebuild_usage()
    _rebuild_refusals()
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_reserve")
        op.execute("DROP FUNCTION budget_short")
        _run("move_2.sql", "limit_2.sql", "decide_2.sql", "reserve_2.sql")


def _add(table: str, column: sa.Column[Any]) -> None:
    """Add a column that has a default, and so may not be empty."""
    column.nullable = False
    op.add_column(table, column)


def _extend_budgets() -> None:
    op.add_column("budget_budgets", sa.Column("parent", sa.String(255)))
    op.add_column("budget_budgets", sa.Column("limit_share", sa.Integer))
    _add("budget_budgets", sa.Column("timezone", sa.String(255), server_default="UTC"))
    _add("budget_budgets", sa.Column("anchor_day", sa.SmallInteger, server_default="1"))
    _add("budget_budgets", sa.Column("soft_stop", sa.Integer, server_default="1000000"))
    _add("budget_budgets", sa.Column("hard_stop", sa.Integer, server_default="1000000"))
    _add("budget_budgets", sa.Column("stripes", sa.SmallInteger, server_default="1"))
    _add("budget_budgets", sa.Column("state", sa.String(16), server_default="open"))
    op.add_column("budget_budgets", sa.Column("template", sa.String(255)))
    _index("ix_budget_budgets_parent", "budget_budgets", ["root", "parent"], "parent IS NOT NULL")
    _index("ix_budget_budgets_templates", "budget_budgets", ["root", "name"], "name LIKE '%*%'")
    _index("ix_budget_budgets_draining", "budget_budgets", ["root", "state"], "state = 'draining'")
    _add("budget_balances", sa.Column("end_us", sa.BigInteger, server_default=FOREVER))
    _add("budget_balances", sa.Column("entries", sa.BigInteger, server_default="0"))
    _index("ix_budget_balances_end", "budget_balances", ["root", "end_us"])


def _create_journal() -> None:
    op.create_table(
        "budget_journal",
        sa.Column("root", sa.String(255)),
        sa.Column("budget", sa.String(255)),
        sa.Column("window_us", sa.BigInteger),
        sa.Column("stripe", sa.SmallInteger),
        sa.Column("entry", sa.BigInteger),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.Column("what", sa.String(16), nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("reservation_id", sa.Uuid),
        sa.Column("reserved", sa.BigInteger, nullable=False),
        sa.Column("spent", sa.BigInteger, nullable=False),
        sa.Column("reserved_after", sa.BigInteger, nullable=False),
        sa.Column("spent_after", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text),
        sa.PrimaryKeyConstraint(
            "root", "budget", "window_us", "stripe", "entry", name="pk_budget_journal"
        ),
    )
    drawn_on = "(reserved > 0 OR spent > 0)"
    op.execute(
        "INSERT INTO budget_journal (root, budget, window_us, stripe, entry, at_us, what, who,"  # noqa: S608 - a constant
        " reserved, spent, reserved_after, spent_after, reason)"
        " SELECT b.root, b.budget, b.window_us, b.stripe, 1, g.updated_us, 'checkpoint',"
        " 'migration 0002', b.reserved, b.spent, b.reserved, b.spent, 'before there was a journal'"
        " FROM budget_balances b JOIN budget_budgets g ON g.root = b.root AND g.name = b.budget"
        f" WHERE {drawn_on}"
    )
    op.execute(f"UPDATE budget_balances SET entries = 1 WHERE {drawn_on}")  # noqa: S608 - a constant


def _create_grants() -> None:
    op.create_table(
        "budget_grants",
        sa.Column("root", sa.String(255)),
        sa.Column("key", sa.String(255)),
        sa.Column("budget", sa.String(255), nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("until_us", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("root", "key", name="pk_budget_grants"),
        sa.CheckConstraint("amount >= 0", name=op.f("ck_budget_grants_amount")),
    )
    _index("ix_budget_grants_budget", "budget_grants", ["root", "budget", "until_us"])
    op.create_table(
        "budget_adjustments",
        sa.Column("root", sa.String(255)),
        sa.Column("key", sa.String(255)),
        sa.Column("budget", sa.String(255), nullable=False),
        sa.Column("window_us", sa.BigInteger, nullable=False),
        sa.Column("stripe", sa.SmallInteger, nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("root", "key", name="pk_budget_adjustments"),
    )
    _index(
        "ix_budget_adjustments_balance",
        "budget_adjustments",
        ["root", "budget", "window_us", "stripe"],
    )


def _rebuild_usage() -> None:
    """Give usage records a unit; a reply that was recorded again is noted with its record.

    Built anew, since SQLite cannot change a key.
    """
    _set_aside("usage")
    op.create_table(
        "budget_usage",
        sa.Column("root", sa.String(255)),
        sa.Column("reservation_id", sa.Uuid),
        sa.Column("key", sa.String(300)),
        sa.Column("unit", sa.String(255)),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("late", sa.Boolean, nullable=False),
        sa.Column("recorded_us", sa.BigInteger, nullable=False),
        sa.Column("repeated_by", sa.Integer),
        sa.PrimaryKeyConstraint("root", "reservation_id", "key", "unit", name="pk_budget_usage"),
        sa.CheckConstraint("amount >= 0", name=op.f("ck_budget_usage_amount")),
    )
    # A record counted on every line, whatever its budget counts. Which records an attempt repeated
    # was not kept: any of the earlier ones stands for them.
    op.execute(
        "INSERT INTO budget_usage"
        " SELECT u.root, u.reservation_id, u.key, l.unit, u.attempt, u.amount, u.late,"
        " u.recorded_us, (SELECT max(a.attempt) FROM budget_attempts a WHERE a.root = u.root"
        " AND a.reservation_id = u.reservation_id AND a.attempt > u.attempt"
        " AND a.repeated IS NOT NULL)"
        " FROM usage_before u JOIN (SELECT DISTINCT root, reservation_id, unit FROM budget_lines) l"
        " ON l.root = u.root AND l.reservation_id = u.reservation_id"
    )
    op.drop_table("usage_before")
    op.drop_column("budget_attempts", "repeated")


def _rebuild_refusals() -> None:
    """Turn one row for each refusal into one for each budget."""
    _set_aside("refusals")
    op.create_table(
        "budget_refusals",
        sa.Column("root", sa.String(255)),
        sa.Column("budget", sa.String(255)),
        sa.Column("reason", sa.String(16)),
        sa.Column("slot", sa.SmallInteger),
        sa.Column("count", sa.BigInteger, nullable=False),
        sa.Column("refusal_id", sa.Uuid, nullable=False),
        sa.Column("stage", sa.Text, nullable=False),
        sa.Column("task_name", sa.Text, nullable=False),
        sa.Column("requested", sa.BigInteger, nullable=False),
        sa.Column("limit_amount", sa.BigInteger),
        sa.Column("reserved", sa.BigInteger),
        sa.Column("spent", sa.BigInteger),
        sa.Column("refused_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("root", "budget", "reason", "slot", name="pk_budget_refusals"),
    )
    op.execute(
        "INSERT INTO budget_refusals (root, budget, reason, slot, count, refusal_id, stage,"
        " task_name, requested, refused_us)"
        " SELECT root, budget, 'unrecorded', 0, n, refusal_id, stage, task_name, requested,"
        " refused_us FROM (SELECT r.*, count(*) OVER (PARTITION BY root, budget) AS n,"
        " row_number() OVER (PARTITION BY root, budget ORDER BY refused_us DESC, refusal_id) AS k"
        " FROM refusals_before r) AS counted WHERE k = 1"
    )
    op.drop_table("refusals_before")


def _set_aside(table: str) -> None:
    """Rename a table to ``TABLE_before``, and what has a name that the new one will have."""
    op.rename_table(f"budget_{table}", f"{table}_before")
    if table == "refusals":
        op.drop_index("ix_budget_refusals_budget", f"{table}_before")
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"ALTER TABLE {table}_before DROP CONSTRAINT pk_budget_{table}")


def _run(*files: str) -> None:
    for name in files:
        op.get_bind().exec_driver_sql(Path(__file__).with_name(name).read_text("utf-8"))


def _index(name: str, table: str, columns: list[str], where: str | None = None) -> None:
    condition = None if where is None else sa.text(where)
    op.create_index(name, table, columns, postgresql_where=condition, sqlite_where=condition)


def downgrade() -> None:
    """Go back to the first release. What it does not know is lost, refusals and the journal too.

    Not where a budget would mean something else there: a share would be unlimited, a closed budget
    open, a window one that never ends.
    """
    unknown = op.get_bind().scalar(
        sa.text(
            "SELECT count(*) FROM budget_budgets WHERE parent IS NOT NULL"
            " OR limit_share IS NOT NULL OR period <> 'total' OR state <> 'open'"
            " OR soft_stop < 1000000 OR hard_stop < 1000000"
        )
    )
    if unknown or op.get_bind().scalar(sa.text("SELECT count(*) FROM budget_adjustments")):
        raise ValueError(
            "the ledger has budgets with parents, shares, periods, stops or adjustments, or closed "
            "ones, which version 0001 would take for others; nothing was changed"
        )
    postgresql = op.get_bind().dialect.name == "postgresql"
    if postgresql:
        for function in ("budget_reserve", "budget_decide", "budget_limit", "budget_move"):
            op.execute(f"DROP FUNCTION {function}")
    for table in ("journal", "grants", "adjustments", "extensions", "refusals"):
        op.drop_table(f"budget_{table}")
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
    op.create_index("ix_budget_refusals_budget", "budget_refusals", ["root", "budget"])
    _set_aside("usage")
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
    op.execute(
        "INSERT INTO budget_usage"
        " SELECT u.root, u.reservation_id, u.key, u.attempt, u.amount, u.late, u.recorded_us"
        " FROM usage_before u JOIN budget_lines l ON l.root = u.root"
        " AND l.reservation_id = u.reservation_id AND l.line = 0 AND l.unit = u.unit"
    )
    op.drop_table("usage_before")
    op.add_column("budget_attempts", sa.Column("repeated", sa.BigInteger))
    op.drop_column("budget_reservations", "charges_start")
    for column in ("unit", "extended"):
        op.drop_column("budget_lines", column)
    op.drop_index("ix_budget_balances_end", "budget_balances")
    for column in ("end_us", "entries"):
        op.drop_column("budget_balances", column)
    for index in ("parent", "templates", "draining"):
        op.drop_index(f"ix_budget_budgets_{index}", "budget_budgets")
    for column in (
        "parent",
        "limit_share",
        "timezone",
        "anchor_day",
        "soft_stop",
        "hard_stop",
        "stripes",
        "state",
        "template",
    ):
        op.drop_column("budget_budgets", column)
    if postgresql:
        _run("short_1.sql", "reserve_1.sql")
