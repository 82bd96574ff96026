"""Weighted fair shares: whose turn it is, and what comes of being idle."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_budget.core.shares import LANE, MOST_COUNTED, Account, Key, Order, Shares


class Market:
    """Tenants that all have work without an end, served until so much is served in all."""

    def __init__(self, parents: Mapping[str, str] | None = None, **weights: int) -> None:
        self.shares = Shares(parents or {}, weights)
        self.had: dict[str, int] = {}

    def serve(self, tenants: Mapping[str, int], turns: int, a_tick: int = 1) -> Market:
        """Give ``turns`` turns to ``tenants``, each with jobs of so many units."""
        for first in range(0, turns, a_tick):
            order = Order(self.shares, dict.fromkeys(tenants, 0))
            for _ in range(min(a_tick, turns - first)):
                tenant = order.next()
                assert tenant is not None
                order.serve(tenant, tenants[tenant])
                self.had[tenant] = self.had.get(tenant, 0) + tenants[tenant]
            self.shares = Shares(
                self.shares.parents,
                self.shares.weights,
                {**self.shares.accounts, **order.changed()},
            )
        return self


def test_units_and_not_jobs_are_shared() -> None:
    assert Market().serve({"a": 1, "b": 100}, 1010).had == {"a": 1000, "b": 1000}


def test_by_weight() -> None:
    assert Market(a=3, b=1).serve({"a": 10, "b": 10}, 400).had == {"a": 3000, "b": 1000}


def test_tiny_usage_adds_up() -> None:
    # Each job is a thousandth of what moves the virtual time of its tenant.
    market = Market(a=1000, b=1000).serve({"a": 1, "b": 1}, 4000)
    assert market.had == {"a": 2000, "b": 2000}
    assert market.shares.accounts[Key("a")] == Account(2)


def test_what_weighs_nothing_counts_as_a_unit() -> None:
    market = Market().serve({"a": 0, "b": 1}, 100)
    assert market.had == {"a": 0, "b": 50}


def test_no_job_counts_more_than_its_bound() -> None:
    market = Market().serve({"a": 2**63 - 1}, 1)
    assert market.shares.accounts[Key("a")].finish == MOST_COUNTED


def test_who_was_idle_has_no_credit() -> None:
    market = Market().serve({"a": 10, "b": 10}, 10)
    market.serve({"a": 10}, 1000)
    before = dict(market.had)
    market.serve({"a": 10, "b": 10}, 100)
    gained = {name: had - before[name] for name, had in market.had.items()}
    # Of what it left it gets back no more than a job.
    assert gained["b"] - gained["a"] <= 10


def test_a_newcomer_begins_where_the_others_are() -> None:
    market = Market().serve({"a": 10, "b": 10}, 1000).serve({"a": 10, "b": 10, "c": 10}, 300)
    assert market.had["c"] == pytest.approx(1000, abs=10)


def test_bursts_do_not_jump_the_share() -> None:
    """Who comes for one job at a time, again and again, gets no more than who always waits."""
    market = Market()
    for _ in range(100):
        market.serve({"a": 10}, 1).serve({"a": 10, "b": 10}, 2)
    assert market.had["b"] <= market.had["a"]


def test_weight_nothing_goes_where_nobody_else_has_work() -> None:
    market = Market(a=0, b=1).serve({"a": 1, "b": 1}, 100)
    assert market.had == {"b": 100}
    assert market.serve({"a": 1}, 5).had == {"a": 5, "b": 100}
    # It is not remembered against it, nor for it.
    assert market.serve({"a": 1, "b": 1}, 5).had == {"a": 5, "b": 105}


def test_several_of_weight_nothing_share() -> None:
    assert Market(a=0, b=0).serve({"a": 1, "b": 1}, 100).had == {"a": 50, "b": 50}


TREE = {"a1": "a", "a2": "a", "b1": "b"}


def test_tenants_under_one_parent_share_what_is_its() -> None:
    market = Market(TREE).serve({"a1": 1, "a2": 1, "b1": 1}, 400)
    assert market.had == {"a1": 100, "a2": 100, "b1": 200}


def test_what_one_leaves_idle_goes_to_its_siblings_first() -> None:
    market = Market(TREE).serve({"a1": 1, "a2": 1, "b1": 1}, 400)
    before = dict(market.had)
    market.serve({"a1": 1, "b1": 1}, 200)
    assert {name: had - before[name] for name, had in market.had.items()} == {
        "a1": 100,
        "a2": 0,
        "b1": 100,
    }
    # And to others where the parent has no work at all.
    assert market.serve({"b1": 1}, 50).had["b1"] == 350


def test_a_parent_with_work_of_its_own_shares_with_those_below_it() -> None:
    market = Market(TREE).serve({"a": 1, "a1": 1, "a2": 1, "b1": 1}, 600)
    assert market.had == {"a": 100, "a1": 100, "a2": 100, "b1": 300}
    # As long as it stands there, its own work keeps its account.
    assert Key("a", own=True) in market.shares.accounts
    market.serve({"a": 1, "b1": 1}, 100)
    assert market.had == {"a": 150, "a1": 100, "a2": 100, "b1": 350}


def test_parents_that_lead_in_a_circle_end() -> None:
    assert Market({"a": "b", "b": "a"}).serve({"a": 1, "c": 1}, 10).had == {"a": 5, "c": 5}


def test_who_has_waited_longest_goes_first_among_equals() -> None:
    assert Order(Shares(), {"a": 1, "b": 3, "c": 2}).next() == "b"


def test_who_leaves_has_no_more_turns() -> None:
    order = Order(Shares(TREE), {"a1": 0, "a2": 1, "b1": 2})
    seen = []
    while (tenant := order.next()) is not None:
        seen.append(tenant)
        order.leave(tenant)
    assert seen == ["b1", "a2", "a1"]
    assert order.changed() == {}


def test_who_is_passed_by_keeps_its_place() -> None:
    """Its work does not fit for a while; the others go on, and it does not lose by it."""
    shares = Shares()
    for _ in range(50):
        order = Order(shares, {"a": 0, "b": 0})
        while order.next() == "a":
            order.leave("a")
        order.serve("b", 10)
        shares = Shares(accounts={**shares.accounts, **order.changed()})
    market = Market()
    market.shares = shares
    assert market.serve({"a": 10, "b": 10}, 50).had == {"a": 500}


@given(
    st.dictionaries(
        st.sampled_from("abcde"),
        st.tuples(st.integers(1, 9), st.integers(1, 50)),
        min_size=2,
    ),
    st.integers(1, 200),
    st.integers(1, 9),
)
def test_no_two_that_wait_get_further_apart_than_a_job_of_each(
    tenants: dict[str, tuple[int, int]], turns: int, a_tick: int
) -> None:
    market = Market(**{name: weight for name, (weight, _) in tenants.items()})
    market.serve({name: units for name, (_, units) in tenants.items()}, turns, a_tick)
    had = {name: Fraction(market.had.get(name, 0), tenants[name][0]) for name in tenants}
    for one, (weight, units) in tenants.items():
        for other, (its_weight, its_units) in tenants.items():
            bound = Fraction(units, weight) + Fraction(its_units, its_weight)
            assert abs(had[one] - had[other]) <= bound


def test_what_was_not_used_is_given_back_on_the_whole_way() -> None:
    market = Market(TREE, a1=3).serve({"a1": 10}, 2)
    shares = market.shares
    assert shares.accounts == {
        Key("a1"): Account(6, 2),
        Key("a"): Account(20, 0, 6),
        LANE: Account(0, 0, 20),
    }
    assert shares.corrected({"a1": 11}) == {Key("a1"): Account(3), Key("a"): Account(9, 0, 6)}
    assert shares.corrected({"a1": -1})[Key("a1")] == Account(7)
    assert shares.corrected({"a1": 10**9}) == {Key("a1"): Account(), Key("a"): Account(0, 0, 6)}
    assert shares.corrected({"new": -5}) == {Key("new"): Account(5)}
    assert shares.corrected({}) == {}


def test_a_budget_of_weight_nothing_is_corrected_as_it_was_counted() -> None:
    market = Market(a=0).serve({"a": 10}, 1)
    assert market.shares.corrected({"a": 4}) == {Key("a"): Account(6)}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 10**15)), max_size=30))
def test_nothing_is_lost_by_dividing(jobs: list[tuple[str, int]]) -> None:
    weights = {"a": 7, "b": 1000}
    shares = Shares(weights=weights)
    total = {"a": 0, "b": 0}
    for tenant, units in jobs:
        order = Order(shares, {tenant: 0})
        order.serve(tenant, units)
        before = shares.accounts.get(Key(tenant), Account())
        floor = shares.accounts.get(LANE, Account()).floor
        if before.finish < floor:
            # It was idle: it begins where the others are.
            total[tenant] = floor * weights[tenant]
        total[tenant] += min(max(units, 1), MOST_COUNTED)
        shares = Shares(weights=weights, accounts={**shares.accounts, **order.changed()})
        now = shares.accounts[Key(tenant)]
        assert now.finish * weights[tenant] + now.rest == total[tenant]
