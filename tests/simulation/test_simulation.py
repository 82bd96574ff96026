"""Seeds of the simulator: a few each time, more with ``make simulate SEEDS=1..1000``.

A seed gives one order of steps, and with it one outcome: a failing one prints its steps and how to
run it again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from celery_budget.core.reservations import CLAIMABLE
from celery_budget.store import Store, at_once, attempts, migrate, windows
from tests.simulation.scheduler import LOCK_SECONDS
from tests.simulation.simulate import simulate

#: Run each time; the others are other ones each day.
FIXED = (1, 2)
TODAY = int(time.time()) // 86_400


def seeds() -> list[int]:
    """The seeds to run: those of ``SEEDS``, such as ``7``, ``1..1000`` or ``3,5,8..10``."""
    given = os.environ.get("SEEDS", "")
    if not given:
        return [*FIXED, TODAY * 10]
    chosen: list[int] = []
    for part in given.split(","):
        first, _, last = part.partition("..")
        chosen += range(int(first), int(last or first) + 1)
    return chosen


@pytest.fixture(
    scope="module",
    params=[
        "sqlite",
        *(
            pytest.param(name, marks=pytest.mark.postgres)
            # With the counters of every budget over three rows.
            for name in ("postgresql", "postgresql-striped")
        ),
    ],
)
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    """A migrated store for all seeds: each takes a root of its own."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('simulation') / 'budget.db'}"
    else:
        url = request.getfixturevalue("postgres_server").create_database()
    store = Store(url, LOCK_SECONDS)
    store.run(migrate.upgrade)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "postgresql-striped":
            patch.setattr(windows, "rows_for", lambda connection, stripes: 3)
        yield store
    store.dispose()


@pytest.mark.parametrize("seed", seeds())
def test_a_seed(seed: int, store: Store) -> None:
    run = simulate(seed, store)
    assert not run.problems, str(run)


@pytest.mark.skipif("SEEDS" in os.environ, reason="seeds were asked for")
def test_a_seed_gives_the_same_steps_again(store: Store, request: pytest.FixtureRequest) -> None:
    if "striped" in request.node.name:
        pytest.skip("a request begins at a row by chance")
    assert simulate(2, store).trace == simulate(2, store).trace


@pytest.mark.skipif("SEEDS" in os.environ, reason="seeds were asked for")
def test_a_ledger_that_misbehaves_is_found_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulator's own test: a message that comes twice starts two attempts at once."""
    monkeypatch.setattr(attempts, "CLAIMABLE", (*CLAIMABLE, "running"))

    def decides_nothing(*given: Any, lock_ms: int) -> Any:
        return None, [reservation_id for reservation_id, *_ in given[-1]]

    # The stored function knows what may be claimed.
    monkeypatch.setattr(at_once, "claim", decides_nothing)
    assert any(simulate(seed, store).problems for seed in range(100, 110))
