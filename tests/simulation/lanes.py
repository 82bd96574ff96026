"""A lane without a store and without a clock: jobs arrive, are released, run and end."""

from __future__ import annotations

import bisect
import heapq
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from celery_budget.core.dispatch import Decision, Snapshot, Waiting, choose, unseen
from celery_budget.core.lanes import Lane, Load
from celery_budget.core.shares import Account, Key, Shares

SECOND = 1_000_000


@dataclass(frozen=True)
class Job:
    """One that arrives at ``at_us`` and runs for ``runs_us``."""

    number: int
    tenant: str
    weight: int
    at_us: int
    runs_us: int

    @property
    def id(self) -> uuid.UUID:
        return uuid.UUID(int=self.number)


#: A job behind what it is sorted by.
Place = tuple[int, int, Job]


def _places(job: Job) -> tuple[Place, Place]:
    return (job.weight, job.number, job), (job.at_us, job.number, job)


@dataclass
class Simulation:
    """A lane, and what becomes of ``jobs``.

    :ivar sample: how many of the smallest and of the oldest of each tenant a tick sees.
    :ivar workers: how many jobs run at a time; what is released beyond that is queued.
    :ivar released: when each job was released, by its number, in that order.
    :ivar on_tick: called with each decision, what it was made of, and all that waits then, by its
        id.
    """

    lane: Lane
    sample: int = 1_000_000
    workers: int = 1_000_000
    parents: dict[str, str] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    accounts: dict[Key, Account] = field(default_factory=dict)
    choose: Callable[[Snapshot], Decision] = choose
    on_tick: Callable[[Snapshot, Decision, dict[uuid.UUID, Job]], None] = lambda *_: None
    now_us: int = 0
    waiting: dict[uuid.UUID, Job] = field(default_factory=dict)
    #: By tenant, what waits by weight and by age.
    places: dict[str, tuple[list[Place], list[Place]]] = field(default_factory=dict)
    queued: list[Job] = field(default_factory=list)
    running: list[tuple[int, int, Job]] = field(default_factory=list)
    released: dict[int, int] = field(default_factory=dict)
    started: dict[int, int] = field(default_factory=dict)
    #: Units times microseconds of what was released and had not ended.
    busy: int = 0

    def run(self, jobs: Iterable[Job], until_us: int | None = None) -> None:
        """Let all of ``jobs`` arrive, and go on until nothing happens any more."""
        coming = [(job.at_us, job.number, job) for job in jobs]
        heapq.heapify(coming)
        while coming or self.running:
            next_us = min(events[0][0] for events in (coming, self.running) if events)
            if until_us is not None and next_us > until_us:
                return
            held = self.load(self.queued).units + self.load(self._runs()).units
            self.busy += held * (next_us - self.now_us)
            self.now_us = next_us
            while self.running and self.running[0][0] <= self.now_us:
                heapq.heappop(self.running)
            while coming and coming[0][0] <= self.now_us:
                job = heapq.heappop(coming)[2]
                self._wait(job)
            self._start()
            while self.tick().release:
                self._start()

    def tick(self) -> Decision:
        waiting = self._sampled()
        snapshot = Snapshot(
            self.lane,
            self.load(self.queued),
            self.load(self._runs()),
            waiting,
            Shares(self.parents, self.weights, dict(self.accounts)),
            unseen(waiting, self.sample),
        )
        decision = self.choose(snapshot)
        self.accounts.update(decision.accounts)
        for one in decision.release:
            job = self._go(one)
            self.released[job.number] = self.now_us
            self.queued.append(job)
        self.on_tick(snapshot, decision, self.waiting)
        return decision

    def wait_of(self, job: Job) -> int:
        return self.started[job.number] - job.at_us

    @staticmethod
    def load(jobs: Iterable[Job]) -> Load:
        total = Load()
        for job in jobs:
            total += Load(1, job.weight)
        return total

    def _runs(self) -> list[Job]:
        return [job for _, _, job in self.running]

    def _sampled(self) -> list[Waiting]:
        chosen = {
            job.id: job
            for places in self.places.values()
            for ordered in places
            for *_, job in ordered[: self.sample]
        }
        return [
            Waiting(job.id, job.tenant, job.weight, self.now_us - job.at_us)
            for job in chosen.values()
        ]

    def _wait(self, job: Job) -> None:
        self.waiting[job.id] = job
        for ordered, place in zip(self._places_of(job), _places(job), strict=True):
            bisect.insort(ordered, place)

    def _go(self, number: uuid.UUID) -> Job:
        job = self.waiting.pop(number)
        for ordered, place in zip(self._places_of(job), _places(job), strict=True):
            del ordered[bisect.bisect_left(ordered, place)]
        return job

    def _places_of(self, job: Job) -> tuple[list[Place], list[Place]]:
        return self.places.setdefault(job.tenant, ([], []))

    def _start(self) -> None:
        while self.queued and len(self.running) < self.workers:
            job = self.queued.pop(0)
            self.started[job.number] = self.now_us
            heapq.heappush(self.running, (self.now_us + job.runs_us, job.number, job))
