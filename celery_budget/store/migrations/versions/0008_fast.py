"""Budgets over several rows, and what a worker says in one statement."""

from pathlib import Path

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _spread()
    _say_at_once()
    _wake_once()
    _upgrade_relay()
    _lock_by_functions()
    _count_beside()
    _index_by_root(last=True)
    _plan_by_keys()


def downgrade() -> None:
    _index_by_root(last=False)
    _count_within()
    _lock_by_statements()
    _downgrade_relay()
    _wake_each_time()
    _say_no_more()
    _gather()


def _spread() -> None:
    """A budget's counters may be spread over several rows."""
    op.add_column(
        "budget_budgets", sa.Column("spread", sa.SmallInteger, nullable=False, server_default="1")
    )
    # There was one number that it could be: nobody has chosen it.
    op.execute("UPDATE budget_budgets SET stripes = 0")
    op.add_column("budget_balances", sa.Column("share", sa.BigInteger))
    op.add_column("budget_balances", sa.Column("basis", sa.BigInteger))
    op.add_column(
        "budget_balances", sa.Column("waits", sa.BigInteger, nullable=False, server_default="0")
    )
    contended = sa.text("waits > 0")
    op.create_index(
        "ix_budget_balances_waits",
        "budget_balances",
        ["root", "end_us"],
        postgresql_where=contended,
        sqlite_where=contended,
    )
    if op.get_bind().dialect.name == "postgresql":
        # What is taken back from a budget may be more than one of its rows has spent.
        op.execute("ALTER TABLE budget_balances DROP CONSTRAINT ck_budget_balances_spent")
        op.execute(
            "ALTER TABLE budget_balances ADD CONSTRAINT ck_budget_balances_spent"
            " CHECK (spent >= 0 OR share IS NOT NULL)"
        )
        for name in ("reserve", "decide", "move", "pace"):
            op.execute(f"DROP FUNCTION budget_{name}")
        for name in ("whole_8", "decide_8", "move_8", "pace_8", "admit_8", "reserve_8"):
            _run(f"{name}.sql")


#: What is to be one row again.
_SEVERAL = (
    " IN (SELECT root, budget, window_us FROM budget_balances GROUP BY root, budget, window_us"
    " HAVING count(*) > 1)"
)


def _gather() -> None:
    """Each window has one row again, with what all of its rows had and one entry that tells so."""
    if op.get_bind().dialect.name == "postgresql":
        for name in ("reserve", "admit", "decide", "move", "pace"):
            op.execute(f"DROP FUNCTION budget_{name}")
        for name in ("gather", "place", "hold", "take", "allot", "whole", "bound"):
            op.execute(f"DROP FUNCTION budget_{name}")
        for table in ("lines", "adjustments"):
            op.execute(f"UPDATE budget_{table} SET stripe = 0 WHERE stripe > 0")  # noqa: S608 - constants
        key = "(root, budget, window_us)"
        op.execute(f"DELETE FROM budget_journal WHERE {key}{_SEVERAL}")  # noqa: S608 - constants
        op.execute(
            "UPDATE budget_balances b SET reserved = s.reserved, spent = s.spent, entries = 1,"
            " share = NULL, basis = NULL FROM (SELECT root, budget, window_us,"
            " CAST(sum(reserved) AS bigint) AS reserved, CAST(sum(spent) AS bigint) AS spent"
            " FROM budget_balances GROUP BY root, budget, window_us HAVING count(*) > 1) s"
            " WHERE b.root = s.root AND b.budget = s.budget AND b.window_us = s.window_us"
            " AND b.stripe = 0"
        )
        op.execute(
            "INSERT INTO budget_journal (root, budget, window_us, stripe, entry, at_us, what, who,"  # noqa: S608 - constants
            " reserved, spent, reserved_after, spent_after, reason)"
            " SELECT root, budget, window_us, 0, 1,"
            " CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint), 'checkpoint',"
            " 'migration 0008', reserved, spent, reserved, spent, 'from several rows'"
            f" FROM budget_balances WHERE stripe = 0 AND {key}{_SEVERAL}"
        )
        op.execute("DELETE FROM budget_balances WHERE stripe > 0")
        op.execute("ALTER TABLE budget_balances DROP CONSTRAINT ck_budget_balances_spent")
        op.execute(
            "ALTER TABLE budget_balances ADD CONSTRAINT ck_budget_balances_spent CHECK (spent >= 0)"
        )
        for name in ("decide_2", "move_2", "pace_6", "reserve_7"):
            _run(f"{name}.sql")
    op.drop_index("ix_budget_balances_waits", "budget_balances")
    for name in ("waits", "basis", "share"):
        op.drop_column("budget_balances", name)
    op.execute("UPDATE budget_budgets SET stripes = 1")
    op.drop_column("budget_budgets", "spread")


#: Each calls what comes before it.
AT_ONCE = ("close", "charge", "claim", "start", "record", "end")


def _say_at_once() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for name in AT_ONCE:
            _run(f"{name}_8.sql")


def _say_no_more() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for name in reversed(AT_ONCE):
            op.execute(f"DROP FUNCTION budget_{name}")


def _wake_once() -> None:
    """Of all that commit while a relay sleeps one tells it."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_wake")
        _run("wake_8.sql")


def _wake_each_time() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_wake")
        _run("wake_3.sql")


def _upgrade_relay() -> None:
    """What was published is marked by one statement."""
    if op.get_bind().dialect.name == "postgresql":
        _run("mark_8.sql")


def _downgrade_relay() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_mark_published")


def _lock_by_functions() -> None:
    if op.get_bind().dialect.name == "postgresql":
        _run("lock_8.sql")


def _lock_by_statements() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION budget_try_lock")
        op.execute("DROP FUNCTION budget_lock")


def _count_beside() -> None:
    """A caller's transaction takes no row of a count."""
    if op.get_bind().dialect.name == "postgresql":
        _drop_counts()
        for name in ("backlog_8", "lane_full_8"):
            _run(f"{name}.sql")


def _count_within() -> None:
    if op.get_bind().dialect.name == "postgresql":
        _drop_counts()
        for name in ("backlog_6", "lane_full_6"):
            _run(f"{name}.sql")


def _drop_counts() -> None:
    for name in ("lane_full", "lane_waiting", "backlog"):
        op.execute(f"DROP FUNCTION budget_{name}")


#: Indexes that find rows by something else than their key.
OTHERS = {
    ("ix_budget_balances_end", "budget_balances"): ["end_us"],
    ("ix_budget_reservations_task", "budget_reservations"): ["task_id"],
    ("ix_budget_lines_balance", "budget_lines"): ["budget", "window_us", "stripe"],
}


def _index_by_root(*, last: bool) -> None:
    """With the root last they are not what a row is found by whose key is known.

    While a table is small, or nobody has analyzed it yet, one that begins with the root looks as
    good as the key: all of the root's rows are read then, and a session keeps such a plan.
    """
    for (name, table), columns in OTHERS.items():
        op.drop_index(name, table)
        op.create_index(name, table, [*columns, "root"] if last else ["root", *columns])


#: What is called outside of a transaction that says so, see ``celery_budget.store.engine``.
BY_KEYS = ("reserve", "claim", "start", "record", "end", "close", "mark_published")


def _plan_by_keys() -> None:
    """A plan made while a table was nearly empty must not read all of it later; goes with them.

    As long as one of these runs, and not for the rest of a caller's transaction.
    """
    if op.get_bind().dialect.name == "postgresql":
        for name in BY_KEYS:
            op.execute(f"ALTER FUNCTION budget_{name} SET enable_seqscan = off")


def _run(name: str) -> None:
    op.get_bind().exec_driver_sql(Path(__file__).with_name(name).read_text("utf-8"))
