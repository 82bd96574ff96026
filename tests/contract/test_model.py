"""Any sequence of what callers, workers, recovery and admins do, against a model in plain Python.

A few short runs each time; ``HYPOTHESIS_PROFILE=long`` makes many long ones. A failing one prints
its steps.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_budget import reconcile, settlement
from celery_budget.core.budgets import Budget, Share
from celery_budget.core.identity import new_id
from celery_budget.core.periods import Period
from celery_budget.core.reservations import (
    AlreadyExtended,
    AlreadyReserved,
    Closed,
    Conflict,
    Extended,
    Line,
    Outcome,
    Parked,
    Refused,
    Reserved,
    ReserveRequest,
    Running,
    Skipped,
    Unknown,
)
from celery_budget.errors import (
    HoldsOpen,
    InvalidAmount,
    InvalidBudget,
    KeyConflict,
    PolicyError,
    RequestConflict,
    UnknownBudget,
)
from celery_budget.settings import Settings
from celery_budget.settlement import Attempt
from celery_budget.store import Store, budgets, declaring, journal
from tests.contract.oracle import ENDED, MILLION, Asked, Item, Mixed, Oracle, Pot, Short, Work
from tests.contract.support import RAISED, RETRIED, RETURNED, Ledger, admit_many, message_of

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
PROFILE = hypothesis_settings(
    max_examples=500 if LONG else 30,
    stateful_step_count=60 if LONG else 30,
    # The same short runs each time, so that a change is judged by what it changes; the long ones
    # search.
    derandomize=not LONG,
)

#: The month does not end while a test runs.
MONTH = Period("month", "UTC", (datetime.now(timezone.utc).day + 14) % 28 + 1)
PERIODS = {"total": Period(), "day": Period("week"), "month": MONTH}

amounts = st.integers(0, 40)
limits = st.none() | st.integers(0, 150) | st.sampled_from([Share(500_000), Share(125_000)])
stops = st.sampled_from([(MILLION, MILLION), (800_000, MILLION), (500_000, 900_000)])
names = st.sampled_from(["org", "team", "user:a", "user:b", "calls", "usd", "t:1", "t:2"])
asked_names = names | st.sampled_from(["user:a", "user:b", "calls", "ghost"])


@st.composite
def lines(draw: Any) -> list[Asked]:
    """One or two budgets; requests are charged at the start, anything else rarely."""
    chosen = draw(st.lists(st.tuples(asked_names, amounts), min_size=1, max_size=2))
    by_name = dict(chosen)
    if "ghost" in by_name:
        by_name = {"ghost": 1}
    odd = draw(st.integers(0, 9)) == 0
    return [
        (name, amount, "start" if name == "calls" or (odd and number == 1) else "used")
        for number, (name, amount) in enumerate(by_name.items())
    ]


class LedgerMachine(RuleBasedStateMachine):
    """The real ledger beside the model."""

    work = Bundle("work")
    store: Store
    url: str

    @initialize(org=limits, team=limits, calls=st.integers(0, 60))
    def begin(self, org: Any, team: Any, calls: int) -> None:
        root = f"model-{uuid4().hex[:12]}"
        # What does not fit waits; recovery is asked, not waited for.
        settings = Settings(database_url=self.url, root=root, max_deliveries=100)
        self.ledger = Ledger(self.store, settings)
        self.oracle = Oracle(
            {
                "org": Pot("tokens", None if isinstance(org, Share) else org),
                "team": Pot("tokens", team, "org"),
                "user:a": Pot("tokens", 60, "team", 800_000),
                "user:b": Pot("tokens", Share(500_000), "team"),
                "calls": Pot("requests", calls, period="month"),
                "usd": Pot("micro-usd", None, period="month"),
            },
            Pot("tokens", 30, "team"),
        )
        for name, pot in self.oracle.pots.items():
            self.declare(name, pot)
        self.declare("t:*", self.oracle.template)
        self.all: list[Work] = []
        self.waiting: list[Work] = []
        self.grants: dict[str, tuple[str, int]] = {}
        self.adjustments: dict[str, tuple[str, int]] = {}
        self.keys = 0

    def declare(self, name: str, pot: Pot) -> None:
        self.ledger.store.run(declaring.apply, {self.ledger.root: [budget_of(name, pot)]})

    # Budgets.

    @rule(name=names, limit=limits, stop=stops)
    def set_terms(self, name: str, limit: Any, stop: tuple[int, int]) -> None:
        pot = self.oracle.pots.get(name)
        if pot is None:
            return
        terms = {"soft_stop": stop[0], "hard_stop": stop[1]}
        if isinstance(limit, Share) and pot.parent is None:
            with pytest.raises(InvalidBudget):
                self.ledger.set(name, limit, None, **terms)
            return
        self.ledger.set(name, limit, None, **terms)
        pot.limit, pot.soft, pot.hard = limit, *stop

    @rule(
        name=st.sampled_from(["team", "user:a", "user:b", "t:1"]),
        parent=st.sampled_from([None, "org", "team", "user:a", "usd"]),
    )
    def set_parent(self, name: str, parent: str | None) -> None:
        pot = self.oracle.pots.get(name)
        if pot is None:
            return
        circle = parent is not None and name in self.oracle.up(parent)
        orphan = parent is None and isinstance(pot.limit, Share)
        if circle or orphan or parent == "usd":
            with pytest.raises(InvalidBudget):
                self.ledger.set(name, pot.limit, None, parent=parent)
        else:
            self.ledger.set(name, pot.limit, None, parent=parent)
            pot.parent = parent

    @rule(name=st.sampled_from(["calls", "usd"]), period=st.sampled_from(sorted(PERIODS)))
    def set_period(self, name: str, period: str) -> None:
        pot = self.oracle.pots[name]
        self.ledger.set(name, pot.limit, None, **period_terms(PERIODS[period]))
        pot.period = period

    @rule(name=names, stripes=st.sampled_from([None, 2, 3, 7]))
    def set_stripes(self, name: str, stripes: int | None) -> None:
        """Over how many rows a budget is changes nothing, whatever is open."""
        pot = self.oracle.pots.get(name)
        if pot is not None:
            self.ledger.set(name, pot.limit, None, stripes=stripes)

    @rule(some=st.dictionaries(names, st.integers(0, 150), min_size=1, max_size=3))
    def apply(self, some: dict[str, int]) -> None:
        """A file of budgets: their limits are set and they are open afterwards."""
        known = {name: limit for name, limit in some.items() if name in self.oracle.pots}
        for name, limit in known.items():
            self.oracle.pots[name].limit, self.oracle.pots[name].state = limit, "open"
        wanted = [budget_of(name, self.oracle.pots[name]) for name in known]
        self.store.run(declaring.apply, {self.ledger.root: wanted})
        assert self.store.run(declaring.apply, {self.ledger.root: wanted}) == ()

    def draws_on(self, name: str) -> int:
        return sum(
            one.state not in ENDED and any(item.budget == name for item in one.items)
            for one in self.all
        )

    @rule(name=names | st.just("t:*"), drain=st.booleans())
    def close(self, name: str, drain: bool) -> None:
        pot = self.oracle.template if name == "t:*" else self.oracle.pots.get(name)
        if pot is None:
            with pytest.raises(UnknownBudget):
                self.ledger.close(name, drain)
        elif pot.state != "closed" and self.draws_on(name) and not drain:
            with pytest.raises(HoldsOpen):
                self.ledger.close(name, drain)
        else:
            if pot.state != "closed":
                pot.state = "draining" if self.draws_on(name) else "closed"
            assert self.ledger.close(name, drain) == pot.state

    @rule(name=names | st.just("t:*"))
    def reopen(self, name: str) -> None:
        pot = self.oracle.template if name == "t:*" else self.oracle.pots.get(name)
        if pot is not None:
            assert self.ledger.reopen(name) == (pot.state != "open")
            pot.state = "open"

    @rule(name=names, amount=st.integers(1, 40), key=st.sampled_from("xyz"))
    def grant(self, name: str, amount: int, key: str) -> None:
        if name not in self.oracle.pots:
            with pytest.raises(UnknownBudget):
                self.ledger.grant(key, amount, name)
        elif self.grants.setdefault(key, (name, amount)) != (name, amount):
            with pytest.raises(KeyConflict):
                self.ledger.grant(key, amount, name)
        elif self.ledger.grant(key, amount, name):
            self.oracle.pots[name].granted += amount

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def expire(self, data: Any) -> None:
        key = data.draw(st.sampled_from(sorted(self.grants)))
        name, amount = self.grants.pop(key)
        self.keys += 1
        self.ledger.put("grants", {"until_us": 1, "key": f"{key}{self.keys}"}, key=key)
        self.oracle.pots[name].granted -= amount

    @rule(name=names, amount=st.integers(-40, 40), key=st.sampled_from("xyz"))
    def adjust(self, name: str, amount: int, key: str) -> None:
        pot = self.oracle.pots.get(name)
        error: type[Exception] | None = None
        if amount == 0:
            error = InvalidAmount
        elif pot is None:
            error = UnknownBudget
        elif key in self.adjustments:
            error = None if self.adjustments[key] == (name, amount) else KeyConflict
        elif self.oracle.balance(name, pot.window)[1] + amount < 0:
            error = InvalidAmount
        if error is not None:
            with pytest.raises(error):
                self.ledger.adjust(key, amount, name)
            return
        assert pot is not None
        assert self.ledger.adjust(key, amount, name) == (key not in self.adjustments)
        if key not in self.adjustments:
            self.adjustments[key] = name, amount
            self.oracle.adjusted[name, pot.window] += amount

    # Time.

    @rule(name=st.sampled_from(["calls", "usd"]))
    def roll(self, name: str) -> None:
        """The window that is open ends; one that was made ahead begins."""
        now, pot = self.ledger.now(), self.oracle.pots[name]
        rows = self.ledger.windows(name)
        start, end = max((row for row in rows if row[0] <= now), default=(0, 0))
        if end <= now or pot.period == "total":
            return
        ahead = [row[0] for row in rows if row[0] > now]
        self.ledger.put("balances", {"end_us": start + 1}, budget=name, window_us=start)
        for later in ahead:
            self.ledger.put("balances", {"window_us": start + 1}, budget=name, window_us=later)
        pot.window += 1

    @rule(name=st.sampled_from(["calls", "usd"]), soon=st.booleans())
    def upkeep(self, name: str, soon: bool) -> None:
        now, pot = self.ledger.now(), self.oracle.pots[name]
        # None where an empty one was pruned and nobody has drawn on the next.
        start, end = max(self.ledger.windows(name), default=(0, 0))
        ahead = soon and pot.period != "total" and start <= now < end
        if ahead:
            end = now + 300_000_000
            self.ledger.put("balances", {"end_us": end}, budget=name, window_us=start)
        drained = {
            one
            for one, other in self.oracle.pots.items()
            if other.state == "draining" and not self.draws_on(one)
        }
        upkept = self.ledger.upkeep()
        assert set(upkept.closed) == drained
        for one in drained:
            self.oracle.pots[one].state = "closed"
        if ahead and pot.state == "open" and sum(self.oracle.balance(name, pot.window)):
            assert self.ledger.windows(name)[-1][0] == end

    # Callers.

    def request(self, asked: list[Asked], **changes: Any) -> ReserveRequest:
        made = tuple(Line(*line) for line in asked)
        return self.ledger.request(budget=asked[0][0], lines=made, **changes)

    def admitted(
        self,
        request: ReserveRequest,
        items: list[Item],
        finishing: bool | None = None,
        **changes: Any,
    ) -> Work:
        one = Work(request, items, **changes)
        self.all.append(one)
        self.oracle.items += items
        for item in items:
            self.fitted(item, item.held, request.finishing if finishing is None else finishing)
        return one

    def fitted(self, item: Item, more: int, finishing: bool) -> None:
        """What was just held never passed the limit."""
        limit = self.oracle.limit(item.budget)[0]
        pot = self.oracle.pots[item.budget]
        if limit is not None and more > 0 and item.window == pot.window:
            row = self.ledger.standing(item.budget)
            stop = pot.hard if finishing else pot.soft
            assert row.reserved + row.spent <= limit * stop // MILLION

    @rule(
        target=work,
        asked=lines(),
        finishing=st.booleans(),
        late_ack=st.booleans(),
        expires=st.integers(0, 5),
    )
    def reserve(self, asked: list[Asked], finishing: bool, late_ack: bool, expires: int) -> Work:
        request = self.request(asked, finishing=finishing)
        message = {"expires_us": 1} if expires == 0 else {}
        items = self.expect(request, asked)
        if isinstance(items, type):
            with pytest.raises(items):
                self.ledger.admit(request, **message)
        elif isinstance(items, Short):
            same_refusal(self.ledger.admit(request, **message), items)
        else:
            assert self.ledger.admit(request, **message) == Reserved(request.reservation_id)
            return self.admitted(request, items, late_ack=late_ack, expires=expires == 0)
        return Work(request, [], state="refused")

    def expect(
        self, request: ReserveRequest, asked: list[Asked]
    ) -> list[Item] | Short | type[Exception]:
        if self.oracle.unknown(asked) is not None:
            return UnknownBudget
        try:
            return self.oracle.ask(asked, request.finishing)
        except Mixed:
            return PolicyError

    @rule(one=work)
    def same_call(self, one: Work) -> None:
        """The caller has not heard the answer and asks once more."""
        if one.state == "refused":
            return
        # Where it was released and its id is another's by now, that one is found.
        live = self.live(one.request) or one
        if live.request.fingerprint != one.request.fingerprint:
            with pytest.raises(RequestConflict):
                self.ledger.admit(self.first(one))
        elif live is not one:
            found = AlreadyReserved(live.request.reservation_id, live.request.task_id)
            assert self.ledger.admit(self.first(one)) == found
        else:
            admitted = self.ledger.admit(self.first(one))
            assert admitted == Reserved(one.request.reservation_id)

    def first(self, one: Work) -> ReserveRequest:
        return dataclasses.replace(one.request, retries=0)

    @rule(target=work, one=work, other=st.booleans())
    def same_id(self, one: Work, other: bool) -> Work:
        """The same request id again: the same request, or another one."""
        fingerprint = "other" if other else one.request.fingerprint
        again = dataclasses.replace(
            self.first(one), reservation_id=new_id(), fingerprint=fingerprint
        )
        live = self.live(again)
        if live is None:
            asked = [(line.budget, line.amount, line.charge) for line in again.lines]
            items = self.expect(again, asked)
            if isinstance(items, list):
                assert self.ledger.admit(again) == Reserved(again.reservation_id)
                return self.admitted(again, items)
        elif live.request.fingerprint != fingerprint:
            with pytest.raises(RequestConflict):
                self.ledger.admit(again)
        else:
            found = AlreadyReserved(live.request.reservation_id, live.request.task_id)
            assert self.ledger.admit(again) == found
        return Work(again, [], state="refused")

    def live(self, request: ReserveRequest) -> Work | None:
        """The request of this id that was admitted and not released."""
        for one in self.all:
            if one.state != "released" and one.request.request_id == request.request_id:
                return one
        return None

    @rule(
        asked=st.lists(st.tuples(lines(), st.booleans()), min_size=1, max_size=4),
        old=st.none() | work,
        twice=st.sampled_from(["", "", "same", "other", "call"]),
        best_effort=st.booleans(),
    )
    def reserve_many(
        self,
        asked: list[tuple[list[Asked], bool]],
        old: Work | None,
        twice: str,
        best_effort: bool,
    ) -> None:
        batch = [self.request(some, finishing=finishing) for some, finishing in asked]
        if old is not None and self.live(old.request) is not None:
            batch.insert(
                len(batch) // 2, dataclasses.replace(self.first(old), reservation_id=new_id())
            )
        if twice:
            changes: dict[str, Any] = {} if twice == "call" else {"reservation_id": new_id()}
            changes |= {"fingerprint": "another"} if twice == "other" else {}
            batch.append(dataclasses.replace(batch[0], **changes))
        pairs = [(request, message_of(request)) for request in batch]
        try:
            expected, new = self.expect_many(batch, best_effort)
        except Mixed:
            with pytest.raises(PolicyError):
                admit_many(self.store, self.ledger.settings, pairs, best_effort=best_effort)
            return
        heard = admit_many(self.store, self.ledger.settings, pairs, best_effort=best_effort)
        for got, wanted in zip(heard, expected, strict=True):
            if isinstance(wanted, Short):
                same_refusal(got, wanted)
            else:
                assert got == wanted
        # How the budgets stand is looked at when all of them are in.
        finishing = any(request.finishing for request, _ in new)
        for request, items in new:
            self.admitted(request, items, finishing or None)

    def expect_many(
        self, batch: list[ReserveRequest], best_effort: bool
    ) -> tuple[list[Any], list[tuple[ReserveRequest, list[Item]]]]:
        """What a batch comes to, one request after another; and what is new then."""
        before = list(self.oracle.items)
        outcomes: list[Any] = []
        seen: dict[str, tuple[ReserveRequest, Any]] = {}
        new: list[tuple[ReserveRequest, list[Item]]] = []
        asked = {
            one.reservation_id: [(line.budget, line.amount, line.charge) for line in one.lines]
            for one in batch
        }
        for some in asked.values():
            self.oracle.unknown(some)
        try:
            for request in batch:
                live = self.live(request)
                known, outcome = seen.get(request.request_id, (live and live.request, None))
                if known is None:
                    some = asked[request.reservation_id]
                    missing = self.oracle.unknown(some)
                    drawn: Any = Unknown(missing) if missing else None
                    drawn = drawn or self.oracle.ask(some, request.finishing)
                    outcome = drawn
                    if isinstance(drawn, list):
                        outcome = Reserved(request.reservation_id)
                        new.append((request, drawn))
                        self.oracle.items += drawn
                    seen[request.request_id] = request, outcome
                elif known.fingerprint != request.fingerprint:
                    outcome = Conflict(request.request_id, request.owner, known.task_id)
                elif outcome is None or (
                    isinstance(outcome, Reserved)
                    and known is not request
                    and known.reservation_id != request.reservation_id
                ):
                    outcome = AlreadyReserved(known.reservation_id, known.task_id)
                outcomes.append(outcome)
        finally:
            self.oracle.items = before
        if not best_effort and any(isinstance(o, (Short, Unknown, Conflict)) for o in outcomes):
            outcomes = self.of_whole(batch, outcomes, new)
            dropped = {request.reservation_id for request, _ in new}
            outcomes = [
                Skipped() if getattr(one, "reservation_id", None) in dropped else one
                for one in outcomes
            ]
            new = []
        return outcomes, new

    def of_whole(
        self,
        batch: list[ReserveRequest],
        outcomes: list[Any],
        new: list[tuple[ReserveRequest, list[Item]]],
    ) -> list[Any]:
        """Refusals of a batch that is none tell what all of it asked of the budget."""
        total = Counter[str]()
        for _, items in new:
            for item in items:
                total[item.budget] += item.held
        both = list(zip(batch, outcomes, strict=True))
        shorts = {one.request_id: out for one, out in both if isinstance(out, Short)}
        for short in shorts.values():
            total[short.budget] += short.requested
        return [
            self.oracle.short(out.budget, total[out.budget], one.finishing)
            if isinstance(out, Short) and total[out.budget] != out.requested
            else out
            for one, out in both
        ]

    @rule(target=work, asked=lines())
    def go_on(self, asked: list[Asked]) -> Work:
        """What running work publishes: what does not fit is parked."""
        request = self.request(asked, finishing=True)
        items = self.expect(request, asked)
        if isinstance(items, type):
            with pytest.raises(items):
                self.ledger.admit(request, continuation=True)
        elif isinstance(items, Short):
            assert isinstance(self.ledger.admit(request, continuation=True), Parked)
            one = Work(request, [], state="refused", parked=True)
            self.waiting.append(one)
            return one
        else:
            assert isinstance(self.ledger.admit(request, continuation=True), Reserved)
            return self.admitted(request, items)
        return Work(request, [], state="refused")

    # Workers.

    @rule(one=work)
    def claim(self, one: Work) -> None:
        if one.state == "refused":
            return
        heard = self.ledger.deliver(one.request, late_ack=one.late_ack)
        if one.state in ("reserved", "waiting") and not one.parked:
            assert isinstance(heard, Attempt)
            assert heard.replay is None
            one.attempt, one.state = heard, "running"
            for item in one.items:
                if not item.metered:
                    item.used, item.settled = item.used + item.held, item.settled + item.held
                    item.held = 0
        elif one.state == "running" or one.open == "mine":
            assert heard == Running()
        elif one.open:
            assert isinstance(heard, Attempt)
            assert heard.replay is not None
            one.attempt, one.open = heard, "mine"
        else:
            assert heard == Closed(one.state)

    @rule(
        one=work,
        amount=amounts,
        key=st.sampled_from([None, "k1", "k2"]),
        unit=st.sampled_from(["tokens", "micro-usd", "requests"]),
        stale=st.booleans(),
    )
    def record(self, one: Work, amount: int, key: str | None, unit: str, stale: bool) -> None:
        attempt = one.lost[0] if stale and one.lost else one.attempt
        if attempt is None:
            return
        metered = [item for item in one.items if item.unit == unit and item.metered]
        if not metered:
            with pytest.raises(PolicyError):
                attempt.record(amount, key, unit)
            return
        written = key or f"{attempt.number}:{len(one.usage)}"
        known = one.usage.get((written, unit))
        assert attempt.record(amount, key, unit) == (known is None)
        if known is not None:
            known[2] = attempt.number if attempt.number > known[0] else known[2]
            return
        one.usage[written, unit] = [attempt.number, amount, 0]
        for item in metered:
            item.used += amount
            if one.state in ENDED:
                item.settled = max(item.settled, item.used)
            else:
                item.held = max(item.held, item.used)

    @rule(
        one=work,
        amount=amounts,
        key=st.sampled_from(["e1", "e2"]),
        unit=st.sampled_from(["tokens", "micro-usd"]),
    )
    def extend(self, one: Work, amount: int, key: str, unit: str) -> None:
        if one.attempt is None:
            return
        longer = [item for item in one.items if item.unit == unit and item.metered]
        if one.state != "running":
            assert isinstance(one.attempt.extend(amount, key, unit), Closed)
            return
        if not longer:
            with pytest.raises(PolicyError):
                one.attempt.extend(amount, key, unit)
            return
        mark = one.attempt.number, key, unit
        fits = self.oracle.fits_more([(item, amount) for item in longer])
        heard = one.attempt.extend(amount, key, unit)
        if mark in one.extensions:
            assert heard == AlreadyExtended()
        elif not fits:
            assert isinstance(heard, Refused)
        else:
            assert heard == Extended(amount)
            one.extensions.add(mark)
            for item in longer:
                item.held, item.extended = item.held + amount, item.extended + amount
                self.fitted(item, amount, True)

    @rule(one=work)
    def retry(self, one: Work) -> None:
        if one.state != "running" or one.retry:
            return
        one.request, written = self.ledger.retry(one.request, one.attempt)
        held = self.write_next(one, [(line.budget, line.amount) for line in one.request.lines])
        assert isinstance(written, Reserved if held else Parked)
        one.retry = "written" if held else "parked"

    def write_next(self, one: Work, wanted: list[tuple[str, int]]) -> bool:
        """Whether the next attempt is held now; otherwise no more is held than was used."""
        one.wanted = wanted
        if self.oracle.hold_next(one.items, wanted):
            return True
        for item in one.items:
            item.held = item.kept
        return False

    def run_again(self, one: Work) -> None:
        """The same message once more, or what was written to follow the attempt."""
        if one.retry:
            if one.retry == "written":
                self.oracle.refit(one.items)
            one.parked, one.retry = one.retry == "parked", ""
            one.expires = False
        else:
            own = [(item.budget, item.estimate) for item in one.items]
            one.parked = not self.write_next(one, own)
        one.state, one.published = "waiting", False

    @rule(one=work, kind=st.sampled_from(["returned", "raised", "retried", "rejected"]))
    def end(self, one: Work, kind: str) -> None:
        if one.state != "running" or (kind == "retried") != bool(one.retry):
            return
        if kind == "rejected" and one.expires:
            return
        rejected = Outcome("rejected", again=self.ledger.settings.again)
        outcome = {"returned": RETURNED, "raised": RAISED, "retried": RETRIED}.get(kind, rejected)
        assert one.attempt.end(outcome)
        if one.retry or kind == "rejected":
            self.run_again(one)
        else:
            if kind == "returned":
                one.end_run("settled", False)
            else:
                one.end("settled")
            one.open = "mine"
        assert one.attempt.end(outcome), "the same call after a lost answer"

    @rule(one=work)
    def end_late(self, one: Work) -> None:
        """A worker that lost its attempt has no say."""
        for attempt in one.lost:
            assert not attempt.end(RETURNED)
            assert not attempt.close()

    @rule(one=work)
    def close_attempt(self, one: Work) -> None:
        if one.attempt is not None:
            assert one.attempt.close() == (one.open != "")
            one.open = ""

    @rule(one=work)
    def release(self, one: Work) -> None:
        if one.state == "refused":
            return
        done = settlement.revoke(
            self.store, self.ledger.root, one.request.reservation_id, "cancelled"
        )
        assert done == (one.cancelled or one.state in ("reserved", "waiting"))
        if done and not one.cancelled:
            one.cancelled = True
            one.end("released" if one.state == "reserved" else "settled")

    # Relay and recovery.

    @rule()
    def relay(self) -> None:
        self.ledger.relay()
        for one in self.all:
            if one.state in ("reserved", "waiting") and not (one.parked or one.published):
                if one.expires:
                    one.end("released" if one.state == "reserved" else "settled")
                one.published = True
        known = {one.request.task_id for one in self.all}
        assert set(self.ledger.broker.published) <= known

    @rule(one=work)
    def never_started(self, one: Work) -> None:
        if one.state == "reserved" and one.published:
            self.ledger.make_due(one.request)
            assert self.ledger.recover().republished == 1
            one.published = False

    @rule(one=work, ready=st.sampled_from([None, None, "returned", "raised"]))
    def lapse(self, one: Work, ready: str | None) -> None:
        if one.state != "running" and not one.open:
            return
        self.ledger.lapse(one.request)
        if one.open:
            assert self.ledger.recover().replayed == 1
            one.open = "nobody's"
            return
        self.ledger.results.stored = {one.request.task_id: ready} if ready else {}
        recovered = self.ledger.recover()
        self.ledger.results.stored = {}
        one.lost.append(one.attempt)
        if ready:
            assert recovered.finished == 1
            one.end_run("settled", False)
            one.lost.pop()
        elif one.late_ack:
            assert recovered.rerun == 1
            self.run_again(one)
        else:
            assert recovered.lost == 1
            one.end_run("lost", True)

    @rule(give_up=st.booleans())
    def sweep(self, give_up: bool) -> None:
        waits = [one for one in self.all if one.parked or one.retry == "parked"]
        over = next((one for one in [*waits, *self.waiting] if give_up and one.parked), None)
        if over is not None:
            self.ledger.put("parked", {"deadline_us": 1}, task_id=over.request.task_id)
        self.ledger.sweep()
        if over in self.waiting:
            self.waiting.remove(over)
        elif over is not None:
            over.end("settled")
            waits.remove(over)
        # Which comes first is the sweep's to choose; what it admitted is no longer parked.
        left = {row.task_id for row in self.ledger.rows("parked")}
        for one in list(waits):
            if one.parked and one.expires:
                # Its message's time was over before; it is given up, not looked at.
                assert one.request.task_id not in left
                one.end("settled")
                waits.remove(one)
            elif one.request.task_id not in left:
                self.admit_parked(one)
        for one in list(self.waiting):
            if one.request.task_id not in left:
                self.waiting.remove(one)
                asked = [(line.budget, line.amount, line.charge) for line in one.request.lines]
                row = self.ledger.rows("lines", reservation_id=one.request.reservation_id)
                drawn = [
                    Item(
                        line.budget,
                        self.oracle.pots[line.budget].window,
                        line.unit,
                        line.charge,
                        line.estimate,
                        line.reserved,
                    )
                    for line in row
                ]
                assert {name for name, _, _ in asked} <= {item.budget for item in drawn}
                one.items, one.state, one.parked = drawn, "reserved", False
                self.all.append(one)
                self.oracle.items += drawn
                for item in drawn:
                    self.fitted(item, item.held, True)
        for one in waits:
            if one.parked or one.retry == "parked":
                before = [dataclasses.astuple(item) for item in one.items]
                assert not self.oracle.hold_next(one.items, one.wanted)
                assert before == [dataclasses.astuple(item) for item in one.items]
        for one in self.waiting:
            asked = [(line.budget, line.amount, line.charge) for line in one.request.lines]
            assert isinstance(self.oracle.ask(asked, True), Short)

    def admit_parked(self, one: Work) -> None:
        asked: dict[str, int] = {}
        for name, amount in one.wanted:
            for level in self.oracle.up(name):
                asked[level] = max(amount, asked.get(level, 0))
        new = self.oracle.renewed(one.items)
        one.items += new
        self.oracle.items += new
        for item, estimate, held in self.oracle.targets(one.items, asked):
            more = held - item.held
            item.estimate, item.held, item.extended = estimate, held, 0
            self.fitted(item, more, True)
        one.parked, one.published = False, False
        one.retry = "written" if one.retry else ""

    @rule()
    def fold(self) -> None:
        """What is old in the journal goes into checkpoints; everything is old here."""
        for row in self.ledger.rows("balances"):
            self.store.run(
                journal.fold, self.ledger.root, row.budget, row.window_us, row.stripe, -60_000_000
            )

    # What holds after each step.

    @invariant()
    def the_ledger_is_the_models(self) -> None:
        if not hasattr(self, "ledger"):
            return
        ledger, oracle = self.ledger, self.oracle
        assert reconcile.reconcile(self.store, ledger.settings).mismatches == ()
        told_of = {one.budget: one for one in self.store.read(budgets.balances_of, ledger.root)}
        stands: dict[str, list[Any]] = {name: [] for name in oracle.pots}
        for row in ledger.counted():
            stands[row.budget].append(row)
        for name, pot in oracle.pots.items():
            told = [(row.reserved, row.spent) for row in stands[name]]
            windows = [oracle.balance(name, number) for number in range(pot.window + 1)]
            assert [one for one in told if one != (0, 0)] == [
                one for one in windows if one != (0, 0)
            ]
            began = ledger.windows(name)
            assert all(end <= start for (_, end), (start, _) in pairwise(began))
            now = told_of[name]
            assert (now.reserved, now.spent) == oracle.balance(name, pot.window)
            assert (now.limit, now.state) == (oracle.limit(name)[0], pot.state)
        drawn: dict[Any, list[Any]] = {}
        for row in ledger.rows("lines"):
            drawn.setdefault(row.reservation_id, []).append(
                (row.budget, row.charge, row.unit, row.reserved, row.used, row.settled)
            )
        states = {row.reservation_id: row for row in ledger.rows("reservations")}
        for one in self.all:
            row = states[one.request.reservation_id]
            assert row.state == one.state or (row.state, one.state) == ("published", "reserved")
            assert drawn[one.request.reservation_id] == [
                (i.budget, i.charge, i.unit, i.held, i.used, i.settled) for i in one.items
            ]
        held = Counter(
            (row.owner, row.request_id) for row in states.values() if row.state != "released"
        )
        assert not held or max(held.values()) == 1
        assert len(self.all) == sum(row.reason != "park_expired" for row in states.values()) + sum(
            row.reason == "park_expired" and row.attempts > 0 for row in states.values()
        )


def budget_of(name: str, pot: Pot) -> Budget:
    period = PERIODS[pot.period]
    return Budget(name, pot.unit, pot.limit, pot.parent, period, pot.soft, pot.hard)


def period_terms(period: Period) -> dict[str, Any]:
    return {"period": period.kind, "anchor_day": period.anchor_day}


def same_refusal(heard: Any, wanted: Short) -> None:
    assert isinstance(heard, Refused)
    told = {name: getattr(heard, name) for name in dataclasses.asdict(wanted)}
    assert told == dataclasses.asdict(wanted)


def test_any_sequence_comes_to_what_the_model_says(store: Store, store_url: str) -> None:
    class Machine(LedgerMachine):
        pass

    Machine.store, Machine.url = store, store_url
    run_state_machine_as_test(Machine, settings=PROFILE)
