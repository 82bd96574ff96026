"""Templates: budgets that are made when they are first drawn on."""

from __future__ import annotations

from typing import Any

import pytest

from celery_budget.core.budgets import Share
from celery_budget.core.reservations import (
    AlreadyReserved,
    Line,
    Parked,
    Refused,
    Reserved,
    Unknown,
)
from celery_budget.errors import InvalidBudget, InvalidName, PolicyError, UnknownBudget
from celery_budget.store import budgets
from tests.contract.support import Ledger, admit_many, message_of


@pytest.fixture
def tenants(ledger: Ledger) -> Ledger:
    """Tenants below ``org``, users below tenants; neither is there yet."""
    ledger.set("org", 1000)
    ledger.set("tenant:*", 100, parent="org", period="day", soft_stop=500_000, weight=3)
    ledger.set("tenant:*/user:*", Share.parse("10%", "limit"), parent="tenant:*")
    return ledger


def names(ledger: Ledger) -> list[str]:
    """The budgets that there are, without templates."""
    return [row.name for row in ledger.rows("budgets") if "*" not in row.name]


def test_an_unseen_budget_is_made_with_all_above_it(tenants: Ledger) -> None:
    tenants.reserve(5, budget="tenant:acme/user:7")
    made = {row.name: row for row in tenants.rows("budgets")}
    assert sorted(names(tenants)) == ["org", "tenant:acme", "tenant:acme/user:7"]
    assert tenants.balances("tenant:acme/user:7", "tenant:acme", "org") == [(5, 0)] * 3
    tenant, user = made["tenant:acme"], made["tenant:acme/user:7"]
    assert (tenant.limit_amount, tenant.parent, tenant.period, tenant.template) == (
        100,
        "org",
        "day",
        "tenant:*",
    )
    assert (tenant.soft_stop, tenant.hard_stop, tenant.unit) == (500_000, 1_000_000, "tokens")
    assert tenant.weight == 3
    assert (user.limit_share, user.parent, user.period, user.template) == (
        100_000,
        "tenant:acme",
        "total",
        "tenant:*/user:*",
    )


def test_it_is_made_once(tenants: Ledger) -> None:
    tenants.reserve(5, budget="tenant:acme/user:7")
    before = tenants.rows("budgets")
    tenants.reserve(5, budget="tenant:acme/user:7")
    tenants.reserve(5, budget="tenant:acme")
    assert tenants.rows("budgets") == before
    tenants.reserve(5, budget="tenant:acme/user:8")
    assert len(tenants.rows("budgets")) == len(before) + 1
    assert tenants.balances("tenant:acme", "org") == [(20, 0), (20, 0)]


def test_several_are_made_for_one_request(tenants: Ledger) -> None:
    tenants.reserve(5, ("tenant:b/user:1", 6), ("tenant:c", 7), budget="tenant:a/user:1")
    assert tenants.balances("tenant:a", "tenant:b", "tenant:c", "org") == [
        (5, 0),
        (6, 0),
        (7, 0),
        (7, 0),
    ]


def test_what_is_refused_is_made_all_the_same(tenants: Ledger) -> None:
    """It is there to be shown, and to be raised."""
    assert tenants.admit(tenants.request(11, budget="tenant:acme/user:7")) == Refused(
        "tenant:acme/user:7", "tokens", 11, 10, 0, 0, "exhausted", 10
    )
    assert tenants.balance("tenant:acme/user:7") == (0, 0)


def test_a_budget_of_its_own_comes_before_any_template(tenants: Ledger) -> None:
    tenants.set("tenant:big", 999)
    tenants.reserve(999, budget="tenant:big")
    assert tenants.balances("tenant:big", "org") == [(999, 0), (0, 0)]


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("tenant:acme", "tenant:*"),
        ("tenant:vip-acme", "tenant:vip-*"),
        ("tenant:vip-", "tenant:*"),
        ("tenant:x-gold", "tenant:*-gold"),
        ("tenant:vip-gold", "tenant:*-gold"),
        ("tenant:vip-x-gold", "tenant:*-gold"),
        ("job:a", "*:*"),
        ("job", "*"),
    ],
)
def test_the_most_literal_template_wins(ledger: Ledger, name: str, template: str) -> None:
    for one in ("*", "*:*", "tenant:*", "tenant:vip-*", "tenant:*-gold"):
        ledger.set(one, 10)
    ledger.reserve(1, budget=name)
    [row] = ledger.rows("budgets", name=name)
    assert row.template == template


def test_of_two_as_literal_the_first_by_name_wins(ledger: Ledger) -> None:
    for one in ("b*", "*b", "*c"):
        ledger.set(one, 10)
    ledger.reserve(1, budget="bxb")
    [row] = ledger.rows("budgets", name="bxb")
    assert row.template == "*b"


@pytest.mark.parametrize(
    "name",
    ["tenant:", "tenant:a/b", "tenant:/", "Tenant:acme", "atenant:acme", "tenant:a/user:", "org2"],
)
def test_where_no_template_fits_nothing_is_made(tenants: Ledger, name: str) -> None:
    before = tenants.dump()
    with pytest.raises(UnknownBudget) as caught:
        tenants.admit(tenants.request(1, budget=name))
    assert caught.value.budget == name
    assert tenants.dump() == before


@pytest.mark.parametrize("order", [0, 1, 2])
def test_beside_an_unknown_budget_nothing_is_made(tenants: Ledger, order: int) -> None:
    lines = [Line("org", 1), Line("tenant:a/user:1", 1), Line("nobody", 1)]
    lines = lines[order:] + lines[:order]
    before = tenants.dump()
    request = tenants.request(budget=lines[0].budget, lines=tuple(lines))
    for continuation in (False, True):
        with pytest.raises(UnknownBudget, match="'nobody'"):
            tenants.admit(request, continuation=continuation)
    assert tenants.dump() == before


@pytest.mark.parametrize("name", ["*", "tenant:*", "tenant:*/user:7", "a*b"])
def test_no_request_names_a_template(tenants: Ledger, name: str) -> None:
    with pytest.raises(InvalidName, match="template"):
        tenants.request(1, budget=name)


def test_a_template_has_no_balance(tenants: Ledger) -> None:
    assert [row.budget for row in tenants.counted()] == ["org"]
    with pytest.raises(UnknownBudget):
        tenants.balance("tenant:*")
    assert [one.budget for one in tenants.store.run(budgets.balances_of, tenants.root)] == ["org"]


@pytest.mark.parametrize("which", ["tenant:*", "tenant:*/user:*"])
def test_a_closed_template_makes_nothing(tenants: Ledger, which: str) -> None:
    tenants.reserve(1, budget="tenant:old/user:1")
    assert tenants.close(which) == "closed"
    before = tenants.dump()
    with pytest.raises(UnknownBudget):
        tenants.admit(tenants.request(1, budget="tenant:new/user:1"))
    assert tenants.dump() == before
    tenants.reserve(1, budget="tenant:old/user:1")
    tenants.reopen(which)
    tenants.reserve(1, budget="tenant:new/user:1")


def test_a_closed_template_keeps_its_names_from_wider_ones(ledger: Ledger) -> None:
    ledger.set("*", 1_000_000, "requests")
    ledger.set("t*", 50)
    ledger.close("t*")
    before = ledger.dump()
    with pytest.raises(UnknownBudget, match="'ta'"):
        ledger.admit(ledger.request(5, budget="ta"))
    assert ledger.dump() == before
    ledger.reserve(5, budget="u")


def test_a_parent_that_no_template_makes_is_told(tenants: Ledger) -> None:
    tenants.close("tenant:*")
    with pytest.raises(UnknownBudget, match="'tenant:new'"):
        tenants.admit(tenants.request(1, budget="tenant:new/user:1"))


def test_a_budget_that_drains_is_not_made_again(tenants: Ledger) -> None:
    tenants.reserve(0, budget="tenant:a")
    assert tenants.close("tenant:a", drain=True) == "draining"
    assert tenants.admit(tenants.request(1, budget="tenant:a/user:1")) == Refused(
        "tenant:a", "tokens", 1, 100, 0, 0, "draining", 50
    )


def test_new_terms_of_a_template_are_those_of_new_budgets(tenants: Ledger) -> None:
    tenants.reserve(1, budget="tenant:a")
    tenants.set("tenant:*", 7, parent="org", soft_stop=1_000_000)
    tenants.reserve(1, budget="tenant:b")
    assert [tenants.standing(name).limit for name in ("tenant:a", "tenant:b")] == [100, 7]


@pytest.mark.parametrize(
    ("name", "terms", "message"),
    [
        ("a:*", {"parent": "b:*"}, "does not exist"),
        ("a:*", {"parent": "nobody"}, "does not exist"),
        ("a", {"parent": "tenant:*"}, "more wildcards"),
        ("a:*", {"parent": "tenant:*/user:*"}, "more wildcards"),
        ("a:*", {"parent": "tenant:*", "unit": "requests"}, "counts requests"),
        ("tenant:*", {"parent": "tenant:*/user:*"}, "more wildcards"),
        ("tenant:*", {"parent": "tenant:*"}, "its own parent"),
    ],
)
def test_what_no_template_can_be(
    tenants: Ledger, name: str, terms: dict[str, Any], message: str
) -> None:
    before = tenants.dump()
    with pytest.raises(InvalidBudget, match=message):
        tenants.set(name, 5, **terms)
    assert tenants.dump() == before


def test_a_parent_is_filled_from_the_left(ledger: Ledger) -> None:
    ledger.set("t:*", 100)
    ledger.set("t:*/r:*", 100, parent="t:*")
    ledger.set("t:*/r:*/u:*", 100, parent="t:*/r:*")
    ledger.reserve(3, budget="t:1/r:2/u:3")
    assert ledger.balances("t:1/r:2/u:3", "t:1/r:2", "t:1") == [(3, 0)] * 3


def test_a_parent_may_be_made_for_a_budget_that_is_declared(tenants: Ledger) -> None:
    tenants.set("special", 5, None, parent="tenant:acme")
    assert sorted(names(tenants)) == ["org", "special", "tenant:acme"]
    tenants.reserve(5, budget="special")
    assert tenants.balances("special", "tenant:acme", "org") == [(5, 0)] * 3


def test_the_parents_of_a_template_may_come_of_another(ledger: Ledger) -> None:
    """The one that stands for its name best, though the template names a plainer one."""
    ledger.set("t:*", 100)
    ledger.set("t:vip-*", 900)
    ledger.set("t:*/u:*", None, parent="t:*")
    ledger.reserve(500, budget="t:vip-1/u:1")
    assert ledger.standing("t:vip-1").limit == 900


def test_a_template_whose_budget_cannot_be_makes_nothing(ledger: Ledger) -> None:
    """The template that makes the parent counts something else."""
    ledger.set("t:*", 100)
    ledger.set("t:vip-*", 100, "requests")
    ledger.set("t:*/u:*", 100, parent="t:*")
    before = ledger.dump()
    with pytest.raises(InvalidBudget, match="counts tokens and its parent"):
        ledger.admit(ledger.request(1, budget="t:vip-1/u:1"))
    assert ledger.dump() == before


def test_a_template_does_not_make_the_name_of_a_parent_too_long(ledger: Ledger) -> None:
    long = "x" * 250
    ledger.set(f"{long}*", 100)
    ledger.set("*", 100, parent=f"{long}*")
    ledger.reserve(1, budget="12345")
    before = ledger.dump()
    with pytest.raises(InvalidName, match="255"):
        ledger.admit(ledger.request(1, budget="123456"))
    assert ledger.dump() == before


def test_templates_that_lead_to_one_another_make_nothing(ledger: Ledger) -> None:
    """No command writes such templates; the names that they make one of another never end."""
    ledger.set("x:*z", 1)
    ledger.set("y:*z", 1, parent="x:*z")
    ledger.put("budgets", {"parent": "y:*z"}, name="x:*z")
    before = ledger.dump()
    with pytest.raises(InvalidBudget, match="no end"):
        ledger.admit(ledger.request(1, budget="x:az"))
    assert ledger.dump() == before


def test_more_levels_than_there_may_be_are_not_made(ledger: Ledger) -> None:
    ledger.set("l0", 100)
    for level in range(1, 16):
        ledger.set(f"l{level}", 100, parent=f"l{level - 1}")
    ledger.set("t:*", 100, parent="l15")
    ledger.reserve(1, budget="t:1")
    with pytest.raises(InvalidBudget, match="more than 16"):
        ledger.set("t:*/u:*", 100, parent="t:*")
    with pytest.raises(InvalidBudget, match="more than 16"):
        ledger.set("u", 100, parent="t:2")
    assert names(ledger).count("t:2") == 0


@pytest.mark.parametrize(
    "name",
    [
        "t:ä",
        "t:É",
        "t:%",
        "t:_",
        "t:日本",
        "t:b c",
        "t: ",
        "t:'\"",
        "t:\\",
        "t:[a-z]",
        "t:.",
        "t:" + "x" * 253,
    ],
)
def test_names_stand_for_themselves(ledger: Ledger, name: str) -> None:
    ledger.set("t:*", 10)
    ledger.set("t:a*", 1)
    ledger.reserve(10, budget=name)
    other = name.swapcase()
    assert other != name, "the prefix has letters"
    with pytest.raises(UnknownBudget):
        ledger.admit(ledger.request(1, budget=other))
    assert names(ledger) == [name]


@pytest.mark.parametrize("literal", ["a.c", "a+c", "a_c", "a%c", "(a", "[ab]", "a\\d"])
def test_what_is_literal_in_a_template_stays_so(ledger: Ledger, literal: str) -> None:
    ledger.set(f"{literal}:*", 10)
    for name in ("abc:1", "ac:1", "aac:1", "a:1", "b:1", "a1:1"):
        with pytest.raises(UnknownBudget):
            ledger.admit(ledger.request(1, budget=name))
    ledger.reserve(10, budget=f"{literal}:1")


@pytest.mark.parametrize(
    "name",
    ["", "x" * 256, "t:\n", "t:\x00", "t:\x7f", "t:\x85", "t:e\u0301", "t:\ud800", 7, None, b"t:a"],
)
def test_what_is_no_name_is_not_asked_for(ledger: Ledger, name: Any) -> None:
    with pytest.raises(InvalidName):
        ledger.request(1, budget=name)


def test_cases_are_different_budgets(ledger: Ledger) -> None:
    ledger.set("t:*", 10)
    ledger.reserve(10, budget="t:acme")
    ledger.reserve(10, budget="t:Acme")
    assert sorted(names(ledger)) == ["t:Acme", "t:acme"]


def test_parked_work_makes_what_it_needs(tenants: Ledger) -> None:
    tenants.set("org", 0)
    request = tenants.request(1, budget="tenant:a")
    assert isinstance(tenants.admit(request, continuation=True), Parked)
    tenants.set("org", 10)
    assert tenants.sweep().admitted == 1
    assert tenants.balances("tenant:a", "org") == [(1, 0), (1, 0)]


def test_a_repeat_is_one_whatever_became_of_the_template(tenants: Ledger) -> None:
    request = tenants.reserve(1, budget="tenant:a")
    tenants.close("tenant:*")
    assert tenants.admit(request) == Reserved(request.reservation_id)
    again = tenants.request(1, budget="tenant:a", task_id=request.task_id)
    assert tenants.admit(again) == AlreadyReserved(request.reservation_id, request.task_id)


def test_two_rules_on_what_is_not_there_yet_are_an_error(tenants: Ledger) -> None:
    lines = (Line("tenant:a/user:1", 1), Line("tenant:a/user:2", 1, "start"))
    with pytest.raises(PolicyError, match="'tenant:a' twice"):
        tenants.admit(tenants.request(budget="tenant:a/user:1", lines=lines))
    assert tenants.rows("reservations") == tenants.rows("lines") == []
    assert tenants.balance("org") == (0, 0)


@pytest.mark.parametrize("best_effort", [True, False])
def test_a_batch_makes_all_that_it_needs(tenants: Ledger, best_effort: bool) -> None:
    requests = [tenants.request(1, budget=f"tenant:{one}/user:1") for one in range(12)]
    unknown = tenants.request(1, ("nobody", 1), budget="tenant:x")
    asked = [(one, message_of(one)) for one in (*requests, unknown)]
    tried = admit_many(tenants.store, tenants.settings, asked, best_effort=best_effort)
    assert tried[-1] == Unknown("nobody")
    assert "tenant:x" not in names(tenants)
    if best_effort:
        assert tried[:-1] == [Reserved(one.reservation_id) for one in requests]
        assert tenants.balance("org") == (12, 0)
    else:
        assert tenants.balance("org") == (0, 0)
