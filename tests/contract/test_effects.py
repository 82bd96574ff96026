"""Effects: each once, under the fence, in a caller's transaction, whatever goes on beside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget import settlement
from celery_budget.core.reservations import Begun, Cancelling, Closed, Extended, Happened, Running
from celery_budget.errors import StoreError
from celery_budget.settlement import Attempt
from celery_budget.store import effects, schema
from celery_budget.store.enlisted import Enlisted
from celery_budget.store.requests import reserve
from tests.contract.racers import WAIT_SECONDS, Beside, OneTry, at_once, wait_for_waiting
from tests.contract.support import BOOT, RAISED, RETURNED, Ledger, message_of

KEPT_US = 604_800_000_000


class Undo(Exception):
    """Ends a transaction so that it is rolled back."""


@contextmanager
def transaction(ledger: Ledger) -> Iterator[Enlisted]:
    """A caller's transaction, with a connection of its own; committed unless the block raises."""
    url = sa.make_url(ledger.settings.database_url)
    if url.get_backend_name() == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    engine = sa.create_engine(url)
    try:
        with engine.connect() as connection:
            enlisted = Enlisted(ledger.store, connection, ledger.root, any_isolation=False)
            enlisted.open()
            enlisted.enter()
            try:
                yield enlisted
                connection.commit()
            finally:
                connection.rollback()
                enlisted.leave()
    finally:
        engine.dispose()


def have(
    ledger: Ledger,
    attempt: Attempt,
    key: str = "mail",
    value: str | None = '"sent"',
    undo: bool = False,
) -> Any:
    """Have an effect in a transaction of its own; what came of it."""
    begun: Any = None
    try:
        with transaction(ledger) as caller:
            begun = attempt.begin_effect(caller, key)
            if begun == Begun():
                assert attempt.keep_effect(caller, key, value)
            if undo:
                raise Undo
    except Undo:
        pass
    return begun


def committed_state(ledger: Ledger, request: Any) -> str:
    """The reservation's state as others see it; read only, beside whoever writes."""
    state = sa.select(schema.reservations.c.state).where(
        schema.reservations.c.reservation_id == request.reservation_id
    )
    return str(ledger.store.read(lambda connection: connection.execute(state).scalar_one()))


def abandoned(ledger: Ledger, amount: int = 10) -> tuple[Any, Attempt]:
    """A request whose attempt has lost its claim, and that attempt."""
    request, attempt = ledger.start(amount)
    ledger.lapse(request)
    assert ledger.recover().rerun == 1
    return request, attempt


on_postgresql = pytest.mark.parametrize("store_url", ["postgresql"], indirect=True, scope="session")


def test_an_effect_is_had_once_and_its_value_is_kept(funded: Ledger) -> None:
    request, attempt = funded.start()
    assert have(funded, attempt) == Begun()
    assert have(funded, attempt, value='"again"') == Happened('"sent"')
    assert have(funded, attempt, key="other", value=None) == Begun()
    assert have(funded, attempt, key="other") == Happened(None)
    [mail, other] = funded.rows("effects", reservation_id=request.reservation_id)
    assert (mail.key, mail.attempt, mail.value) == ("mail", 1, '"sent"')
    assert (other.key, other.value) == ("other", None)


def test_each_request_has_its_own(funded: Ledger) -> None:
    for _ in range(2):
        _, attempt = funded.start()
        assert have(funded, attempt) == Begun()


def test_a_rollback_leaves_no_proof(funded: Ledger) -> None:
    _, attempt = funded.start()
    assert have(funded, attempt, undo=True) == Begun()
    assert funded.rows("effects") == []
    assert have(funded, attempt) == Begun()


def test_a_proof_can_be_withdrawn(funded: Ledger) -> None:
    _, attempt = funded.start()
    with transaction(funded) as caller:
        assert attempt.begin_effect(caller, "mail") == Begun()
        attempt.withdraw_effect(caller, "mail")
    assert not funded.rows("effects")
    with transaction(funded) as caller:
        assert not attempt.keep_effect(caller, "mail", None)


def test_a_later_attempt_gets_what_was_stored(funded: Ledger) -> None:
    request, first = funded.start()
    assert have(funded, first) == Begun()
    funded.lapse(request)
    assert funded.recover().rerun == 1
    assert have(funded, funded.run(request)) == Happened('"sent"')


@pytest.mark.parametrize("followed", ["retried", "lost"])
@pytest.mark.parametrize("told", ["both", "tokens", "nothing", "elsewhere"])
def test_what_is_got_of_an_effect_is_charged_once(funded: Ledger, followed: str, told: str) -> None:
    """The attempt that had it has told what it used; one that did something else is no proof."""
    funded.set("money", unit="micro-usd")
    request = funded.reserve(10, ("money", 20))
    first = funded.run(request)
    if told != "nothing":
        first.record(7)
    if told == "both":
        first.record(15, unit="micro-usd")
    if told != "elsewhere":
        assert have(funded, first) == Begun()
    if followed == "retried":
        request, _ = funded.retry(request, first)
        assert first.end(replace(RETURNED, kind="retried", payload=None))
    else:
        funded.lapse(request)
        assert funded.recover().rerun == 1
    second = funded.run(request)
    assert have(funded, second) == (Begun() if told == "elsewhere" else Happened('"sent"'))
    assert second.end(RETURNED)
    spent = {"both": (7, 15), "tokens": (7, 20), "nothing": (10, 20), "elsewhere": (17, 20)}
    assert funded.balances("b", "money") == [(0, one) for one in spent[told]]
    assert funded.row(request).unmetered is (told != "both")


@pytest.mark.parametrize("claimed", [False, True])
def test_an_attempt_that_lost_its_claim_has_none(funded: Ledger, claimed: bool) -> None:
    request, lost = abandoned(funded)
    if claimed:
        funded.run(request)
    before = funded.dump()
    assert have(funded, lost) == Closed("ended")
    with transaction(funded) as caller:
        assert not lost.end_within(caller, RETURNED, "done")
    assert lost.within is None
    assert funded.dump() == before


def test_nor_has_one_that_has_ended(funded: Ledger) -> None:
    _, attempt = funded.start()
    attempt.end(RETURNED)
    assert have(funded, attempt) == Closed("ended")


def test_two_attempts_have_one_effect(funded: Ledger) -> None:
    """The one that lost its lease is in the middle of its effect when the other is to start."""
    request, first = funded.start()
    begun, done = threading.Event(), threading.Event()

    def have_it_slowly() -> Any:
        with transaction(funded) as caller:
            outcome = first.begin_effect(caller, "mail")
            begun.set()
            assert done.wait(WAIT_SECONDS)
            first.keep_effect(caller, "mail", '"first"')
        return outcome

    slow = Beside(have_it_slowly)
    assert begun.wait(WAIT_SECONDS)
    if funded.store.dialect == "postgresql":
        funded.lapse(request)
        # Recovery neither takes the claim away nor waits for it.
        assert funded.recover().rerun == 0
    assert committed_state(funded, request) == "running"
    done.set()
    assert slow.result() == Begun()
    funded.lapse(request)
    assert funded.recover().rerun == 1
    second = funded.run(request)
    assert have(funded, second) == Happened('"first"')
    assert have(funded, first, key="other") == Closed("ended")
    assert len(funded.rows("effects")) == 1


def test_attempts_that_race_for_an_effect_have_it_once(funded: Ledger) -> None:
    """Many rounds: an attempt whose lease lapsed, and recovery with the attempt that follows."""
    for _ in range(10):
        request, first = funded.start(1)
        funded.lapse(request)

        def follow(request: Any = request) -> list[Any]:
            had = []
            while not had:
                funded.recover()
                claimed = funded.deliver(request)
                if isinstance(claimed, Attempt):
                    had.append(have(funded, claimed, value='"second"'))
            return had

        mine, [theirs] = at_once([lambda first=first: have(funded, first), follow])
        [row] = funded.rows("effects", reservation_id=request.reservation_id)
        if mine == Begun():
            assert theirs == Happened('"sent"')
        else:
            assert (mine, theirs) == (Closed("ended"), Begun())
        assert row.attempt == (1 if mine == Begun() else 2)


@pytest.mark.postgres
@on_postgresql
def test_two_threads_of_one_attempt_have_one_effect(funded: Ledger) -> None:
    _, attempt = funded.start()
    with transaction(funded) as caller:
        assert attempt.begin_effect(caller, "mail") == Begun()
        second = Beside(lambda: have(funded, attempt, value='"second"'))
        wait_for_waiting(funded.store)
        # Another effect waits for nobody.
        assert Beside(lambda: have(funded, attempt, key="other")).result() == Begun()
        attempt.keep_effect(caller, "mail", '"first"')
    assert second.result() == Happened('"first"')


@pytest.mark.postgres
@on_postgresql
@pytest.mark.parametrize("undo", [False, True])
def test_the_attempt_goes_on_beside_its_effect(funded: Ledger, undo: bool) -> None:
    """By connections of the ledger's own, which wait for nothing."""
    request, attempt = funded.start(10)
    whole = funded.store
    attempt.store = funded.store = OneTry(funded.settings.database_url, lock_seconds=0.05)
    try:
        with transaction(funded) as caller:
            assert attempt.begin_effect(caller, "mail") == Begun()
            assert attempt.record(4)
            assert attempt.record(9), "over the hold"
            assert attempt.extend(5) == Extended(5)
            assert funded.deliver(request) == Running()
            ids, asked = [request.task_id], (funded.store, funded.settings, request.task_id)
            assert settlement.renew(funded.store, funded.settings, ids, BOOT, []) == 1
            assert funded.retry(request, attempt)[1] is not None
            assert settlement.cancel(*asked) == Cancelling()
            if undo:
                raise Undo
    except Undo:
        pass
    finally:
        funded.store.dispose()
        attempt.store = funded.store = whole
    assert funded.line(request)[1] == 13
    assert len(funded.rows("effects")) == (0 if undo else 1)


@pytest.mark.postgres
@on_postgresql
def test_who_knows_that_the_process_is_gone_waits_for_its_transaction(funded: Ledger) -> None:
    request, attempt = funded.start()
    with transaction(funded) as caller:
        assert attempt.begin_effect(caller, "mail") == Begun()
        lost = Beside(
            lambda: settlement.worker_lost(
                funded.store, funded.settings, request.task_id, BOOT, may_rerun=True
            )
        )
        wait_for_waiting(funded.store)
        # Who waits is no hindrance to what the attempt does meanwhile, its settlement included.
        assert attempt.record(3)
        assert attempt.end_within(caller, RETURNED, "done")
    lost.result()
    assert (funded.state(request), funded.balance()) == ("settled", (0, 3))
    assert attempt.stands()


@pytest.mark.parametrize("commit", [True, False])
def test_what_is_recorded_meanwhile_is_in_the_ledger_whatever_happens(
    funded: Ledger, commit: bool
) -> None:
    request, attempt = funded.start(10)
    try:
        with transaction(funded) as caller:
            assert attempt.begin_effect(caller, "mail") == Begun()
            assert attempt.record(4, key="reply")
            assert not attempt.record(4, key="reply")
            assert attempt.remaining() == 6
            assert attempt.extend(2) == Extended(2)
            if not commit:
                raise Undo
    except Undo:
        pass
    assert attempt.end(RAISED)
    assert (funded.state(request), funded.balance()) == ("settled", (0, 4))


@pytest.mark.parametrize("commit", [True, False])
def test_usage_over_the_hold_is_recorded_where_the_caller_has_the_balance(
    funded: Ledger, commit: bool
) -> None:
    """As after a message that it has published from the same budget."""
    _, attempt = funded.start(10)
    impatient = replace(funded, store=OneTry(funded.settings.database_url, lock_seconds=0.05))
    attempt.store = impatient.store
    try:
        with transaction(impatient) as caller:
            child = funded.request(5)
            caller.run(reserve, child, message_of(child))
            assert attempt.record(14)
            if not commit:
                raise Undo
    except Undo:
        pass
    assert attempt.end(RAISED)
    impatient.store.dispose()
    assert funded.balance() == (5 if commit else 0, 14)


@pytest.mark.parametrize("commit", [True, False])
def test_a_settlement_is_part_of_the_transaction(funded: Ledger, commit: bool) -> None:
    request, attempt = funded.start(10)
    attempt.record(3)
    try:
        with transaction(funded) as caller:
            assert attempt.begin_effect(caller, "mail") == Begun()
            assert attempt.end_within(caller, RETURNED, "done")
            assert not attempt.end_within(caller, RETURNED, "other"), "it is settled once"
            assert attempt.begin_effect(caller, "late") == Closed("ended")
            assert committed_state(funded, request) == "running"
            # What it uses all the same is counted, here or, if this is undone, at the end.
            assert attempt.record(4, key="late")
            if not commit:
                raise Undo
    except Undo:
        pass
    assert attempt.stands() == commit
    assert (funded.state(request), len(funded.rows("effects"))) == (
        ("settled", 1) if commit else ("running", 0)
    )
    assert attempt.end(RETURNED if commit else RAISED)
    assert attempt.settled
    assert (funded.state(request), funded.balance()) == ("settled", (0, 7))
    [row] = funded.rows("attempts")
    assert row.outcome == ("returned" if commit else "raised")
    assert attempt.close()
    assert funded.deliver(request) == Closed("settled")


def test_a_settlement_whose_worker_died_gives_its_value_again(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    with transaction(funded) as caller:
        assert attempt.end_within(caller, RETURNED, "done")
    funded.lapse(request)
    assert funded.recover().replayed == 1
    replay = funded.deliver(request)
    assert isinstance(replay, Attempt)
    assert replay.replay is not None
    assert replay.replay.payload == RETURNED.payload


@pytest.mark.postgres
@on_postgresql
def test_two_settlements_at_once_settle_once(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    other = replace(attempt)
    attempt.record(2)

    def settle(one: Attempt) -> bool:
        with transaction(funded) as caller:
            return one.end_within(caller, RETURNED, "done")

    assert all(at_once([lambda: settle(attempt), lambda: settle(other)]))
    assert (funded.state(request), funded.balance()) == ("settled", (0, 2))


# How long they are kept.


def ended(ledger: Ledger, count: int = 1) -> Any:
    """A request that has ended and is closed, with some effects."""
    request, attempt = ledger.start(1)
    for number in range(count):
        assert have(ledger, attempt, key=f"step-{number}") == Begun()
    attempt.end(RETURNED)
    attempt.close()
    return request


def age(ledger: Ledger, request: Any, by_us: int = KEPT_US + 1_000_000) -> None:
    """Let all of a request have been that much earlier."""
    where = {"reservation_id": request.reservation_id}
    for table, column in (("effects", "created_us"), ("reservations", "ended_us")):
        value = getattr(ledger.rows(table, **where)[0], column)
        if value is not None:
            ledger.put(table, {column: value - by_us}, **where)


def test_effects_are_kept_after_the_end_and_then_deleted(funded: Ledger) -> None:
    young, old = ended(funded), ended(funded, 3)
    age(funded, young, KEPT_US - 60_000_000)
    age(funded, old)
    funded.recover()
    assert {row.reservation_id for row in funded.rows("effects")} == {young.reservation_id}


def test_a_replay_after_that_is_refused_and_not_repeated(funded: Ledger) -> None:
    request, attempt = funded.start(1)
    assert have(funded, attempt) == Begun()
    attempt.end(RETURNED)
    attempt.close()
    age(funded, request)
    funded.recover()
    assert funded.rows("effects") == []
    assert funded.deliver(request) == Closed("settled")
    assert have(funded, attempt) == Closed("ended")
    assert funded.rows("effects") == []


def test_those_of_an_open_request_are_kept_for_ever(funded: Ledger) -> None:
    request, attempt = funded.start()
    assert have(funded, attempt) == Begun()
    age(funded, request, 100 * KEPT_US)
    funded.recover()
    assert len(funded.rows("effects")) == 1
    # Nor are they deleted while its outcome may still be given again.
    attempt.end(RETURNED)
    age(funded, request, 100 * KEPT_US)
    funded.recover()
    assert len(funded.rows("effects")) == 1
    attempt.close()
    funded.recover()
    assert funded.rows("effects") == []


def test_they_are_deleted_in_chunks(funded: Ledger) -> None:
    request = ended(funded, 5)
    age(funded, request)

    def prune(limit: int) -> int:
        return funded.store.run(effects.prune, funded.root, KEPT_US, limit)

    assert [prune(2), prune(2), prune(2), prune(2)] == [2, 2, 1, 0]


@pytest.mark.postgres
@on_postgresql
def test_who_deletes_passes_by_what_another_deletes(funded: Ledger) -> None:
    request = ended(funded, 2)
    age(funded, request)
    key = (funded.root, KEPT_US)
    with funded.store.transaction() as connection:
        assert effects.prune(connection, *key, 1) == 1
        assert Beside(lambda: funded.store.run(effects.prune, *key, 10)).result() == 1


def test_a_lock_that_is_not_had_in_time_is_retryable(funded: Ledger) -> None:
    """Somebody who changes the reservation by hand keeps the effect waiting, for so long."""
    _, attempt = funded.start()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with funded.store.transaction() as connection:
            connection.execute(sa.text("SELECT 1 FROM budget_reservations"))
            if connection.dialect.name == "postgresql":
                connection.execute(sa.text("LOCK TABLE budget_reservations"))
            held.set()
            assert done.wait(WAIT_SECONDS)

    holding = Beside(hold)
    assert held.wait(WAIT_SECONDS)
    impatient = replace(funded, store=OneTry(funded.settings.database_url, lock_seconds=0.05))

    def wait() -> None:
        with transaction(impatient) as caller:
            if funded.store.dialect == "sqlite":
                # How long is waited there is the connection's own.
                caller.run(
                    lambda connection: connection.exec_driver_sql("PRAGMA busy_timeout = 50")
                )
            attempt.begin_effect(caller, "mail")

    try:
        with pytest.raises(StoreError) as waited:
            wait()
        assert waited.value.retryable
    finally:
        done.set()
        holding.result()
        impatient.store.dispose()
