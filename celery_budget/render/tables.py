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
    Report,
    Suggestion,
)
from celery_budget.render.budgets import balances_table
from celery_budget.render.text import facts, literal, moment, number, table_of

__all__ = [
    "DRIFT_LOW",
    "FULL",
    "MEANING",
    "counts_table",
    "drift_table",
    "parked_table",
    "quarantine_counts",
    "quarantine_facts",
    "quarantine_table",
    "queued_table",
    "relays_table",
    "report_view",
    "suggestions_table",
    "verdict",
]

#: Actual over estimated: the estimator is marked below this, and above the ceiling of its stage.
DRIFT_LOW = 0.5

#: A message that is due for longer than this is waiting for a relay that does not run.
OVERDUE_SECONDS = 10

_COMPARED = ("requests", "estimated", "actual", "ratio")

_BAD = "bold red"
_GOOD = "green"

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
    "over": "used more than estimated",
    "unmetered": "an attempt did not tell all its usage; charged its estimate",
    "unreserved": "reached a worker without a reservation",
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

#: Open work that is no request, in the singular.
_OPEN = {
    "cancelling": "cancellation requested",
    "unclosed": "attempt not closed",
    "due": "message due",
    "held": "message held by a lane",
    "untold": "result not stored",
}


def _titled(title: str, body: RenderableType) -> Group:
    return Group(Text(title, "bold"), body, Text())


def counts_table(counts: dict[str, int]) -> RenderableType:
    """How many requests there are, by what became of them, and what that means."""
    rows = [
        (literal(name), number(count), Text(MEANING.get(name, ""), "dim"))
        for name, count in counts.items()
    ]
    return table_of(["requests", "number", ""], rows, numbers=["number"])


def drift_table(drifts: Sequence[Drift]) -> RenderableType:
    """What estimators promised against what was charged; marked where they are far apart."""
    if not drifts:
        return Text("Nothing has been measured yet: no success has recorded its usage.")
    table = table_of(
        ["stage", "estimator", "version", *_COMPARED, ""],
        map(_drift_row, drifts),
        numbers=_COMPARED,
    )
    above = [_advice(drift) for drift in drifts if drift.above]
    return Group(table, *above) if above else table


def _advice(drift: Drift) -> Text:
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


def _drift_row(drift: Drift) -> list[Text | str]:
    mark = _drift_mark(drift)
    return [
        literal(drift.stage),
        literal(drift.estimator),
        literal(drift.version),
        number(drift.requests),
        number(drift.estimated),
        number(drift.actual),
        Text("-" if drift.ratio is None else f"{drift.ratio:.2f}", "yellow" if mark else ""),
        Text(mark, "yellow"),
    ]


def _drift_mark(drift: Drift) -> str:
    marks = ["shadow"] if drift.shadow else []
    if drift.above or (drift.ratio is None and drift.actual):
        marks.append("estimated too low")
    elif drift.ratio is not None and drift.ratio < DRIFT_LOW:
        marks.append("estimated too high")
    return ", ".join(marks)


def queued_table(queues: Sequence[Queued]) -> RenderableType:
    """How much waits for each budget, and for how long the oldest."""
    rows = [
        (literal(one.budget), number(one.requests), Text(f"{one.oldest_seconds:.0f} s"))
        for one in queues
    ]
    return table_of(["budget", "parked", "oldest"], rows, numbers=["parked", "oldest"])


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
    return table_of(["host", "pid", "seen", ""], map(_relay_row, relays), numbers=["pid", "seen"])


def _relay_row(relay: RelaySeen) -> list[Text | str]:
    gone = relay.gone
    state = "gone" if gone else "sleeping" if relay.sleeping else ""
    return [
        literal(relay.host),
        str(relay.pid),
        Text(f"{relay.seconds:,.1f} s ago", _BAD if gone else ""),
        Text(state, _BAD if gone else "dim"),
    ]


#: Said where requests that fail for good are not kept any more.
FULL = "quarantine is full: what fails for good is not kept"


def quarantine_counts(counts: dict[str, int], full: bool = False) -> RenderableType:
    """How many messages are in quarantine, by reason.

    :param full: whether requests that fail for good are not kept any more.
    """
    if not counts:
        return Text("No message is in quarantine.")
    rows = [
        (literal(reason), number(count), Text(ISOLATED.get(reason, ""), "dim"))
        for reason, count in counts.items()
    ]
    table = table_of(["reason", "messages", ""], rows, numbers=["messages"])
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
    if reconciliation.ok:
        return Text.assemble(
            ("the ledger adds up: ", _GOOD),
            _still_open(requests, reconciliation.open_work, reconciliation.overdue_seconds),
        )
    wrong = len(reconciliation.mismatches)
    return Group(
        Text(
            f"the ledger does not add up: {number(wrong)} {_plural(wrong, 'mismatch', 'es')}", _BAD
        ),
        *(literal(f"- {mismatch}") for mismatch in reconciliation.mismatches),
    )


def _still_open(requests: int, open_work: dict[str, int], overdue_seconds: int) -> Text:
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


def lane_counts(counts: Mapping[str, int]) -> RenderableType:
    """How many requests were admitted in each lane."""
    rows = [(literal(name), number(count)) for name, count in counts.items()]
    return table_of(["lane", "admitted"], rows, numbers=["admitted"])


def report_view(report: Report) -> RenderableType:
    """Balances, counts, what waits, drift, relays, quarantine and what is open."""
    waits = [_titled("Parked", queued_table(report.parked))] if report.parked else []
    lanes = [_titled("Lanes", lane_counts(report.lanes))] if report.lanes else []
    return Group(
        _titled("Budgets", balances_table(report.balances)),
        _titled("Requests", counts_table(report.counts)),
        *waits,
        *lanes,
        _titled("Estimated and actual", drift_table(report.drift)),
        _titled("Relays", relays_table(report.relays)),
        _titled("Quarantine", quarantine_counts(report.quarantine, report.quarantine_full)),
        _still_open(report.counts["admitted"], report.open_work, report.overdue_seconds),
    )
