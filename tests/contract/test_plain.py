"""The commonest request: what changes while it waits is obeyed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from celery_budget.core.identity import new_id
from celery_budget.core.reservations import Refused, Reserved
from celery_budget.store import schema
from celery_budget.store.balances import Key, lock_balances
from tests.contract.racers import Beside, wait_for_waiting
from tests.contract.support import Ledger

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.parametrize("store_url", ["postgresql"], indirect=True, scope="session"),
]


def ids() -> Iterator[UUID]:
    """Ids of requests that do not note whether they had to wait: those go another way."""
    while True:
        one = new_id()
        if one.bytes[15] & 7:
            yield one


def plain(ledger: Ledger, amount: int) -> Any:
    return replace(ledger.request(amount), reservation_id=next(ids()))


def waiting(ledger: Ledger, request: Any, **change: Any) -> Any:
    """What a request hears that waits for the balance while its budget is changed."""
    keys = [
        Key(row.budget, row.window_us, row.stripe) for row in ledger.rows("balances", budget="b")
    ]
    b = schema.budgets
    with ledger.store.transaction() as holder:
        lock_balances(holder, ledger.root, keys)
        beside = Beside(lambda: ledger.admit(request))
        wait_for_waiting(ledger.store)
        with ledger.store.transaction() as connection:
            changed = sa.update(b).where(b.c.root == ledger.root, b.c.name == "b").values(**change)
            assert connection.execute(changed).rowcount == 1
    return beside.result()


@pytest.fixture(params=[1, 4], ids=["one row", "four rows"])
def rows(request: pytest.FixtureRequest, funded: Ledger) -> Ledger:
    """The ledger's budget ``b`` in so many rows; what draws on one waits for any of them."""
    funded.set("b", 100, stripes=request.param)
    return funded


@pytest.mark.parametrize(
    "change",
    [{"limit_amount": 14}, {"soft_stop": 100_000, "hard_stop": 100_000}, {"state": "frozen"}],
    ids=lambda change: next(iter(change)),
)
def test_what_is_changed_while_it_waits_is_obeyed(rows: Ledger, change: dict[str, Any]) -> None:
    rows.reserve(5)
    request = plain(rows, 10)
    assert not isinstance(waiting(rows, request, **change), Reserved)
    assert rows.balance() == (5, 0)
    for table in ("reservations", "lines", "outbox", "journal"):
        assert not rows.rows(table, reservation_id=request.reservation_id)
    # The numbers of the journal's entries have no gap.
    for row in rows.rows("balances", budget="b"):
        entries = rows.rows("journal", budget="b", stripe=row.stripe)
        assert sorted(one.entry for one in entries) == list(
            range(row.entries - len(entries) + 1, row.entries + 1)
        )


def test_what_stays_within_the_new_limit_is_admitted(rows: Ledger) -> None:
    rows.reserve(5)
    request = plain(rows, 10)
    heard = waiting(rows, request, limit_amount=15)
    assert heard == Reserved(request.reservation_id)
    assert rows.balance() == (15, 0)


def test_what_is_taken_while_it_waits_is_taken(funded: Ledger) -> None:
    funded.conserved = False  # what is taken here has no line
    request = plain(funded, 50)
    key = Key("b", funded.windows("b")[-1][0])
    c = schema.balances
    with funded.store.transaction() as holder:
        lock_balances(holder, funded.root, [key])
        beside = Beside(lambda: funded.admit(request))
        wait_for_waiting(funded.store)
        taken = sa.update(c).where(c.c.root == funded.root, c.c.budget == "b")
        holder.execute(taken.values(spent=c.c.spent + 60))
    assert isinstance(beside.result(), Refused)
    assert funded.balance() == (0, 60)


def test_of_several_rows_one_that_has_room_by_itself_is_drawn_on(rows: Ledger) -> None:
    request = plain(rows, 10)
    assert rows.admit(request) == Reserved(request.reservation_id)
    [line] = rows.rows("lines", reservation_id=request.reservation_id)
    count = len(rows.rows("balances", budget="b"))
    assert line.stripe == request.reservation_id.bytes[15] % count
    [entry] = rows.rows("journal", reservation_id=request.reservation_id)
    assert (entry.stripe, entry.reserved, entry.what) == (line.stripe, 10, "reserve")
