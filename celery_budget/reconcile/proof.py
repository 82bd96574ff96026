"""Whether the ledger adds up, putting balances right, and folding what the journal keeps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from celery_budget.errors import InvalidAmount
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, journal, repairs, reports
from celery_budget.store.balances import Key, key_of

__all__ = ["Reconciliation", "fold", "prove", "reconcile", "repair"]

#: How many balances with old journal entries are looked up at a time.
PAGE = 1000


@dataclass(frozen=True)
class Reconciliation:
    """Whether the ledger adds up.

    :ivar mismatches: one sentence for each thing that is wrong; empty where it adds up.
    :ivar open_work: requests that have not ended, by state; how many of them were cancelled while
        they ran; messages still due; parked work; results that have still to be stored.
    :ivar overdue_seconds: for how long the oldest due message has been waiting for a relay.
    """

    mismatches: tuple[str, ...]
    open_work: dict[str, int]
    overdue_seconds: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. Work that is still open is not wrong."""
        return not self.mismatches

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "ok": self.ok,
            "mismatches": list(self.mismatches),
            "open": self.open_work,
            "overdue_seconds": self.overdue_seconds,
        }


def reconcile(store: Store, settings: Settings) -> Reconciliation:
    """Check the ledger against itself, all of it at one moment."""
    return store.read(prove, settings.root)


def prove(connection: Connection, root: str) -> Reconciliation:
    """Compare balances with lines and journal, lines with requests and usage; locks nothing."""
    found = [_balance_told(key, *rows) for key, rows in _wrong_balances(connection, root).items()]
    found += [
        f"task {row.task_id} is {row.state} and its line on {row.budget!r} holds {row.reserved}, "
        f"used {row.used} and charged {row.settled}"
        for row in reports.mismatched_lines(connection, root)
    ]
    found += [
        f"a line on {row.budget!r} holds {row.reserved} and charged {row.settled}, and its request "
        f"{row.reservation_id} is gone"
        for row in reports.orphaned_lines(connection, root)
    ]
    found += [
        f"task {row.task_id} used {row.used} of {row.budget!r} by its line and "
        f"{row.recorded} by its usage records"
        for row in reports.mismatched_usage(connection, root)
    ]
    found += [
        f"task {row.task_id} of {row.owner!r} is {row.state} and nothing will bring it to an end"
        for row in reports.unreachable(connection, root)
    ]
    return Reconciliation(
        tuple(found),
        reports.open_work(connection, root),
        reports.overdue_us(connection, root) // 1_000_000,
    )


def _wrong_balances(connection: Connection, root: str) -> dict[Key, tuple[Any, Any]]:
    """Return what disagrees with a balance: its lines' sum and its journal's, none where it agrees.

    In the order in which balances are locked.
    """
    lines = {key_of(row): row for row in reports.mismatched_balances(connection, root)}
    journals = {key_of(row): row for row in reports.mismatched_journals(connection, root)}
    return {key: (lines.get(key), journals.get(key)) for key in sorted({*lines, *journals})}


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
        entries = "an entry of its journal was changed"
    else:
        led = f"{by_journal.journal_reserved} and {by_journal.journal_spent}"
        entries = f"its journal leads to {led}"
    return f"{_balance_name(key)} {says}, {lines}, {entries}"


def _balance_name(key: Key) -> str:
    if key.window_us == 0:
        return f"budget {key.budget!r}"
    began = datetime.fromtimestamp(key.window_us / 1_000_000, timezone.utc)
    return f"budget {key.budget!r} in its window from {began:%Y-%m-%dT%H:%M:%SZ}"


def repair(store: Store, settings: Settings) -> tuple[str, ...]:
    """Make every balance what its lines add up to; return a sentence for each that was not.

    Each in a transaction of its own, behind the balance's lock, with an entry in its journal. What
    is wrong between requests and their lines is not put right by this: nobody can know which of
    them is. Nor is a balance that its journal leads to and its lines do not (a line is wrong), or
    whose lines add up to what none can be; it is left, and told again.
    """
    rebuilt = []
    for key in store.read(_wrong_balances, settings.root):
        with suppress(InvalidAmount):
            if store.run(repairs.rebuild, settings.root, key, "budget reconcile --repair"):
                rebuilt.append(f"{_balance_name(key)} was rebuilt from its lines")
    return tuple(rebuilt)


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
