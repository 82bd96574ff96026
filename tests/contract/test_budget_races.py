"""Races for budgets: their limits hold at every level, whatever is declared or made meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from celery_budget import reconcile, settlement
from celery_budget.core.budgets import Budget
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import (
    START,
    AlreadyReserved,
    Cancelling,
    Closed,
    Line,
    Refused,
    Released,
    Reserved,
    Tried,
)
from celery_budget.errors import HoldsOpen, InvalidBudget
from celery_budget.settlement import Attempt
from celery_budget.store import budgets, declaring, journal, repairs
from celery_budget.store.balances import Key
from tests.contract.racers import Processes, at_once, use_first_in_rounds
from tests.contract.support import BOOT, RAISED, RETURNED, Ledger, message_of
from tests.contract.support import admit_many as admit_all

ROUNDS = 6


def admitted(ledger: Ledger, *args: Any, **changes: Any) -> bool:
    request = ledger.request(*args, **changes)
    return ledger.admit(request) == Reserved(request.reservation_id)


def until_refused(ledger: Ledger, *args: Any, **changes: Any) -> int:
    count = 0
    while admitted(ledger, *args, **changes):
        count += 1
    return count


def open_holds(ledger: Ledger, budget: str) -> int:
    ended = {row.reservation_id for row in ledger.rows("reservations") if row.ended_us is not None}
    return sum(row.reservation_id not in ended for row in ledger.rows("lines", budget=budget))


# Several levels and units


def test_siblings_share_what_is_above_them(racing: Ledger) -> None:
    names = [f"child{one}" for one in range(8)]
    for one in range(ROUNDS):
        racing.set("b", 100 * (one + 1))
        for name in names:
            racing.set(name, None, parent="b")
        done = at_once([lambda name=name: admitted(racing, 30, budget=name) for name in names])
        assert sum(done) == 3
        racing.adjust(f"rest{one}", 10)
    assert racing.balance() == (90 * ROUNDS, 10 * ROUNDS)


def test_lines_in_opposite_orders_all_or_none(racing: Ledger) -> None:
    for unit in ("usd", "requests", "tokens"):
        racing.set(unit, 50, unit=unit, parent=None)
    for name in ("x", "y"):
        racing.set(name, None, unit="usd", parent="usd")

    def ask(order: tuple[str, ...]) -> bool:
        lines = tuple(Line(name, 10, START if name == "requests" else "used") for name in order)
        return admitted(racing, lines=lines, owner=order[0])

    orders = [("x", "requests", "tokens"), ("tokens", "y", "requests"), ("requests", "tokens", "x")]
    done = at_once([lambda order=order: ask(order) for order in orders * 3])
    assert sum(done) == 5
    assert racing.balances("usd", "requests", "tokens") == [(50, 0)] * 3


def test_starts_and_ends_in_opposite_orders(racing: Ledger) -> None:
    racing.set("b", None)
    racing.set("rate", None, unit="requests")
    racing.set("a", None, parent="b")

    def live(order: tuple[str, str]) -> None:
        lines = tuple(Line(name, 3, START if name == "rate" else "used") for name in order)
        for _ in range(4):
            request = racing.reserve(lines=lines, owner=order[0])
            attempt = racing.run(request)
            attempt.record(5, unit="tokens")
            attempt.end(RETURNED)

    at_once([lambda order=order: live(order) for order in [("a", "rate"), ("rate", "a")] * 3])
    assert racing.balances("a", "b", "rate") == [(0, 120), (0, 120), (0, 72)]


# What is made at first use


def test_the_first_use_of_a_window_makes_one(racing: Ledger) -> None:
    racing.set("b", 6, period="hour")
    racing.set("child", None, parent="b", period="day")
    for _ in range(ROUNDS):
        for name in ("b", "child"):
            racing.age(name, 100 * 3_600_000_000)
        before = len(racing.windows("b")), len(racing.windows("child"))
        done = at_once([lambda: admitted(racing, 1, budget="child")] * 12)
        assert sum(done) == 6
        assert (len(racing.windows("b")), len(racing.windows("child"))) == tuple(
            count + 1 for count in before
        )
        assert racing.balances("b", "child") == [(6, 0), (6, 0)]


def test_the_first_use_of_a_template_makes_one_budget_and_those_above(racing: Ledger) -> None:
    racing.set("org", None)
    racing.set("group:*", 7, parent="org")
    racing.set("tenant:*", 5, parent="group:*")
    for one in range(ROUNDS):
        names = [f"tenant:{one}"] * 12
        done = at_once([lambda name=name: admitted(racing, 1, budget=name) for name in names])
        assert sum(done) == 5
        made = [row.name for row in racing.rows("budgets") if row.name.endswith(f":{one}")]
        assert sorted(made) == [f"group:{one}", f"tenant:{one}"]
        assert racing.balances(*made) == [(5, 0), (5, 0)]
        assert len(racing.windows(f"tenant:{one}")) == 1


def test_first_uses_of_several_templates_in_opposite_orders(racing: Ledger) -> None:
    racing.set("tenant:*", None)
    racing.set("cost:*", None, unit="usd")
    for one in range(ROUNDS):
        names = [f"tenant:{one}", f"cost:{one}"]
        at_once(
            [
                lambda order=order: racing.reserve(1, (order[1], 1), budget=order[0])
                for order in (names, names[::-1]) * 4
            ]
        )
        assert racing.balances(*names) == [(8, 0), (8, 0)]


def test_processes_use_templates_and_windows_first(racing: Ledger) -> None:
    rounds = 20
    racing.set("org", None, period="hour")
    racing.set("tenant:*", 10, parent="org", period="hour")
    racing.put("balances", {"window_us": 0, "end_us": 1}, budget="org")
    started = Processes(3, use_first_in_rounds, racing.settings, rounds)
    for done in zip(*started.results(), strict=True):
        assert sum(done) == 2
    made = [row.name for row in racing.rows("budgets") if row.template]
    assert len(made) == rounds
    assert racing.balances(*made) == [(8, 0)] * rounds
    assert racing.balance("org") == (8 * rounds, 0)


def test_windows_made_ahead_beside_first_uses(racing: Ledger) -> None:
    names = [f"b{one}" for one in range(6)]
    for name in names:
        racing.set(name, None, period="hour")
        racing.reserve(1, budget=name)
    for _ in range(ROUNDS):
        for name in names:
            racing.age(name, 3_600_000_000)
        calls: list[Callable[[], Any]] = [racing.upkeep] * 3
        calls += [lambda name=name: racing.reserve(1, budget=name) for name in names]
        at_once(calls)
        for name in names:
            spans = racing.windows(name)
            assert len(spans) == len({start for start, _ in spans})
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))


# What is declared meanwhile


@pytest.mark.parametrize("lowered", ["b", "child"])
@pytest.mark.parametrize("limit", [40, 5, 0])
def test_a_limit_that_is_lowered_at_any_level_holds_from_its_commit_on(
    racing: Ledger, lowered: str, limit: int
) -> None:
    racing.set("b", 10_000)
    racing.set("child", 10_000, parent="b")

    def lower() -> int:
        while racing.balance("child")[0] < 10:
            pass
        with racing.store.transaction() as connection:
            declaring.set_budget(connection, racing.root, lowered, {"limit": limit})
            return budgets.balance(connection, racing.root, lowered).reserved

    ask = [lambda: until_refused(racing, 1, budget="child")] * 4
    at_commit = at_once([lower, *ask])[0]
    assert racing.balances("b", "child") == [(max(at_commit, limit), 0)] * 2


def test_a_budget_moves_to_another_parent_beside_admissions(racing: Ledger) -> None:
    # Of names before and after its own: what is locked next may come before what is locked.
    racing.set("a", 60)
    racing.set("z", 60)
    racing.set("m", None, parent="a")
    racing.set("n", None, parent="a")

    def move() -> None:
        for one in range(12):
            racing.set("m", None, parent="az"[one % 2])

    at_once(
        [
            move,
            *[lambda: until_refused(racing, 1, budget="m")] * 3,
            *[lambda: until_refused(racing, 1, budget="n")] * 2,
            lambda: [admit_many(racing, racing.request(1, budget="m")) for _ in range(10)],
        ]
    )
    left, right = racing.balance("a")[0], racing.balance("z")[0]
    assert left <= 60
    assert right <= 60
    assert racing.balance("m")[0] + racing.balance("n")[0] == left + right


def test_two_budgets_that_become_each_others_parent_make_no_circle(racing: Ledger) -> None:
    def put(name: str, parent: str) -> bool:
        try:
            racing.set(name, 100, parent=parent)
        except InvalidBudget:
            return False
        return True

    for _ in range(ROUNDS):
        racing.set("x", 100, parent=None)
        racing.set("y", 100, parent=None)
        done = at_once([lambda: put("x", "y"), lambda: put("y", "x")])
        assert sorted(done) == [False, True]
        assert admitted(racing, 1, budget="x")
        assert admitted(racing, 1, budget="y")


def test_budgets_are_applied_beside_admissions(racing: Ledger) -> None:
    names = ["a", "m", "z"]
    for name in names:
        racing.set(name, 1000)

    def apply(limits: tuple[int, int, int], parent: str | None) -> None:
        of = [
            Budget(name, "tokens", limit, None if name == "a" else parent)
            for name, limit in zip(names, limits, strict=True)
        ]
        for _ in range(4):
            racing.store.run(declaring.apply, {racing.root: of})

    def ask(order: list[str]) -> None:
        first, *more = order
        for _ in range(8):
            admitted(racing, 1, *[(name, 1) for name in more], budget=first)

    at_once(
        [
            lambda: apply((50, 40, 30), None),
            lambda: apply((45, 45, 45), "a"),
            *[lambda order=order: ask(order) for order in (names, names[::-1]) * 2],
        ]
    )
    for name in names:
        assert racing.balance(name)[0] <= 1000


@pytest.mark.parametrize("drain", [False, True])
def test_a_budget_that_is_closed_has_no_open_holds(racing: Ledger, drain: bool) -> None:
    def close(name: str) -> str:
        try:
            return racing.close(name, drain=drain)
        except HoldsOpen:
            return "open"

    states = set()
    for one in range(4 * ROUNDS):
        name = f"b{one}"
        racing.set(name, 10)
        racing.set(f"c{one}", 10, parent=name)
        state, *done = at_once(
            [
                lambda name=name: close(name),
                lambda name=name: admitted(racing, 1, budget=name),
                lambda one=one: admitted(racing, 1, budget=f"c{one}"),
            ]
        )
        holds = open_holds(racing, name)
        assert holds == sum(done)
        assert racing.standing(name).state == state
        assert (state == "closed") == (holds == 0)
        if state != "open":
            assert isinstance(racing.admit(racing.request(1, budget=f"c{one}")), Refused)
        states.add(state)
    assert len(states) >= 1


def test_the_last_hold_of_a_draining_budget_ends_beside_two_sweeps(racing: Ledger) -> None:
    for one in range(ROUNDS):
        name = f"b{one}"
        racing.set(name, 10)
        _, attempt = racing.start(1, budget=name)
        assert racing.close(name, drain=True) == "draining"
        at_once([racing.upkeep, racing.upkeep, lambda attempt=attempt: attempt.end(RETURNED)])
        racing.upkeep()
        assert racing.standing(name).state == "closed"


# Batches


def admit_many(ledger: Ledger, *requests: Any, best_effort: bool = True) -> list[Tried]:
    asked = [(request, message_of(request)) for request in requests]
    return admit_all(ledger.store, ledger.settings, asked, best_effort=best_effort)


def test_two_batches_that_meet_in_opposite_orders(racing: Ledger) -> None:
    names = [f"b{one}" for one in range(10)]
    for name in names:
        racing.set(name, 3)
    for one in range(ROUNDS):
        requests = [racing.request(1, budget=name, task_id=f"{one}-{name}") for name in names]
        again = [replace(request, reservation_id=new_id()) for request in requests[::-1]]
        other = [racing.request(4, budget=name) for name in names]
        first, second, third, fourth = at_once(
            [
                lambda these=these: admit_many(racing, *these)
                for these in (requests, again, other, other[::-1])
            ]
        )
        wanted = 10 if one < 3 else 0
        kinds = [type(outcome) for outcome in (*first, *second)]
        assert kinds.count(Reserved) == wanted
        assert kinds.count(AlreadyReserved) == wanted
        assert kinds.count(Refused) == 20 - 2 * wanted
        assert {type(outcome) for outcome in (*third, *fourth)} == {Refused}
        for name in names:
            assert racing.balance(name) == (min(one + 1, 3), 0)
    # The third and the fourth brought the same calls.
    assert racing.refused() == 20 * 3 + 10 * ROUNDS


def test_all_or_none_beside_the_same_requests_one_by_one(racing: Ledger) -> None:
    for one in range(ROUNDS):
        racing.set("b", 30 * (one + 1) - 10)
        requests = [racing.request(10, task_id=f"{one}-{two}") for two in range(3)]
        singles = [replace(request, reservation_id=new_id()) for request in requests[::-1]]
        calls: list[Callable[[], Any]] = [
            lambda requests=requests: admit_many(racing, *requests, best_effort=False)
        ]
        calls += [lambda request=request: racing.admit(request) for request in singles]
        at_once(calls)
        rows = [row for row in racing.rows("reservations") if row.task_id.startswith(f"{one}-")]
        assert len(rows) == 2
        assert racing.balance()[0] == 20 * (one + 1) + 10 * one
        racing.set("b", None)
        racing.reserve(10)


# One end, whoever brings it


@pytest.mark.parametrize("how", ["cancel", "revoke"])
@pytest.mark.parametrize("state", ["reserved", "running"])
def test_a_cancelled_request_beside_its_run(racing: Ledger, how: str, state: str) -> None:
    for _ in range(ROUNDS):
        spent = racing.balance()[1]
        racing.set("b", 100 + spent)
        request = racing.reserve(10)
        attempt = racing.run(request) if state == "running" else None

        def work(request: Any = request, attempt: Attempt | None = attempt) -> bool:
            held: Any = attempt or racing.deliver(request)
            if not isinstance(held, Attempt):
                assert isinstance(held, Closed)
                return False
            held.record(4)
            return held.end(RETURNED)

        def stop(request: Any = request) -> Any:
            if how == "cancel":
                return settlement.cancel(racing.store, racing.settings, request.task_id)
            key = (racing.root, request.reservation_id, "revoked")
            return settlement.revoke(racing.store, *key)

        worked, first, second = at_once([work, stop, stop])
        if worked:
            assert {type(first), type(second)} <= {bool, Cancelling, Closed}
            assert True not in (first, second)
            assert racing.balance() == (0, spent + 4)
        else:
            assert state == "reserved"
            given_back = Released(request.task_id, "released") if how == "cancel" else True
            assert first == second == given_back
            assert racing.balance() == (0, spent)
        ends = [row.what for row in racing.rows("journal", reservation_id=request.reservation_id)]
        assert len(ends) == 2


@pytest.mark.parametrize("late_ack", [False, True])
def test_one_failure_that_two_sweeps_and_its_worker_report_is_given_back_once(
    racing: Ledger, late_ack: bool
) -> None:
    for _ in range(2 * ROUNDS):
        spent = racing.balance()[1]
        racing.set("b", 100 + spent)
        request, attempt = racing.start(10, late_ack=late_ack)
        attempt.record(3)
        racing.lapse(request)

        def lost(request: Any = request) -> bool:
            return settlement.worker_lost(
                racing.store, racing.settings, request.task_id, BOOT, False
            )

        at_once(
            [
                racing.recover,
                racing.recover,
                lambda attempt=attempt: attempt.end(RAISED),
                lost,
            ]
        )
        state = racing.state(request)
        rows = racing.rows("journal", reservation_id=request.reservation_id)
        ends = [row for row in rows if row.what in ("settle", "lose", "release")]
        charged = {"settled": 3, "lost": 10, "waiting": 0}[state]
        assert len(ends) == (charged > 0)
        if state == "waiting":
            # A sweep had it run again before anybody told that it failed.
            assert late_ack
            assert racing.balance() == (13, spent)
            settlement.revoke(racing.store, racing.root, request.reservation_id, "enough")
            charged = 3
        assert racing.balance() == (0, spent + charged)


# The journal


def test_folding_and_repairing_beside_all_that_goes_on(racing: Ledger) -> None:
    racing.set("b", None)
    racing.set("child", None, parent="b")
    keys = [Key("b", 0), Key("child", 0)]

    def fold() -> None:
        for _ in range(5):
            for key in keys:
                racing.store.run(
                    journal.fold, racing.root, key.budget, key.window_us, key.stripe, -1_000_000
                )

    def repair() -> None:
        for _ in range(5):
            for key in reversed(keys):
                assert not racing.store.run(repairs.rebuild, racing.root, key, "test")

    def live() -> None:
        for _ in range(6):
            _, attempt = racing.start(10, budget="child")
            attempt.record(3)
            attempt.end(RETURNED)

    at_once([fold, fold, repair, *[live] * 4, lambda: racing.adjust("k", 5, "child")])
    assert racing.balances("b", "child") == [(0, 72), (0, 77)]
    assert reconcile.reconcile(racing.store, racing.settings).ok
