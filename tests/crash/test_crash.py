"""A sample of the crash matrix; ``make crash-matrix`` runs all of it.

``CRASH_SEED`` chooses others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module

import pytest
import sqlalchemy as sa

from celery_budget.store.schema import balances, reservations
from tests.crash.cli import numbers
from tests.crash.matrix import Matrix, Outcome
from tests.crash.points import BROKERS, CELLS, STEPS, Fault
from tests.crash.seeds import chosen, seed
from tests.crash.table import matrix
from tests.crash.tasks import WORK
from tests.services.base import ServiceUnavailable

pytestmark = pytest.mark.fault

#: So many cells each time, spread over the whole path.
SAMPLE = 9
#: What task bodies pass.
BODIES = {"call", "effect", "settle", "early", "body"}


@pytest.fixture(scope="module")
def crash() -> Iterator[Matrix]:
    """The matrix, with servers of its own: it kills them."""
    given = [name for name in os.environ if name.startswith("BUDGET_TEST_")]
    if given:
        pytest.skip(f"{given[0]} is set: that server is not ours to kill")
    with Matrix() as found:
        try:
            found.start()
        except ServiceUnavailable as error:
            if os.environ.get("CI", "").lower() == "true":
                raise
            pytest.skip(str(error))
        yield found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(SAMPLE))
def test_a_cell(part: int, crash: Matrix) -> None:
    outcome = crash.run(chosen(part, SAMPLE), seed())
    assert not outcome.problems, f"CRASH_SEED={seed()}: {outcome}\n{outcome.logs}"


@pytest.mark.timeout(600)
def test_a_child_that_dies_before_it_publishes_a_chords_body(crash: Matrix) -> None:
    """Celery lets nobody else publish it for a while; the replay comes earlier than that."""
    [number] = [
        number
        for number, cell in enumerate(CELLS)
        if str(cell) == "redis: publish a chord's body, before, process"
    ]
    outcome = crash.run(number, 1)
    assert not outcome.problems, f"{outcome}\n{outcome.logs}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("broker", BROKERS)
def test_every_step_is_taken_when_nothing_happens(broker: str, crash: Matrix) -> None:
    """As often as its ``times`` says at least, so that a cell's fault has a place to strike."""
    watched = [
        (step, when, Fault(step.role, step.place, when, "", done=step.done and when != "before"))
        for step in STEPS
        if step.cause is None
        for when in step.whens
    ]
    outcome = crash.run_calm(broker, [fault for _, _, fault in watched])
    assert not outcome.problems, f"{outcome}\n{outcome.logs}"
    missed = [
        (step.name, when, count)
        for (step, when, _), count in zip(watched, outcome.counts, strict=True)
        if count < step.times
    ]
    assert not missed


@pytest.mark.timeout(600)
def test_what_is_wrong_is_told(crash: Matrix) -> None:
    """An effect had twice, a hold that is left, a request that is lost: each is seen."""

    def meddle(connection: sa.Connection) -> None:
        order = reservations.c.task_name == "crash.order"
        connection.execute(WORK.insert().values(word="order"))
        connection.execute(balances.update().values(reserved=balances.c.reserved + 1))
        connection.execute(reservations.update().where(order).values(state="lost"))

    outcome = crash.run_calm("redis", meddle=meddle)
    told = "; ".join(outcome.problems)
    assert "'order': 2" in told
    assert "tenant:a holds 1" in told
    assert "order is lost" in told


def test_every_place_exists() -> None:
    """Also those that only a fault leads to."""
    faults = {step.cause for step in STEPS if step.cause is not None}
    places = {step.place for step in STEPS} | {fault.place for fault in faults}
    for place in places - BODIES:
        module, colon, path = place.partition(":")
        if not colon:
            module, _, path = place.partition(".")
            package = "celery_budget" if module == "admission" else "celery_budget.store"
            module = f"{package}.{module}"
        found: object = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        assert callable(found)


def test_the_sample_is_spread_over_the_path_and_changes_with_its_seed() -> None:
    parts = [len(CELLS) * part // SAMPLE for part in range(SAMPLE + 1)]
    for part in range(SAMPLE):
        picked = {chosen(part, SAMPLE, seed) for seed in range(1000)}
        assert picked == set(range(parts[part], parts[part + 1]))


def test_the_matrix_shows_what_was_run() -> None:
    number = next(n for n, cell in enumerate(CELLS) if cell.step.name == "claim")
    wrong = Outcome(number, 1, "", ["something"])
    assert "WRONG" not in matrix([Outcome(number, 1, ""), Outcome(number, 2, "")])
    row = next(line for line in matrix([wrong]).splitlines() if line.startswith("claim, before"))
    assert row.split() == ["claim,", "before", "WRONG", *["."] * 9]
    admit = next(line for line in matrix([]).splitlines() if line.startswith("admit, after"))
    assert admit.split() == ["admit,", "after", *["."] * 6]


def test_numbers_of_cells_and_seeds() -> None:
    assert numbers("3,5,8..10") == [3, 5, 8, 9, 10]
