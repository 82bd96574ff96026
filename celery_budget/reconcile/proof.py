"""Whether the ledger adds up, what is still open, and folding what the journal keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from celery_budget.reconcile.brokers import Queues, QueueStanding, ask
from celery_budget.reconcile.kinds import at
from celery_budget.reconcile.lanes import lane_standings_in
from celery_budget.reconcile.reports import relays_in
from celery_budget.reconcile.results import Stored, unstored
from celery_budget.reconcile.steps import Pending, Seen, look, pending_steps
from celery_budget.reconcile.totals import day_name
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, derived, journal, pending, reports, tallies
from celery_budget.store.balances import Key, key_of
from celery_budget.store.windows import read_now

__all__ = [
    "Reconciliation",
    "balance_name",
    "fold",
    "prove",
    "reconcile",
    "wrong_balances",
    "wrong_tallies",
]

#: How many balances with old journal entries are looked up at a time.
PAGE = 1000
#: Of how many queues the brokers are asked.
MOST_QUEUES = 100
#: How many mismatches of one kind are told one by one.
MOST_TOLD = 1000


#: Called with how many parts are done, and how many there are.
Told = Callable[[int, int], None]


@dataclass(frozen=True)
class Reconciliation:
    """Whether the ledger adds up, and what of it is open.

    :ivar mismatches: one sentence for each thing that is wrong; empty where it adds up.
    :ivar open_work: requests that have not ended, by state; how many of them were cancelled while
        they ran; messages still due; parked work; results that have still to be stored.
    :ivar overdue_seconds: for how long the oldest due message has been waiting for a relay.
    :ivar requests: how many were admitted.
    :ivar remedies: one sentence for each kind of mismatch: what can be done about it.
    :ivar notes: one sentence for each thing that is odd and not wrong.
    :ivar pending: what was accepted and lacks a step, by kind, with some of each told in words.
    :ivar queues: where published work waits, by the ledger and by its brokers.
    :ivar relays: how many relays run.
    :ivar results: how many ended requests were looked up in the result backend; none where that
        was not asked for.
    :ivar unstored: one sentence for each of them whose result is not there.
    """

    mismatches: tuple[str, ...]
    open_work: dict[str, int]
    overdue_seconds: int = 0
    requests: int = 0
    remedies: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    pending: tuple[Pending, ...] = ()
    queues: tuple[QueueStanding, ...] = ()
    relays: int = 0
    results: int | None = None
    unstored: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. Work that is still open is not wrong."""
        return not self.mismatches and not self.unstored

    def stuck(self, seconds: float) -> tuple[Pending, ...]:
        """Return what is overdue for longer than this, by kind."""
        return tuple(one for one in self.pending if one.overdue and one.overdue_seconds >= seconds)

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "ok": self.ok,
            "mismatches": list(self.mismatches),
            "remedies": list(self.remedies),
            "notes": list(self.notes),
            "open": self.open_work,
            "overdue_seconds": self.overdue_seconds,
            "requests": self.requests,
            "relays": self.relays,
            "pending": [one.as_dict() for one in self.pending],
            "queues": [one.as_dict() for one in self.queues],
            "results": self.results,
            "unstored": list(self.unstored),
        }


def reconcile(
    store: Store,
    settings: Settings,
    *,
    limit: int = 20,
    queues: Queues | None = None,
    stored: Stored | None = None,
    results: int = 0,
    told: Told | None = None,
) -> Reconciliation:
    """Check the ledger against itself, all of it at one moment; then brokers and results.

    Locks nothing. Brokers and result backend are asked with no transaction open, so what they say
    is of a moment later.

    :param limit: how much that lacks a step is told in words, of each kind.
    :param queues: asks brokers; none where they are not to be asked.
    :param stored: tells whether a result is stored.
    :param results: of how many ended requests that is looked up, those admitted last.
    :param told: called after each part of the proof with how many are done, and how many there are.
    """
    proved, seen, published = store.read(_read, settings.root, limit, told)
    standings = ask(published, queues)
    looked_up: int | None = None
    missing: tuple[str, ...] = ()
    if stored is not None and results:
        looked_up, missing = unstored(store, settings, stored, results)
    by_queue = {(one.broker, one.queue): one for one in standings}
    return replace(
        proved,
        pending=pending_steps(seen, settings, by_queue),
        queues=standings,
        results=looked_up,
        unstored=missing,
    )


def _read(
    connection: Connection, root: str, limit: int, told: Told | None
) -> tuple[Reconciliation, Seen, list[pending.Published]]:
    relays = sum(not relay.gone for relay in relays_in(connection, root))
    lanes = {one.lane.name: one for one in lane_standings_in(connection, root)}
    proved = replace(
        prove(connection, root, told),
        requests=pending.admitted(connection, root),
        relays=relays,
        notes=tuple(map(_told_misdated, derived.misdated(connection, root))),
    )
    at_us = read_now(connection)
    seen = look(connection, root, limit, at_us, lanes, relays)
    return proved, seen, pending.published(connection, root, MOST_QUEUES, at_us)


def prove(connection: Connection, root: str, told: Told | None = None) -> Reconciliation:
    """Compare balances with lines and journal, lines with requests and usage; locks nothing.

    And messages with those that come before them, and tallies with requests. However much is
    wrong, of what may be many a thousand are told, and how many more there are.
    """
    found: dict[str, list[str]] = {}
    for done, (kind, (look_for, tell)) in enumerate(_PROOFS.items(), 1):
        rows = list(look_for(connection, root))
        found[kind] = [tell(row) for row in rows]
        left = rows[-1].of - len(rows) if rows and hasattr(rows[-1], "of") else 0
        if left:
            found[kind].append(f"and {left} more of the kind of the one before")
        if told is not None:
            told(done, len(_PROOFS))
    return Reconciliation(
        tuple(sentence for sentences in found.values() for sentence in sentences),
        reports.open_work(connection, root),
        reports.overdue_us(connection, root) // 1_000_000,
        remedies=tuple(_REMEDIES[kind] for kind, sentences in found.items() if sentences),
    )


def wrong_balances(connection: Connection, root: str) -> dict[Key, tuple[Any, Any]]:
    """Return what disagrees with a balance: its lines' sum and its journal's, none where it agrees.

    In the order in which balances are locked.
    """
    lines = {key_of(row): row for row in reports.mismatched_balances(connection, root)}
    journals = {key_of(row): row for row in reports.mismatched_journals(connection, root)}
    return {key: (lines.get(key), journals.get(key)) for key in sorted({*lines, *journals})}


def _told_balance(found: tuple[Key, tuple[Any, Any]]) -> str:
    key, (by_lines, by_journal) = found
    return _balance_told(key, by_lines, by_journal)


def _told_shares(row: Any) -> str:
    return (
        f"{balance_name(Key(row.budget, row.window_us))} has shares of {row.shares} of "
        f"{row.basis}, and parts of its {row.used} may be above them"
    )


def _told_line(row: Any) -> str:
    return (
        f"task {row.task_id} is {row.state} and its line on {row.budget!r} holds {row.reserved}, "
        f"used {row.used} and charged {row.settled}"
    )


def _told_orphan(row: Any) -> str:
    return (
        f"a line on {row.budget!r} holds {row.reserved} and charged {row.settled}, and its request "
        f"{row.reservation_id} is gone"
    )


def _told_usage(row: Any) -> str:
    return (
        f"task {row.task_id} used {row.used} of {row.budget!r} by its line and "
        f"{row.recorded} by its usage records"
    )


def _told_unreachable(row: Any) -> str:
    return f"task {row.task_id} of {row.owner!r} is {row.state} and nothing will bring it to an end"


def _told_stuck(row: Any) -> str:
    _, task_id = row
    return f"the message of task {task_id} is passed by, and none comes before it by its order key"


def wrong_tallies(connection: Connection, root: str) -> list[tuple[int, int]]:
    """Return days whose tallies are not what their requests add up to, and how many are not."""
    found = (
        (day, len(tallies.mismatched_tallies(connection, root, day)))
        for day in tallies.days(connection, root)
    )
    return [(day, wrong) for day, wrong in found if wrong]


def _told_tallies(row: tuple[int, int]) -> str:
    day, wrong = row
    return (
        f"{wrong} {'tally' if wrong == 1 else 'tallies'} of {day_name(day)} "
        f"{'is' if wrong == 1 else 'are'} not what its requests add up to"
    )


def _told_misdated(row: derived.Misdated) -> str:
    lane, counted_us = row
    whose = "of the outbox" if lane is None else f"of lane {lane!r}"
    return (
        f"the count of what waits {whose} is from {at(counted_us)}, and believed until then; made "
        f"anew after {_REPAIRED}"
    )


def _few(
    find: Callable[[Connection, str, int], Any],
) -> Callable[[Connection, str], Any]:
    return lambda connection, root: find(connection, root, MOST_TOLD)


#: By kind of mismatch: what finds them, and what tells one.
_PROOFS: dict[str, tuple[Callable[[Connection, str], Any], Callable[[Any], str]]] = {
    "balances": (
        lambda connection, root: wrong_balances(connection, root).items(),
        _told_balance,
    ),
    "shares": (reports.mismatched_shares, _told_shares),
    "lines": (_few(reports.mismatched_lines), _told_line),
    "orphans": (_few(reports.orphaned_lines), _told_orphan),
    "usage": (_few(reports.mismatched_usage), _told_usage),
    "unreachable": (_few(reports.unreachable), _told_unreachable),
    "behind": (_few(derived.stuck_behind), _told_stuck),
    "tallies": (wrong_tallies, _told_tallies),
}

_REPAIRED = "'celery -A PROJ budget reconcile --repair'"
_REMEDIES = {
    "balances": f"balances and journals are rebuilt by {_REPAIRED}, unless a line is wrong",
    "shares": f"what is left of a budget is shared anew by {_REPAIRED}",
    "lines": (
        "nobody can know whether a request or its line is right: look at it with 'celery -A PROJ "
        "budget explain TASK_ID', restore the row from a backup, or correct what was charged with "
        "'celery -A PROJ budget adjust'"
    ),
    "orphans": (
        "a request's row was deleted by hand: restore it from a backup, or delete its lines as "
        f"well and run {_REPAIRED}"
    ),
    "usage": (
        "a usage record, or a line, was changed by hand: look at it with 'celery -A PROJ budget "
        "explain TASK_ID', and restore the row from a backup"
    ),
    "unreachable": (
        "what nothing brings to an end is given back with 'celery -A PROJ budget cancel TASK_ID'"
    ),
    "behind": f"messages that are passed by for good are let go by {_REPAIRED}",
    "tallies": f"what reports add up from is made anew by {_REPAIRED}",
}


def _balance_told(key: Key, by_lines: Any, by_journal: Any) -> str:
    """Return the sentence that names a balance, its lines and its journal."""
    row = by_lines or by_journal
    if row.reserved is None:
        says = "has no balance"
    else:
        says = f"says {row.reserved} reserved and {row.spent} spent"
    if by_lines is None:
        lines = "its lines agree"
    else:
        lines = f"its lines add up to {by_lines.lines_reserved} and {by_lines.lines_spent}"
    if by_journal is None:
        entries = "its journal agrees"
    elif by_journal.missing:
        entries = "an entry of its journal is missing"
    elif by_journal.changed:
        entries = "an entry of its journal does not follow from the one before it"
    else:
        led = f"{by_journal.journal_reserved} and {by_journal.journal_spent}"
        entries = f"its journal leads to {led}"
    return f"{balance_name(key)} {says}, {lines}, {entries}"


def balance_name(key: Key) -> str:
    """Return a balance's name in a sentence."""
    if key.stripe > 0:
        return f"a part of {balance_name(Key(key.budget, key.window_us))}"
    if key.window_us == 0:
        return f"budget {key.budget!r}"
    began = datetime.fromtimestamp(key.window_us / 1_000_000, timezone.utc)
    return f"budget {key.budget!r} in its window from {began:%Y-%m-%dT%H:%M:%SZ}"


def fold(
    store: Store, settings: Settings, age_us: int, told: Callable[[int, int], None] | None = None
) -> int:
    """Fold what the journal keeps from before ``age_us`` ago; return how many entries went.

    One checkpoint for each balance stands for them, each in a transaction of its own.

    :param told: called after each balance with how many are done, and how many there are.
    """
    keys: list[Key] = []
    after: tuple[str, int, int] | None = None
    while True:
        rows = store.read(journal.foldable, settings.root, age_us, PAGE, after)
        keys += map(key_of, rows)
        if len(rows) < PAGE:
            break
        after = tuple(rows[-1])
    gone = 0
    for done, key in enumerate(keys, 1):
        gone += store.run(
            journal.fold, settings.root, key.budget, key.window_us, key.stripe, age_us
        )
        if told is not None:
            told(done, len(keys))
    return gone
