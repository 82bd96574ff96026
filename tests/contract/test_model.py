"""Any sequence of what callers, workers and recovery do, against a model of the balances."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from celery_budget import reconcile, settlement
from celery_budget.core.reservations import (
    Closed,
    Parked,
    Refused,
    Reserved,
    ReserveRequest,
    Running,
)
from celery_budget.settings import Settings
from celery_budget.settlement import Attempt
from celery_budget.store import Store, migrate
from tests.contract.support import RAISED, RETRIED, RETURNED, Ledger

BUDGETS = ("a", "b")
amounts = st.integers(0, 40)
limits = st.none() | st.integers(0, 150)
names = st.sampled_from(BUDGETS)


@dataclass
class Work:
    """One reservation as the model sees it."""

    request: ReserveRequest
    budget: str
    estimate: int
    held: int
    used: int = 0
    charged: int = 0
    state: str = "reserved"
    attempt: Attempt | None = None
    recorded: int | None = None
    late_ack: bool = True
    retry: str = ""
    parked: bool = False

    @property
    def fresh(self) -> int:
        """What the attempt's estimate is not used up by what it has recorded."""
        return max(0, self.estimate - (self.recorded or 0))

    def end(self, state: str, charged: int) -> None:
        self.state, self.held, self.charged = state, 0, charged


class LedgerMachine(RuleBasedStateMachine):
    """The ledger in a SQLite file beside the model."""

    work = Bundle("work")

    @initialize(first=limits, second=limits)
    def begin(self, first: int | None, second: int | None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="budget-model-"))
        shutil.copy(template(), self.folder / "budget.db")
        url = f"sqlite:///{self.folder / 'budget.db'}"
        # What does not fit waits; recovery is asked, not waited for.
        self.ledger = Ledger(Store(url), Settings(database_url=url, max_deliveries=100))
        self.limits: dict[str, int | None] = {}
        self.all: list[Work] = []
        for name, limit in zip(BUDGETS, (first, second), strict=True):
            self.ledger.set(name, limit)
            self.limits[name] = limit

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.store.dispose()
            shutil.rmtree(self.folder)

    def drawn(self, name: str) -> tuple[int, int]:
        mine = [one for one in self.all if one.budget == name]
        return sum(one.held for one in mine), sum(one.charged for one in mine)

    def fits(self, name: str, amount: int) -> bool:
        limit = self.limits[name]
        return limit is None or 0 < limit >= sum(self.drawn(name)) + amount

    @rule(name=names, limit=limits)
    def set_limit(self, name: str, limit: int | None) -> None:
        self.ledger.set(name, limit, None)
        self.limits[name] = limit

    @rule(target=work, name=names, amount=amounts, late_ack=st.booleans())
    def reserve(self, name: str, amount: int, late_ack: bool) -> Any:
        request = self.ledger.request(amount, budget=name)
        admitted = self.ledger.admit(request)
        assert isinstance(admitted, Reserved if self.fits(name, amount) else Refused)
        one = Work(request, name, amount, 0, late_ack=late_ack, state="refused")
        if isinstance(admitted, Reserved):
            one.held, one.state = amount, "reserved"
            limit = self.limits[name]
            assert limit is None or sum(self.drawn(name)) + amount <= limit
            self.all.append(one)
        return one

    @rule(one=work)
    def repeat(self, one: Work) -> None:
        if one.state not in ("refused", "released"):
            admitted = self.ledger.admit(one.request)
            assert admitted == Reserved(one.request.reservation_id)

    @rule(one=work)
    def claim(self, one: Work) -> None:
        if one.state == "refused":
            return
        heard = self.ledger.deliver(one.request, late_ack=one.late_ack)
        if one.state in ("reserved", "waiting") and not one.parked:
            assert isinstance(heard, Attempt)
            one.attempt, one.recorded, one.state = heard, None, "running"
        elif one.state == "running":
            assert heard == Running()
        else:
            assert heard == Closed(one.state)

    @rule(one=work, amount=amounts)
    def record(self, one: Work, amount: int) -> None:
        if one.attempt is None:
            return
        assert one.attempt.record(amount)
        one.used += amount
        if one.state in ("settled", "lost"):
            one.charged = max(one.charged, one.used)
            return
        one.held = max(one.held, one.used)
        if one.state == "running":
            one.recorded = (one.recorded or 0) + amount

    @rule(one=work, outcome=st.sampled_from([RETURNED, RAISED, RETRIED]))
    def end(self, one: Work, outcome: Any) -> None:
        if one.state != "running" or one.attempt is None:
            return
        assert one.attempt.end(outcome)
        if one.retry:
            self.follow(one)
            return
        unmetered = outcome is RETURNED and one.recorded is None
        one.end("settled", one.used + (one.estimate if unmetered else 0))
        assert one.attempt.close()

    def follow(self, one: Work) -> None:
        """The retry that was written takes over."""
        one.parked = one.retry == "parked"
        one.state, one.retry = "waiting", ""

    def write_next(self, one: Work, estimate: int) -> bool:
        """Whether the next attempt is held now; otherwise no more is held than was used."""
        target = one.used + estimate
        if target <= one.held or self.fits(one.budget, target - one.held):
            one.held, one.estimate = target, estimate
            return True
        one.held = one.used
        return False

    @rule(one=work)
    def retry(self, one: Work) -> None:
        if one.state != "running" or one.attempt is None or one.retry:
            return
        one.request, written = self.ledger.retry(one.request, one.attempt)
        held = self.write_next(one, one.estimate)
        assert isinstance(written, Reserved if held else Parked)
        one.retry = "written" if held else "parked"

    @rule(one=work)
    def release(self, one: Work) -> None:
        if one.state == "refused":
            return
        done = settlement.revoke(
            self.ledger.store, self.ledger.root, one.request.reservation_id, "cancelled"
        )
        assert done == (one.state in ("reserved", "waiting"))
        if done:
            one.end("released" if one.state == "reserved" else "settled", one.used)
            one.parked = False

    @rule(one=work)
    def lapse(self, one: Work) -> None:
        if one.state != "running":
            return
        self.ledger.lapse(one.request)
        recovered = self.ledger.recover()
        if not one.late_ack:
            assert recovered.lost == 1
            one.end("lost", one.used + one.fresh)
            one.retry = ""
            return
        assert recovered.rerun == 1
        if one.retry:
            self.follow(one)
        else:
            one.state = "waiting"
            one.parked = not self.write_next(one, one.estimate)

    @precondition(lambda self: any(one.parked or one.retry == "parked" for one in self.all))
    @rule()
    def sweep(self) -> None:
        self.ledger.sweep()
        # Which comes first is the sweep's to choose; what it admitted is no longer parked.
        left = {row.reservation_id for row in self.ledger.rows("parked")}
        for one in self.all:
            waits = one.parked or one.retry == "parked"
            if waits and one.request.reservation_id not in left:
                one.held = one.used + one.estimate
                one.parked = False
                one.retry = "written" if one.retry else ""
        for one in self.all:
            if one.parked or one.retry == "parked":
                assert not self.fits(one.budget, one.used + one.estimate - one.held)

    @rule(one=consumes(work))
    def forget(self, one: Work) -> None:
        """Leave one alone for the rest of the run."""

    @invariant()
    def balances_are_the_models(self) -> None:
        if hasattr(self, "ledger"):
            for name in BUDGETS:
                assert self.ledger.balance(name) == self.drawn(name)
            assert reconcile.reconcile(self.ledger.store, self.ledger.settings).mismatches == ()


# Removed when the interpreter ends.
_folder = tempfile.TemporaryDirectory(prefix="budget-model-")


def template() -> Path:
    """A migrated file, made once: every example takes a copy."""
    path = Path(_folder.name) / "template.db"
    if not path.exists():
        store = Store(f"sqlite:///{path}")
        store.run(migrate.upgrade)
        store.dispose()
    return path


LedgerMachine.TestCase.settings = hypothesis_settings(max_examples=40, stateful_step_count=30)
TestLedger = LedgerMachine.TestCase
