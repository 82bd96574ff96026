"""What the third release left open goes on under this one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command

from celery_budget import parking, reconcile, settlement
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import Parked, Reserved, ReserveRequest
from celery_budget.relay import Unpublishable
from celery_budget.settings import Settings
from celery_budget.settlement import Attempt
from celery_budget.store import Store, migrate, quarantine, schema
from tests.contract.support import RETRIED, RETURNED, Ledger

RELEASE = "0003"
#: What came after it, and was empty then.
SINCE = {
    "usage": {"details", "assumed"},
    "lines": {"earlier"},
    "reservations": {
        "prices",
        "cancelled_us",
        "lane",
        "deadline_us",
        "shadows",
        "parked_us",
        "unparked_us",
        "parked_budget",
        "parked_reason",
        "due_us",
        "admitted",
        "tallied",
        "enforced",
        "waived",
    },
    "outbox": {"lane", "tenant", "weight"},
    "parked": {"budget", "reason", "amount", "turn", "ahead_us", "window_us"},
    "quarantine": {"attempts", "used"},
    "attempts": {
        "pid", "suspected_us", "rerun", "inquires", "error", "queue", "publishes", "published_us",
    },
}  # fmt: skip
WITH_ROWS = (
    "reservations", "lines", "attempts", "usage", "outbox", "parked", "quarantine", "untold",
    "balances", "journal", "extensions",
)  # fmt: skip


def to(connection: sa.Connection, version: str) -> None:
    config = migrate._config()
    config.attributes["connection"] = connection
    move = command.downgrade if version == RELEASE else command.upgrade
    move(config, version)


@dataclass
class Left:
    """A ledger of the third release with a request in each state, taken over by this one."""

    ledger: Ledger
    requests: dict[str, ReserveRequest] = field(default_factory=dict)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)

    def leave(self) -> None:
        """Leave a request in each state that one can be in."""
        ledger = self.ledger
        ledger.set("b", 1000)
        ledger.set("full", 10)
        for name in ("settled", "lost"):
            self.start(name, late_ack=name == "settled").record(4, key="one")
        assert self.attempts["settled"].end(RETURNED)
        assert self.attempts["settled"].close()
        ledger.lapse(self.requests["lost"])
        assert ledger.recover().lost == 1
        self.isolate()
        self.start("running").record(4, key="one")
        self.start("extended").extend(5)
        self.start("unclosed").record(3)
        assert self.attempts["unclosed"].end(RETURNED)
        self.start("waiting").record(4, key="one")
        self.requests["waiting"], _ = ledger.retry(
            self.requests["waiting"], self.attempts["waiting"]
        )
        assert self.attempts["waiting"].end(RETRIED)
        self.start("blocked")
        ledger.retry(self.requests["blocked"], self.attempts["blocked"])
        self.requests["parked"] = ledger.request(20, budget="full")
        assert isinstance(ledger.admit(self.requests["parked"], continuation=True), Parked)
        self.start("parked retry", 10, budget="full").record(10)
        _, written = ledger.retry(self.requests["parked retry"], self.attempts["parked retry"])
        assert isinstance(written, Parked)
        assert self.attempts["parked retry"].end(RETRIED)
        self.requests["published"] = ledger.reserve()
        assert ledger.relay().published > 0
        self.requests["reserved"] = ledger.reserve()

    def start(self, name: str, amount: int = 10, **options: Any) -> Attempt:
        request, attempt = self.ledger.start(amount, **options)
        self.requests[name], self.attempts[name] = request, attempt
        return attempt

    def isolate(self) -> None:
        def refuse(message: WireMessage) -> None:
            raise Unpublishable("oversize", "no way")

        def tell(task_id: str, reason: str) -> None:
            raise ConnectionError("no backend")

        ledger, told = self.ledger, self.ledger.results.ended
        self.requests["quarantined"] = ledger.reserve()
        ledger.broker.on_publish = refuse
        ledger.results.ended = tell  # type: ignore[method-assign]
        assert ledger.relay().quarantined >= 1
        ledger.results.ended = told  # type: ignore[method-assign]
        ledger.broker.on_publish = lambda message: None

    def rows(self) -> dict[str, Any]:
        """Every row, of what the third release knew."""
        found = {}
        for name in WITH_ROWS:
            table = getattr(schema, name)
            known = [one for one in table.c if one.name not in SINCE.get(name, ())]
            with self.ledger.store.transaction() as connection:
                rows = connection.execute(sa.select(*known).order_by(*table.primary_key)).all()
            assert rows, name
            found[name] = [tuple(row) for row in rows]
        return found

    def states(self) -> dict[str, str]:
        return {
            name: self.ledger.state(one) for name, one in self.requests.items() if name != "parked"
        }


@pytest.fixture
def left(empty: Store) -> Left:
    empty.run(migrate.upgrade)
    found = Left(Ledger(empty, Settings("unused")))
    found.leave()
    found.before = found.rows()
    empty.run(to, RELEASE)
    assert not sa.inspect(empty._engine).has_table("budget_effects")
    empty._engine.dispose()
    empty.run(to, "head")
    empty._engine.dispose()
    return found


def test_it_is_all_there_and_adds_up(left: Left) -> None:
    assert left.rows() == left.before
    assert reconcile.reconcile(left.ledger.store, left.ledger.settings).mismatches == ()
    assert set(left.states().values()) == {
        "settled", "lost", "released", "running", "waiting", "published", "reserved"
    }  # fmt: skip
    assert left.ledger.row(left.requests["running"]).cancelled_us is None


def test_all_of_it_goes_on(left: Left) -> None:
    ledger, attempts = left.ledger, left.attempts
    ledger.conserved = True
    assert attempts["running"].record(4, key="one") is False
    assert attempts["running"].record(2)
    assert attempts["running"].end(RETURNED)
    assert ledger.line(left.requests["running"]) == (0, 6, 6)
    assert attempts["extended"].remaining() == 15
    assert attempts["extended"].end(RETURNED)
    assert ledger.line(left.requests["extended"]) == (0, 0, 15)
    assert attempts["unclosed"].close()
    assert attempts["blocked"].end(RETRIED)
    assert ledger.relay().published >= 2
    for name in ("published", "reserved", "waiting"):
        attempt = ledger.run(left.requests[name])
        attempt.record(1)
        assert attempt.end(RETURNED)
    assert ledger.line(left.requests["waiting"]) == (0, 5, 5)
    ledger.set("full", 100)
    assert parking.run_once(ledger.store, ledger.settings).admitted == 2
    assert ledger.state(left.requests["parked"]) == "reserved"
    assert ledger.state(left.requests["parked retry"]) == "waiting"
    again = (quarantine.requeue, ledger.root, left.requests["quarantined"].task_id)
    admitted = ledger.store.run(*again, lambda message, _: message, lock_ms=5000, bound=None)
    assert isinstance(admitted, Reserved)
    assert len(ledger.rows("untold")) == 1
    assert ledger.tell_all().told == 0, "it is another request's by now"
    assert ledger.rows("untold") == []
    assert ledger.results.told == [(left.requests["lost"].task_id, "lost")]
    assert reconcile.reconcile(ledger.store, ledger.settings).mismatches == ()


def test_what_recovery_finds_it_brings_on(left: Left) -> None:
    ledger = left.ledger
    for name in ("running", "extended", "unclosed", "blocked"):
        ledger.lapse(left.requests[name])
    recovered = ledger.recover()
    assert (recovered.rerun, recovered.replayed) == (3, 1)
    assert ledger.state(left.requests["running"]) == "waiting"
    assert reconcile.reconcile(ledger.store, ledger.settings).mismatches == ()


def test_it_can_be_cancelled(left: Left) -> None:
    for name in left.requests:
        settlement.cancel(left.ledger.store, left.ledger.settings, left.requests[name].task_id)
    states = left.states()
    running = {name for name, state in states.items() if state == "running"}
    assert running == {"running", "extended", "blocked"}
    for name in running:
        assert left.attempts[name].end(RETRIED)
        assert left.attempts[name].cancelled
    assert reconcile.reconcile(left.ledger.store, left.ledger.settings).mismatches == ()
