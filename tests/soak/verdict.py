"""Whether a soak ended as it was planned, and what it shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import sqlalchemy as sa

from celery_budget.core.lanes import Load
from celery_budget.reconcile import Drift
from celery_budget.store.schema import attempts, journal, lines, outbox, reservations
from tests.cluster import Cluster
from tests.soak.app import WORK
from tests.soak.plan import Job

__all__ = ["Verdict", "Waits", "judge"]

#: How many problems of one kind are told.
MOST = 5


class Asked(Protocol):
    """What is known of a client in the end."""

    refused: set[int]
    refusals: Counter[str]
    ids: dict[str, set[str]]


@dataclass(frozen=True)
class Waits:
    """How long requests of one tenant waited for their first attempt, in seconds."""

    requests: int
    p50: float
    p95: float
    longest: float


@dataclass(frozen=True)
class Verdict:
    """What came of a soak.

    :ivar problems: what did not end as it was planned; empty where all did.
    :ivar ended: how many jobs came to which end.
    :ivar lane: the most that was seen queued and running in the lane, and its limits.
    :ivar refusals: how often clients were refused, by tenant and reason.
    :ivar trouble: how often what got in the way.
    """

    seconds: float
    ended: Mapping[str, int]
    lane: tuple[Load, Load]
    drift: Sequence[Drift]
    waits: Mapping[str, Waits]
    refusals: Mapping[str, Mapping[str, int]]
    trouble: Mapping[str, int]
    problems: list[str] = field(default_factory=list)


def judge(
    cluster: Cluster,
    planned: Sequence[Job],
    clients: Mapping[str, Asked],
    ceilings: Sequence[tuple[int, Mapping[str, int]]],
    lane: tuple[Load, Load],
    trouble: Mapping[str, int],
    seconds: float,
) -> Verdict:
    """Compare what the ledger says, and what the work left behind, with the plan.

    :param ceilings: from which time by the ledger's clock which budget has which limit.
    :param lane: the most that was seen queued and running in the lane, and its limits.
    """
    ledger = _Ledger(cluster)
    refused = set[int]().union(*(client.refused for client in clients.values()))
    admitted = [job for job in planned if job.number not in refused]
    report = cluster.budget.report()
    problems = [
        *cluster.budget.reconcile().mismatches,
        *_of_answers(admitted, clients),
        *ledger.of_ends(admitted, refused, planned),
        *ledger.of_effects(admitted),
        *ledger.of_ceilings(ceilings),
        *ledger.of_remains(),
        *_of_refusals(report.counts, clients),
        *_of_lane(*lane),
    ]
    ended = Counter("refused" if job.number in refused else job.fate for job in planned)
    return Verdict(
        seconds,
        dict(ended),
        lane,
        report.drift,
        ledger.waits(),
        {name: dict(client.refusals) for name, client in clients.items()},
        dict(trouble),
        problems,
    )


def _of_answers(admitted: Sequence[Job], clients: Mapping[str, Asked]) -> list[str]:
    """Each request was answered, each time with the same task."""
    ids = {name: ids for client in clients.values() for name, ids in client.ids.items()}
    return _some(
        "answered with",
        [
            f"{job.request_id}: {sorted(ids.get(job.request_id, ()))}"
            for job in admitted
            if len(ids.get(job.request_id, ())) != 1
        ],
    )


def _of_refusals(counts: Mapping[str, int], clients: Mapping[str, Asked]) -> list[str]:
    """Each refusal that a client was told of is counted, and no other."""
    told = sum(client.refusals.total() for client in clients.values())
    return [] if counts["refused"] == told else [f"{counts['refused']} refused and {told} told"]


def _of_lane(most: Load, limits: Load) -> list[str]:
    """The lane never let go more than it may."""
    over = most.jobs > limits.jobs or most.units > limits.units
    return [f"the lane had {most} queued and running, above {limits}"] if over else []


class _Ledger:
    """The ledger of a soak that is over, and what its work has left."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._requests = self._rows(reservations)
        self._lines = {row.reservation_id: row for row in self._rows(lines)}

    def _rows(self, table: Any) -> list[Any]:
        with self._cluster.budget.store.snapshot() as connection:
            return list(connection.execute(sa.select(table)))

    def of_ends(
        self, admitted: Sequence[Job], refused: set[int], planned: Sequence[Job]
    ) -> list[str]:
        """Everything ended once, in its own way, charged what it used."""
        by_id = {row.request_id: row for row in self._requests}
        outcomes: dict[Any, Counter[str]] = {}
        for row in self._rows(attempts):
            outcomes.setdefault(row.reservation_id, Counter())[row.outcome] += 1
        isolated = {one.task_id: one for one in self._cluster.budget.quarantine(len(planned) + 1)}
        wrong = []
        for job in admitted:
            row = by_id.get(job.request_id)
            if row is None:
                wrong.append(f"{job.request_id} is not there")
                continue
            had = outcomes[row.reservation_id]
            failed = job.fate in ("permanent", "exhausted")
            charged = self._lines[row.reservation_id].settled
            kept = isolated.pop(row.task_id, None)
            if (
                row.state != "settled"
                or had["returned"] != (not failed)
                or had["raised"] != failed
                or charged != job.charged
                or (kept is not None) != failed
            ):
                wrong.append(
                    f"{job.request_id} ({job.fate}) is {row.state} ({row.reason}), charged "
                    f"{charged} of {job.charged}, {dict(had)}, "
                    f"{'' if kept else 'not '}in quarantine"
                )
        there = {f"job-{number}" for number in refused} & by_id.keys()
        more = len(self._requests) - len(admitted)
        return [
            *_some("ended otherwise", wrong),
            *_some("refused and admitted", sorted(there)),
            *([f"{more} requests that nobody made"] if more else []),
            *_some("in quarantine without a request", sorted(isolated)),
        ]

    def of_effects(self, admitted: Sequence[Job]) -> list[str]:
        """Each job had its effect once, or never where it failed."""
        had = Counter(row.job for row in self._rows(WORK))
        due = {job.number for job in admitted if job.fate not in ("permanent", "exhausted")}
        return [
            *_some("effects twice", [str(job) for job, times in had.items() if times > 1]),
            *_some("effects missing", sorted(map(str, due - had.keys()))),
            *_some("effects of nobody", sorted(map(str, had.keys() - due))),
        ]

    def of_ceilings(self, ceilings: Sequence[tuple[int, Mapping[str, int]]]) -> list[str]:
        """No admission, and no retry, brought a budget above its limit."""

        def limit(row: Any) -> int:
            return [limits for since, limits in ceilings if since <= row.at_us][-1][row.budget]

        return _some(
            "above the limit",
            [
                f"{row.budget} {row.what}: {row.reserved_after} held, {row.spent_after} spent"
                for row in self._rows(journal)
                if row.what in ("reserve", "raise")
                and row.reserved > 0
                and row.reserved_after + row.spent_after > limit(row)
            ],
        )

    def of_remains(self) -> list[str]:
        """Nothing is held, and no message is left."""
        left = [str(row.task_id) for row in self._rows(outbox) if row.reservation_id is not None]
        held = [one.budget for one in self._cluster.budget.balances() if one.reserved]
        return [*_some("messages left", left), *_some("still held", held)]

    def waits(self) -> dict[str, Waits]:
        """How long each tenant's requests waited, from their admission to their first attempt."""
        started: dict[Any, int] = {}
        for row in self._rows(attempts):
            before = started.get(row.reservation_id, row.started_us)
            started[row.reservation_id] = min(before, row.started_us)
        of: dict[str, list[float]] = {}
        for row in self._requests:
            wait = (started[row.reservation_id] - row.created_us) / 1_000_000
            of.setdefault(row.owner, []).append(wait)
        return {owner: _waits(sorted(waits)) for owner, waits in sorted(of.items())}


def _waits(waits: Sequence[float]) -> Waits:
    def rank(part: int) -> float:
        # The nearest rank: a value that was seen.
        return waits[max(0, -(-len(waits) * part // 100) - 1)]

    return Waits(len(waits), rank(50), rank(95), waits[-1])


def _some(what: str, which: Sequence[str]) -> list[str]:
    """Return a problem that names the first of what is wrong; none where nothing is."""
    if not which:
        return []
    more = f" and {len(which) - MOST} more" if len(which) > MOST else ""
    return [f"{what}: {'; '.join(which[:MOST])}{more}"]
