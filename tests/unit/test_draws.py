"""What a request draws on, and whether it fits: the decision by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_budget.core.budgets import MILLION, most
from celery_budget.core.draws import Draw, Level, chain, decide, limits_in_force, short
from celery_budget.core.reservations import Line, Refused
from celery_budget.errors import InvalidName, PolicyError

MOST = 2**63 - 1


def level(name: str, parent: str | None = None, **changes: Any) -> Level:
    """A budget with 100 tokens and nothing drawn."""
    plain = Level(name, "tokens", parent, 100, None, 0, MILLION, MILLION, "open", 7, 0, 0)
    return replace(plain, **changes)


def tree(*levels: Level) -> dict[str, Level]:
    return {one.budget: one for one in levels}


WAY = tree(level("user", "tenant"), level("tenant", "org"), level("org"))


def test_a_chain_goes_up() -> None:
    assert [one.budget for one in chain(WAY, "user")] == ["user", "tenant", "org"]
    assert [one.budget for one in chain(WAY, "org")] == ["org"]


def test_what_does_not_exist_is_told() -> None:
    with pytest.raises(KeyError):
        list(chain(WAY, "nobody"))
    with pytest.raises(KeyError):
        list(chain(tree(level("user", "gone")), "user"))


def test_all_on_the_way_are_drawn_on_from_the_bottom() -> None:
    assert decide((Line("user", 5),), WAY, False) == (
        Draw("user", "tokens", 7, 5, "used"),
        Draw("tenant", "tokens", 7, 5, "used"),
        Draw("org", "tokens", 7, 5, "used"),
    )


def test_a_window_that_is_not_there_yet_is_told_by_its_level() -> None:
    [draw] = decide((Line("b", 5),), tree(level("b", window_us=None)), False)
    assert draw == Draw("b", "tokens", 0, 5, "used")


@pytest.mark.parametrize("amounts", [(5, 9), (9, 5)])
def test_a_common_parent_is_drawn_on_once(amounts: tuple[int, int]) -> None:
    levels = tree(level("a", "org"), level("b", "org"), level("org", None, limit_amount=9))
    first, second = amounts
    draws = decide((Line("a", first), Line("b", second)), levels, False)
    assert isinstance(draws, tuple)
    assert [(one.budget, one.amount) for one in draws] == [("a", first), ("org", 9), ("b", second)]


def test_one_budget_by_two_rules() -> None:
    levels = tree(level("a", "t"), level("b", "t"), level("t", "org"), level("org"))
    with pytest.raises(PolicyError, match="'t' twice"):
        decide((Line("a", 1), Line("b", 1, "start")), levels, False)
    with pytest.raises(PolicyError, match="'t' twice"):
        decide((Line("a", 1000), Line("b", 1, "start")), levels, False)
    assert isinstance(decide((Line("a", 1, "start"), Line("b", 1, "start")), levels, False), tuple)


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, (100, False)),
        ({"limit_amount": None}, (None, False)),
        ({"limit_amount": 0}, (0, True)),
        ({"granted": 5}, (105, False)),
        ({"granted": 5, "limit_amount": None}, (None, False)),
        ({"granted": 5, "limit_amount": 0}, (5, True)),
        ({"granted": 3 * MOST}, (MOST, False)),
    ],
)
def test_the_limit_in_force(changes: dict[str, Any], limit: tuple[int | None, bool]) -> None:
    assert limits_in_force(tree(level("b", **changes)), "b") == {"b": limit}


@pytest.mark.parametrize(
    ("org", "parts", "limit"),
    [
        ({}, 100_000, (10, False)),
        ({}, 9_999, (0, True)),
        ({}, MILLION, (100, False)),
        ({}, 0, (0, True)),
        ({"limit_amount": None}, 1, (None, False)),
        ({"limit_amount": None}, 0, (None, False)),
        ({"granted": 900}, 100_000, (100, False)),
        ({"limit_amount": 0, "granted": 900}, 100_000, (90, False)),
        ({"limit_amount": MOST}, 999_999, (MOST * 999_999 // MILLION, False)),
    ],
)
def test_a_share_in_force(org: dict[str, Any], parts: int, limit: tuple[int | None, bool]) -> None:
    levels = tree(level("b", "org", limit_amount=None, limit_share=parts), level("org", **org))
    assert limits_in_force(levels, "b")["b"] == limit


def test_a_share_of_a_share_in_force() -> None:
    half = {"limit_amount": None, "limit_share": MILLION // 2}
    levels = tree(
        level("c", "b", **half, granted=1), level("b", "a", **half, granted=2), level("a")
    )
    limits = limits_in_force(levels, "c")
    assert {name: limit for name, (limit, _) in limits.items()} == {"a": 100, "b": 52, "c": 27}


@pytest.mark.parametrize(
    ("changes", "amount", "finishing", "reason", "bound"),
    [
        ({}, 100, False, None, 100),
        ({}, 101, False, "exhausted", 100),
        ({"reserved": 1}, 99, False, None, 100),
        ({"reserved": 1}, 100, False, "held", 100),
        ({"reserved": 1}, 101, False, "exhausted", 100),
        ({"spent": 1}, 100, False, "exhausted", 100),
        ({"spent": 50, "reserved": 50}, 0, False, None, 100),
        ({"spent": 50, "reserved": 51}, 0, False, "held", 100),
        ({"spent": 101}, 0, True, "exhausted", 100),
        ({"soft_stop": 500_000}, 50, False, None, 50),
        ({"soft_stop": 500_000}, 51, False, "exhausted", 50),
        ({"soft_stop": 500_000}, 100, True, None, 100),
        ({"soft_stop": 500_000, "hard_stop": 700_000}, 71, True, "exhausted", 70),
        ({"soft_stop": 500_000, "reserved": 51}, 0, False, "held", 50),
        ({"state": "closed"}, 0, True, "closed", 100),
        ({"state": "draining"}, 0, True, "draining", 100),
        ({"state": "draining", "spent": 200}, 1, False, "draining", 100),
        ({"limit_amount": 0}, 0, True, "blocked", 0),
        ({"limit_amount": 0, "state": "closed"}, 0, True, "closed", 0),
        ({"limit_amount": None}, MOST, False, None, MOST),
        ({"limit_amount": None, "soft_stop": 0}, MOST, False, None, MOST),
        ({"limit_amount": None, "reserved": 1}, MOST, False, "held", MOST),
        ({"limit_amount": None, "spent": MOST}, 0, False, None, MOST),
        ({"limit_amount": MOST, "spent": MOST}, MOST, False, "exhausted", MOST),
    ],
)
def test_whether_it_fits_and_why_not(
    changes: dict[str, Any], amount: int, finishing: bool, reason: str | None, bound: int
) -> None:
    one = level("b", **changes)
    [(limit, blocked)] = limits_in_force(tree(one), "b").values()
    refused = short(one, limit, blocked, amount, finishing)
    decided = decide((Line("b", amount),), tree(one), finishing)
    if reason is None:
        assert refused is None
        assert isinstance(decided, tuple)
    else:
        shown = MOST if limit is None else limit
        assert refused == decided
        assert refused == Refused(
            "b", "tokens", amount, shown, one.reserved, one.spent, reason, bound
        )


def test_the_first_lines_way_is_told_and_on_it_the_lowest() -> None:
    full = {"reserved": 100}
    levels = tree(
        level("user", "tenant"),
        level("tenant", "org", **full),
        level("org", **full),
        level("other", **full),
    )
    lines = (Line("user", 1), Line("other", 2))
    for order, budget in ((lines, "tenant"), (lines[::-1], "other")):
        refused = decide(order, levels, False)
        assert isinstance(refused, Refused)
        assert refused.budget == budget


@pytest.mark.parametrize("charge", ["", "USED", "end", None])
def test_there_are_two_rules(charge: Any) -> None:
    with pytest.raises(PolicyError, match="'used' or 'start'"):
        Line("b", 1, charge)


def test_a_line_names_a_budget() -> None:
    with pytest.raises(InvalidName):
        Line("b*", 1)


amounts = st.integers(0, 12) | st.sampled_from([2**62, MOST - 5, MOST])


@st.composite
def levels_of(draw: st.DrawFn) -> dict[str, Level]:
    """A forest of a few budgets."""
    found: dict[str, Level] = {}
    for number in range(draw(st.integers(1, 5))):
        parent = draw(st.none() | st.sampled_from(sorted(found))) if found else None
        share = draw(st.none() | st.integers(0, MILLION)) if parent else None
        soft, hard = sorted(draw(st.tuples(st.integers(0, MILLION), st.just(MILLION))))
        spent = draw(st.integers(0, 9))
        found[f"b{number}"] = level(
            f"b{number}",
            parent,
            limit_amount=None if share is not None else draw(st.none() | amounts),
            limit_share=share,
            granted=draw(st.integers(0, 3)),
            soft_stop=soft,
            hard_stop=hard,
            state=draw(st.sampled_from(["open"] * 9 + ["closed"])),
            reserved=draw(st.integers(0, 9)),
            spent=spent,
        )
    return found


@given(levels=levels_of(), data=st.data(), finishing=st.booleans())
def test_it_fits_where_each_line_fits_all_above_it(
    levels: dict[str, Level], data: st.DataObject, finishing: bool
) -> None:
    named = data.draw(st.lists(st.sampled_from(sorted(levels)), min_size=1, unique=True))
    lines = tuple(Line(name, data.draw(amounts)) for name in named)
    asked: dict[str, int] = {}
    misfits = []
    for line in lines:
        name: str | None = line.budget
        while name is not None:
            asked[name] = max(line.amount, asked.get(name, 0))
            if not _fits(levels, name, line.amount, finishing):
                misfits.append((name, line.amount))
            name = levels[name].parent
    decided = decide(lines, levels, finishing)
    if isinstance(decided, Refused):
        assert (decided.budget, decided.requested) == misfits[0]
    else:
        assert misfits == []
        assert [(one.budget, one.amount) for one in decided] == list(asked.items())


def _limit(levels: dict[str, Level], name: str) -> int | None:
    """The limit without grants, told from the bottom."""
    one = levels[name]
    if one.limit_share is None:
        return one.limit_amount
    assert one.parent is not None
    above = _limit(levels, one.parent)
    if above is None:
        return None
    return min(above + levels[one.parent].granted, MOST) * one.limit_share // MILLION


def _fits(levels: dict[str, Level], name: str, amount: int, finishing: bool) -> bool:
    one, limit = levels[name], _limit(levels, name)
    drawn = one.reserved + one.spent + amount
    if one.state != "open" or limit == 0:
        return False
    if limit is None:
        return drawn <= MOST
    stop = one.hard_stop if finishing else one.soft_stop
    return drawn <= most(min(limit + one.granted, MOST), stop)
