"""What ended before there were tallies is tallied after the upgrade, and refusals are kept."""

from __future__ import annotations

import pytest
from alembic import command

from celery_budget import settlement
from celery_budget.core.retries import Keep
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, migrate, tallies
from celery_budget.tallying import run_once
from tests.contract.support import RETURNED, Ledger
from tests.contract.tallied import check

BEFORE = "0006"


def to(connection: Connection, version: str) -> None:
    config = migrate._config()
    config.attributes["connection"] = connection
    move = command.downgrade if version == BEFORE else command.upgrade
    move(config, version)


@pytest.fixture
def upgraded(empty: Store) -> Ledger:
    """A ledger of the version before, with ends of several kinds, under this one."""
    empty.run(migrate.upgrade)
    ledger = Ledger(empty, Settings("unused"))
    ledger.set("b", 100)
    _, attempt = ledger.start(10)
    attempt.record(4)
    attempt.end(RETURNED)
    request, attempt = ledger.start(10)
    attempt.end(settlement.Outcome("raised", keep=Keep("max_attempts", "boom", 10)))
    # As it was before: only the quarantine knew why.
    ledger.put("reservations", {"reason": None}, reservation_id=request.reservation_id)
    # Never admitted: it waited too long, its own time was over, or somebody cancelled it.
    ledger.admit(ledger.request(99), continuation=True)
    ledger.admit(ledger.request(99, deadline_us=1), continuation=True)
    ledger.put("parked", {"deadline_us": 1})
    ledger.sweep()
    request = ledger.request(99)
    ledger.admit(request, continuation=True)
    settlement.cancel(ledger.store, ledger.settings, request.task_id)
    # Admitted, and cancelled before it ran.
    settlement.cancel(ledger.store, ledger.settings, ledger.reserve(1).task_id)
    for stage in ("draft", "check"):
        for _ in range(20):
            ledger.admit(ledger.request(99, stage=stage))
    ledger.reserve(5)
    run_once(empty, ledger.settings, 0)
    empty.run(to, BEFORE)
    empty._engine.dispose()
    empty.run(to, "head")
    empty._engine.dispose()
    return ledger


def test_all_that_has_ended_is_tallied_by_the_sweep(upgraded: Ledger) -> None:
    assert upgraded.rows("tallies") == []
    before = check(upgraded)
    counts = [before.counts[name] for name in ("admitted", "given_up", "cancelled", "released")]
    assert counts == [4, 2, 2, 1]
    assert (before.failures["exhausted"], before.failures["expired"]) == (1, 2)
    assert run_once(upgraded.store, upgraded.settings, 0).requests == 6
    after = check(upgraded)
    assert after.counts == before.counts
    [day] = upgraded.store.read(tallies.days, upgraded.root)
    assert upgraded.store.read(tallies.mismatched_tallies, upgraded.root, day) == []


def test_refusals_before_there_were_days_are_counted_in_all(upgraded: Ledger) -> None:
    upgraded.admit(upgraded.request(98, stage="check"))
    report = check(upgraded, by="day")
    assert report.counts["refused"] == 41
    assert [one.counts["refused"] for one in report.groups] == [1]
    assert {row.day == 0 for row in upgraded.rows("refusals")} == {True, False}
