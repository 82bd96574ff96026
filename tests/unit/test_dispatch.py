"""What a lane releases next: limits, order inside a tenant, and the bound of a job's wait."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_budget.core.dispatch import Snapshot, Unseen, Waiting, choose, unseen
from celery_budget.core.lanes import Lane, Load
from celery_budget.core.shares import LANE, Account, Key, Shares
from tests.simulation.lanes import SECOND, Job, Simulation

NOTHING = Load()


def lane(**terms: Any) -> Lane:
    return Lane("l", ("q",), **terms)


def job(number: int, weight: int = 10, tenant: str = "a", waited: float = 0) -> Waiting:
    return Waiting(uuid.UUID(int=number), tenant, weight, int(waited * SECOND))


def chosen(
    given: Lane, *waiting: Waiting, queued: Load = NOTHING, running: Load = NOTHING
) -> tuple[list[int], str | None]:
    decision = choose(Snapshot(given, queued, running, waiting))
    return [one.int for one in decision.release], decision.why


def test_without_limits_everything_goes_the_smallest_first() -> None:
    assert chosen(lane(), job(1, 30), job(2, 10), job(3, 20)) == ([2, 3, 1], None)


def test_nothing_waits_and_nothing_goes() -> None:
    decision = choose(Snapshot(lane(), NOTHING, NOTHING, ()))
    assert (decision.release, decision.accounts, decision.why) == ((), {}, None)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"max_queued_jobs": 3}, "queued"),
        ({"max_queued_units": 35}, "queued"),
        ({"max_running_jobs": 5}, "running"),
        ({"max_running_units": 55}, "running"),
        ({"burst_units": 25}, "burst"),
    ],
)
def test_each_limit_holds_back_and_is_named(limits: dict[str, int], why: str) -> None:
    waiting = [job(number) for number in range(5)]
    found = chosen(lane(**limits), *waiting, queued=Load(1, 10), running=Load(2, 20))
    assert found == ([0, 1], why)


@pytest.mark.parametrize("limit", ["max_queued_jobs", "max_running_jobs", "max_running_units"])
def test_a_limit_of_nothing_lets_nothing_through(limit: str) -> None:
    assert chosen(lane(**{limit: 0}), job(1))[0] == []


def test_what_is_heavier_than_a_burst_goes_alone() -> None:
    given = lane(burst_units=25)
    assert chosen(given, job(1, 100), job(2, 90)) == ([2], "burst")
    assert chosen(given, job(1, 100), job(2, 10)) == ([2], "burst")
    # A second alike is released beside nothing, be it weightless.
    assert chosen(given, job(1, 100, waited=9), job(2, 0)) == ([1], "burst")


def test_what_could_never_go_is_passed_by() -> None:
    given = lane(max_running_units=50)
    aged = job(1, 51, waited=1000)
    assert chosen(given, aged, job(2, 20)) == ([2], None)


def test_a_small_job_goes_past_a_large_one_that_does_not_fit() -> None:
    given = lane(max_running_units=50, ageing=1)
    large = job(1, 40, waited=39)
    assert chosen(given, large, job(2, 5), running=Load(1, 20)) == ([2], "running")


def test_what_becomes_free_is_kept_for_an_aged_job() -> None:
    given = lane(max_running_units=50, ageing=1)
    large = job(1, 40, waited=40)
    assert chosen(given, large, job(2, 5), job(3, 5, "b"), running=Load(1, 20)) == (
        [],
        "running",
    )
    assert chosen(given, large, job(2, 5), running=Load(1, 10)) == ([1], "running")


def test_nothing_is_kept_without_ageing() -> None:
    given = lane(max_running_units=50, ageing=0)
    large = job(1, 40, waited=10**6)
    assert chosen(given, large, job(2, 5), running=Load(1, 20)) == ([2], "running")


def test_a_job_ages_past_what_comes_later() -> None:
    given = lane(ageing=10, burst_units=1)
    assert chosen(given, job(1, 100, waited=8.9), job(2, 10))[0] == [2]
    assert chosen(given, job(1, 100, waited=9.1), job(2, 10))[0] == [1]
    # Of two that count alike the one that has waited longer.
    assert chosen(given, job(1, 100, waited=9), job(2, 10))[0] == [1]


def test_what_is_not_seen_is_not_overtaken_by_more_than_it_may() -> None:
    seen = [job(1, 90, waited=20), job(2, 80, waited=10), job(3, 10), job(4, 20, waited=4)]
    # The two oldest, and the two lightest.
    others = unseen(seen, 2)
    assert others == {"a": Unseen(10 * SECOND, 20)}
    assert unseen(seen, 5) == {}
    # What has waited for eight seconds less than others may have has to let them go first.
    found = choose(Snapshot(lane(ageing=3), NOTHING, NOTHING, seen, unseen=others))
    assert [one.int for one in found.release] == [4, 1, 2]
    found = choose(Snapshot(lane(ageing=2), NOTHING, NOTHING, seen, unseen=others))
    assert [one.int for one in found.release] == [3, 4, 1, 2]
    # What can never go keeps nobody back.
    given = lane(ageing=3, max_running_units=15)
    found = choose(Snapshot(given, NOTHING, NOTHING, seen, unseen=others))
    assert [one.int for one in found.release] == [3]


def test_the_accounts_that_change_are_those_of_what_was_released() -> None:
    shares = Shares(parents={"a": "org"}, accounts={Key("b"): Account(7)})
    decision = choose(Snapshot(lane(), NOTHING, NOTHING, [job(1, 10)], shares))
    assert decision.accounts == {
        Key("a"): Account(10),
        Key("org"): Account(10, 0, 10),
        LANE: Account(0, 0, 10),
    }


LIMITS = st.none() | st.integers(0, 40)
JOBS = st.lists(
    st.tuples(st.integers(0, 15), st.sampled_from("abc"), st.integers(0, 60)), max_size=12
)


@given(
    JOBS,
    st.builds(
        lane,
        max_queued_jobs=LIMITS,
        max_queued_units=LIMITS,
        max_running_jobs=LIMITS,
        max_running_units=LIMITS,
        burst_units=LIMITS,
        ageing=st.integers(0, 3),
    ),
    st.integers(0, 4),
    st.integers(0, 20),
    st.integers(0, 4),
    st.integers(0, 20),
)
def test_no_limit_is_passed_and_nothing_is_left_that_fits(
    jobs: list[tuple[int, str, int]],
    given: Lane,
    queued_jobs: int,
    queued_units: int,
    running_jobs: int,
    running_units: int,
) -> None:
    waiting = {
        one.outbox_id: one for one in (job(number, *rest) for number, rest in enumerate(jobs))
    }
    queued, running = Load(queued_jobs, queued_units), Load(running_jobs, running_units)
    decision = choose(Snapshot(given, queued, running, list(waiting.values())))
    assert len(set(decision.release)) == len(decision.release)
    went = NOTHING
    for one in decision.release:
        went += Load(1, waiting.pop(one).weight)

    def keeps(load: Load) -> bool:
        now = queued + load
        both = now + running
        return all(
            limit is None or value <= limit
            for limit, value in (
                (given.max_queued_jobs, now.jobs),
                (given.max_queued_units, now.units),
                (given.max_running_jobs, both.jobs),
                (given.max_running_units, both.units),
            )
        ) and (given.burst_units is None or load.jobs <= 1 or load.units <= given.burst_units)

    assert not went.jobs or keeps(went)
    left = [one for one in waiting.values() if given.too_heavy(one.weight) is None]
    assert (decision.why is not None) == bool(left)
    if not any(given.ageing and one.counts(given.ageing) <= 0 for one in left):
        # Nothing that fits is left, unless something aged holds it back.
        assert not any(keeps(went + Load(1, one.weight)) for one in left)


ARRIVALS = st.lists(
    st.tuples(st.sampled_from("aab"), st.integers(0, 30), st.integers(0, 20), st.integers(1, 10)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=400)
@given(ARRIVALS, st.integers(1, 5), st.sampled_from([1, 2, 10**6]), st.integers(1, 4))
def test_nobody_is_overtaken_but_by_what_comes_soon_after(
    arrivals: list[tuple[str, int, int, int]], ageing: int, sample: int, workers: int
) -> None:
    jobs = [
        Job(number, tenant, weight, at * SECOND, runs * SECOND)
        for number, (tenant, weight, at, runs) in enumerate(arrivals)
    ]
    given = lane(max_running_units=40, max_queued_units=35, burst_units=25, ageing=ageing)
    simulation = Simulation(given, sample, workers)
    simulation.run(jobs)
    # Whatever arrives, all of it is released and run.
    assert sorted(simulation.started) == [one.number for one in jobs]
    turn = {number: place for place, number in enumerate(simulation.released)}
    for one in jobs:
        mine = [other for other in jobs if other.tenant == one.tenant]
        for other in mine:
            if turn[other.number] < turn[one.number] and other.at_us > one.at_us:
                assert (other.at_us - one.at_us) * ageing <= one.weight * SECOND


@given(st.integers(20, 40), st.integers(1, 5), st.sampled_from([1, 3]), st.data())
def test_a_large_job_is_released_while_small_ones_never_stop_coming(
    weight: int, ageing: int, sample: int, data: st.DataObject
) -> None:
    # Small ones keep the lane full by themselves: one a second, of tenants that all weigh alike.
    runs = data.draw(st.integers(5, 8))
    small = [
        Job(
            number,
            data.draw(st.sampled_from("ab")),
            data.draw(st.integers(6, 9)),
            number * SECOND,
            runs * SECOND,
        )
        for number in range(1, 130)
    ]
    large = Job(0, "a", weight, 20 * SECOND, SECOND)
    simulation = Simulation(lane(max_running_units=40, ageing=ageing), sample)
    simulation.run([*small, large], 130 * SECOND)
    assert 0 in simulation.released
