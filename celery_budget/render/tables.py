"""Reports for people: counts, drift, and whether the ledger adds up."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from celery_budget.reconcile import (
    Drift,
    ParkedRequest,
    Quarantined,
    Queued,
    Reconciliation,
    RelaySeen,
    Suggestion,
)
from celery_budget.render.grids import (
    ISOLATED,
    MEANING,
    Grid,
    counts_grid,
    drift_grid,
    parked_grid,
    quarantine_grid,
    relays_grid,
)
from celery_budget.render.text import facts, literal, moment, number, table_of

__all__ = [
    "FULL",
    "ISOLATED",
    "MEANING",
    "OVERDUE_SECONDS",
    "advice",
    "counts_table",
    "drift_table",
    "grid_table",
    "parked_table",
    "quarantine_counts",
    "quarantine_facts",
    "quarantine_table",
    "queued_table",
    "relays_table",
    "still_open",
    "suggestions_table",
    "verdict",
]

#: A message that is due for longer than this is waiting for a relay that does not run.
OVERDUE_SECONDS = 10

_BAD = "bold red"
_GOOD = "green"
_STYLES = {"bad": _BAD, "odd": "yellow", "dim": "dim"}

#: Open work that is no request, in the singular.
_OPEN = {
    "cancelling": "cancellation requested",
    "unclosed": "attempt not closed",
    "due": "message to publish",
    "held": "message held by a lane",
    "untold": "result not stored",
}


def grid_table(grid: Grid) -> RenderableType:
    """Return a grid as a table."""
    rows = ([literal(cell.text, _STYLES.get(cell.kind, "")) for cell in row] for row in grid.rows)
    return table_of(grid.columns, rows, numbers=grid.numbers)


def counts_table(counts: Mapping[str, int]) -> RenderableType:
    """How many requests there are, by what became of them, and what that means."""
    return grid_table(counts_grid(counts))


def drift_table(drifts: Sequence[Drift]) -> RenderableType:
    """What estimators promised against what was charged; marked where they are far apart."""
    if not drifts:
        return Text("Nothing has been measured yet: no success has recorded its usage.")
    table = grid_table(drift_grid(drifts))
    above = [advice(drift) for drift in drifts if drift.above]
    return Group(table, *above) if above else table


def advice(drift: Drift) -> Text:
    """What to do about an estimator that promises too little: a higher limit would hide it."""
    estimator = f"estimator {drift.estimator} (version {drift.version})"
    used = (
        f"used what {estimator} did not promise at all"
        if drift.ratio is None
        else f"used {drift.ratio:.2f} times what {estimator} promised, above {drift.ceiling:g}"
    )
    return literal(
        f"stage {drift.stage} {used}: mend the estimator before you change a limit; see "
        f"'celery -A PROJ budget suggest --stage {shlex.quote(drift.stage)}'",
        "yellow",
    )


def suggestions_table(
    suggestions: Sequence[Suggestion], stage: str | None = None
) -> RenderableType:
    """What estimates would have been enough for the last requests of each stage, or of one."""
    if not suggestions:
        of = "" if stage is None else f" of stage {stage}"
        return literal(f"Nothing has been measured yet{of}: no success has recorded its usage.")
    numbers = ("requests", "suggested", "median", "largest", "covered now")
    rows = [
        (
            literal(one.stage),
            literal(one.unit),
            number(one.requests),
            number(one.amount),
            number(one.median),
            number(one.largest),
            f"{one.covered / one.requests:.0%}",
        )
        for one in suggestions
    ]
    share = f"{suggestions[0].quantile:.12g}"
    said = f"suggested: what {share} of the last requests of a stage did not exceed"
    return Group(table_of(["stage", "unit", *numbers], rows, numbers=numbers), Text(said, "dim"))


def queued_table(queues: Sequence[Queued]) -> RenderableType:
    """How much waits for each budget, and for how long the oldest."""
    return grid_table(parked_grid(queues))


def parked_table(waiting: Sequence[ParkedRequest]) -> RenderableType:
    """What waits for budget, one by one."""
    if not waiting:
        return Text("Nothing waits for budget.")
    rows = [
        (
            literal(one.budget),
            literal(one.reason),
            number(one.amount),
            literal(f"{one.task_name}[{one.task_id}]"),
            literal(one.owner),
            moment(one.created_us),
            moment(one.deadline_us),
        )
        for one in waiting
    ]
    return table_of(
        ["budget", "reason", "needs", "task", "owner", "since", "until"],
        rows,
        numbers=["needs"],
    )


def relays_table(relays: Sequence[RelaySeen]) -> RenderableType:
    """The relays of a ledger; marked where one has not been seen for a while."""
    if not relays:
        return Text(
            "No relay runs; what is admitted is published once one does: "
            "'celery -A PROJ budget relay'."
        )
    return grid_table(relays_grid(relays))


#: Said where requests that fail for good are not kept any more.
FULL = "quarantine is full: what fails for good is not kept"


def quarantine_counts(counts: Mapping[str, int], full: bool = False) -> RenderableType:
    """How many messages are in quarantine, by reason.

    :param full: whether requests that fail for good are not kept any more.
    """
    if not counts:
        return Text("No message is in quarantine.")
    table = grid_table(quarantine_grid(counts))
    if not full:
        return table
    return Group(table, Text(FULL, _BAD))


def quarantine_table(isolated: Sequence[Quarantined]) -> RenderableType:
    """What is in quarantine, each with the id by which it is published again or discarded."""
    if not isolated:
        return Text("No message is in quarantine.")
    rows = [
        (
            literal(one.quarantine_id),
            literal(f"{one.task_name}[{one.task_id}]"),
            literal(f"{one.queue} at {one.broker}" if one.broker else one.queue),
            literal(one.reason),
            number(one.failures if one.attempts is None else one.attempts),
            moment(one.quarantined_us),
            literal(one.error),
        )
        for one in isolated
    ]
    columns = ["id", "task", "queue", "reason", "tries", "since", "error"]
    return table_of(columns, rows, numbers=["tries"])


def quarantine_facts(one: Quarantined) -> RenderableType:
    """All that is known of one that is in quarantine."""
    known: dict[str, str | None] = {
        "id": one.quarantine_id,
        "task": f"{one.task_name}[{one.task_id}]",
        "queue": f"{one.queue} at {one.broker}" if one.broker else one.queue,
        "reason": f"{one.reason}: {ISOLATED.get(one.reason, '')}",
        "since": moment(one.quarantined_us),
        "arguments": " ".join(filter(None, (one.args, one.kwargs))) or None,
        "error": one.error,
    }
    if one.attempts is None:
        known["publishing failed"] = f"{one.failures} times"
    else:
        known["attempts"] = str(one.attempts)
        for name, used in (one.used or {}).items():
            known[f"used of {name}"] = number(used)
    if one.traceback is None:
        return facts(known)
    return Group(facts(known), Text(), *map(literal, one.traceback.splitlines()))


def verdict(reconciliation: Reconciliation, requests: int) -> RenderableType:
    """Whether the ledger adds up, in one line; each mismatch in one more.

    :param requests: how many were admitted.
    """
    if not reconciliation.mismatches:
        return Text.assemble(
            ("the ledger adds up: ", _GOOD),
            still_open(requests, reconciliation.open_work, reconciliation.overdue_seconds),
        )
    wrong = len(reconciliation.mismatches)
    return Group(
        Text(
            f"the ledger does not add up: {number(wrong)} {_plural(wrong, 'mismatch', 'es')}", _BAD
        ),
        *(literal(f"- {mismatch}") for mismatch in reconciliation.mismatches),
    )


def still_open(requests: int, open_work: dict[str, int], overdue_seconds: int) -> Text:
    """How many requests there are, and which of them are open, in one line."""
    return Text(
        f"{number(requests)} {_plural(requests, 'request')}, "
        f"{_open(open_work)}{_overdue(overdue_seconds)}",
        _GOOD,
    )


def _overdue(seconds: int) -> str:
    if seconds < OVERDUE_SECONDS:
        return ""
    return f" (the oldest message is due since {number(seconds)} s: is a relay running?)"


def _open(open_work: dict[str, int]) -> str:
    """What is open: requests by state, in the order of their lives, then the rest."""
    left = [
        f"{number(open_work[name])} {_open_name(name, open_work[name])}"
        for name in sorted(open_work, key=[*MEANING, *_OPEN, *open_work].index)
        if open_work[name]
    ]
    return f"open: {', '.join(left)}" if left else "nothing open"


def _open_name(name: str, count: int) -> str:
    noun, _, rest = _OPEN.get(name, "").partition(" ")
    return f"{_plural(count, noun)} {rest}" if noun else name


def _plural(count: int, noun: str, ending: str = "s") -> str:
    return noun if count == 1 else noun + ending
