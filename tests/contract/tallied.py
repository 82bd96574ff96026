"""What a report has to say, counted plainly from the rows of a ledger: an oracle."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from celery_budget import reconcile
from celery_budget.core.tallies import DAY_US
from celery_budget.reconcile import Asked, Group, Report
from tests.contract.support import Ledger

STATES = ("planned", "reserved", "published", "running", "waiting", "settled", "released", "lost")
FAILED = {"retried", "rejected", "raised"}
NOT_FAILED = ("cancelled", "revoked", "predecessor", "result stored")
SPENT = ("expired", "deadline", "park_expired", "wait_expired", "max_attempts", "retry_within")
BY: dict[str, Callable[[Any], str]] = {
    "tenant": lambda row: row.owner,
    "stage": lambda row: row.stage,
    "task": lambda row: row.task_name,
    "day": lambda row: day(row.created_us),
    "estimator": lambda row: f"{row.estimator}:{row.estimator_version}",
}


def day(us: int) -> str:
    return datetime.fromtimestamp(us // 1_000_000, timezone.utc).date().isoformat()


def check(ledger: Ledger, asked: Asked | None = None, by: str | None = None) -> Report:
    """Check that the report of a ledger is what its rows add up to."""
    asked = asked or Asked()
    report = reconcile.report(ledger.store, ledger.settings, asked, by)
    lines, attempts = (_by_reservation(ledger, name) for name in ("lines", "attempts"))
    rows = [
        row
        for row in ledger.rows("reservations")
        if (asked.since_us is None or row.created_us >= asked.since_us)
        and (asked.until_us is None or row.created_us < asked.until_us)
        and asked.stage in (None, row.stage)
        and (asked.budget is None or any(_on(asked, line) for line in lines[row.reservation_id]))
    ]
    told = _told(rows, lines, attempts, asked)
    assert _shown(report) == told
    assert {(one.stage, one.estimator, one.version, one.shadow): (one.requests, one.estimated,
            one.actual) for one in report.drift} == _drift(rows, lines, attempts)  # fmt: skip
    lanes = Counter(row.lane for row in rows if row.lane is not None and row.admitted)
    assert report.lanes == lanes
    if by is not None:
        grouped = defaultdict(list)
        for row in rows:
            grouped[BY[by](row)].append(row)
        shown = {one.key: _shown(one) for one in report.groups}
        wanted = {key: _told(some, lines, attempts, asked) for key, some in grouped.items()}
        # Where only refusals were counted there is no request.
        assert {key: one for key, one in shown.items() if key in wanted or any(
            one["counts"].values())} == wanted  # fmt: skip
    days = {one.key: _shown(one) for one in report.days}
    for key in {day(row.created_us) for row in rows}:
        if key in days:
            some = [row for row in rows if day(row.created_us) == key]
            assert days.pop(key) == _told(some, lines, attempts, asked)
    assert not any(any(one["counts"].values()) for one in days.values())
    return report


def _by_reservation(ledger: Ledger, table: str) -> dict[Any, list[Any]]:
    found = defaultdict(list)
    for row in ledger.rows(table):
        found[row.reservation_id].append(row)
    return found


def _on(asked: Asked, line: Any) -> bool:
    return bool(line.budget == asked.budget)


def _shown(one: Report | Group) -> dict[str, Any]:
    counts = {name: n for name, n in one.counts.items() if name not in ("refused", "parked")}
    failures = {name: n for name, n in one.failures.items() if name != "refused"}
    return {
        "counts": counts,
        "failures": failures,
        "amounts": {amount.budget: amount.as_dict() for amount in one.amounts},
        "waits": one.waits.count,
        "runs": one.runs.count,
    }


def _told(rows: list[Any], lines: Any, attempts: Any, asked: Asked) -> dict[str, Any]:
    counts = dict.fromkeys((*STATES, "cancelled", "expired", "over", "unmetered", "unreserved"), 0)
    failures = dict.fromkeys(("transient", "permanent", "exhausted", "uncertain", "expired"), 0)
    counts |= {"admitted": 0, "given_up": 0}
    amounts: dict[str, dict[str, Any]] = {}
    waits = runs = 0
    for row in rows:
        ran = [one for one in attempts[row.reservation_id] if one.outcome != "refused"]
        why = (row.reason or "").split(",")[0]
        cancelled = row.ended_us is not None and why in ("cancelled", "revoked")
        counts["admitted"] += row.admitted
        counts["given_up"] += not row.admitted and not cancelled
        counts[row.state] += row.admitted
        counts["cancelled"] += cancelled
        for flag in ("over", "unmetered", "unreserved"):
            counts[flag] += getattr(row, flag)
        failures["transient"] += max(0, len(ran) - 1)
        if row.ended_us is None:
            continue
        waits += bool(ran)
        runs += sum(one.outcome != "uncertain" for one in ran)
        if row.state == "lost":
            failures["uncertain"] += 1
        elif row.state == "released":
            over = why in SPENT
            failures["expired"] += over
            counts["expired"] += over and row.admitted
            failures["permanent"] += not over and why not in NOT_FAILED
        elif why in SPENT:
            failures["exhausted"] += 1
        elif why not in NOT_FAILED:
            failures["permanent"] += ran[-1].outcome in FAILED
            # Its task has told what the lost attempt had used.
            failures["uncertain"] += ran[-1].outcome == "uncertain"
        if row.state != "released":
            _draw(amounts, lines[row.reservation_id], asked)
    return {
        "counts": counts, "failures": failures, "amounts": amounts, "waits": waits, "runs": runs
    }  # fmt: skip


def _draw(amounts: dict[str, dict[str, Any]], lines: list[Any], asked: Asked) -> None:
    for budget in {line.budget for line in lines}:
        if asked.budget not in (None, budget):
            continue
        of = [line for line in lines if line.budget == budget]
        estimated = sum(line.estimate + line.extended for line in of)
        charged = sum(line.settled for line in of)
        one = amounts.setdefault(
            budget,
            {"budget": budget, "unit": of[0].unit, "requests": 0, "estimated": 0, "charged": 0,
             "over": 0, "requests_over": 0},
        )  # fmt: skip
        one["requests"] += 1
        one["estimated"] += estimated
        one["charged"] += charged
        one["over"] += max(0, charged - estimated)
        one["requests_over"] += charged > estimated


def _drift(rows: list[Any], lines: Any, attempts: Any) -> dict[Any, tuple[int, ...]]:
    found: dict[Any, tuple[int, ...]] = {}

    def note(key: Any, *numbers: int) -> None:
        found[key] = tuple(map(sum, zip(found.get(key, (0, 0, 0)), numbers, strict=True)))

    for row in rows:
        if row.state != "settled" or row.unmetered:
            continue
        last = attempts[row.reservation_id][-1]
        if last.outcome != "returned":
            continue
        first = lines[row.reservation_id][0]
        actual = first.settled
        note((row.stage, row.estimator, row.estimator_version, False), 1, first.estimate, actual)
        if row.shadows is not None and row.attempts == 1:
            for shadow, estimated in json.loads(row.shadows).items():
                name, _, version = shadow.rpartition(":")
                note((row.stage, name, version, True), 1, estimated, actual)
    return found


def midnight(ledger: Ledger, ago: int = 0) -> int:
    """When the day began that was so many days ago, by the ledger's clock."""
    return (ledger.now() // DAY_US - ago) * DAY_US
