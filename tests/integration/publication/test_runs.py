"""Each way of publishing, run to its end by a real worker: Celery's results, exact balances."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from celery.result import ResultBase

from celery_budget.store import schema
from tests.cluster import eventually
from tests.integration.publication.paths import OPTIONS, PATHS, Path
from tests.integration.publication.sides import Side, Sides
from tests.integration.publication.tasks import USED
from tests.integration.wire import UUID

#: Seconds after which a test gives up waiting.
WAIT = 30


@pytest.mark.postgres
@pytest.mark.parametrize("name", PATHS)
def test_a_path_runs_to_its_end(workers: Sides, name: str) -> None:
    check(workers, PATHS[name])


@pytest.mark.postgres
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_runs_to_its_end(workers: Sides, name: str) -> None:
    check(workers, OPTIONS[name])


def check(sides: Sides, path: Path) -> None:
    """Publish on both sides; the results are the same and the ledger is exact."""
    plain, budget = sides
    result = plain.publish(path.publish)
    plain.run_all()
    expected = outcome(result)
    assert len(plain.tasks.ran) == path.runs
    assert outcome(budget.publish(path.publish)) == expected
    eventually(lambda: len(budget.tasks.ran), path.runs.__le__, WAIT, "all runs")
    charged_exactly(budget)
    assert budget.tasks.told() == plain.tasks.told()


def outcome(result: Any) -> Any:
    """Wait for a result and return it, or its members', as state and value or error."""
    if result is None:
        return None
    members = getattr(result, "results", None)
    if members is not None:
        return [outcome(member) for member in members]
    value = result.get(timeout=WAIT, interval=0.02, propagate=False)
    if isinstance(value, ResultBase):
        value = outcome(value)
    return result.state, UUID.sub("an id", repr(value))


def charged_exactly(side: Side) -> None:
    """Wait until the tenant's requests have ended: each run once, charged once, nothing held."""
    store, owner = side.shop.budget.store, f"tenant:{side.tasks.tenant}"
    runs = [run for run in side.tasks.ran if run.draws]

    def balance() -> tuple[int, int]:
        found = side.shop.budget.balance(owner)
        return found.reserved, found.spent

    eventually(balance, (0, USED * len(runs)).__eq__, WAIT, f"{len(runs)} charges")
    requests, attempts = schema.reservations.c, schema.attempts.c
    with store.transaction() as connection:
        states = connection.execute(sa.select(requests.state).where(requests.owner == owner))
        assert set(states.scalars()) <= {"settled"}
        claimed = connection.execute(
            sa.select(requests.task_id, requests.nesting, attempts.retries)
            .join_from(
                schema.reservations,
                schema.attempts,
                sa.and_(
                    requests.root == attempts.root,
                    requests.reservation_id == attempts.reservation_id,
                ),
            )
            .where(requests.owner == owner)
        ).all()
    assert sorted(map(tuple, claimed)) == sorted({run.request for run in runs})
    assert side.shop.budget.reconcile().ok
