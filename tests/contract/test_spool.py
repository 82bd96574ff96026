"""What a worker could not tell the ledger, told later: once, and while it is its to say."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget import settlement
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import (
    Again,
    Outcome,
    Reserved,
    ReserveRequest,
    Running,
    StoredOutcome,
)
from celery_budget.core.retries import FAILED, Keep
from celery_budget.core.usage import Used
from celery_budget.errors import StoreError
from celery_budget.integration import spooling
from celery_budget.settlement import Attempt, Delivery
from celery_budget.spool import ASIDE, Ended, Entry, Lost, Spool, Usage
from celery_budget.store import Store, engine
from tests.contract.racers import Beside
from tests.contract.support import BOOT, RAISED, RETRIED, RETURNED, Ledger
from tests.contract.test_effects import Undo, transaction

WORKER = "worker@host/17"
OTHER = "worker@host/18"


class Leaving(Store):
    """A store that can go away."""

    away = False

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        if self.away:
            raise StoreError("away", retryable=True)
        with super().transaction() as connection:
            yield connection

    @contextmanager
    def statement(self) -> Iterator[sa.Connection]:
        if self.away:
            raise StoreError("away", retryable=True)
        with super().statement() as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[sa.Connection]:
        if self.away:
            raise StoreError("away", retryable=True)
        with super().snapshot() as connection:
            yield connection


class Worker:
    """A worker with a spool, whose ledger can go away."""

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self.ledger = ledger
        self.store = Leaving(ledger.settings.database_url)
        self.settings = ledger.settings
        self.spool = Spool(folder, ledger.root)
        self.stopping = threading.Event()

    def claim(self, request: ReserveRequest, late_ack: bool = True, worker: str = WORKER) -> Any:
        key = (self.ledger.root, request.reservation_id, request.task_id)
        delivery = Delivery(*key, request.nesting, request.retries, worker, BOOT, late_ack)
        return settlement.claim(
            self.store, self.settings, delivery, new_id(), self.stopping, None, self.spool
        )

    def start(self, amount: int = 10, **changes: Any) -> tuple[ReserveRequest, Attempt]:
        request = self.ledger.reserve(amount)
        attempt = self.claim(request, **changes)
        assert isinstance(attempt, Attempt)
        return request, attempt

    def leaves(self) -> None:
        """The ledger is away, and the worker has to stop."""
        self.store.away = True
        self.stopping.set()

    def comes_back(self) -> None:
        self.store.away = False

    def files(self) -> list[str]:
        if not self.spool.folder.exists():
            return []
        return sorted(path.name for path in self.spool.folder.iterdir())

    def kinds(self) -> list[str]:
        return [name[0] for name in self.files()]

    def replay(self) -> None:
        """Replay it all; nothing may be left."""
        self.comes_back()
        assert spooling.replay(self) is None  # type: ignore[arg-type]
        assert self.files() == []


@pytest.fixture
def worker(funded: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr(engine, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(engine, "LONGEST_WAIT_SECONDS", 0.001)
    worker = Worker(funded, tmp_path)
    yield worker
    worker.store.dispose()


def test_what_was_used_and_how_it_ended(worker: Worker) -> None:
    ledger = worker.ledger
    request, attempt = worker.start()
    worker.leaves()
    assert attempt.record(4, key="reply")
    assert worker.kinds() == ["1"]
    assert attempt.record(2)
    assert attempt.end(RETURNED)
    assert attempt.spooled
    assert not attempt.settled
    assert worker.kinds() == ["1", "1", "3"]
    assert ledger.state(request) == "running"
    worker.replay()
    assert (ledger.state(request), ledger.balance()) == ("settled", (0, 6))
    # Its message is published again, for a worker to give the outcome.
    assert ledger.message(request).state == "due"
    given = worker.claim(request)
    assert given.replay == StoredOutcome("returned", RETURNED.payload)


def test_a_ledger_that_comes_back_in_time_leaves_nothing(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, attempt = worker.start()
    worker.store.away = True
    found: list[list[str]] = []

    def wait(timeout: float) -> bool:
        found.append(worker.kinds())
        worker.comes_back()
        return False

    monkeypatch.setattr(worker.stopping, "wait", wait)
    assert attempt.record(4)
    worker.store.away = True
    assert attempt.end(RETURNED)
    # It was on disk while it was waited for.
    assert found == [["1"], ["3"]]
    assert worker.files() == []
    assert attempt.settled
    assert not attempt.spooled
    assert worker.ledger.balance() == (0, 4)


def test_nothing_is_written_for_a_fault_that_passes_before_a_wait(worker: Worker) -> None:
    _, attempt = worker.start()
    attempt.record(4)
    attempt.end(RETURNED)
    assert not worker.spool.folder.parent.exists() or worker.files() == []


def test_a_worker_that_stops_tries_a_few_times(worker: Worker) -> None:
    """Most faults are over at once: a deadlock, say."""
    _, attempt = worker.start()
    worker.stopping.set()
    tries: list[int] = []
    transaction = worker.store.transaction

    def fails_twice() -> Any:
        tries.append(1)
        worker.store.away = len(tries) < 3
        return transaction()

    worker.store.transaction = fails_twice  # type: ignore[method-assign]
    assert attempt.end(RETURNED)
    assert attempt.settled
    assert worker.files() == []


def copies(worker: Worker) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in worker.spool.folder.iterdir()}


@pytest.mark.parametrize(
    "outcome", [RETURNED, RAISED, RETRIED, Outcome("ignored"), Outcome("replaced")]
)
def test_a_replay_once_more_changes_nothing(worker: Worker, outcome: Outcome) -> None:
    request, attempt = worker.start()
    worker.leaves()
    attempt.record(4, key="reply")
    attempt.end(outcome)
    kept = copies(worker)
    assert len(kept) == 2
    worker.replay()
    before = worker.ledger.dump()
    for path, content in kept.items():
        path.write_bytes(content)
    worker.replay()
    after = worker.ledger.dump()
    for table in ("reservations", "balances", "usage", "lines", "journal"):
        assert after[table] == before[table]
    assert worker.ledger.state(request) == "settled"


def test_two_who_replay_at_once(worker: Worker) -> None:
    requests = []
    started = [worker.start(5) for _ in range(10)]
    worker.leaves()
    for request, attempt in started:
        requests.append(request)
        attempt.record(2)
        attempt.end(RETURNED)
    worker.comes_back()
    gate = threading.Barrier(2)

    def replay() -> None:
        # As another worker: another process has another lock.
        spool = Spool(worker.spool.folder.parent, worker.ledger.root)
        gate.wait()
        for entry, held in spool.take():
            settlement.replay(worker.store, worker.settings, entry)
            held.drop()

    both = [Beside(replay), Beside(replay)]
    for one in both:
        one.result()
    worker.replay()
    assert {worker.ledger.state(request) for request in requests} == {"settled"}
    assert worker.ledger.balance() == (0, 20)


def test_whose_claim_is_gone_is_refused_and_what_it_used_counts(worker: Worker) -> None:
    ledger = worker.ledger
    request, attempt = worker.start()
    attempt.record(1)
    worker.leaves()
    attempt.record(3)
    attempt.end(RETURNED)
    ledger.lapse(request)
    assert ledger.recover().rerun == 1
    second = ledger.run(request)
    worker.replay()
    assert ledger.state(request) == "running"
    assert isinstance(ledger.deliver(request), Running)
    second.record(2)
    assert second.end(RETURNED)
    assert ledger.balance() == (0, 6)


def test_what_was_used_is_charged_late_where_the_attempt_is_lost(worker: Worker) -> None:
    ledger = worker.ledger
    request, attempt = worker.start(10, late_ack=False)
    worker.leaves()
    attempt.record(14)
    attempt.end(RETURNED)
    ledger.lapse(request)
    assert ledger.recover().lost == 1
    assert ledger.balance() == (0, 10)
    worker.replay()
    assert (ledger.state(request), ledger.balance()) == ("lost", (0, 14))


def test_what_failed_for_good_is_kept_in_quarantine(worker: Worker) -> None:
    request, attempt = worker.start()
    worker.leaves()
    attempt.end(replace(RAISED, keep=Keep(FAILED, "boom", 100)))
    worker.replay()
    (kept,) = worker.ledger.rows("quarantine")
    assert (kept.reservation_id, kept.error) == (request.reservation_id, "boom")


def test_a_retry_goes_out(worker: Worker) -> None:
    ledger = worker.ledger
    request, attempt = worker.start()
    following, _ = ledger.retry(request, attempt)
    worker.leaves()
    attempt.end(RETRIED)
    worker.replay()
    assert ledger.state(request) == "waiting"
    assert isinstance(worker.claim(following), Attempt)


def test_what_was_rejected_comes_again(worker: Worker) -> None:
    request, attempt = worker.start()
    worker.leaves()
    attempt.end(Outcome("rejected", again=Again(10, 1, 1)))
    worker.replay()
    assert worker.ledger.state(request) == "waiting"
    assert isinstance(worker.claim(request), Attempt)


class SoftLimit(Exception):
    """Celery's, which the handler of a signal raises wherever the task is."""


def test_a_record_that_a_time_limit_interrupts_is_made_at_the_end(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, attempt = worker.start()
    worker.store.away = True

    def strike(timeout: float) -> bool:
        raise SoftLimit

    with monkeypatch.context() as patched:
        patched.setattr(worker.stopping, "wait", strike)
        with pytest.raises(SoftLimit):
            attempt.record(4)
    assert worker.kinds() == ["1"]
    # Nobody replays it while its task runs.
    worker.comes_back()
    assert list(worker.spool.take()) == []
    assert attempt.end(RAISED)
    assert worker.files() == []
    assert worker.ledger.balance() == (0, 4)


def test_what_a_caller_has_rolled_back_is_told_with_the_end(worker: Worker) -> None:
    _, attempt = worker.start()
    with suppress(Undo), transaction(worker):  # type: ignore[arg-type]
        attempt.record(4)
        raise Undo
    worker.leaves()
    attempt.end(RETURNED)
    # On PostgreSQL it was committed by a connection of the ledger's own.
    assert worker.kinds() == (["1", "3"] if worker.store.dialect == "sqlite" else ["3"])
    worker.replay()
    assert worker.ledger.balance() == (0, 4)


def test_a_task_that_cannot_be_answered_is_left_to_recovery(worker: Worker) -> None:
    ledger = worker.ledger
    request, attempt = worker.start()
    worker.leaves()
    attempt.record(4)
    assert not attempt.cut_short
    with pytest.raises(StoreError):
        attempt.remaining()
    assert attempt.cut_short
    attempt.leave()
    worker.replay()
    assert (ledger.state(request), ledger.balance()) == ("running", (10, 0))
    ledger.lapse(request)
    assert ledger.recover().rerun == 1
    assert ledger.run(request).end(RETURNED)
    assert ledger.balance() == (0, 14)


def test_a_claim_ends_waiting(worker: Worker) -> None:
    request = worker.ledger.reserve()
    worker.leaves()
    with pytest.raises(StoreError):
        worker.claim(request)
    assert worker.files() == []
    worker.comes_back()
    assert isinstance(worker.claim(request), Attempt)


def test_what_runs_in_place_has_no_spool(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = worker.ledger
    request = ledger.request()
    delivery = Delivery(
        ledger.root, request.reservation_id, request.task_id, 0, 0, WORKER, BOOT, late_ack=False
    )
    attempt = settlement.start(worker.store, worker.settings, request, delivery, new_id())
    assert isinstance(attempt, Attempt)
    worker.leaves()
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        worker.store.away = len(waited) < 20

    monkeypatch.setattr("celery_budget.spool.time.sleep", sleep)
    assert attempt.record(4)
    assert attempt.end(RETURNED)
    assert len(waited) == 20
    assert worker.files() == []
    assert ledger.balance() == (0, 4)


def lost(worker: Worker, request: ReserveRequest, **changes: Any) -> Lost:
    entry = Lost(
        worker.ledger.root, request.reservation_id, request.task_id, WORKER, BOOT, may_rerun=False
    )
    return replace(entry, **changes)


def leave(worker: Worker, *entries: Entry) -> None:
    for entry in entries:
        held = worker.spool.put(entry)
        assert held is not None
        held.release()


def test_a_process_that_is_lost_for_good(worker: Worker) -> None:
    """Celery has stored the failure; what the process had still to say of its end is void."""
    ledger = worker.ledger
    request, attempt = worker.start()
    worker.leaves()
    attempt.record(4)
    attempt.end(RETURNED)
    leave(worker, lost(worker, request))
    assert worker.kinds() == ["1", "2", "3"]
    worker.replay()
    assert (ledger.state(request), ledger.balance()) == ("lost", (0, 10))


def test_a_process_that_is_lost_after_its_task_had_ended(worker: Worker) -> None:
    ledger = worker.ledger
    request, attempt = worker.start()
    worker.leaves()
    attempt.record(4)
    attempt.end(RETURNED)
    leave(worker, lost(worker, request, may_rerun=True))
    worker.replay()
    assert (ledger.state(request), ledger.balance()) == ("settled", (0, 4))


@pytest.mark.parametrize("may_rerun", [True, False])
def test_the_result_of_a_lost_one_is_told_unless_celery_has_stored_it(
    worker: Worker, may_rerun: bool
) -> None:
    request, _ = worker.start(late_ack=False)
    leave(worker, lost(worker, request, may_rerun=may_rerun))
    worker.replay()
    assert worker.ledger.state(request) == "lost"
    worker.ledger.tell_all()
    told = [(request.task_id, "lost")] if may_rerun else []
    assert worker.ledger.results.told == told


def test_what_has_taken_the_place_of_a_task_runs_on(worker: Worker) -> None:
    """It has the task's id, and may be run by the same worker."""
    ledger = worker.ledger
    request, attempt = worker.start()
    following = ledger.request(task_id=request.task_id, nesting=1, finishing=True)
    assert isinstance(ledger.admit(following, continuation=True), Reserved)
    second = worker.claim(following)
    worker.leaves()
    attempt.end(Outcome("replaced"))
    leave(worker, lost(worker, request, may_rerun=True))
    worker.replay()
    assert (ledger.state(request), ledger.state(following)) == ("settled", "running")
    assert second.end(RETURNED)


def test_a_message_that_was_given_back_stops_nobody_who_runs_it(worker: Worker) -> None:
    """A second delivery was, in another thread of the same process."""
    request, attempt = worker.start()
    given = SimpleNamespace(
        id=request.task_id,
        hostname="worker@host",
        retries=0,
        budget_reservation=f"{worker.ledger.root}/{request.reservation_id}",
    )
    spooling.keep_unstarted(worker, given)  # type: ignore[arg-type]
    assert worker.kinds() == ["4"]
    worker.replay()
    assert worker.ledger.state(request) == "running"
    assert attempt.end(RETURNED)


def test_another_process_of_the_worker_runs_on(worker: Worker) -> None:
    """The task came to it when recovery had the attempt of the lost one run again."""
    ledger = worker.ledger
    request, _ = worker.start()
    ledger.lapse(request)
    assert ledger.recover().rerun == 1
    second = worker.claim(request, worker=OTHER)
    for may_rerun in (False, True):
        leave(worker, lost(worker, request, may_rerun=may_rerun))
        worker.replay()
        assert ledger.state(request) == "running"
    assert second.end(RETURNED)


@pytest.mark.parametrize(("may_rerun", "state"), [(False, "released"), (True, "reserved")])
def test_a_process_that_is_lost_before_it_claimed(
    worker: Worker, may_rerun: bool, state: str
) -> None:
    request = worker.ledger.reserve()
    leave(worker, lost(worker, request, may_rerun=may_rerun))
    worker.replay()
    assert worker.ledger.state(request) == state


def test_another_request_of_the_same_task_is_left_alone(worker: Worker) -> None:
    request = worker.ledger.reserve()
    leave(worker, lost(worker, request, reservation_id=uuid.UUID(int=5)))
    worker.replay()
    assert worker.ledger.state(request) == "reserved"


def test_what_the_ledger_never_takes_is_moved_aside_and_stops_nothing(worker: Worker) -> None:
    request, attempt = worker.start()
    root = worker.ledger.root
    leave(
        worker,
        Usage(root, uuid.UUID(int=5), 1, "attempt:1:1", Used({None: 1})),
        Usage(root, request.reservation_id, 1, "attempt:1:1", Used({"apples": 1})),
        Ended(root, uuid.UUID(int=5), 1, new_id(), RETURNED, "no-such-task", BOOT),
        Usage(root, request.reservation_id, 1, "attempt:1:2", Used({None: 3})),
    )
    spooling.replay(worker)  # type: ignore[arg-type]
    # The end of what is not there is refused, as one whose claim is gone.
    assert [name[-len(ASIDE) :] for name in worker.files()] == [ASIDE, ASIDE]
    attempt.end(RETURNED)
    assert worker.ledger.balance() == (0, 3)


def test_what_cannot_be_told_yet_stays(worker: Worker) -> None:
    request, attempt = worker.start()
    worker.leaves()
    attempt.record(4)
    attempt.end(RETURNED)
    before = worker.files()
    assert isinstance(spooling.replay(worker), StoreError)  # type: ignore[arg-type]
    assert worker.files() == before
    worker.replay()
    assert worker.ledger.state(request) == "settled"


def test_a_process_is_known_only_where_it_runs_one_task_at_a_time(worker: Worker) -> None:
    request = worker.ledger.reserve()
    seen = SimpleNamespace(id=request.task_id, hostname="worker@host", request_dict={})
    for pid in (None, spooling.os.getpid()):
        spooling.keep_lost(worker, SimpleNamespace(**vars(seen), worker_pid=pid), False)  # type: ignore[arg-type]
    assert worker.files() == []
    spooling.keep_lost(worker, SimpleNamespace(**vars(seen), worker_pid=17), False)  # type: ignore[arg-type]
    ((entry, held),) = worker.spool.take()
    assert entry == lost(worker, request, reservation_id=None, boot_id=spooling.BOOT_ID)
    held.drop()
