"""Budgets below one another: a request draws on all the way up, or on none of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from celery_budget import admission, settlement
from celery_budget.core.amounts import MAX_AMOUNT as MOST
from celery_budget.core.budgets import MILLION
from celery_budget.core.draws import Draw, Level, chain, decide
from celery_budget.core.reservations import (
    Line,
    Outcome,
    Parked,
    Refused,
    Reserved,
    ReserveRequest,
)
from celery_budget.errors import InvalidBudget, PolicyError
from celery_budget.settings import Settings
from celery_budget.settlement import Attempt
from celery_budget.store import Store, budgets, schema
from tests.contract.support import RAISED, RETRIED, RETURNED, Ledger, admit_many, message_of

#: From the bottom.
WAY = ("user", "tenant", "org")


@pytest.fixture
def tree(ledger: Ledger) -> Ledger:
    """``user`` below ``tenant`` below ``org``, and beside the first two ``other``."""
    ledger.set("org", 1000)
    ledger.set("tenant", 500, parent="org")
    ledger.set("user", 100, parent="tenant")
    ledger.set("other", 100, parent="org")
    return ledger


def way(ledger: Ledger) -> list[tuple[int, int]]:
    return ledger.balances(*WAY)


def test_a_request_draws_on_all_the_way_up(tree: Ledger) -> None:
    request = tree.reserve(10, budget="user")
    assert way(tree) == [(10, 0)] * 3
    assert tree.balance("other") == (0, 0)
    assert [(row.budget, row.line) for row in tree.rows("lines")] == [
        ("user", 0),
        ("tenant", 1),
        ("org", 2),
    ]
    attempt = tree.run(request)
    attempt.record(7)
    assert way(tree) == [(10, 0)] * 3
    attempt.end(RETURNED)
    assert way(tree) == [(0, 7)] * 3


def test_a_parent_may_be_drawn_on_by_itself(tree: Ledger) -> None:
    tree.reserve(10, budget="tenant")
    assert way(tree) == [(0, 0), (10, 0), (10, 0)]


@pytest.mark.parametrize("short", WAY)
@pytest.mark.parametrize("reason", ["held", "exhausted", "blocked", "closed", "draining"])
def test_a_refusal_names_the_one_that_is_short_and_why(
    tree: Ledger, short: str, reason: str
) -> None:
    limit = 20
    if reason == "blocked":
        limit = 0
        tree.set(short, 0)
    elif reason == "closed":
        tree.close(short)
    else:
        request = tree.reserve(20, budget=short)
        if reason == "exhausted":
            tree.run(request).end(RETURNED)
        elif reason == "draining":
            assert tree.close(short, drain=True) == "draining"
        tree.set(short, limit)
    standing = tree.standing(short)
    before = tree.dump()
    assert tree.admit(tree.request(1, budget="user")) == Refused(
        short,
        "tokens",
        1,
        int(standing.limit or 0),
        standing.reserved,
        standing.spent,
        reason,
        int(standing.limit or 0),
    )
    after = tree.dump()
    assert [(row.budget, row.reason) for row in tree.rows("refusals")] == [(short, reason)]
    assert {**after, "refusals": []} == before


def test_of_several_that_are_short_the_lowest_is_told(tree: Ledger) -> None:
    for name in WAY:
        tree.set(name, 10)
    tree.reserve(10, budget="other")
    refused = tree.admit(tree.request(11, budget="user"))
    assert refused == Refused("user", "tokens", 11, 10, 0, 0, "exhausted", 10)
    tree.set("user", 11)
    refused = tree.admit(tree.request(11, budget="user"))
    assert refused == Refused("tenant", "tokens", 11, 10, 0, 0, "exhausted", 10)
    tree.set("tenant", None)
    refused = tree.admit(tree.request(9, budget="user"))
    assert refused == Refused("org", "tokens", 9, 10, 10, 0, "held", 10)


def test_of_several_lines_the_first_ones_way_is_told(tree: Ledger) -> None:
    """Though its top is short and the bottom of the other's."""
    tree.set("org", 5)
    tree.set("z", 1, "micro-usd")
    refused = tree.admit(tree.request(6, ("z", 2), budget="user"))
    assert isinstance(refused, Refused)
    assert (refused.budget, refused.requested) == ("org", 6)
    refused = tree.admit(tree.request(2, ("user", 6), budget="z"))
    assert isinstance(refused, Refused)
    assert (refused.budget, refused.requested) == ("z", 2)


def test_exhausted_and_held_are_told_apart_to_the_unit(tree: Ledger) -> None:
    """What is spent leaves room for 40 of 100; 30 of that are held."""
    _, attempt = tree.start(60, budget="user")
    attempt.end(RETURNED)
    tree.reserve(30, budget="user")
    for amount, reason in ((11, "held"), (40, "held"), (41, "exhausted")):
        assert tree.admit(tree.request(amount, budget="user")) == Refused(
            "user", "tokens", amount, 100, 30, 60, reason, 100
        )
    tree.reserve(10, budget="user")


def test_a_common_parent_is_drawn_on_once_by_the_greater_amount(tree: Ledger) -> None:
    request = tree.reserve(10, ("other", 25), budget="user")
    assert tree.balances(*WAY, "other") == [(10, 0), (10, 0), (25, 0), (25, 0)]
    attempt = tree.run(request)
    attempt.record(12)
    assert tree.balances(*WAY, "other") == [(12, 0), (12, 0), (25, 0), (25, 0)]
    attempt.end(RAISED)
    assert tree.balances(*WAY, "other") == [(0, 12)] * 4


@pytest.mark.parametrize("amounts", [(25, 10), (10, 25)])
def test_a_common_parent_has_to_hold_the_greater_amount_only(
    tree: Ledger, amounts: tuple[int, int]
) -> None:
    tree.set("org", 25)
    first, second = amounts
    tree.reserve(first, ("other", second), budget="user")
    assert tree.balance("org") == (25, 0)


def test_a_common_parent_that_is_short_of_the_second_line(tree: Ledger) -> None:
    tree.set("org", 24)
    refused = tree.admit(tree.request(10, ("other", 25), budget="user"))
    assert refused == Refused("org", "tokens", 25, 24, 0, 0, "exhausted", 24)


@pytest.mark.parametrize("lower_first", [True, False])
def test_a_budget_named_together_with_its_parent(tree: Ledger, lower_first: bool) -> None:
    names = ("user", "tenant") if lower_first else ("tenant", "user")
    tree.reserve(10, (names[1], 20), budget=names[0])
    assert way(tree) == [(10, 0) if lower_first else (20, 0), (20, 0), (20, 0)]


@pytest.mark.parametrize("lower_first", [True, False])
def test_one_budget_by_two_rules_is_an_error(tree: Ledger, lower_first: bool) -> None:
    lines = (Line("user", 1), Line("other", 1, "start"))
    tree.set("org", 0)  # a refusal would be no better
    before = tree.dump()
    request = tree.request(budget="user", lines=lines if lower_first else lines[::-1])
    with pytest.raises(PolicyError, match="'org' twice"):
        tree.admit(request)
    assert tree.dump() == before


def test_of_several_budgets_with_two_rules_the_lowest_is_told(tree: Ledger) -> None:
    tree.set("second", 100, parent="tenant")
    lines = (Line("user", 1), Line("second", 1, "start"))
    before = tree.dump()
    with pytest.raises(PolicyError, match="'tenant' twice"):
        tree.admit(tree.request(budget="user", lines=lines))
    assert tree.dump() == before


# The tree itself.


def test_sixteen_levels_above_one_another_and_no_more(ledger: Ledger) -> None:
    ledger.set("l0", 100)
    for level in range(1, 17):
        ledger.set(f"l{level}", 100, parent=f"l{level - 1}")
    before = ledger.dump()
    with pytest.raises(InvalidBudget, match="more than 16"):
        ledger.set("l17", 100, parent="l16")
    assert ledger.dump() == before
    request = ledger.reserve(5, budget="l16")
    names = [f"l{level}" for level in range(17)]
    assert ledger.balances(*names) == [(5, 0)] * 17
    ledger.run(request).end(RETURNED)
    assert ledger.balances(*names) == [(0, 5)] * 17


def test_no_new_top_pushes_a_chain_below_sixteen_levels(ledger: Ledger) -> None:
    ledger.set("l0", 100)
    for level in range(1, 17):
        ledger.set(f"l{level}", 100, parent=f"l{level - 1}")
    ledger.set("top", 100)
    before = ledger.dump()
    for name in ("l0", "l1", "l8"):
        with pytest.raises(InvalidBudget, match="more than 16"):
            ledger.set(name, 100, parent="top" if name == "l0" else "side", **_beside(ledger, name))
    assert [row for row in ledger.dump()["budgets"] if row[1] != "side"] == before["budgets"]
    ledger.set("l1", 100, parent="top")
    ledger.reserve(1, budget="l16")
    assert ledger.balances("top", "l0", "l1") == [(1, 0), (0, 0), (1, 0)]


def _beside(ledger: Ledger, name: str) -> dict[str, str]:
    """Make ``side`` so deep that ``name`` would be one level too deep below it."""
    if name == "l1":
        ledger.set("side", 100, parent="l0")
    elif name == "l8":
        ledger.set("side", 100, parent="l7")
    return {}


@pytest.mark.parametrize(("name", "parent"), [("org", "user"), ("org", "tenant"), ("org", "other")])
def test_no_budget_is_above_itself(tree: Ledger, name: str, parent: str) -> None:
    before = tree.dump()
    with pytest.raises(InvalidBudget, match="above itself"):
        tree.set(name, 1000, parent=parent)
    assert tree.dump() == before


def test_no_budget_is_its_own_parent(tree: Ledger) -> None:
    with pytest.raises(InvalidBudget, match="its own parent"):
        tree.set("org", 1000, parent="org")
    with pytest.raises(InvalidBudget, match="its own parent"):
        tree.set("new", 1000, parent="new")


def test_a_parent_has_to_exist(ledger: Ledger) -> None:
    with pytest.raises(InvalidBudget, match="'nobody' of 'b' does not exist"):
        ledger.set("b", 1, parent="nobody")
    assert ledger.rows("budgets") == ledger.rows("balances") == []


def test_a_parent_counts_the_same(tree: Ledger) -> None:
    before = tree.dump()
    with pytest.raises(InvalidBudget, match="counts requests and its parent 'tenant' tokens"):
        tree.set("new", 5, "requests", parent="tenant")
    assert tree.dump() == before
    tree.set("money", 5, "micro-usd")
    with pytest.raises(InvalidBudget, match="micro-usd"):
        tree.set("other", 5, None, parent="money")
    tree.set("new", 5, None, parent="tenant")
    assert tree.standing("new").unit == "tokens", "that of its parent unless told"


@pytest.mark.parametrize("name", ["org", "tenant", "user"])
def test_a_unit_stays_in_a_tree(tree: Ledger, name: str) -> None:
    before = tree.dump()
    with pytest.raises(InvalidBudget):
        tree.set(name, 5, "requests")
    assert tree.dump() == before


def test_a_unit_stays_once_a_child_has_it(ledger: Ledger) -> None:
    ledger.set("b", 100)
    ledger.set("c", 100, parent="b")
    with pytest.raises(InvalidBudget, match="is the parent of 'c'"):
        ledger.set("b", 100, "requests")
    ledger.set("c", 100, None, parent=None)
    ledger.set("b", 100, "requests")


@pytest.mark.parametrize("how", ["line", "adjustment", "grant"])
def test_a_unit_stays_once_something_was_counted_in_it(funded: Ledger, how: str) -> None:
    if how == "line":
        funded.reserve(0)
    elif how == "grant":
        funded.grant("k", 5)
    else:
        funded.adjust("k", 5)
    before = funded.dump()
    with pytest.raises(InvalidBudget, match="its unit cannot become"):
        funded.set("b", 100, "requests")
    assert funded.dump() == before


# Other parents.


def test_what_was_admitted_before_settles_where_it_was_admitted(tree: Ledger) -> None:
    request, attempt = tree.start(10, budget="user")
    tree.set("user", 100, parent="other")
    assert tree.balances(*WAY, "other") == [(10, 0)] * 3 + [(0, 0)]
    attempt.record(15)
    assert tree.balances(*WAY, "other") == [(15, 0)] * 3 + [(0, 0)]
    second = tree.reserve(20, budget="user")
    assert tree.balances(*WAY, "other") == [(35, 0), (15, 0), (35, 0), (20, 0)]
    attempt.end(RAISED)
    assert tree.balances(*WAY, "other") == [(20, 15), (0, 15), (20, 15), (20, 0)]
    attempt.record(1)
    tree.run(second).end(RETURNED)
    assert tree.balances(*WAY, "other") == [(0, 36), (0, 16), (0, 36), (0, 20)]
    assert tree.state(request) == "settled"


def test_a_retry_goes_on_where_it_was_admitted(tree: Ledger) -> None:
    request, attempt = tree.start(10, budget="user")
    attempt.record(4)
    tree.set("user", 100, parent="other")
    tree.set("other", 0)
    following, written = tree.retry(request, attempt)
    assert isinstance(written, Reserved)
    assert tree.balances(*WAY, "other") == [(14, 0)] * 3 + [(0, 0)]
    attempt.end(RETRIED)
    tree.run(following).end(RETURNED)
    assert tree.balances(*WAY, "other") == [(0, 14)] * 3 + [(0, 0)]


def test_a_budget_may_leave_its_tree(tree: Ledger) -> None:
    request = tree.reserve(10, budget="user")
    tree.set("user", 100, parent=None)
    tree.reserve(5, budget="user")
    assert way(tree) == [(15, 0), (10, 0), (10, 0)]
    assert settlement.revoke(tree.store, tree.root, request.reservation_id, "cancelled")
    assert way(tree) == [(5, 0), (0, 0), (0, 0)]


# Ends, at every level.


def spent(amount: int) -> list[tuple[int, int]]:
    return [(0, amount)] * 3


def ended(outcome: Outcome) -> Callable[[Ledger, ReserveRequest, Attempt], None]:
    return lambda tree, request, attempt: attempt.end(outcome) and None


def lost(tree: Ledger, request: ReserveRequest, attempt: Attempt) -> None:
    tree.lapse(request)
    assert tree.recover().lost == 1


@pytest.mark.parametrize(
    ("end", "records", "late", "charged"),
    [
        pytest.param(ended(RETURNED), [4], [], 4, id="below"),
        pytest.param(ended(RETURNED), [4, 30], [], 34, id="over"),
        pytest.param(ended(RETURNED), [], [], 10, id="unmetered"),
        pytest.param(ended(RETURNED), [0], [], 0, id="zero"),
        pytest.param(ended(RAISED), [], [], 0, id="raised"),
        pytest.param(ended(RETURNED), [], [3], 10, id="late-within-the-estimate"),
        pytest.param(ended(RETURNED), [], [3, 90], 93, id="late-over"),
        pytest.param(ended(RAISED), [6], [200], 206, id="late-over-the-limit"),
        pytest.param(lost, [4], [], 10, id="lost"),
        pytest.param(lost, [12], [], 12, id="lost-over"),
        pytest.param(lost, [4], [8], 12, id="lost-and-late"),
    ],
)
def test_every_level_is_charged_the_same(
    tree: Ledger,
    end: Callable[[Ledger, ReserveRequest, Attempt], None],
    records: list[int],
    late: list[int],
    charged: int,
) -> None:
    request, attempt = tree.start(10, budget="user", late_ack=False)
    for amount in records:
        attempt.record(amount)
    assert way(tree) == [(max(10, sum(records)), 0)] * 3
    end(tree, request, attempt)
    for amount in late:
        attempt.record(amount)
    assert way(tree) == spent(charged)


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_what_never_ran_is_given_back_at_every_level(tree: Ledger, how: str) -> None:
    request = tree.reserve(10, budget="user", expires_us=1 if how == "expired" else None)
    if how == "expired":
        tree.relay()
    else:
        assert settlement.revoke(tree.store, tree.root, request.reservation_id, "cancelled")
    assert tree.state(request) == "released"
    assert way(tree) == [(0, 0)] * 3


def test_usage_over_the_hold_blocks_every_level_that_is_full(tree: Ledger) -> None:
    tree.set("tenant", 50)
    _, attempt = tree.start(10, budget="user")
    attempt.record(60)
    assert way(tree) == [(60, 0)] * 3
    assert tree.standing("tenant").available == -10
    refused = tree.admit(tree.request(0, budget="user"))
    assert refused == Refused("tenant", "tokens", 0, 50, 60, 0, "held", 50)
    attempt.end(RETURNED)
    refused = tree.admit(tree.request(0, budget="user"))
    assert refused == Refused("tenant", "tokens", 0, 50, 0, 60, "exhausted", 50)
    tree.reserve(10, budget="other")


@pytest.mark.parametrize("short", WAY)
def test_a_retry_raises_the_holds_of_all_levels_or_none(tree: Ledger, short: str) -> None:
    request, attempt = tree.start(10, budget="user")
    attempt.record(7)
    tree.set(short, 16)
    following, written = tree.retry(request, attempt)
    assert isinstance(written, Parked)
    assert way(tree) == [(7, 0)] * 3
    attempt.end(RETRIED)
    assert tree.sweep().admitted == 0
    assert way(tree) == [(7, 0)] * 3
    tree.set(short, 17)
    assert tree.sweep().admitted == 1
    assert way(tree) == [(17, 0)] * 3
    tree.run(following).end(RETURNED)
    assert way(tree) == spent(17)


def test_a_larger_retry_asks_it_of_all_levels(tree: Ledger) -> None:
    request, attempt = tree.start(10, budget="user")
    attempt.record(7)
    following = replace(request, retries=1, lines=(Line("user", 30),))
    written = admission.retry(
        tree.store, tree.settings, following, message_of(following), 1, attempt.claim_id
    )
    assert isinstance(written, Reserved)
    assert way(tree) == [(37, 0)] * 3
    attempt.end(RETRIED)


@pytest.mark.parametrize("short", WAY)
def test_parked_work_draws_on_all_levels_or_none(tree: Ledger, short: str) -> None:
    tree.set(short, 9)
    parked = tree.admit(tree.request(10, budget="user"), continuation=True)
    assert isinstance(parked, Parked)
    assert way(tree) == [(0, 0)] * 3
    assert tree.sweep().admitted == 0
    tree.set(short, 10)
    assert tree.sweep().admitted == 1
    assert way(tree) == [(10, 0)] * 3


@pytest.mark.parametrize("short", WAY)
def test_a_message_that_runs_again_needs_its_estimate_at_every_level(
    tree: Ledger, short: str
) -> None:
    request, attempt = tree.start(10, budget="user")
    attempt.record(7)
    tree.set(short, 16)
    tree.lapse(request)
    assert tree.recover().rerun == 1
    assert way(tree) == [(7, 0)] * 3
    tree.set(short, 17)
    assert tree.sweep().admitted == 1
    assert way(tree) == [(17, 0)] * 3
    tree.run(request).end(RETURNED)
    assert way(tree) == spent(17)


def test_the_levels_of_unlimited_budgets_count_too(ledger: Ledger) -> None:
    ledger.set("org", None)
    ledger.set("user", None, parent="org")
    ledger.reserve(2**62, budget="user")
    assert ledger.balances("user", "org") == [(2**62, 0)] * 2
    ledger.reserve(2**62 - 1, budget="org")
    assert ledger.admit(ledger.request(1, budget="user")) == Refused(
        "org", "tokens", 1, 2**63 - 1, 2**63 - 1, 0, "held", 2**63 - 1
    )


def test_the_order_of_balances_is_that_of_names(tree: Ledger) -> None:
    names = [one.budget for one in tree.store.run(budgets.balances_of, tree.root)]
    assert names == sorted(names)
    assert {one.parent for one in tree.store.run(budgets.balances_of, tree.root)} == {
        None,
        "org",
        "tenant",
    }


@pytest.mark.parametrize("level", WAY)
def test_a_soft_stop_of_any_level_counts_for_new_work(tree: Ledger, level: str) -> None:
    tree.set(level, 100, soft_stop=MILLION // 2)
    tree.reserve(50, budget="user")
    assert tree.admit(tree.request(1, budget="user")) == Refused(
        level, "tokens", 1, 100, 50, 0, "held", 50
    )
    tree.reserve(50, budget="user", finishing=True)


# The database's decision and that of celery_budget.core.draws.

SOME = st.sampled_from([0, 1, 2, 3, 5, 9, 10, 11, 20, 2**53 + 1, 2**62, MOST - 1, MOST])
DRAWN = [(0, 0), (3, 0), (0, 3), (4, 5), (2**62, 2**62 - 1)]
RATIO = st.sampled_from([0, 1, 333_333, 500_000, 999_999, MILLION])


@st.composite
def forests(draw: st.DrawFn) -> dict[str, Level]:
    """A few budgets as they stand, parents first."""
    found: dict[str, Level] = {}
    for number in range(draw(st.integers(1, 6))):
        parent = draw(st.none() | st.sampled_from(sorted(found))) if number else None
        share = draw(st.none() | RATIO) if parent else None
        soft, hard = sorted(draw(st.tuples(RATIO, RATIO)))
        opened = draw(st.integers(0, 4)) > 0
        reserved, spent = draw(st.sampled_from(DRAWN))
        found[f"b{number}"] = Level(
            f"b{number}",
            found[parent].unit if parent else draw(st.sampled_from(["tokens", "requests"])),
            parent,
            None if share is not None else draw(st.none() | SOME),
            share,
            draw(st.sampled_from([0, 0, 0, 2, 7, MOST])),
            *draw(st.sampled_from([(MILLION, MILLION), (MILLION, MILLION), (soft, hard)])),
            draw(st.sampled_from(["open"] * 12 + ["draining", "closed"])),
            0 if opened else None,
            reserved if opened else 0,
            spent if opened else 0,
        )
    return found


def fill(connection: Any, root: str, forest: dict[str, Level]) -> None:
    """Write budgets, balances and grants; no lines stand behind them."""
    for one in forest.values():
        connection.execute(
            schema.budgets.insert().values(
                root=root,
                name=one.budget,
                unit=one.unit,
                parent=one.parent,
                limit_amount=one.limit_amount,
                limit_share=one.limit_share,
                soft_stop=one.soft_stop,
                hard_stop=one.hard_stop,
                state=one.state,
                period="total",
                created_us=1,
                updated_us=1,
            )
        )
        if one.window_us is not None:
            connection.execute(
                schema.balances.insert().values(
                    root=root,
                    budget=one.budget,
                    window_us=one.window_us,
                    stripe=0,
                    reserved=one.reserved,
                    spent=one.spent,
                )
            )
        for number, until_us in enumerate((MOST, 1)):
            if one.granted:
                connection.execute(
                    schema.grants.insert().values(
                        root=root,
                        key=f"{one.budget} {number}",
                        budget=one.budget,
                        amount=one.granted,
                        until_us=until_us,
                        who="test",
                        created_us=1,
                    )
                )


def two_rules(forest: dict[str, Level], lines: tuple[Line, ...]) -> bool:
    """Whether one budget would be charged by two rules."""
    rules = {(one.budget, line.charge) for line in lines for one in chain(forest, line.budget)}
    return len({name for name, _ in rules}) < len(rules)


def admitted_by(ledger: Ledger, request: ReserveRequest, batch: bool) -> Any:
    """What comes of a request by itself, or of a batch of one."""
    if not batch:
        return ledger.admit(request)
    asked = [(request, message_of(request))]
    [tried] = admit_many(ledger.store, ledger.settings, asked)
    return tried


@hypothesis_settings(max_examples=150)
@given(forest=forests(), data=st.data(), finishing=st.booleans(), batch=st.booleans())
def test_the_store_decides_as_the_pure_function_does(
    store: Store,
    store_url: str,
    forest: dict[str, Level],
    data: st.DataObject,
    finishing: bool,
    batch: bool,
) -> None:
    ledger = Ledger(store, Settings(database_url=store_url, root=f"root-{uuid4().hex[:12]}"))
    store.run(fill, ledger.root, forest)
    named = data.draw(
        st.lists(st.sampled_from(sorted(forest)), min_size=1, max_size=3, unique=True)
    )
    charges = st.sampled_from(["used"] * 5 + ["start"])
    lines = tuple(Line(name, data.draw(SOME), data.draw(charges)) for name in named)
    request = ledger.request(budget=named[0], lines=lines, finishing=finishing)
    if two_rules(forest, lines):
        with pytest.raises(PolicyError) as by_function:
            decide(lines, forest, finishing)
        before = ledger.dump()
        with pytest.raises(PolicyError) as by_store:
            admitted_by(ledger, request, batch)
        assert str(by_store.value) == str(by_function.value)
        assert ledger.dump() == before
        return
    expected = decide(lines, forest, finishing)
    balances = {one.budget: (one.reserved, one.spent) for one in forest.values()}
    admitted = admitted_by(ledger, request, batch)
    drawn: list[Draw] = []
    if isinstance(expected, Refused):
        assert admitted == expected
        assert ledger.rows("lines") == ledger.rows("reservations") == []
    else:
        assert admitted == Reserved(request.reservation_id)
        drawn = [
            Draw(row.budget, row.unit, row.window_us, row.estimate, row.charge)
            for row in ledger.rows("lines")
        ]
        assert drawn == list(expected)
        for draw in expected:
            reserved, spent = balances[draw.budget]
            balances[draw.budget] = reserved + draw.amount, spent
    found = {row.budget: (row.reserved, row.spent) for row in ledger.counted()}
    assert found == {name: balances[name] for name in found}
    opened = {name for name, one in forest.items() if one.window_us is not None}
    assert found.keys() == opened | {draw.budget for draw in drawn}
