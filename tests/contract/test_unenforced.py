"""What is not enforced: admitted as under no limit, and what it would have been refused is told."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from celery_budget import reconcile
from celery_budget.core.budgets import Share
from celery_budget.core.draws import Level, decide, unlimited
from celery_budget.core.reservations import (
    AlreadyExtended,
    AlreadyReserved,
    Extended,
    Line,
    Parked,
    Refused,
    Reserved,
    ReserveRequest,
    Tried,
)
from celery_budget.errors import QueueFull, UnknownBudget
from celery_budget.settings import Settings
from celery_budget.settlement import Attempt
from celery_budget.store import Store, lanes, parked
from tests.contract.racers import at_once
from tests.contract.support import RAISED, RETRIED, RETURNED, Ledger, admit_many, message_of

MOST = 2**63 - 1


def shadow(ledger: Ledger, amount: int = 10, *more: tuple[str, int], **changes: Any) -> Any:
    return ledger.request(amount, *more, **{"enforced": False, **changes})


def waived(ledger: Ledger) -> dict[tuple[str, str, str], tuple[int, int]]:
    """How often each budget would have refused, and how much, by budget, stage and reason."""
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for row in ledger.rows("refusals"):
        assert row.reason.startswith("waived:"), row
        key = row.budget, row.stage, row.reason.removeprefix("waived:")
        count, amount = found.get(key, (0, 0))
        found[key] = count + row.count, amount + row.amount
    return found


def noted(ledger: Ledger, request: ReserveRequest) -> Any:
    row = ledger.row(request)
    return None if row.waived is None else json.loads(row.waived)


def test_what_fits_leaves_no_mark(funded: Ledger) -> None:
    request = shadow(funded, 100)
    assert funded.admit(request) == Reserved(request.reservation_id)
    assert (waived(funded), noted(funded, request)) == ({}, None)
    assert not funded.row(request).enforced
    assert funded.balance() == (100, 0)


def test_what_does_not_fit_is_admitted_and_told(funded: Ledger) -> None:
    funded.reserve(80)
    request = shadow(funded, 30)
    admitted = funded.admit(request)
    told = Refused("b", "tokens", 30, 100, 80, 0, "held", 100)
    assert isinstance(admitted, Reserved)
    assert admitted.waived == told
    assert noted(funded, request) == {
        "kind": "refused", "budget": "b", "unit": "tokens", "requested": 30, "limit": 100,
        "reserved": 80, "spent": 0, "reason": "held", "most": 100,
    }  # fmt: skip
    assert waived(funded) == {("b", "draft", "held"): (1, 30)}
    assert funded.balance() == (110, 0)
    assert funded.message(request).state == "due"
    assert isinstance(funded.admit(funded.request(1)), Refused)


def test_a_repeat_is_counted_once(funded: Ledger) -> None:
    request = shadow(funded, 130)
    funded.admit(request)
    assert funded.admit(request) == Reserved(request.reservation_id)
    again = replace(request, reservation_id=uuid4())
    assert funded.admit(again) == AlreadyReserved(request.reservation_id, request.task_id)
    assert waived(funded) == {("b", "draft", "exhausted"): (1, 130)}
    assert funded.balance() == (130, 0)


@pytest.mark.parametrize("level", ["user", "tenant", "org"])
def test_every_level_is_waived(ledger: Ledger, level: str) -> None:
    ledger.set("org", None)
    ledger.set("tenant", None, parent="org")
    ledger.set("user", None, parent="tenant")
    ledger.set(level, 0)
    ledger.admit(shadow(ledger, 7, budget="user"))
    assert waived(ledger) == {(level, "draft", "blocked"): (1, 7)}
    assert ledger.balances("user", "tenant", "org") == [(7, 0)] * 3


def test_stops_are_waived(ledger: Ledger) -> None:
    ledger.set("b", 100, soft_stop=500_000, hard_stop=800_000)
    ledger.admit(shadow(ledger, 60))
    ledger.admit(shadow(ledger, 30, finishing=True))
    counted = {("b", "draft", "exhausted"): (1, 60), ("b", "draft", "held"): (1, 30)}
    assert waived(ledger) == counted


def test_what_is_kept_for_parked_work_is_waived(funded: Ledger) -> None:
    funded.reserve(60)
    funded.admit(funded.request(50, parks=True))
    funded.put("parked", {"ahead_us": MOST})
    request = shadow(funded, 1)
    assert isinstance(funded.admit(request), Reserved)
    assert noted(funded, request)["reason"] == "queued"


def test_what_would_park_is_not_parked(funded: Ledger) -> None:
    for continuation in (False, True):
        request = shadow(funded, 200, parks=True)
        assert isinstance(funded.admit(request, continuation=continuation), Reserved)
    many = [(shadow(funded, 200, parks=True), None) for _ in range(2)]
    for tried in admit_many(
        funded.store, funded.settings, [(one, message_of(one)) for one, _ in many]
    ):
        assert isinstance(tried, Reserved)
    assert funded.rows("parked") == []
    assert waived(funded) == {("b", "draft", "exhausted"): (4, 800)}


def test_callers_mistakes_are_not_waived(funded: Ledger) -> None:
    with pytest.raises(UnknownBudget):
        funded.admit(shadow(funded, 1, budget="nobody"))
    funded.close()
    closed = funded.admit(shadow(funded, 1))
    assert isinstance(closed, Refused)
    assert closed.reason == "closed"
    funded.set("child", 0, parent=None)
    funded.admit(shadow(funded, MOST - 1, budget="child"))
    beyond = funded.admit(shadow(funded, 2, budget="child"))
    assert isinstance(beyond, Refused)
    assert funded.balance("child") == (MOST - 1, 0)


def test_a_draining_budget_above_is_not_passed_by_what_is_short_below(ledger: Ledger) -> None:
    ledger.set("org", 100)
    ledger.set("b", 0, parent="org")
    ledger.admit(shadow(ledger, 1))
    ledger.close("org", drain=True)
    refused = ledger.admit(shadow(ledger, 1))
    assert isinstance(refused, Refused)
    assert (refused.budget, refused.reason) == ("org", "draining")


def test_bounds_on_what_waits_are_waived_and_what_is_too_heavy_is_not(ledger: Ledger) -> None:
    ledger.set("b", 1000)
    terms = {"max_waiting_jobs": 1, "max_running_units": 50}
    ledger.store.run(
        lanes.declare, ledger.root, "slow", {"queues": ("slow",), "preflight": False, **terms}
    )
    for _ in range(3):
        request = shadow(ledger, 10)
        assert isinstance(ledger.admit(request, queue="slow"), Reserved)
    assert noted(ledger, request)["kind"] == "full"
    with pytest.raises(QueueFull, match="slow"):
        ledger.admit(shadow(ledger, 51), queue="slow")
    ledger.settings = replace(ledger.settings, max_outbox=1)
    ledger.reserve(10)
    ledger.put("backlog", {"counted_us": 1})
    beyond = shadow(ledger, 10)
    assert isinstance(ledger.admit(beyond), Reserved)
    assert noted(ledger, beyond)["kind"] == "backlogged"
    assert waived(ledger) == {}


def test_a_batch_with_one_that_is_enforced_is_refused_with_it(funded: Ledger) -> None:
    both = [shadow(funded, 200), funded.request(200)]
    tried = admit_many(funded.store, funded.settings, [(one, message_of(one)) for one in both])
    assert isinstance(tried[1], Refused)
    assert funded.balance() == (0, 0)
    assert [row.reason for row in funded.rows("refusals")] == ["exhausted"]


def test_what_follows_goes_by_what_the_request_was_admitted_under(funded: Ledger) -> None:
    request = shadow(funded, 90)
    funded.admit(request)
    attempt = funded.run(request)
    assert attempt.extend(30, "k") == Extended(30)
    assert attempt.extend(30, "k") == AlreadyExtended()
    attempt.record(50)
    # A worker that enforces by now: the request is still what it was.
    following, written = funded.retry(replace(request, enforced=True), attempt, 80)
    assert isinstance(written, Reserved)
    attempt.end(RETRIED)
    assert funded.balance() == (130, 0)
    assert noted(funded, request)["requested"] == 10
    funded.relay()
    second = funded.run(following)
    second.record(10)
    second.end(RETURNED)
    assert funded.balance() == (0, 60)
    counted = {("b", "draft", "held"): (2, 40)}
    assert waived(funded) == counted


def test_a_lost_attempt_is_followed_over_the_limit(funded: Ledger) -> None:
    request = shadow(funded, 90)
    funded.admit(request)
    funded.relay()
    attempt = funded.run(request)
    attempt.record(50)
    funded.reserve(10)
    funded.lapse(request)
    funded.recover()
    assert funded.rows("parked") == []
    assert funded.state(request) == "waiting"
    assert funded.balance() == (150, 0)


def test_in_place_it_starts_and_goes_on(funded: Ledger) -> None:
    request = shadow(funded, 150)
    attempt = funded.start_in_place(request)
    assert isinstance(attempt, Attempt)
    assert funded.balance() == (150, 0)
    attempt.end(RETURNED)
    assert waived(funded) == {("b", "draft", "exhausted"): (1, 150)}


def test_it_turns_to_a_lane_whose_budget_is_short(funded: Ledger) -> None:
    funded.set("gpu", 0)
    funded.store.run(
        lanes.declare,
        funded.root,
        "fast",
        {"queues": ("fast",), "preflight": False, "budgets": ("gpu",)},
    )
    request = shadow(funded, 20)
    funded.admit(request)
    attempt = funded.run(request)
    assert attempt.turn_to("fast", None) == Extended(20)
    assert funded.balances("b", "gpu") == [(20, 0), (20, 0)]
    assert waived(funded) == {("gpu", "draft", "blocked"): (1, 20)}


def test_what_the_ledger_keeps_of_it_says_so(ledger: Ledger) -> None:
    request = shadow(ledger, 130)
    assert parked.request_of(SimpleNamespace(request=parked.written(request))) == request


def test_turned_on_it_refuses_from_then_on(funded: Ledger) -> None:
    for _ in range(3):
        assert isinstance(funded.admit(shadow(funded, 60)), Reserved)
    assert isinstance(funded.admit(funded.request(1)), Refused)
    assert funded.balance() == (180, 0)
    assert reconcile.reconcile(funded.store, funded.settings).ok


def test_at_once_over_real_connections_none_is_refused(racing: Ledger) -> None:
    """Beside those that are enforced, of which none is admitted beyond the limit."""
    racing.set("b", 40)
    racing.set("a", 20, parent="b")

    def admit(number: int) -> list[Any]:
        budget = "ab"[number % 2]
        return [
            (enforced, racing.admit(racing.request(5, budget=budget, enforced=enforced)))
            for enforced in (number % 3 == 0, False, number % 3 == 1)
        ]

    calls: list[Callable[[], Any]] = [lambda one=one: admit(one) for one in range(8)]
    outcomes = [one for some in at_once(calls) for one in some]
    assert all(isinstance(out, Reserved) for enforced, out in outcomes if not enforced)
    admitted = [out for _, out in outcomes if isinstance(out, Reserved)]
    assert racing.balance("b") == (5 * len(admitted), 0)
    over = [out for out in admitted if out.waived is not None]
    assert sum(count for count, _ in waived_of(racing).values()) == len(over)
    assert len(over) >= 8
    assert reconcile.reconcile(racing.store, racing.settings).ok


def waived_of(ledger: Ledger) -> dict[tuple[str, str], tuple[int, int]]:
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for row in ledger.rows("refusals"):
        if row.reason.startswith("waived:"):
            count, amount = found.get((row.budget, row.reason), (0, 0))
            found[row.budget, row.reason] = count + row.count, amount + row.amount
    return found


# Any calls come to what they would under no limit.


@dataclass
class Twins:
    """The same calls on a ledger with limits that enforces nothing, and on one without limits."""

    limited: Ledger
    free: Ledger
    chance: random.Random
    requests: list[tuple[ReserveRequest, ReserveRequest]] = field(default_factory=list)
    running: list[tuple[Any, Any, Any, Any]] = field(default_factory=list)

    def ask(self) -> tuple[ReserveRequest, ReserveRequest]:
        budget = self.chance.choice(["user", "tenant", "other"])
        amount = self.chance.choice([0, 1, 7, 40, 400])
        more = (("calls", 1),) if self.chance.random() < 0.3 else ()
        task_id = str(uuid4())
        flags = {
            "finishing": self.chance.random() < 0.2,
            "parks": self.chance.random() < 0.3,
        }
        lines = (Line(budget, amount), *(Line(name, one, "start") for name, one in more))
        one, other = (
            replace(ledger.request(budget=budget, task_id=task_id, **flags), lines=lines)
            for ledger in (self.limited, self.free)
        )
        return replace(one, enforced=False), other

    def both(self, call: Callable[[Ledger, int], Any]) -> list[Any]:
        return [call(ledger, side) for side, ledger in enumerate((self.limited, self.free))]

    def admit(self) -> None:
        asked, goes_on = self.ask(), self.chance.random() < 0.3
        tried = self.both(lambda ledger, n: ledger.admit(asked[n], continuation=goes_on))
        assert [type(one) for one in tried] == [Reserved, Reserved]
        self.requests.append(asked)

    def batch(self) -> None:
        asked = [self.ask() for _ in range(3)]
        tried: list[list[Tried]] = self.both(
            lambda ledger, n: admit_many(
                ledger.store, ledger.settings, [(one[n], message_of(one[n])) for one in asked]
            )
        )
        assert [type(one) for some in tried for one in some] == [Reserved] * 6
        self.requests.extend(asked)

    def in_place(self) -> None:
        asked = self.ask()
        begun = self.both(lambda ledger, n: ledger.start_in_place(asked[n]))
        assert all(isinstance(one, Attempt) for one in begun)
        self.running.append((*asked, *begun))

    def claim(self) -> None:
        if self.requests:
            asked = self.requests.pop(self.chance.randrange(len(self.requests)))
            begun = self.both(lambda ledger, n: ledger.run(asked[n]))
            self.running.append((*asked, *begun))

    def extend(self) -> None:
        if self.running:
            attempts = self.running[-1][2:]
            more, key = self.chance.choice([1, 50, 500]), str(self.chance.random())
            told = self.both(lambda _, n: attempts[n].extend(more, key))
            assert told == [Extended(more)] * 2

    def record(self) -> None:
        if self.running:
            attempts, used = self.running[-1][2:], self.chance.choice([1, 30, 900])
            self.both(lambda _, n: attempts[n].record(used, unit="tokens"))

    def end(self) -> None:
        if self.running:
            one, other, *attempts = self.running.pop(self.chance.randrange(len(self.running)))
            outcome = self.chance.choice([RETURNED, RAISED, RETRIED])
            if outcome is RETRIED and self.limited.message(one) is not None:
                asked = (one, other)
                again = self.both(lambda ledger, n: ledger.retry(asked[n], attempts[n]))
                assert [type(written) for _, written in again] == [Reserved, Reserved]
                self.requests.append((again[0][0], again[1][0]))
            elif outcome is RETRIED:
                outcome = RETURNED
            self.both(lambda _, n: attempts[n].end(outcome))

    def check(self) -> None:
        counted = self.both(lambda ledger, _: ledger.counted())
        assert counted[0] == counted[1]
        assert self.limited.rows("parked") == []


@pytest.mark.parametrize("seed", range(3))
def test_any_calls_come_to_what_they_would_under_no_limit(
    store: Store, store_url: str, seed: int
) -> None:
    limited, free = (
        Ledger(store, Settings(database_url=store_url, root=f"{side}-{uuid4().hex[:12]}"))
        for side in ("limited", "free")
    )
    for ledger, limits in ((limited, (60, "50%", 20, 2)), (free, (None, None, None, None))):
        org, tenant, user, calls = limits
        stops = {} if ledger is free else {"soft_stop": 500_000, "hard_stop": 900_000}
        ledger.set("org", org, **stops)
        ledger.set("other", 0 if ledger is limited else None)
        share = None if tenant is None else _half()
        ledger.set("tenant", share, parent="org")
        ledger.set("user", user, parent="tenant")
        ledger.set("calls", calls, unit="requests")
    twins = Twins(limited, free, random.Random(seed))
    steps = (
        [twins.admit] * 4 + [twins.batch, twins.in_place, twins.extend, twins.record]
        + [twins.claim] * 3 + [twins.end] * 3
    )  # fmt: skip
    for _ in range(60):
        twins.chance.choice(steps)()
        twins.check()
    assert limited.rows("refusals")
    assert reconcile.reconcile(store, limited.settings, limit=10_000).mismatches == ()
    # Turned on, it refuses from then on.
    assert isinstance(limited.admit(limited.request(1, budget="user")), Refused)
    assert isinstance(limited.admit(limited.request(1, budget="other", parks=True)), Parked)


def _half() -> Any:
    return Share(500_000)


def test_without_limits_what_is_no_want_is_still_decided() -> None:
    level = Level("b", "tokens", None, 0, None, 0, 0, 0, "open", 0, 5, 5)
    lines = [Line("b", 10)]
    assert isinstance(decide(lines, {"b": level}, False), Refused)
    assert not isinstance(decide(lines, unlimited({"b": level}), False), Refused)
    closed = decide(lines, unlimited({"b": replace(level, state="closed")}), False)
    assert isinstance(closed, Refused)
