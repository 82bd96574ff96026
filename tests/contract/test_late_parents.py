"""A budget that is given a parent while an admission waits for it."""

from __future__ import annotations

from typing import Any

import pytest

from celery_budget.core.identity import new_id
from celery_budget.core.reservations import Reserved
from celery_budget.store import declaring
from tests.contract.racers import Beside, wait_for_waiting
from tests.contract.support import Ledger

pytestmark = pytest.mark.postgres


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True, scope="session")
@pytest.mark.parametrize("noting", [False, True])
def test_who_waited_gives_its_balance_back_before_it_locks_the_parents(
    racing: Ledger, noting: bool
) -> None:
    """``a`` comes before ``b``, which the first one has when it learns of ``a``."""
    racing.set("a", 100)
    racing.reserve(1)
    # One of eight notes that it waits, and goes another way.
    wanted = (one for one in iter(new_id, None) if (one.bytes[-1] % 8 == 0) is noting)
    single = racing.request(5, reservation_id=next(wanted))
    both = racing.request(5, ("b", 5), budget="a", reservation_id=next(wanted))
    with racing.store.transaction() as connection:
        terms: dict[str, Any] = {"parent": "a"}
        declaring.set_budget(connection, racing.root, "b", terms)
        first = Beside(lambda: racing.admit(single))
        wait_for_waiting(racing.store, 1)
        second = Beside(lambda: racing.admit(both))
        wait_for_waiting(racing.store, 2)
    assert first.result() == Reserved(single.reservation_id)
    assert second.result() == Reserved(both.reservation_id)
    assert racing.balances("a", "b") == [(10, 0), (11, 0)]
