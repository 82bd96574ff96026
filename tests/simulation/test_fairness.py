"""A soak of what a lane releases, without a store and a clock: nobody starves, nothing idles."""

from __future__ import annotations

import os
import random
import sys
import uuid
from dataclasses import replace

import pytest

from celery_budget.core.dispatch import Decision, Snapshot
from celery_budget.core.lanes import Lane, Load
from tests.simulation.lanes import SECOND, Job, Simulation

#: By how much the wait of a tenant may grow where two others have work all the time: the three
#: share the lane, and room that does not fit its next job is left to theirs until that has aged.
MULTIPLE = 4.0
HEAVIEST = 9_500
#: For how long a job runs, in seconds, whatever it weighs.
RUNS = (5, 15)

LANE = Lane("soak", ("q",), max_queued_units=20_000, max_running_units=60_000)
LONG = 600
#: How many of the smallest and of the oldest of each tenant a tick sees.
SAMPLE = 8


def seeds() -> list[int]:
    """Three, or those in SEEDS, as 7 or 1..100."""
    first, _, last = os.environ.get("SEEDS", "1..3").partition("..")
    return list(range(int(first), int(last or first) + 1))


def work(seed: int) -> dict[str, list[Job]]:
    """Jobs by tenant: one floods, one comes in batches, one now and then."""
    noise = random.Random(seed)
    numbers = iter(range(10**6))

    def job(tenant: str, at: float) -> Job:
        weight, runs = noise.randint(500, HEAVIEST), noise.uniform(*RUNS)
        return Job(next(numbers), tenant, weight, int(at * SECOND), int(runs * SECOND))

    # A job or so a second fits. The flood is twice that, half of it at once.
    flood = [job("flood", noise.uniform(0, LONG)) for _ in range(LONG)]
    flood += [job("flood", 0) for _ in range(LONG)]
    batches = [
        job("batches", start + noise.uniform(0, 2))
        for start in range(60, LONG, 150)
        for _ in range(40)
    ]
    steady = [job("steady", at + noise.uniform(0, 10)) for at in range(0, LONG, 10)]
    return {"flood": flood, "batches": batches, "steady": steady}


def p95(waits: list[int]) -> float:
    return sorted(waits)[len(waits) * 95 // 100] / SECOND


@pytest.mark.parametrize("seed", seeds())
def test_who_floods_does_not_make_others_wait(seed: int) -> None:
    given = work(seed)
    alone = Simulation(LANE, SAMPLE)
    alone.run(given["batches"])
    idle: list[int] = []

    def look(snapshot: Snapshot, decision: Decision, left: dict[uuid.UUID, Job]) -> None:
        """Nothing that fits is left where nothing was released, unless an aged job comes first."""
        if decision.release or not left:
            return
        lane, queued = snapshot.lane, snapshot.queued + Load()
        room = min(
            (lane.max_queued_units or 0) - queued.units,
            (lane.max_running_units or 0) - queued.units - snapshot.running.units,
        )
        aged = any(one.counts(lane.ageing) <= 0 for one in snapshot.waiting)
        if not aged and min(one.weight for one in left.values()) <= room:
            idle.append(room)

    simulation = Simulation(LANE, SAMPLE, on_tick=look)
    jobs = [one for several in given.values() for one in several]
    simulation.run(jobs)

    waits = {name: p95([simulation.wait_of(one) for one in given[name]]) for name in given}
    by_itself = p95([alone.wait_of(one) for one in given["batches"]])
    last = max(one.at_us + simulation.wait_of(one) for one in jobs)
    used = simulation.busy / ((LANE.max_running_units or 0) * last)
    sys.stdout.write(
        f"\nseed {seed}: p95 wait of batches {waits['batches']:.1f} s, alone {by_itself:.1f} s; "
        f"steady {waits['steady']:.1f} s, flood {waits['flood']:.1f} s; "
        f"the lane was {used:.0%} full\n"
    )
    # No job waits for ever, and nothing idles.
    assert len(simulation.started) == len(jobs)
    assert idle == []
    assert used > 0.85
    assert waits["batches"] <= MULTIPLE * by_itself
    # Who keeps within its share waits until its job has aged, and then until there is room.
    assert waits["steady"] <= HEAVIEST / LANE.ageing + RUNS[1]
    assert waits["flood"] > 5 * waits["batches"]


def test_without_shares_the_flood_would_make_them_wait() -> None:
    """The same work in one tenant: the bound above is not met by itself."""
    given = work(1)
    alone = Simulation(LANE, SAMPLE)
    alone.run(given["batches"])
    by_itself = p95([alone.wait_of(one) for one in given["batches"]])
    simulation = Simulation(LANE, SAMPLE)
    simulation.run(replace(one, tenant="all") for several in given.values() for one in several)
    assert p95([simulation.wait_of(one) for one in given["batches"]]) > 10 * by_itself
