"""Budgets of lanes: how they are written, declared and read again."""

from __future__ import annotations

from typing import Any

import pytest

from celery_budget.core.lane_files import compare_lanes, parse_lanes, written_lanes
from celery_budget.core.lanes import MOST_BUDGETS, Lane, LaneBudget
from celery_budget.core.parking import Parking
from celery_budget.core.policies import BudgetPolicy
from celery_budget.core.reservations import START, USED, Line
from celery_budget.errors import (
    BudgetError,
    InvalidAmount,
    InvalidBudget,
    InvalidLane,
    InvalidName,
    PolicyError,
)


def test_a_lanes_budget_is_written_as_it_is_read() -> None:
    for text, budget in (
        ("free:tokens", LaneBudget("free:tokens")),
        ("calls=2", LaneBudget("calls", 2)),
        ("calls=0", LaneBudget("calls", 0)),
    ):
        assert (LaneBudget.parse(text), str(budget)) == (budget, text)


def test_what_comes_through_draws_on_it() -> None:
    lane = Lane("free", ("q",), budgets=("free", "calls=1"))  # type: ignore[arg-type]
    assert lane.lines(7) == (Line("free", 7, USED), Line("calls", 1, START))
    assert Lane("plain", ("q",)).lines(7) == ()


@pytest.mark.parametrize(
    ("budgets", "error"),
    [
        (("free=x",), InvalidLane),
        (("free=1=2",), InvalidLane),
        (("free=-1",), InvalidAmount),
        (("",), InvalidName),
        (("tenant:*",), InvalidName),
        (("a", "a=1"), InvalidLane),
        ((7,), InvalidLane),
        ("free", InvalidLane),
        (tuple(f"b{number}" for number in range(MOST_BUDGETS + 1)), InvalidLane),
    ],
)
def test_what_is_no_lanes_budget_is_an_error(budgets: Any, error: type[BudgetError]) -> None:
    with pytest.raises(error):
        Lane("free", ("q",), budgets=budgets)


def test_a_budget_that_could_not_be_written_is_none() -> None:
    with pytest.raises(InvalidLane, match="'a=1'"):
        LaneBudget("a=1")


def test_files_declare_them() -> None:
    tables = {"free": {"queues": ["q"], "budgets": ["free", "calls=1"]}}
    [lane] = parse_lanes(tables, "r")["r"]
    assert lane.budgets == (LaneBudget("free"), LaneBudget("calls", 1))
    text = written_lanes({"r": [lane]}, "r")
    assert 'budgets = ["free", "calls=1"]' in text
    assert "budgets" not in written_lanes({"r": [Lane("plain", ("q",))]}, "r")
    [change] = compare_lanes("r", {"free": Lane("free", ("q",))}, [lane])
    assert change.fields == (("budgets", "none", "free, calls=1"),)
    for wrong in ("free", ["free=x"], ["tenant:*"]):
        with pytest.raises(InvalidBudget, match=r"\[lane.free\]"):
            parse_lanes({"free": {"queues": ["q"], "budgets": wrong}}, "r")


@pytest.mark.parametrize("lanes", [[], "free", ("free", "free"), [""], [7], {"free"}, 0])
def test_what_is_no_list_of_lanes_is_an_error(lanes: Any) -> None:
    with pytest.raises((PolicyError, InvalidName), match="fallback="):
        BudgetPolicy("b", 1, fallback=lanes)


def test_to_fall_back_needs_lanes() -> None:
    parking = Parking("fallback")
    assert not parking.parks
    with pytest.raises(PolicyError, match="names no lanes"):
        BudgetPolicy("b", 1, parking=parking)
    policy = BudgetPolicy("b", 1, parking=parking, fallback=["free", "paid"])
    assert policy.lanes == ("free", "paid")
    assert BudgetPolicy("b", 1).lanes == ()
