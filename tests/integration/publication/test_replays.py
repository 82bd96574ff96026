"""A worker that goes away once it has settled: its outcome is given again, nothing runs twice."""

from __future__ import annotations

from typing import Any

import pytest

from celery_budget.integration.context import HEADER
from celery_budget.settlement import Attempt
from tests.integration.publication.paths import PATHS
from tests.integration.publication.sides import Sides


@pytest.mark.parametrize(
    "name",
    [
        "delay",
        "callbacks",
        "a chain as a callback",
        "errbacks",
        "a chain",
        "a chain with an unbudgeted step",
        "a chain that fails",
        "a chord",
        "a chord whose body is a chain",
        "replaced by a budgeted task",
        "replaced by an unbudgeted task",
        "replaced by a chain",
    ],
)
def test_what_follows_an_outcome_is_published_once(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plain, budget = sides
    plain.publish(PATHS[name].publish)
    plain.run_all()
    budget.publish(PATHS[name].publish)
    first = budget.take()
    with monkeypatch.context() as patch:
        patch.setattr(Attempt, "close", lambda attempt: False)
        for message in first:
            budget.execute(message)
    budget.lose()
    second = budget.take()
    # All come again but what was replaced: that has no outcome to give.
    assert ids(first) <= ids(second) or name.startswith("replaced")
    for message in second:
        budget.execute(message)
    budget.run_all()
    assert budget.tasks.told() == plain.tasks.told()
    assert budget.shop.amounts(f"tenant:{budget.tasks.tenant}")[0] == 0
    assert budget.shop.budget.reconcile().ok


def ids(messages: list[Any]) -> set[str]:
    """The ids of the budgeted ones."""
    return {message.headers["id"] for message in messages if HEADER in message.headers}
