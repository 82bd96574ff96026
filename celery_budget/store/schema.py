"""The tables. Times are microseconds since the epoch by the database's clock, amounts are integers.

Every key starts with the root, so that a distributed store can keep a root's rows together. The
counters of a budget live in :data:`balances`, one row for each window and stripe; a reservation's
part of them in :data:`lines`, so that a balance is the sum of its lines at every committed moment.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    PrimaryKeyConstraint,
    SmallInteger,
    String,
    Table,
    Text,
    TypeDecorator,
    Uuid,
    and_,
    false,
    select,
    text,
    true,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.messages import MIDDLE_RANK

__all__ = [
    "IS_HELD",
    "IS_KEPT",
    "IS_NEXT",
    "IS_RELEASED",
    "IS_TEMPLATE",
    "IS_UNPUBLISHED",
    "IS_UNTALLIED",
    "adjustments",
    "alert_looks",
    "alerts",
    "attempts",
    "backlog",
    "balances",
    "budgets",
    "exact_sum",
    "extensions",
    "grants",
    "instant",
    "journal",
    "lane_queues",
    "lane_tallies",
    "lanes",
    "lines",
    "metadata",
    "now_us",
    "of_reservation",
    "outbox",
    "parked",
    "quarantine",
    "refusals",
    "relays",
    "reservations",
    "reuse",
    "share_returns",
    "shares",
    "tallies",
    "untold",
    "usage",
    "wide_sum",
]

metadata = MetaData(naming_convention={"ck": "ck_%(table_name)s_%(constraint_name)s"})


class now_us(FunctionElement[int]):  # noqa: N801 - reads as the SQL function it stands for
    """The database's clock in microseconds since the epoch; moves within a transaction."""

    type = BigInteger()
    inherit_cache = True


@compiles(now_us, "postgresql")
def _now_us_postgresql(element: Any, compiler: Any, **kw: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)"


@compiles(now_us, "sqlite")
def _now_us_sqlite(element: Any, compiler: Any, **kw: Any) -> str:
    # SQLite 3.40 has no unixepoch('subsec'); %f has milliseconds.
    return (
        "(CAST(strftime('%s', 'now') AS INTEGER) * 1000000"
        " + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER) * 1000)"
    )


class exact_sum(FunctionElement[Any]):  # noqa: N801 - reads as the SQL function it stands for
    """A sum of integers that may pass 64 bits; what comes back is what ``int()`` takes."""

    inherit_cache = True


@compiles(exact_sum, "postgresql")
def _exact_sum_postgresql(element: Any, compiler: Any, **kw: Any) -> str:
    # Of bigint it is numeric.
    return f"sum({compiler.process(element.clauses, **kw)})"


@compiles(exact_sum, "sqlite")
def _exact_sum_sqlite(element: Any, compiler: Any, **kw: Any) -> str:
    # SQLite's own fails beyond 64 bits; this one is the engine's.
    return f"budget_sum({compiler.process(element.clauses, **kw)})"


class _Whole(TypeDecorator[int]):
    """An integer of any size, as :class:`wide_sum` gives it."""

    impl = Text
    cache_ok = True

    def process_result_value(self, value: Any, dialect: Any) -> int | None:
        if not isinstance(value, str):
            return None if value is None else int(value)
        high, _, low = value.partition(":")
        return (int(high) << 32) + int(low)


class wide_sum(FunctionElement[int]):  # noqa: N801 - reads as the SQL function it stands for
    """A sum of integers that may pass 64 bits, for a caller's own connection as well.

    Without a function that only the engine's connections have. It is read as a result, and means
    nothing inside of an expression.
    """

    type = _Whole()
    inherit_cache = True


@compiles(wide_sum, "postgresql")
def _wide_sum_postgresql(element: Any, compiler: Any, **kw: Any) -> str:
    return f"sum({compiler.process(element.clauses, **kw)})"


@compiles(wide_sum, "sqlite")
def _wide_sum_sqlite(element: Any, compiler: Any, **kw: Any) -> str:
    # In halves, neither of which passes 64 bits.
    of = compiler.process(element.clauses, **kw)
    return f"sum(({of}) >> 32) || ':' || sum(({of}) & 4294967295)"


class Exact(TypeDecorator[int]):
    """A whole number of any size, that :class:`exact_sum` adds up."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Any) -> Any:
        return dialect.type_descriptor(Numeric() if dialect.name == "postgresql" else Text())

    def process_bind_param(self, value: int | None, dialect: Any) -> Any:
        return value if value is None or dialect.name == "postgresql" else str(value)

    def process_result_value(self, value: Any, dialect: Any) -> int | None:
        return None if value is None else int(value)


def instant() -> Any:
    """One reading of the database's clock for a whole statement, by which an index can be searched.

    PostgreSQL evaluates a clock that moves for each row it looks at.
    """
    return select(now_us()).scalar_subquery()


def _when(condition: str) -> dict[str, Any]:
    """Arguments that make an index partial in both dialects."""
    return {"postgresql_where": text(condition), "sqlite_where": text(condition)}


#: Of messages whose priority says nothing.
DEFAULT_RANK = str(MIDDLE_RANK)

#: Tells templates apart, in the text of a statement.
IS_TEMPLATE = "name LIKE '%*%'"

#: Which messages a relay looks at, and which their order keys count, in the text of a statement:
#: as in the indexes, so that they are used also where a statement was prepared.
IS_NEXT = "state = 'due' AND NOT behind"
IS_UNPUBLISHED = "state <> 'published'"
#: And which are kept only against a replay of their parent.
IS_KEPT = "state = 'published' AND reservation_id IS NULL"
#: What a lane holds back, and what it has let go that is not started, or runs.
IS_HELD = "state = 'held'"
IS_RELEASED = "lane IS NOT NULL AND state IN ('due', 'published')"

#: Of which requests it was measured what they used.
IS_MEASURED = "state = 'settled' AND NOT unmetered"

#: Which have ended and are in no tally.
IS_UNTALLIED = "ended_us IS NOT NULL AND NOT tallied"

budgets = Table(
    "budget_budgets",
    metadata,
    Column("root", String(255)),
    Column("name", String(255)),
    Column("unit", String(255), nullable=False),
    Column("period", String(16), nullable=False),
    # None for unlimited, and where the limit is a share of the parent's.
    Column("limit_amount", BigInteger),
    Column("created_us", BigInteger, nullable=False),
    Column("updated_us", BigInteger, nullable=False),
    Column("parent", String(255)),
    # In parts per million, as the stops are.
    Column("limit_share", Integer),
    Column("timezone", String(255), nullable=False, server_default="UTC"),
    Column("anchor_day", SmallInteger, nullable=False, server_default="1"),
    Column("soft_stop", Integer, nullable=False, server_default="1000000"),
    Column("hard_stop", Integer, nullable=False, server_default="1000000"),
    # Over how many rows its counters are spread as it was declared; 0 for as it turns out.
    Column("stripes", SmallInteger, nullable=False, server_default="1"),
    # open; draining: takes nothing new and is closed when nothing is held; closed.
    Column("state", String(16), nullable=False, server_default="open"),
    # The template it was made from.
    Column("template", String(255)),
    # Its share of a lane, beside that of others; 0 goes last.
    Column("weight", Integer, nullable=False, server_default="1"),
    # At which parts of its limit it alerts, with commas between them; none for the setting's.
    Column("alert_at", String(255)),
    # Over how many rows its counters are spread now.
    Column("spread", SmallInteger, nullable=False, server_default="1"),
    PrimaryKeyConstraint("root", "name", name="pk_budget_budgets"),
    CheckConstraint("limit_amount >= 0", name="limit"),
    Index("ix_budget_budgets_parent", "root", "parent", **_when("parent IS NOT NULL")),
    # As it is written in the query, or PostgreSQL would not see that it applies.
    Index("ix_budget_budgets_templates", "root", "name", **_when(IS_TEMPLATE)),
    Index("ix_budget_budgets_draining", "root", "state", **_when("state = 'draining'")),
)

balances = Table(
    "budget_balances",
    metadata,
    Column("root", String(255)),
    Column("budget", String(255)),
    Column("window_us", BigInteger),
    Column("stripe", SmallInteger),
    Column("reserved", BigInteger, nullable=False),
    Column("spent", BigInteger, nullable=False),
    # When the window ends. Windows of one budget never overlap, and begin one after another.
    Column("end_us", BigInteger, nullable=False, server_default=str(MAX_AMOUNT)),
    # The number of its last entry in the journal.
    Column("entries", BigInteger, nullable=False, server_default="0"),
    # Of a window with several rows what this one admits up to by itself, and the bound that all of
    # these add up to; -1 for a bound while none of them does. None where there is one row.
    Column("share", BigInteger),
    Column("basis", BigInteger),
    # How often an admission has waited for it, until the sweep looks.
    Column("waits", BigInteger, nullable=False, server_default="0"),
    PrimaryKeyConstraint("root", "budget", "window_us", "stripe", name="pk_budget_balances"),
    CheckConstraint("reserved >= 0", name="reserved"),
    # What is taken back from a budget may be more than one of its rows has spent.
    CheckConstraint("spent >= 0 OR share IS NOT NULL", name="spent").ddl_if(dialect="postgresql"),
    CheckConstraint("spent >= 0", name="spent").ddl_if(dialect="sqlite"),
    Index("ix_budget_balances_waits", "root", "end_us", **_when("waits > 0")),
    # The root is the last: a row that is asked for by its key is not looked for by this one, which
    # finds all of a root while the table is so small, and the plan is kept.
    Index("ix_budget_balances_end", "end_us", "root"),
)

journal = Table(
    "budget_journal",
    metadata,
    # The balance that changed, and the number of the change: without a gap for each balance.
    Column("root", String(255)),
    Column("budget", String(255)),
    Column("window_us", BigInteger),
    Column("stripe", SmallInteger),
    Column("entry", BigInteger),
    Column("at_us", BigInteger, nullable=False),
    Column("what", String(16), nullable=False),
    Column("who", Text, nullable=False),
    Column("reservation_id", Uuid),
    # By how much it changed, and what it was then.
    Column("reserved", BigInteger, nullable=False),
    Column("spent", BigInteger, nullable=False),
    Column("reserved_after", BigInteger, nullable=False),
    Column("spent_after", BigInteger, nullable=False),
    Column("reason", Text),
    PrimaryKeyConstraint(
        "root", "budget", "window_us", "stripe", "entry", name="pk_budget_journal"
    ),
    # What one request did to balances.
    Index(
        "ix_budget_journal_reservation",
        "root",
        "reservation_id",
        **_when("reservation_id IS NOT NULL"),
    ),
)

grants = Table(
    "budget_grants",
    metadata,
    Column("root", String(255)),
    Column("key", String(255)),
    Column("budget", String(255), nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("until_us", BigInteger, nullable=False),
    Column("reason", Text),
    Column("who", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("root", "key", name="pk_budget_grants"),
    CheckConstraint("amount >= 0", name="amount"),
    Index("ix_budget_grants_budget", "root", "budget", "until_us"),
)

adjustments = Table(
    "budget_adjustments",
    metadata,
    Column("root", String(255)),
    Column("key", String(255)),
    Column("budget", String(255), nullable=False),
    Column("window_us", BigInteger, nullable=False),
    Column("stripe", SmallInteger, nullable=False),
    # What it added to what is spent; negative where it gave back.
    Column("amount", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("who", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("root", "key", name="pk_budget_adjustments"),
    Index("ix_budget_adjustments_balance", "root", "budget", "window_us", "stripe"),
)

reservations = Table(
    "budget_reservations",
    metadata,
    Column("root", String(255)),
    Column("reservation_id", Uuid),
    Column("owner", String(255), nullable=False),
    Column("request_id", Text, nullable=False),
    Column("nesting", Integer, nullable=False),
    Column("task_id", Text, nullable=False),
    Column("task_name", Text, nullable=False),
    Column("stage", Text, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("opaque", Boolean, nullable=False),
    Column("estimator", Text, nullable=False),
    Column("estimator_version", Text, nullable=False),
    Column("parent_id", Uuid),
    Column("state", String(16), nullable=False),
    # Why it ended, where its state and its attempts do not say so.
    Column("reason", Text),
    # Celery's count of retries in the message that may start the next attempt.
    Column("retries", Integer, nullable=False),
    Column("attempts", Integer, nullable=False),
    # Attempts started by the current message.
    Column("deliveries", Integer, nullable=False),
    Column("unreserved", Boolean, nullable=False),
    Column("unmetered", Boolean, nullable=False),
    Column("over", Boolean, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("ended_us", BigInteger),
    # Whether it has lines that are charged when an attempt starts.
    Column("charges_start", Boolean, nullable=False, server_default=false()),
    # Of a chain that was reserved whole: its first step's reservation, and which step this is.
    Column("plan_id", Uuid),
    Column("step", SmallInteger),
    # By which prices its estimates in money were made.
    Column("prices", Text),
    # When it was asked, while it ran, to run no further.
    Column("cancelled_us", BigInteger),
    # The lane it is dispatched by, where one feeds its queue.
    Column("lane", String(255)),
    # When all of it is to be over: waiting, attempts and retries together.
    Column("deadline_us", BigInteger),
    # What other versions of its estimator would have promised, by their versions, as JSON.
    Column("shadows", Text),
    # When it last waited for budget, parked, from when to when, for which one, and why.
    Column("parked_us", BigInteger),
    Column("unparked_us", BigInteger),
    Column("parked_budget", String(255)),
    Column("parked_reason", String(16)),
    # When its first message was due, where that was later than its admission.
    Column("due_us", BigInteger),
    # False for one that was given up while it was parked: it is only kept for its story.
    Column("admitted", Boolean, nullable=False, server_default=true()),
    # Whether what it adds is in the tallies. Whoever changes one that is takes it out before.
    Column("tallied", Boolean, nullable=False, server_default=false()),
    # False for one that is admitted, and goes on, over any limit; and what it would have been
    # refused with, the last time it would, as JSON.
    Column("enforced", Boolean, nullable=False, server_default=true()),
    Column("waived", Text),
    PrimaryKeyConstraint("root", "reservation_id", name="pk_budget_reservations"),
    # The id of a request that never ran may be reserved anew.
    Index(
        "ux_budget_reservations_request",
        "root",
        "owner",
        "request_id",
        "nesting",
        unique=True,
        **_when("state <> 'released'"),
    ),
    # The root is the last, see balances.
    Index("ix_budget_reservations_task", "task_id", "root"),
    Index("ix_budget_reservations_open", "root", "state", **_when("ended_us IS NULL")),
    # What estimates are suggested by: the last of a stage.
    Index("ix_budget_reservations_measured", "root", "stage", "ended_us", **_when(IS_MEASURED)),
    Index("ix_budget_reservations_plan", "root", "plan_id", **_when("state = 'planned'")),
    # What followed from one.
    Index("ix_budget_reservations_parent", "root", "parent_id", **_when("parent_id IS NOT NULL")),
    Index("ix_budget_reservations_untallied", "root", "ended_us", **_when(IS_UNTALLIED)),
    # Which were admitted when; on PostgreSQL by ranges of pages, which costs an admission next to
    # nothing.
    Index(
        "ix_budget_reservations_created",
        "created_us",
        postgresql_using="brin",
        postgresql_with={"autosummarize": True, "pages_per_range": 32},
    ),
)

lines = Table(
    "budget_lines",
    metadata,
    Column("root", String(255)),
    Column("reservation_id", Uuid),
    Column("line", SmallInteger),
    Column("budget", String(255), nullable=False),
    Column("window_us", BigInteger, nullable=False),
    Column("stripe", SmallInteger, nullable=False),
    Column("charge", String(16), nullable=False),
    # What the estimator promised for the current attempt.
    Column("estimate", BigInteger, nullable=False),
    # What is held now, what was recorded so far, and what was charged in the end.
    Column("reserved", BigInteger, nullable=False),
    Column("used", BigInteger, nullable=False),
    Column("settled", BigInteger, nullable=False),
    Column("unit", String(255), nullable=False, server_default=""),
    # By how much the current attempt has extended what it was to use.
    Column("extended", BigInteger, nullable=False, server_default="0"),
    # What its request had recorded of its unit before it turned to this budget; no part of used.
    Column("earlier", BigInteger, nullable=False, server_default="0"),
    PrimaryKeyConstraint("root", "reservation_id", "line", name="pk_budget_lines"),
    CheckConstraint("reserved >= 0 AND used >= 0 AND settled >= 0", name="amounts"),
    # The root is the last, see balances.
    Index("ix_budget_lines_balance", "budget", "window_us", "stripe", "root"),
)

attempts = Table(
    "budget_attempts",
    metadata,
    Column("root", String(255)),
    Column("reservation_id", Uuid),
    Column("attempt", Integer),
    # The fence: who holds it may end the attempt, nobody else.
    Column("claim_id", Uuid, nullable=False),
    Column("retries", Integer, nullable=False),
    Column("worker", Text, nullable=False),
    # The worker's main process, which keeps the lease alive.
    Column("boot_id", Uuid, nullable=False),
    Column("late_ack", Boolean, nullable=False),
    Column("started_us", BigInteger, nullable=False),
    Column("ended_us", BigInteger),
    Column("outcome", String(16)),
    # The encoded return value or exception, until the attempt is closed.
    Column("payload", Text),
    # None once the attempt is closed: nothing is left to do for it.
    Column("lease_until_us", BigInteger),
    # Of one that is being asked about: how often that was tried.
    Column("replays", Integer, nullable=False),
    # The worker's process that runs it; its main process knows whether that lives.
    Column("pid", Integer),
    # When it was first seen that its lease is over; it is taken at a second look.
    Column("suspected_us", BigInteger),
    # Whether another attempt follows where its outcome is not known.
    Column("rerun", Boolean, nullable=False, server_default=false()),
    # Whether its task can tell, or undo, what a lost attempt has done.
    Column("inquires", Boolean, nullable=False, server_default=false()),
    # The name of what its call raised, of a known length, for whoever asks.
    Column("error", String(255)),
    # Of the message that started it, as it was seen then: where it was published, how often, and
    # when for the last time, where that was known already.
    Column("queue", Text),
    Column("publishes", Integer),
    Column("published_us", BigInteger),
    PrimaryKeyConstraint("root", "reservation_id", "attempt", name="pk_budget_attempts"),
    Index(
        "ix_budget_attempts_lease", "root", "lease_until_us", **_when("lease_until_us IS NOT NULL")
    ),
)

#: Joins attempts and their reservations.
of_reservation = and_(
    attempts.c.root == reservations.c.root,
    attempts.c.reservation_id == reservations.c.reservation_id,
)

usage = Table(
    "budget_usage",
    metadata,
    Column("root", String(255)),
    Column("reservation_id", Uuid),
    Column("key", String(300)),
    Column("unit", String(255)),
    Column("attempt", Integer, nullable=False),
    Column("amount", BigInteger, nullable=False),
    # Recorded after the reservation had ended.
    Column("late", Boolean, nullable=False),
    Column("recorded_us", BigInteger, nullable=False),
    # The last later attempt that recorded it once more, which added nothing.
    Column("repeated_by", Integer),
    # What it was read from, as JSON: a provider's reply, by kind of token, model and price.
    Column("details", Text),
    # Of a reply that did not tell all it used: how much of the amount was taken from the estimate.
    Column("assumed", BigInteger),
    PrimaryKeyConstraint("root", "reservation_id", "key", "unit", name="pk_budget_usage"),
    CheckConstraint("amount >= 0", name="amount"),
)

effects = Table(
    "budget_effects",
    metadata,
    Column("root", String(255)),
    Column("reservation_id", Uuid),
    Column("key", String(255)),
    # The attempt that had the effect.
    Column("attempt", Integer, nullable=False),
    # What it led to, as JSON, for later calls.
    Column("value", Text),
    Column("created_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("root", "reservation_id", "key", name="pk_budget_effects"),
    # What is kept no longer is the oldest.
    Index("ix_budget_effects_created", "root", "created_us"),
)

# Which run the calls of one identity join, and what it has returned, for some time.
reuse = Table(
    "budget_reuse",
    metadata,
    Column("root", String(255)),
    Column("owner", String(255)),
    # A digest over the task, its arguments and its version.
    Column("key", String(64)),
    # The run that is joined now; the task id follows from it.
    Column("request_id", Text, nullable=False),
    Column("task_id", Text, nullable=False),
    # For how long after its end, and until when that is at the least.
    Column("kept_us", BigInteger, nullable=False),
    Column("until_us", BigInteger, nullable=False),
    # The encoded return value, once there is one that is not too large.
    Column("payload", Text),
    PrimaryKeyConstraint("root", "owner", "key", name="pk_budget_reuse"),
    Index("ix_budget_reuse_task", "root", "task_id"),
    Index("ix_budget_reuse_until", "root", "until_us"),
)

outbox = Table(
    "budget_outbox",
    metadata,
    Column("root", String(255)),
    Column("outbox_id", Uuid),
    # The reservation whose next attempt the message starts; none for messages without a budget.
    Column("reservation_id", Uuid),
    # The reservation whose attempt published it after its call.
    Column("parent_id", Uuid),
    Column("task_id", Text, nullable=False),
    Column("task_name", Text, nullable=False),
    Column("retries", Integer, nullable=False),
    # due: to be published at due_us. held: until its lane lets it go, at due_us at the earliest.
    # blocked: until its attempt ends. published: confirmed; looked at again at due_us. Without
    # published_us: it never will be, and is only kept against a replay of its parent.
    Column("state", String(16), nullable=False),
    Column("after_attempt", Integer),
    Column("due_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger),
    Column("publishes", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("last_error", Text),
    Column("created_us", BigInteger, nullable=False),
    Column("published_us", BigInteger),
    Column("queue", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("envelope", Text, nullable=False),
    # Which of several that are due goes first: the smaller one.
    Column("rank", SmallInteger, nullable=False, server_default=DEFAULT_RANK),
    # Messages with one key are published one after another, in the order they were written.
    Column("order_key", String(255)),
    # The name of the broker it goes to; empty for the application's own.
    Column("broker", String(255), nullable=False, server_default=""),
    # The batch that it was taken in, while a relay has it: who takes it again takes its fence.
    Column("taken_by", Uuid),
    # Passed by: an unpublished message with its order key comes first. The first never is.
    Column("behind", Boolean, nullable=False, server_default=false()),
    # The lane that releases it, where one feeds its queue; whose share it counts to, and how much.
    Column("lane", String(255)),
    Column("tenant", String(255)),
    Column("weight", BigInteger, nullable=False, server_default="0"),
    PrimaryKeyConstraint("root", "outbox_id", name="pk_budget_outbox"),
    Index("ix_budget_outbox_due", "root", "state", "due_us"),
    Index(
        "ix_budget_outbox_next",
        "root",
        "broker",
        "rank",
        "due_us",
        "outbox_id",
        **_when(IS_NEXT),
    ),
    Index(
        "ix_budget_outbox_order",
        "root",
        "order_key",
        "created_us",
        "outbox_id",
        **_when(f"order_key IS NOT NULL AND {IS_UNPUBLISHED}"),
    ),
    Index("ix_budget_outbox_kept", "root", "outbox_id", **_when(IS_KEPT)),
    # Of what a lane holds: the oldest, the oldest and the lightest of a tenant, what expires.
    Index("ix_budget_outbox_waits", "root", "lane", "due_us", **_when(IS_HELD)),
    Index(
        "ix_budget_outbox_held",
        "root",
        "lane",
        "behind",
        "tenant",
        "due_us",
        "outbox_id",
        **_when(IS_HELD),
    ),
    Index(
        "ix_budget_outbox_light",
        "root",
        "lane",
        "behind",
        "tenant",
        "weight",
        "outbox_id",
        **_when(IS_HELD),
    ),
    Index(
        "ix_budget_outbox_ends",
        "root",
        "expires_us",
        **_when(f"{IS_HELD} AND expires_us IS NOT NULL"),
    ),
    Index("ix_budget_outbox_released", "root", "lane", **_when(IS_RELEASED)),
    Index(
        "ux_budget_outbox_attempt",
        "root",
        "reservation_id",
        "retries",
        unique=True,
        **_when("reservation_id IS NOT NULL"),
    ),
    Index(
        "ux_budget_outbox_child",
        "root",
        "parent_id",
        "task_id",
        unique=True,
        **_when("parent_id IS NOT NULL"),
    ),
)

parked = Table(
    "budget_parked",
    metadata,
    Column("root", String(255)),
    Column("parked_id", Uuid),
    # A waiting reservation whose next attempt does not fit; none for a request without one.
    Column("reservation_id", Uuid),
    Column("after_attempt", Integer),
    Column("owner", String(255), nullable=False),
    Column("task_id", Text, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("nesting", Integer, nullable=False),
    Column("retries", Integer, nullable=False),
    # The request, in JSON.
    Column("request", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("deadline_us", BigInteger, nullable=False),
    # Not to be tried before, as where that failed.
    Column("checked_us", BigInteger, nullable=False),
    Column("task_name", Text, nullable=False),
    Column("queue", Text, nullable=False),
    Column("due_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger),
    Column("body", LargeBinary, nullable=False),
    Column("envelope", Text, nullable=False),
    Column("rank", SmallInteger, nullable=False, server_default=DEFAULT_RANK),
    Column("order_key", String(255)),
    Column("broker", String(255), nullable=False, server_default=""),
    # The budget that was short when it was last tried, why, and how much more it needs of that.
    Column("budget", String(255), nullable=False, server_default=""),
    Column("reason", String(16), nullable=False, server_default="held"),
    Column("amount", BigInteger, nullable=False, server_default="0"),
    # Whose turn it is among those that wait for that budget: the smaller one.
    Column("turn", BigInteger, nullable=False, server_default="0"),
    # Until when nothing else is admitted to that budget, where it goes ahead.
    Column("ahead_us", BigInteger),
    # Of a next attempt that is charged by use: the window it is held in, be it open or not.
    Column("window_us", BigInteger),
    PrimaryKeyConstraint("root", "parked_id", name="pk_budget_parked"),
    Index(
        "ux_budget_parked_request",
        "root",
        "owner",
        "task_id",
        "nesting",
        "retries",
        unique=True,
    ),
    Index("ix_budget_parked_deadline", "root", "deadline_us"),
    Index("ix_budget_parked_turn", "root", "budget", "turn", "created_us"),
    Index("ix_budget_parked_owner", "root", "budget", "owner", "turn"),
    Index("ix_budget_parked_amount", "root", "budget", "amount"),
    Index("ix_budget_parked_oldest", "root", "budget", "created_us"),
    Index("ix_budget_parked_ahead", "root", "budget", **_when("ahead_us IS NOT NULL")),
    Index(
        "ix_budget_parked_window",
        "root",
        "budget",
        "window_us",
        **_when("window_us IS NOT NULL"),
    ),
    Index(
        "ix_budget_parked_reservation",
        "root",
        "reservation_id",
        **_when("reservation_id IS NOT NULL"),
    ),
)

# What cannot be published, and what failed for good. It holds no budget; to publish it all the same
# is a new admission.
quarantine = Table(
    "budget_quarantine",
    metadata,
    Column("root", String(255)),
    Column("quarantine_id", Uuid),
    # The request that ended, in JSON; none for a message that drew on no budget.
    Column("request", Text),
    Column("reservation_id", Uuid),
    Column("parent_id", Uuid),
    Column("task_id", Text, nullable=False),
    Column("task_name", Text, nullable=False),
    # Why: unroutable, rejected, oversize or undecodable, and what the broker said; or max_attempts,
    # retry_within, terminal or failed, and the last error.
    Column("reason", String(16), nullable=False),
    Column("error", Text, nullable=False),
    # How often publishing it failed.
    Column("failures", Integer, nullable=False),
    Column("quarantined_us", BigInteger, nullable=False),
    Column("due_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger),
    Column("queue", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("envelope", Text, nullable=False),
    Column("rank", SmallInteger, nullable=False),
    Column("order_key", String(255)),
    Column("broker", String(255), nullable=False),
    # Of what failed: how often it ran, and what it used of each budget, as JSON.
    Column("attempts", Integer),
    Column("used", Text),
    PrimaryKeyConstraint("root", "quarantine_id", name="pk_budget_quarantine"),
    Index("ix_budget_quarantine_task", "root", "task_id"),
)

# Results that have still to be stored, of requests that have ended without running (again).
untold = Table(
    "budget_untold",
    metadata,
    Column("root", String(255)),
    Column("untold_id", Uuid),
    Column("task_id", Text, nullable=False),
    # Why it ended, which says what is stored.
    Column("reason", Text, nullable=False),
    # What ended; none for a message that drew on no budget.
    Column("reservation_id", Uuid),
    # How often somebody has set out to store it, negative once the last one has failed, and when it
    # is due (again).
    Column("tries", Integer, nullable=False),
    Column("due_us", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("root", "untold_id", name="pk_budget_untold"),
    Index("ix_budget_untold_due", "root", "due_us"),
    Index("ix_budget_untold_task", "root", "task_id"),
)

relays = Table(
    "budget_relays",
    metadata,
    Column("root", String(255)),
    Column("relay_id", Uuid),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("started_us", BigInteger, nullable=False),
    Column("seen_us", BigInteger, nullable=False),
    # Whether it waits to be told of the next message that is due.
    Column("sleeping", Boolean, nullable=False),
    PrimaryKeyConstraint("root", "relay_id", name="pk_budget_relays"),
)

# When a sweep last looked: what nobody could renew since is not taken for lapsed.
sweeps = Table(
    "budget_sweeps",
    metadata,
    Column("root", String(255)),
    Column("seen_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("root", name="pk_budget_sweeps"),
)

# How many messages wait to be published, counted now and then by an admission.
backlog = Table(
    "budget_backlog",
    metadata,
    Column("root", String(255)),
    Column("messages", BigInteger, nullable=False),
    Column("counted_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("root", name="pk_budget_backlog"),
)

lanes = Table(
    "budget_lanes",
    metadata,
    Column("root", String(255)),
    Column("name", String(255)),
    # None for no limit.
    Column("max_queued_jobs", BigInteger),
    Column("max_queued_units", BigInteger),
    Column("max_running_jobs", BigInteger),
    Column("max_running_units", BigInteger),
    Column("burst_units", BigInteger),
    Column("max_waiting_jobs", BigInteger),
    Column("max_waiting_units", BigInteger),
    Column("max_wait_us", BigInteger),
    Column("paused", Boolean, nullable=False),
    Column("preflight", Boolean, nullable=False),
    Column("ageing", BigInteger, nullable=False),
    # As JSON, pairs of name and amount: what is drawn on by what comes through it by a fallback.
    Column("budgets", Text, nullable=False, server_default="[]"),
    # It feeds nothing any more; what it holds still is let go.
    Column("deleted", Boolean, nullable=False),
    # When its last burst was let go.
    Column("ticked_us", BigInteger, nullable=False, server_default="0"),
    # Of more tenants than one look takes: after which one the next look begins.
    Column("after_tenant", String(255), nullable=False, server_default=""),
    # Whether its workers answered when they were asked last, when that was, and why not.
    Column("awake", Boolean),
    Column("checked_us", BigInteger, nullable=False, server_default="0"),
    Column("asleep_reason", Text),
    PrimaryKeyConstraint("root", "name", name="pk_budget_lanes"),
)

# What has been had of a lane, in its virtual time: by tenants, by the budgets above them (which are
# named as tenants are), and by the lane itself, whose name is empty.
shares = Table(
    "budget_shares",
    metadata,
    Column("root", String(255)),
    Column("lane", String(255)),
    Column("name", String(255)),
    # The work of a budget itself, where others with work are below it.
    Column("own", Boolean),
    # See core.shares.
    Column("finish", BigInteger, nullable=False),
    Column("rest", BigInteger, nullable=False),
    Column("floor", BigInteger, nullable=False),
    Column("served_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("root", "lane", "name", "own", name="pk_budget_shares"),
    # What was not served for long is forgotten.
    Index("ix_budget_shares_served", "root", "lane", "served_us"),
)

# What ended requests did not use of what was counted to their tenants, until a dispatch corrects
# it.
share_returns = Table(
    "budget_share_returns",
    metadata,
    Column("root", String(255)),
    Column("lane", String(255)),
    # The message that was counted.
    Column("outbox_id", Uuid),
    Column("tenant", String(255), nullable=False),
    # Negative where more was used.
    Column("units", BigInteger, nullable=False),
    PrimaryKeyConstraint("root", "lane", "outbox_id", name="pk_budget_share_returns"),
)

# The lane that feeds a queue: one of a root.
lane_queues = Table(
    "budget_lane_queues",
    metadata,
    Column("root", String(255)),
    Column("queue", String(255)),
    Column("lane", String(255), nullable=False),
    PrimaryKeyConstraint("root", "queue", name="pk_budget_lane_queues"),
    Index("ix_budget_lane_queues_lane", "root", "lane"),
)

# How much a lane holds back, counted now and then by an admission where it is too much to be
# counted each time.
lane_tallies = Table(
    "budget_lane_tallies",
    metadata,
    Column("root", String(255)),
    Column("lane", String(255)),
    Column("jobs", BigInteger, nullable=False),
    Column("units", BigInteger, nullable=False),
    Column("counted_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("root", "lane", name="pk_budget_lane_tallies"),
)

extensions = Table(
    "budget_extensions",
    metadata,
    Column("root", String(255)),
    Column("reservation_id", Uuid),
    # An extension ends with its attempt: the next one that asks for it by the same key gets it.
    Column("attempt", Integer),
    Column("key", String(300)),
    Column("unit", String(255)),
    Column("amount", BigInteger, nullable=False),
    Column("extended_us", BigInteger, nullable=False),
    PrimaryKeyConstraint(
        "root", "reservation_id", "attempt", "key", "unit", name="pk_budget_extensions"
    ),
    CheckConstraint("amount >= 0", name="amount"),
)

# What requests that have ended add up to, see core.tallies.
tallies = Table(
    "budget_tallies",
    metadata,
    Column("root", String(255)),
    # A digest of all that follows up to the amounts.
    Column("tally_id", Uuid),
    Column("budget", String(255), nullable=False),
    Column("unit", String(255), nullable=False),
    Column("owner", String(255), nullable=False),
    Column("day", Integer, nullable=False),
    Column("stage", Text, nullable=False),
    Column("task_name", Text, nullable=False),
    Column("estimator", Text, nullable=False),
    Column("estimator_version", Text, nullable=False),
    Column("lane", String(255), nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("estimated", Exact, nullable=False),
    Column("charged", Exact, nullable=False),
    Column("excess", Exact, nullable=False),
    Column("exceeded", BigInteger, nullable=False),
    # All others, as JSON.
    Column("figures", Text, nullable=False),
    PrimaryKeyConstraint("root", "tally_id", name="pk_budget_tallies"),
    Index("ix_budget_tallies_day", "root", "budget", "owner", "day"),
)

# A fixed number of rows a day, budget, stage and reason, each a count and the last refusal that
# fell to it: all are counted, a sample is kept, and a storm neither grows the table nor waits for
# one row. Of a day that is over one row is left.
refusals = Table(
    "budget_refusals",
    metadata,
    Column("root", String(255)),
    # In days since the epoch, in UTC; 0 for what was counted before days were.
    Column("day", Integer),
    Column("budget", String(255)),
    Column("stage", Text),
    Column("reason", String(16)),
    Column("slot", SmallInteger),
    Column("count", BigInteger, nullable=False),
    Column("refusal_id", Uuid, nullable=False),
    Column("task_name", Text, nullable=False),
    Column("requested", BigInteger, nullable=False),
    Column("limit_amount", BigInteger),
    Column("reserved", BigInteger),
    Column("spent", BigInteger),
    Column("refused_us", BigInteger, nullable=False),
    # What all of them have asked for, where they were waived: of others it is not counted.
    Column("amount", BigInteger, nullable=False, server_default="0"),
    PrimaryKeyConstraint(
        "root", "day", "budget", "stage", "reason", "slot", name="pk_budget_refusals"
    ),
    Index("ix_budget_refusals_slots", "root", "day", **_when("slot > 0")),
)

alerts = Table(
    "budget_alerts",
    metadata,
    # One for each threshold of a subject and window; of no window it is 0.
    Column("root", String(255)),
    Column("kind", String(32)),
    Column("subject", Text),
    Column("window_us", BigInteger),
    Column("threshold", BigInteger),
    Column("alert_id", Uuid, nullable=False),
    # due: has still to be told; told; failed: is told no more.
    Column("state", String(16), nullable=False),
    # How often it was told, which is the fence of who tells it, and when it is told again.
    Column("tries", Integer, nullable=False),
    Column("due_us", BigInteger, nullable=False),
    Column("since_us", BigInteger, nullable=False),
    Column("told_us", BigInteger),
    # When its window ends.
    Column("end_us", BigInteger, nullable=False, server_default=str(MAX_AMOUNT)),
    # What it says, as JSON.
    Column("said", Text, nullable=False),
    PrimaryKeyConstraint(
        "root", "kind", "subject", "window_us", "threshold", name="pk_budget_alerts"
    ),
    Index("ix_budget_alerts_due", "root", "due_us", **_when("state = 'due'")),
    Index("ix_budget_alerts_end", "root", "end_us"),
)

alert_looks = Table(
    "budget_alert_looks",
    metadata,
    # What is looked at for alerts, when it was, and behind which name that goes on.
    Column("root", String(255)),
    Column("what", String(32)),
    Column("looked_us", BigInteger, nullable=False),
    Column("after_name", String(255), nullable=False),
    PrimaryKeyConstraint("root", "what", name="pk_budget_alert_looks"),
)
