"""Leases: suspected at a first look, taken at a second; an outage of the ledger is no lapse."""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget import settlement
from celery_budget.integration import leases
from celery_budget.integration.context import BOOT_ID
from celery_budget.recovery import Recovered
from celery_budget.store import Store, attempts, lapses
from celery_budget.store.schema import now_us
from tests.contract.racers import at_once
from tests.contract.support import BOOT, RETURNED, Ledger

SECOND_US = 1_000_000


def clock(ledger: Ledger) -> int:
    return int(
        ledger.store.run(lambda connection: connection.execute(sa.select(now_us())).scalar())
    )


def over(ledger: Ledger, request: object, ago_us: int = SECOND_US) -> None:
    """Let a request's lease be over since a while, and nobody have seen that."""
    ledger.put(
        "attempts",
        {"lease_until_us": clock(ledger) - ago_us, "suspected_us": None},
        reservation_id=request.reservation_id,  # type: ignore[attr-defined]
    )


def looked(ledger: Ledger, ago_us: int) -> None:
    """Let a sweep have looked last a while ago."""
    ledger.recover()
    ledger.put("sweeps", {"seen_us": clock(ledger) - ago_us})


def suspicions(ledger: Ledger) -> list[bool]:
    return [row.suspected_us is not None for row in ledger.rows("attempts")]


def test_a_lease_is_taken_at_a_second_look(funded: Ledger) -> None:
    request, _ = funded.start(10)
    over(funded, request)
    assert funded.recover() == Recovered()
    assert suspicions(funded) == [True]
    assert funded.recover() == Recovered(), "a worker has a turn to renew it"
    since = clock(funded) - funded.settings.renew_us
    funded.put("attempts", {"suspected_us": since + 60 * SECOND_US})
    assert funded.recover() == Recovered()
    funded.put("attempts", {"suspected_us": since})
    assert funded.recover() == Recovered(rerun=1)


def test_a_worker_that_renews_between_the_looks_keeps_its_attempt(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    funded.lapse(request)
    ids = [request.task_id]
    assert settlement.renew(funded.store, funded.settings, ids, BOOT, []) == 1
    assert suspicions(funded) == [False]
    assert funded.recover() == Recovered()
    over(funded, request)
    assert funded.recover() == Recovered(), "a lease that is over once more is seen anew"
    assert attempt.end(RETURNED)


def test_a_replay_is_suspected_anew(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.end(RETURNED)
    funded.lapse(request)
    assert funded.recover() == Recovered(replayed=1)
    assert suspicions(funded) == [False]
    funded.lapse(request)
    replay = funded.deliver(request)
    assert replay.replay is not None
    assert suspicions(funded) == [False]


@pytest.mark.parametrize("early", [True, False])
def test_an_outage_starts_no_storm(funded: Ledger, early: bool) -> None:
    looked(funded, 2 * funded.settings.lease_us)
    requests = [funded.start(1, late_ack=not early)[0] for _ in range(20)]
    for request in requests:
        over(funded, request)
    before = clock(funded)
    assert funded.recover() == Recovered()
    for row in funded.rows("attempts"):
        left_us = row.lease_until_us - before
        assert 0 < left_us - funded.settings.lease_us < 60 * SECOND_US, "a whole lease anew"
    # As if the second look had come.
    funded.put("attempts", {"suspected_us": 1})
    assert funded.recover() == Recovered()
    ids = [request.task_id for request in requests]
    assert settlement.renew(funded.store, funded.settings, ids, BOOT, []) == 20
    assert funded.results.told == []


def test_a_gap_extends_by_its_length(funded: Ledger) -> None:
    """Less than a lease: what was over before nearly all of it is over after it, too."""
    lease_us = funded.settings.lease_us
    gap_us = lease_us * 3 // 4
    looked(funded, gap_us)
    request, _ = funded.start(1)
    over(funded, request, gap_us // 2)
    before = funded.rows("attempts")[0].lease_until_us
    assert funded.recover() == Recovered()
    extended = funded.rows("attempts")[0].lease_until_us - before
    assert 0 <= extended - gap_us < 60 * SECOND_US


def test_no_gap_extends_nothing(funded: Ledger) -> None:
    looked(funded, funded.settings.lease_us // 4)
    request, _ = funded.start(1)
    over(funded, request)
    before = funded.rows("attempts")[0].lease_until_us
    funded.recover()
    assert funded.rows("attempts")[0].lease_until_us == before
    assert suspicions(funded) == [True]


def test_what_was_suspected_before_a_gap_is_not_extended_again(funded: Ledger) -> None:
    """A worker that is gone is gone, however often the ledger is away."""
    request, _ = funded.start(1)
    funded.lapse(request)
    looked(funded, 2 * funded.settings.lease_us)
    assert funded.state(request) == "waiting"


_ENDED = sa.text(
    "INSERT INTO budget_attempts (root, reservation_id, attempt, claim_id, retries, worker,"
    " boot_id, late_ack, started_us, ended_us, outcome, replays)"
    " SELECT :root, gen_random_uuid(), 1, gen_random_uuid(), 0, 'w', gen_random_uuid(), true,"
    " n, n, 'returned', 0 FROM generate_series(1, 20000) AS n"
)


@pytest.mark.slow
def test_a_look_does_not_read_what_has_ended(funded: Ledger) -> None:
    engine = funded.store.engine
    if funded.store.dialect != "postgresql":
        pytest.skip("SQLite looks into the index for whatever it can")
    for _ in range(20):
        funded.start(1)
    with funded.store.transaction() as connection:
        connection.execute(_ENDED, {"root": funded.root})
    with funded.store.statement() as connection:
        connection.exec_driver_sql("VACUUM (ANALYZE) budget_attempts")
    plans = []

    def explain(*event: Any) -> None:
        connection, _, statement, parameters = event[:4]
        if "suspected_us" in statement and not statement.startswith("EXPLAIN"):
            rows = connection.exec_driver_sql(f"EXPLAIN {statement}", parameters)
            plans.append("\n".join(row[0] for row in rows))

    sa.event.listen(engine, "before_cursor_execute", explain)
    try:
        funded.store.run(lapses.suspect, funded.root, funded.settings.lease_us)
        funded.store.read(lapses.lapsed, funded.root, 100, funded.settings.renew_us)
        key = (["one", "two"], BOOT, [1], funded.settings.lease_us)
        funded.store.run(attempts.renew, funded.root, *key)
    finally:
        sa.event.remove(engine, "before_cursor_execute", explain)
    assert len(plans) == 3
    assert [plan for plan in plans if "Seq Scan on budget_attempts" in plan] == []
    # Nor does it expect so many that with more of them it would.
    expected = re.findall(r"ix_budget_attempts_lease.*? rows=(\d+)", plans[1])
    assert expected
    assert all(int(rows) <= 1000 for rows in expected)


def test_the_first_sweep_ever_finds_no_gap(funded: Ledger) -> None:
    request, _ = funded.start(1)
    over(funded, request)
    assert funded.rows("sweeps") == []
    before = funded.rows("attempts")[0].lease_until_us
    funded.recover()
    assert funded.rows("attempts")[0].lease_until_us == before
    assert len(funded.rows("sweeps")) == 1


def test_leases_that_are_over_are_noted_a_part_at_a_time(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are a transaction is short; the longest ones come first."""
    monkeypatch.setattr(lapses, "SUSPECTED_AT_ONCE", 2)
    requests = [funded.start(1)[0] for _ in range(5)]
    for number, request in enumerate(requests):
        over(funded, request)
        key = {"reservation_id": request.reservation_id}
        funded.put("attempts", {"lease_until_us": 5 - number}, **key)
    look = (lapses.suspect, funded.root, funded.settings.lease_us)
    assert funded.store.run(*look)
    noted = {row.reservation_id for row in funded.rows("attempts") if row.suspected_us is not None}
    assert noted == {request.reservation_id for request in requests[3:]}
    assert [funded.store.run(*look) for _ in range(2)] == [True, False]
    assert suspicions(funded) == [True] * 5
    # A pass of the sweep goes on until all are, or enough.
    funded.put("attempts", {"suspected_us": None})
    funded.recover()
    assert suspicions(funded) == [True] * 5


def test_all_leases_are_extended_after_an_outage(
    funded: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has looked until that is so, however many there are."""
    monkeypatch.setattr(lapses, "SUSPECTED_AT_ONCE", 2)
    requests = [funded.start(1)[0] for _ in range(5)]
    lease_us = funded.settings.lease_us
    funded.recover()
    funded.put("sweeps", {"seen_us": funded.now() - lease_us})
    for request in requests:
        over(funded, request)
    funded.put("attempts", {"lease_until_us": funded.now() - lease_us // 2, "suspected_us": None})
    now = funded.now()
    look = (lapses.suspect, funded.root, lease_us)
    assert [funded.store.run(*look) for _ in range(3)] == [True, True, False]
    assert all(row.lease_until_us > now for row in funded.rows("attempts"))
    assert funded.rows("sweeps")[0].seen_us >= now


def test_several_sweeps_look_at_once(funded: Ledger) -> None:
    requests = [funded.start(1)[0] for _ in range(10)]
    for request in requests:
        over(funded, request)
    at_once([funded.recover for _ in range(4)])
    assert len(funded.rows("sweeps")) == 1
    assert suspicions(funded) == [True] * 10
    funded.put("attempts", {"suspected_us": 1})
    results = at_once([funded.recover for _ in range(4)])
    assert sum(one.rerun for one in results) == 10
    assert [row.publishes for row in funded.rows("outbox")] == [0] * 10


def test_what_a_dead_process_ran_is_not_renewed(funded: Ledger) -> None:
    request = funded.reserve(1)
    funded.run(request, pid=4242)
    ids = [request.task_id]
    for living, renewed in (([4242], 1), ([1, 4242], 1), ([1], 0), ([], 0)):
        found = settlement.renew(funded.store, funded.settings, ids, BOOT, living)
        assert found == renewed, living


def test_another_machine_may_have_the_same_process_id(funded: Ledger) -> None:
    request = funded.reserve(1)
    funded.run(request, pid=4242)
    other = uuid.uuid4()
    assert not settlement.renew(funded.store, funded.settings, [request.task_id], other, [4242])


def test_a_lost_attempt_is_not_run_again_where_its_task_says_so(funded: Ledger) -> None:
    request = funded.reserve(10)
    attempt = funded.run(request, rerun=False)
    attempt.record(4)
    funded.lapse(request)
    assert funded.recover() == Recovered(lost=1, told=1)
    assert (funded.state(request), funded.balance()) == ("lost", (0, 10))


def test_a_short_lease_has_a_short_second_look(funded: Ledger) -> None:
    funded.settings = replace(funded.settings, lease_seconds=0.001)
    request, _ = funded.start(1)
    over(funded, request, 0)
    assert funded.store.run(lapses.lapsed, funded.root, 9, funded.settings.renew_us) == []
    funded.put("attempts", {"suspected_us": clock(funded) - 1000})
    [seen] = funded.store.run(lapses.lapsed, funded.root, 9, funded.settings.renew_us)
    assert seen.reservation_id == request.reservation_id


def test_leases_are_renewed_while_all_connections_are_taken(funded: Ledger, store_url: str) -> None:
    """Tasks in threads or greenlets may wait for them for longer than a lease."""
    if funded.store.dialect == "sqlite":
        pytest.skip("SQLite's writers wait for each other in any case")
    request = funded.reserve(1)
    funded.run(request, boot_id=BOOT_ID)
    over(funded, request)
    few = Store(store_url, pool_size=1, max_overflow=0)
    budget = SimpleNamespace(store=few, settings=funded.settings)
    turns = [None, [request.task_id]]
    with few.transaction():
        leases.renew_until(
            budget,  # type: ignore[arg-type]
            lambda seconds: None,
            turns.pop,
            lambda: (),
        )
    few.dispose()
    assert funded.rows("attempts")[0].lease_until_us > clock(funded)
