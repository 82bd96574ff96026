"""What a report says, as rows of words: one grid for the tables of terminals and pages alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from celery_budget.core.budgets import Balance
from celery_budget.reconcile import Drift, Queued, RelaySeen
from celery_budget.reconcile.figures import Amounts, Group, Refusals, Spread, Waived
from celery_budget.render.text import duration, instant, number, printable

__all__ = [
    "DRIFT_LOW",
    "FAILED",
    "ISOLATED",
    "MEANING",
    "REFUSED",
    "Cell",
    "Grid",
    "amounts_grid",
    "counts_grid",
    "drift_grid",
    "drift_mark",
    "failures_grid",
    "group_grids",
    "lanes_grid",
    "parked_grid",
    "quarantine_grid",
    "refusals_grid",
    "relays_grid",
    "some_of",
    "times_grid",
    "waived_grid",
    "windows_grid",
]

#: Actual over estimated: an estimator is marked below this, and above the ceiling of its stage.
DRIFT_LOW = 0.5

#: So many names stand in one line.
MOST_NAMED = 12

#: What the counts of a report count, and what the flags of a request mean.
MEANING = {
    "admitted": "requests that reserved budget",
    "refused": "turned away, nothing reserved",
    "parked": "waiting for budget",
    "given_up": "waited too long for budget, never admitted",
    "planned": "later steps of chains that were reserved whole",
    "reserved": "message not published yet",
    "published": "at the broker, not started",
    "running": "an attempt runs",
    "waiting": "between two attempts",
    "settled": "ran and were charged",
    "released": "never ran, nothing charged",
    "lost": "ran, outcome unknown, charged",
    "expired": "their time was over before they ran",
    "cancelled": "ended by whoever asked for them",
    "over": "used more than estimated",
    "unmetered": "an attempt did not tell all its usage; charged its estimate",
    "unreserved": "reached a worker without a reservation",
}

#: Why a budget was short.
REFUSED = {
    "exhausted": "what is spent leaves no room",
    "held": "it would fit if what is held came back",
    "queued": "a request that was parked before goes ahead",
    "blocked": "the limit is 0",
    "draining": "the budget takes nothing new",
    "closed": "the budget is closed",
    "unreserved": "came to a worker without a reservation",
}

#: How work fails.
FAILED = {
    "refused": "never admitted",
    "transient": "an attempt failed, and another followed",
    "permanent": "failed for good, by its error",
    "exhausted": "used up its attempts, or the time for them",
    "uncertain": "nobody knows how it ended",
    "expired": "its time was over before it ran",
}

#: Why messages are in quarantine.
ISOLATED = {
    "unroutable": "no queue takes it, or its exchange is missing",
    "rejected": "the broker refused it each time",
    "oversize": "larger than the broker takes",
    "undecodable": "its stored form cannot be read",
    "max_attempts": "failed, all its attempts used up",
    "retry_within": "failed, the time for its attempts used up",
    "terminal": "failed, by an error that is not retried",
    "failed": "failed, and was not retried",
}


@dataclass(frozen=True)
class Cell:
    """What stands in one place of a grid.

    :ivar kind: how it is meant: ``bad``, ``odd`` (worth a look), ``dim`` (said beside), or nothing.
    """

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Grid:
    """Rows under headings; the first cell names its row.

    :ivar numbers: the headings of columns that are numbers.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numbers: frozenset[str]

    @classmethod
    def of(
        cls,
        title: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[str | Cell]],
        numbers: Iterable[str],
    ) -> Grid:
        """Return a grid of plain words and cells."""
        made = tuple(
            tuple(cell if isinstance(cell, Cell) else Cell(printable(cell)) for cell in row)
            for row in rows
        )
        return cls(title, tuple(columns), made, frozenset(numbers))


def _told(
    title: str, name: str, of: str, counts: Mapping[str, int], meaning: Mapping[str, str]
) -> Grid:
    """Return counts by name, each with what it means."""
    rows = [
        (what, number(count), Cell(meaning.get(what, ""), "dim")) for what, count in counts.items()
    ]
    return Grid.of(title, [name, of, ""], rows, [of])


def counts_grid(counts: Mapping[str, int]) -> Grid:
    """How many requests there are, by what became of them."""
    return _told("Requests", "requests", "number", counts, MEANING)


def failures_grid(failures: Mapping[str, int]) -> Grid:
    """How often work failed, by how."""
    return _told("Failures", "failures", "number", failures, FAILED)


def quarantine_grid(quarantine: Mapping[str, int]) -> Grid:
    """How many messages are in quarantine, by reason."""
    return _told("Quarantine", "reason", "messages", quarantine, ISOLATED)


def lanes_grid(lanes: Mapping[str, int]) -> Grid:
    """How many requests were admitted in each lane."""
    rows = [(name, number(count)) for name, count in lanes.items()]
    return Grid.of("Lanes", ["lane", "admitted"], rows, ["admitted"])


def windows_grid(balances: Iterable[Balance]) -> Grid:
    """The windows that balances are of, each with its budgets."""
    names: dict[tuple[str, int, int], list[str]] = {}
    for balance in balances:
        if balance.end_us is not None:
            window = balance.period, balance.start_us, balance.end_us
            names.setdefault(window, []).append(balance.budget)
    rows = [
        (period, instant(start), instant(end), some_of(sorted(names[period, start, end])))
        for period, start, end in sorted(names, key=lambda one: (one[1], one[2]), reverse=True)
    ]
    return Grid.of("Windows", ["window", "from (UTC)", "to (UTC)", "budgets"], rows, [])


def some_of(names: Sequence[str]) -> str:
    """Return names in one line: all of them, or the first ones and how many more there are."""
    more = len(names) - MOST_NAMED
    rest = f" and {number(more)} more" if more > 0 else ""
    return ", ".join(names[:MOST_NAMED]) + rest


def refusals_grid(refusals: Sequence[Refusals]) -> Grid:
    """How often each budget was short, and why."""
    rows = [
        (one.budget, one.reason, number(one.count), Cell(REFUSED.get(one.reason, ""), "dim"))
        for one in refusals
    ]
    return Grid.of("Refused", ["short of", "reason", "refused", ""], rows, ["refused"])


def waived_grid(waived: Sequence[Waived]) -> Grid:
    """What each budget would have refused, had it been enforced."""
    rows = [
        (one.budget, one.stage, one.reason, number(one.count), number(one.amount)) for one in waived
    ]
    columns = ["short of", "stage", "reason", "requests", "amount"]
    return Grid.of("Would have been refused", columns, rows, columns[3:])


def parked_grid(parked: Sequence[Queued]) -> Grid:
    """How much waits for each budget, and for how long the oldest."""
    rows = [(one.budget, number(one.requests), duration(one.oldest_seconds)) for one in parked]
    return Grid.of("Parked", ["budget", "parked", "oldest"], rows, ["parked", "oldest"])


_AMOUNTS = ("requests", "estimated", "charged", "over-use", "requests over")


def amounts_grid(amounts: Sequence[Amounts]) -> Grid:
    """What was estimated and charged of each budget, by what has ended."""
    rows = [(one.budget, one.unit, *_amounts(one)) for one in amounts]
    return Grid.of("Estimated and charged", ["budget", "unit", *_AMOUNTS], rows, _AMOUNTS)


def _amounts(one: Amounts) -> tuple[str | Cell, ...]:
    return (
        number(one.requests),
        number(one.estimated),
        number(one.charged),
        Cell(number(one.over), "odd" if one.over else ""),
        number(one.requests_over),
    )


_COMPARED = ("requests", "estimated", "actual", "ratio")


def drift_grid(drifts: Sequence[Drift]) -> Grid:
    """What estimators promised against what was used; marked where they are far apart."""
    rows: list[tuple[str | Cell, ...]] = []
    for drift in drifts:
        mark = drift_mark(drift)
        rows.append(
            (
                drift.stage,
                f"{drift.estimator}:{drift.version}",
                number(drift.requests),
                number(drift.estimated),
                number(drift.actual),
                Cell("-" if drift.ratio is None else f"{drift.ratio:.2f}", "odd" if mark else ""),
                Cell(mark, "odd"),
            )
        )
    columns = ["stage", "estimator", *_COMPARED, ""]
    return Grid.of("Estimated and actual", columns, rows, _COMPARED)


def drift_mark(drift: Drift) -> str:
    """Return what is to be said of an estimator; nothing of one that is good enough."""
    marks = ["shadow"] if drift.shadow else []
    if drift.above or (drift.ratio is None and drift.actual):
        marks.append("estimated too low")
    elif drift.ratio is not None and drift.ratio < DRIFT_LOW:
        marks.append("estimated too high")
    return ", ".join(marks)


_SPREAD = ("measured", "p50", "p95", "p99")


def times_grid(waits: Spread, runs: Spread) -> Grid:
    """How long requests waited and attempts ran."""
    rows: list[tuple[str | Cell, ...]] = [
        ("waits", *_spread(waits), Cell("from due to first start", "dim")),
        ("runs", *_spread(runs), Cell("of attempts, each by itself", "dim")),
    ]
    return Grid.of("Times", ["", *_SPREAD, ""], rows, _SPREAD)


def _spread(spread: Spread) -> tuple[str, ...]:
    return number(spread.count), *(
        "-" if one is None else duration(one) for one in (spread.p50, spread.p95, spread.p99)
    )


def relays_grid(relays: Sequence[RelaySeen]) -> Grid:
    """The relays of a ledger; marked where one has not been seen for a while."""
    rows: list[tuple[str | Cell, ...]] = []
    for relay in relays:
        gone = relay.gone
        seen = Cell(f"{relay.seconds:,.1f} s ago", "bad" if gone else "")
        state = Cell("gone", "bad") if gone else Cell("sleeping" if relay.sleeping else "", "dim")
        rows.append((relay.host, str(relay.pid), seen, state))
    return Grid.of("Relays", ["host", "pid", "seen", ""], rows, ["pid", "seen"])


def group_grids(by: str, groups: Sequence[Group]) -> tuple[Grid, ...]:
    """What a report says by groups: counts, failures, times, and amounts by budget.

    What is nothing in all groups has no column.
    """
    counts = _columns(group.counts for group in groups)
    failures = [name for name in _columns(group.failures for group in groups) if name != "refused"]
    times = ["waits p50", "p95", "p99", "runs p50", "p95", "p99"]
    named = [printable(group.key) for group in groups]
    count_rows = [
        (name, *(number(group.counts.get(one, 0)) for one in counts))
        for name, group in zip(named, groups, strict=True)
    ]
    failure_rows = [
        (name, *(number(group.failures.get(one, 0)) for one in failures))
        for name, group in zip(named, groups, strict=True)
    ]
    time_rows: list[tuple[str, ...]] = [
        (name, *_spread(group.waits)[1:], *_spread(group.runs)[1:])
        for name, group in zip(named, groups, strict=True)
    ]
    amount_rows: list[tuple[str | Cell, ...]] = [
        (name, printable(one.budget), printable(one.unit), *_amounts(one))
        for name, group in zip(named, groups, strict=True)
        for one in group.amounts
    ]
    found = [Grid.of(f"Requests by {by}", [by, *counts], count_rows, counts)]
    if failures:
        found.append(Grid.of(f"Failures by {by}", [by, *failures], failure_rows, failures))
    if any(group.waits.count or group.runs.count for group in groups):
        found.append(Grid.of(f"Times by {by}", [by, *times], time_rows, times))
    if amount_rows:
        columns = [by, "budget", "unit", *_AMOUNTS]
        found.append(Grid.of(f"Estimated and charged by {by}", columns, amount_rows, _AMOUNTS))
    return tuple(found)


def _columns(of: Iterable[Mapping[str, int]]) -> list[str]:
    """Return the names that count anything, in the order in which a report has them."""
    known = {name for counts in of for name, count in counts.items() if count}
    order = [*MEANING, *FAILED]
    return sorted(
        known, key=lambda name: (order.index(name) if name in order else len(order), name)
    )
