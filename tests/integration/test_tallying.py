"""The sweep tallies what has ended; an application's report is the same before and after."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_budget.errors import InvalidBudget, InvalidReport, UnknownBudget
from celery_budget.integration.service import RelayService
from celery_budget.store import schema
from celery_budget.tallying import AGE_US
from tests.cluster import eventually
from tests.contract.support import RETURNED, Ledger
from tests.integration.support import Shop


@pytest.fixture
def ledger(make_shop: Callable[..., Shop]) -> tuple[Shop, Ledger]:
    """A shop with one request that ended a while ago, and one that is open."""
    shop = make_shop(budget_sweep_seconds=0.05)
    shop.budget.set("b", limit=100, unit="tokens")
    found = Ledger(shop.budget.store, shop.budget.settings)
    _, attempt = found.start(10)
    attempt.record(4)
    attempt.end(RETURNED)
    attempt.close()
    found.put("reservations", {"ended_us": found.now() - AGE_US})
    found.reserve(5, due_us=found.now() + 3_600_000_000)
    return shop, found


def told(shop: Shop, **asked: Any) -> dict[str, Any]:
    found = shop.budget.report(**asked).as_dict()
    # When it was asked, a relay that runs, and how long ago, is no figure.
    return {
        name: found[name]
        for name in found
        if name not in ("at_us", "relays", "open", "overdue_seconds")
    }


def tallied(ledger: Ledger) -> list[bool]:
    return [row.tallied for row in ledger.rows("reservations")]


def test_a_sweep_tallies(ledger: tuple[Shop, Ledger]) -> None:
    shop, found = ledger
    before = told(shop)
    shop.sweep()
    assert tallied(found) == [True, False]
    assert told(shop) == before


def test_a_relay_tallies_as_it_runs(ledger: tuple[Shop, Ledger]) -> None:
    shop, found = ledger
    before = told(shop, by="stage")
    service = RelayService(shop.budget)
    service.start()
    try:
        eventually(lambda: any(tallied(found)), what="a tally")
    finally:
        service.stop()
    assert told(shop, by="stage") == before
    assert shop.rows(schema.tallies)


def test_what_can_be_asked_of_a_report(ledger: tuple[Shop, Ledger]) -> None:
    shop, _ = ledger
    report = shop.budget.report
    now = datetime.now(timezone.utc)
    assert report(now - timedelta(hours=1)).counts["admitted"] == 2
    assert report(timedelta(hours=1), by="task").groups[0].key == "shop.draft"
    assert report(until=now - timedelta(days=1)).counts["admitted"] == 0
    assert report(budget="b", stage="draft").counts["admitted"] == 2
    assert report(stage="other").counts["admitted"] == 0
    asked = report(now - timedelta(hours=1), now + timedelta(hours=1), "b", "draft", "day")
    assert (asked.budget, asked.stage, asked.by) == ("b", "draft", "day")
    assert asked.until_us is not None
    assert asked.since_us is not None
    assert asked.until_us - asked.since_us == 7_200_000_000
    assert asked.groups[0].key == asked.days[-1].key
    assert asked.days[-1].limits == {"b": 100}


BAD: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"since": datetime(2026, 1, 1)}, InvalidBudget),  # noqa: DTZ001 - it is refused
    ({"until": "yesterday"}, InvalidBudget),
    ({"since": timedelta(1), "until": timedelta(1)}, InvalidReport),
    ({"since": timedelta(1), "until": timedelta(2)}, InvalidReport),
    ({"since": datetime(3000, 1, 1, tzinfo=timezone.utc)}, InvalidReport),
    ({"by": "week"}, InvalidReport),
    ({"budget": "none"}, UnknownBudget),
]


@pytest.mark.parametrize(("asked", "error"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_asked_is_told(
    ledger: tuple[Shop, Ledger], asked: dict[str, Any], error: type[Exception]
) -> None:
    shop, _ = ledger
    with pytest.raises(error):
        shop.budget.report(**asked)
