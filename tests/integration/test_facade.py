"""What an application does with its budgets in Python: the methods of CeleryBudget."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from celery_budget import Budget, Period, Share
from celery_budget.errors import (
    BudgetError,
    HoldsOpen,
    InvalidAmount,
    InvalidBudget,
    InvalidName,
    InvalidPeriod,
    KeyConflict,
    UnknownBudget,
)
from celery_budget.reconcile import Standing, Template
from celery_budget.store import schema
from tests.contract.support import Ledger
from tests.integration.support import Shop

BIG = 2**63 - 1


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def shop(request: pytest.FixtureRequest, make_shop: Callable[..., Shop]) -> Shop:
    """A shop on either store."""
    if request.param == "sqlite":
        return make_shop()
    return make_shop(budget_database_url=request.getfixturevalue("postgres_url"))


def ledger_of(shop: Shop) -> Ledger:
    return Ledger(shop.budget.store, shop.budget.settings)


def test_set_returns_the_budget_and_keeps_what_is_not_given(shop: Shop) -> None:
    budget = shop.budget
    assert budget.set("org", limit=None, unit="usd") == Budget("org", "usd")
    made = budget.set(
        "org/a",
        limit="10%",
        parent="org",
        period="week",
        timezone="Asia/Tokyo",
        anchor_day=7,
        soft_stop=0.8,
        hard_stop=Decimal("0.9"),
    )
    assert made == Budget(
        "org/a", "usd", Share(100_000), "org", Period("week", "Asia/Tokyo", 7), 800_000, 900_000
    )
    assert budget.set("org/a") == made
    assert budget.set("org/a", limit=5).parent == "org"
    assert budget.set("org/a", limit=None).limit is None
    assert budget.set("org/a", parent=None).parent is None
    assert budget.set("org/a", soft_stop="0.25").soft_stop == 250_000
    assert budget.set("org/a", limit=Share(1), parent="org").limit == Share(1)
    assert budget.set("t:*", limit=5, unit="usd", parent="org").name == "t:*"
    assert budget.set("org/a", weight=0).weight == 0
    assert budget.set("org/a", limit=5).weight == 0


BAD: list[tuple[dict[str, Any], type[BudgetError]]] = [
    ({"limit": "5"}, InvalidBudget),
    ({"limit": 5.0}, InvalidAmount),
    ({"limit": True}, InvalidAmount),
    ({"limit": BIG + 1}, InvalidAmount),
    ({"soft_stop": 80}, InvalidBudget),
    ({"weight": -1}, InvalidBudget),
    ({"weight": 1_000_001}, InvalidBudget),
    ({"weight": 1.0}, InvalidBudget),
    ({"weight": True}, InvalidBudget),
    ({"soft_stop": True}, InvalidBudget),
    ({"hard_stop": "x"}, InvalidBudget),
    ({"period": "year"}, InvalidPeriod),
    ({"timezone": "Mars"}, InvalidPeriod),
    ({"anchor_day": 3}, InvalidPeriod),
    ({"parent": "nobody"}, InvalidBudget),
    ({"parent": ""}, InvalidName),
    ({"unit": ""}, InvalidName),
]


@pytest.mark.parametrize(("terms", "error"), BAD)
def test_set_of_what_cannot_be_changes_nothing(
    shop: Shop, terms: dict[str, Any], error: type[BudgetError]
) -> None:
    before = shop.ledger()
    with pytest.raises(error):
        shop.budget.set("tenant:a", **terms)
    with pytest.raises(BudgetError):
        shop.budget.set("new", **{"unit": "x", "limit": 5, **terms})
    assert shop.ledger() == before


def test_a_new_budget_is_never_unlimited_by_leaving_its_limit_out(shop: Shop) -> None:
    with pytest.raises(InvalidBudget, match="'new' is new; say how much it allows with limit="):
        shop.budget.set("new", unit="x")
    with pytest.raises(UnknownBudget):
        shop.budget.balance("new")


def test_closed_budgets_open_again(shop: Shop) -> None:
    assert shop.budget.close("tenant:a") == "closed"
    shop.budget.set("tenant:a", limit=20)
    assert shop.budget.balance("tenant:a").state == "closed"
    shop.budget.set("tenant:a", reopen=True)
    ledger_of(shop).reserve(20, budget="tenant:a")
    with pytest.raises(HoldsOpen):
        shop.budget.close("tenant:a")
    assert shop.budget.close("tenant:a", drain=True) == "draining"


def test_apply_and_export(shop: Shop) -> None:
    text = shop.budget.export()
    assert shop.budget.apply(text) == ()
    more = text + '\n[[budget]]\nname = "b"\nunit = "x"\nroot = "other"\n'
    before = shop.ledger()
    [change] = shop.budget.apply(more, dry_run=True)
    assert (change.root, change.name, change.kind) == ("other", "b", "add")
    assert shop.budget.difference(more) == (change,)
    assert shop.ledger() == before
    assert shop.budget.apply(more) == (change,)
    assert shop.budget.apply(more) == ()
    own = shop.budget.settings.root
    assert shop.budget.export([own, "other"]) == shop.budget.export() + "\n" + (
        '[[budget]]\nname = "b"\nunit = "x"\nroot = "other"\n'
    )
    assert shop.budget.export(["nobody"]) == ""
    with pytest.raises(InvalidName):
        shop.budget.export([""])
    with pytest.raises(InvalidBudget, match=r"^there is no TOML"):
        shop.budget.apply("oops", source="there")


def test_a_trial_says_what_would_be_refused(shop: Shop) -> None:
    ledger_of(shop).reserve(5, budget="tenant:a")
    before = shop.ledger()
    other = '[[budget]]\nname = "b"\nunit = "x"\n'
    for dry_run in (True, False):
        with pytest.raises(HoldsOpen):
            shop.budget.apply(other, prune=True, dry_run=dry_run)
    unit = '[[budget]]\nname = "tenant:a"\nunit = "x"\n'
    with pytest.raises(InvalidBudget, match="was drawn on"):
        shop.budget.apply(unit, dry_run=True)
    assert shop.ledger() == before
    assert [one.kind for one in shop.budget.difference(other, prune=True)] == ["add", "close"]


def test_grants_have_keys_and_ends(shop: Shop) -> None:
    budget = shop.budget
    week = timedelta(days=7)
    receipt = budget.grant("tenant:a", 5, key="k", until=week)
    assert (receipt.key, receipt.repeated) == ("k", False)
    assert budget.grant("tenant:a", 5, key="k", until=week).repeated
    with pytest.raises(KeyConflict):
        budget.grant("tenant:a", 5, key="k", until=week * 2)
    at = datetime(2999, 1, 1, tzinfo=timezone(timedelta(hours=1)))
    other = budget.grant("tenant:a", 1, until=at)
    assert not other.repeated
    assert [grant.key for grant in budget.grants("tenant:a")] == [other.key, "k"]
    assert budget.grants("tenant:a")[0].until_us == int(at.timestamp()) * 1_000_000
    assert budget.balance("tenant:a").limit == 16
    shop.sql(schema.grants.update().where(schema.grants.c.key == "k").values(until_us=1))
    assert [grant.key for grant in budget.grants("tenant:a")] == [other.key]
    assert [grant.until_us for grant in budget.grants("tenant:a", ended=True)][-1] == 1
    assert budget.balance("tenant:a").limit == 11


@pytest.mark.parametrize(
    "until",
    [
        datetime(2999, 1, 1),  # noqa: DTZ001 - what is refused
        datetime(1969, 1, 1, tzinfo=timezone.utc),
        timedelta(0),
        timedelta(days=-1),
        "2999-01-01T00:00:00Z",
        5,
    ],
)
def test_a_grant_needs_an_end_that_is_clear_and_to_come(shop: Shop, until: Any) -> None:
    before = shop.ledger()
    with pytest.raises(BudgetError):
        shop.budget.grant("tenant:a", 5, until=until)
    assert shop.ledger() == before


def test_adjustments_have_keys_and_reasons(shop: Shop) -> None:
    receipt = shop.budget.adjust("tenant:a", 7, reason="by hand", key="k")
    assert (receipt.key, receipt.repeated) == ("k", False)
    assert shop.budget.adjust("tenant:a", 7, reason="again", key="k").repeated
    assert not shop.budget.adjust("tenant:a", -2, reason="back").repeated
    assert shop.amounts("tenant:a") == (0, 5, 5)
    newest, first = shop.budget.journal("tenant:a")
    assert (newest.spent, newest.spent_after, newest.reason) == (-2, 5, "back")
    assert (first.what, first.entry, first.reason) == ("adjust", 1, "by hand")
    assert shop.budget.journal("tenant:a", limit=1) == [newest]
    for limit in (0, True, 1.0):
        with pytest.raises(InvalidAmount):
            shop.budget.journal("tenant:a", limit=limit)  # type: ignore[arg-type]


def test_standing_tells_of_budgets_and_templates(shop: Shop) -> None:
    shop.budget.set("user:*", limit="10%", parent="tenant:a")
    found = shop.budget.standing("tenant:a")
    assert isinstance(found, Standing)
    assert (found.room, found.room_of, found.above) == (10, "tenant:a", ())
    ledger_of(shop).reserve(1, budget="user:1")
    found = shop.budget.standing("user:1")
    assert isinstance(found, Standing)
    assert (found.template, found.room, found.room_of) == ("user:*", 0, "user:1")
    assert [balance.reserved for balance in found.above] == [1]
    template = shop.budget.standing("user:*")
    assert isinstance(template, Template)
    assert template.made == 1
    assert shop.budget.templates() == [template]
    with pytest.raises(UnknownBudget):
        shop.budget.standing("nobody")


def test_repair_tells_what_it_did(shop: Shop) -> None:
    ledger_of(shop).reserve(5, budget="tenant:a")
    assert shop.budget.repair() == ()
    shop.sql(schema.balances.update().values(reserved=4))
    assert shop.budget.repair() == ("budget 'tenant:a' was rebuilt from its lines",)
    assert shop.budget.reconcile().ok


def test_folding_tells_how_far_it_is(shop: Shop) -> None:
    for _ in range(3):
        shop.budget.adjust("tenant:a", 1, reason="x")
    told: list[tuple[int, int]] = []
    shop.sql(schema.journal.update().values(at_us=1))
    assert shop.budget.fold_journal(timedelta(0), lambda *one: told.append(one)) == 2
    assert told == [(1, 1)]
    assert shop.budget.reconcile().ok
