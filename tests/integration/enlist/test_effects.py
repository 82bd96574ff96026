"""Effects and settlements in the transactions of every kind of connection."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget import budgeted, effect, settle, usage
from celery_budget.errors import (
    BudgetExceeded,
    ClaimLost,
    ConfigurationError,
    EffectError,
    EnlistError,
    NotRunning,
)
from celery_budget.integration.context import current_attempt, installed_on
from celery_budget.store import schema
from tests.integration.enlist.conftest import Make
from tests.integration.enlist.support import (
    Async,
    AsyncPsycopg,
    Caller,
    Client,
    Psycopg,
    Session,
    Sqlite,
    Undone,
)
from tests.integration.support import make_app

Body = Callable[[Any], Any]


def running(caller: Caller, body: Callable[[], Any], **options: Any) -> Any:
    """Call ``body()`` in a task with a budget, which runs in place; its result."""
    name = f"shop.running-{uuid.uuid4().hex[:6]}"

    @budgeted(budget="tenant:b", estimate=1)
    @caller.shop.app.task(name=name, shared=False, **options)
    def task() -> Any:
        return body()

    return task.apply().get(disable_sync_subtasks=False)


def effects(caller: Caller) -> list[tuple[str, str | None]]:
    """The effects that were committed, with their values."""
    with caller.shop.budget.store.snapshot() as connection:
        return sorted((row.key, row.value) for row in connection.execute(sa.select(schema.effects)))


def mail(client: Client, word: str = "mail", value: Any = None) -> tuple[bool, Any]:
    """Have an effect once; whether it was had now, and its value."""

    def block(first: Any) -> tuple[bool, Any]:
        if first and value is not None:
            first.store(value)
        return bool(first), first.value

    return client.effect(word, block)


def test_an_effect_is_had_once(any_caller: Caller) -> None:
    client = any_caller.client

    def body() -> Any:
        had = []
        for _ in range(2):
            first, value = mail(client, value={"number": 7})
            if first:
                client.write("order")
            had.append((first, value))
        client.commit()
        had.append(mail(client))
        client.commit()
        return had

    value = {"number": 7}
    assert running(any_caller, body) == [(True, value), (False, value), (False, value)]
    assert any_caller.business() == ["order"]
    assert effects(any_caller) == [("mail", '{"number": 7}')]
    assert any_caller.shop.budget.reconcile().ok


def test_a_rollback_leaves_neither(caller: Caller) -> None:
    client = caller.client

    def body() -> Any:
        had = []
        for end in (client.rollback, client.commit):
            had.append(mail(client)[0])
            client.write("order")
            end()
        return had

    assert running(caller, body) == [True, True]
    assert (caller.business(), effects(caller)) == (["order"], [("mail", None)])


@pytest.mark.parametrize("undo", [False, True])
def test_an_effect_in_a_savepoint_ends_with_it(caller: Caller, undo: bool) -> None:
    client = caller.client

    def body() -> None:
        client.write("order")
        client.effect_in_savepoint("mail", lambda first: first.store(1), undo)
        client.commit()

    running(caller, body)
    assert effects(caller) == ([] if undo else [("mail", "1")])
    assert caller.business() == ["order"]


def test_what_is_published_in_the_block_is_part_of_it(caller: Caller) -> None:
    client = caller.client
    seen: list[Any] = []

    def block(first: Any) -> None:
        if first:
            caller.draft.delay("a", 3)
            caller.plain.delay()

    def body() -> uuid.UUID | None:
        for end in (client.rollback, client.commit, client.commit):
            client.effect("mail", block)
            seen.append(caller.committed()[1:])
            end()
            seen.append(caller.committed()[1:])
        attempt = current_attempt()
        return attempt and attempt.reservation_id

    parent = running(caller, body)
    assert seen == [(0, 0), (0, 0), (0, 0), (3, 2), (3, 2), (3, 2)]
    rows = caller.shop.rows(schema.reservations)
    assert [row.parent_id for row in rows if row.task_name == "shop.draft"] == [parent]
    assert [row.parent_id for row in caller.outbox() if row.task_name == "shop.plain"] == [parent]


def test_a_block_that_raises_leaves_no_proof(caller: Caller) -> None:
    client = caller.client

    def fail(first: Any) -> None:
        caller.draft.delay("a", 3)
        raise LookupError

    def refuse(first: Any) -> None:
        caller.draft.delay("a", 11)

    def body() -> None:
        for block, error in ((fail, LookupError), (refuse, BudgetExceeded)):
            with pytest.raises(error):
                client.effect("mail", block)
        client.write("order")
        client.commit()

    running(caller, body)
    assert caller.committed() == (["order"], 0, 0)
    assert effects(caller) == []


def test_usage_is_recorded_inside(synchronous: Caller) -> None:
    """Through the caller's own connection where there can be no other writer."""
    client = synchronous.client

    def body() -> Any:
        def block(first: Any) -> list[Any]:
            return [usage.record(1, key="a"), usage.record(1, key="a"), usage.record(2)]

        done = client.effect("mail", block)
        done.append(usage.record(4))
        client.rollback()
        done.append(usage.record(8))
        return done

    assert running(synchronous, body) == [True, False, True, True, True]
    # Rolled back or not: it was used.
    assert synchronous.shop.amounts("tenant:b")[1] == 15
    assert synchronous.shop.budget.reconcile().ok


@pytest.mark.parametrize("commit", [True, False])
def test_effect_children_and_settlement_are_one(caller: Caller, commit: bool) -> None:
    client = caller.client

    def body() -> str:
        usage.record(5)
        client.effect("mail", lambda first: caller.draft.delay("a", 3) if first else None)
        client.write("order")
        client.settle("settled")
        assert caller.committed() == ([], 0, 0)
        client.commit() if commit else client.rollback()
        return "returned"

    value = running(caller, body)
    assert value == ("settled" if commit else "returned")
    assert caller.committed() == ((["order"], 3, 1) if commit else ([], 0, 0))
    assert len(effects(caller)) == int(commit)
    assert caller.shop.amounts("tenant:b") == (0, 5, 5)
    [row] = caller.shop.rows(schema.attempts)
    assert (row.outcome, row.lease_until_us) == ("returned", None)
    assert caller.shop.budget.reconcile().ok


def test_what_is_raised_after_the_settlement_changes_nothing(
    either: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    def body() -> None:
        either.client.settle([1, 2])
        either.client.commit()
        raise LookupError("too late")

    with caplog.at_level(logging.WARNING):
        assert running(either, body) == [1, 2]
    assert "has settled itself, and raised afterwards" in caplog.text


def test_nothing_is_had_after_the_settlement(either: Caller) -> None:
    client = either.client

    def body() -> None:
        client.settle(None)
        with pytest.raises(EffectError, match="has ended"):
            mail(client)
        with pytest.raises(EffectError, match="settle it once"):
            client.settle(None)
        client.rollback()
        assert mail(client)[0]
        client.settle(None)
        client.commit()
        with pytest.raises(EffectError, match="has ended"):
            mail(client)
        client.rollback()

    running(either, body)


def test_a_settlement_is_undone_with_its_savepoint(seen: Caller) -> None:
    client = seen.client

    def body() -> str:
        client.write("order")
        with suppress(Undone), client.savepoint():
            client.settle("first")
            raise Undone
        client.settle("second")
        client.commit()
        return "returned"

    assert running(seen, body) == "second"


# What cannot be.


def test_outside_of_a_task_there_is_none(either: Caller) -> None:
    for call in (
        lambda: effect(either.client.given, "mail"),
        lambda: settle(either.client.given, None),
        lambda: usage.idempotency_key("charge"),
    ):
        with pytest.raises(NotRunning, match="none runs in this thread"):
            call()

    @either.shop.app.task(name="shop.unbudgeted", shared=False)
    def unbudgeted() -> None:
        effect(either.client.given, "mail")

    with pytest.raises(NotRunning, match=r"effect\(\)"):
        unbudgeted.apply().get()


@pytest.mark.parametrize(
    "key", ["", "x" * 256, "a\nb", "a\x00", "\ud800", None, 7, b"mail"], ids=repr
)
def test_what_is_no_key_is_refused(on_sqlite: Caller, key: Any) -> None:
    def body() -> None:
        with pytest.raises(EffectError, match="an effect's key"):
            effect(on_sqlite.client.given, key)
        with pytest.raises(EffectError, match="a step"):
            usage.idempotency_key(key)

    running(on_sqlite, body)


@pytest.mark.parametrize("value", [object, float("nan"), {1, 2}, b"x", {(1, 2): 3}], ids=repr)
def test_what_json_cannot_hold_is_refused(on_sqlite: Caller, value: Any) -> None:
    def body() -> None:
        with effect(on_sqlite.client.given, "mail") as first:
            first.store("before")
            with pytest.raises(EffectError, match="cannot be written as JSON"):
                first.store(value)
            assert first.value == "before"
        with (
            effect(on_sqlite.client.given, "mail") as again,
            pytest.raises(EffectError, match="'mail' was had before, and keeps"),
        ):
            again.store(1)
        on_sqlite.client.commit()

    running(on_sqlite, body)
    assert effects(on_sqlite) == [("mail", '"before"')]


def test_a_value_is_what_json_gives_back(on_sqlite: Caller) -> None:
    def body() -> list[Any]:
        values = []
        for number, value in enumerate(((1, 2), "é\x00\ud800", {"a": [None, True, 1.5]}, None)):
            with effect(on_sqlite.client.given, str(number)) as one:
                one.store(value)
            values.append(one.value)
        on_sqlite.client.commit()
        return values

    assert running(on_sqlite, body) == [[1, 2], "é\x00\ud800", {"a": [None, True, 1.5]}, None]


def test_a_value_that_is_no_result_is_not_settled(on_sqlite: Caller) -> None:
    def body() -> str:
        with pytest.raises(EffectError, match="cannot be stored as a result"):
            settle(on_sqlite.client.given, object())
        return "returned"

    assert running(on_sqlite, body) == "returned"


def test_a_connection_to_another_ledger(make_caller: Make) -> None:
    caller, other = make_caller("sqlite"), make_caller("sqlite", Sqlite)

    def body() -> None:
        with pytest.raises(EnlistError, match="SQLite file"):
            mail(other.client)
        with pytest.raises(EnlistError, match="SQLite file"):
            other.client.settle(None)

    running(caller, body)
    assert effects(caller) == effects(other) == []


@pytest.mark.postgres
@pytest.mark.parametrize("kind", [Session, Psycopg, AsyncPsycopg], ids=lambda kind: kind.__name__)
def test_a_connection_to_another_database(make_caller: Make, kind: type[Any]) -> None:
    caller, other = make_caller("postgresql"), make_caller("postgresql", kind)

    def body() -> None:
        with pytest.raises(EnlistError, match="another database"):
            mail(other.client)

    running(caller, body)


@pytest.mark.postgres
def test_a_connection_in_autocommit(make_caller: Make) -> None:
    caller = make_caller("postgresql", Psycopg)
    caller.client.given.autocommit = True

    def body() -> None:
        with pytest.raises(EnlistError, match="autocommit"):
            mail(caller.client)

    running(caller, body)


@pytest.mark.postgres
def test_with_and_async_with(make_caller: Make) -> None:
    caller = make_caller("postgresql", Async)

    def body() -> None:
        with (
            pytest.raises(EnlistError, match="use 'async with'"),
            effect(caller.client.given, "mail"),
        ):
            pass
        with pytest.raises(EnlistError, match="asynchronous"):
            settle(caller.client.given, None)

    running(caller, body)


def test_a_transaction_that_is_rolled_back_inside_of_the_block(synchronous: Caller) -> None:
    client = synchronous.client

    def roll_back(first: Any) -> None:
        client.rollback()
        client.write("order")

    def body() -> None:
        with pytest.raises((EnlistError, EffectError), match=r"has ended inside|was rolled back"):
            client.effect("mail", roll_back)
        client.rollback()

    running(synchronous, body)
    assert (synchronous.business(), effects(synchronous)) == ([], [])


def test_an_attempt_that_lost_its_claim(either: Caller) -> None:
    def body() -> None:
        attempt = current_attempt()
        assert attempt is not None
        claim_id, attempt.claim_id = attempt.claim_id, uuid.uuid4()
        for call in (lambda: mail(either.client), lambda: either.client.settle(None)):
            with pytest.raises(ClaimLost, match="lost its claim"):
                call()
        either.client.write("order")
        either.client.commit()
        attempt.claim_id = claim_id

    running(either, body)
    assert effects(either) == []
    # The transaction could go on.
    assert either.business() == ["order"]


def test_another_thread_runs_no_task(either: Caller) -> None:
    def body() -> list[Any]:
        raised: list[Any] = []

        def beside() -> None:
            try:
                effect(either.client.given, "mail")
            except NotRunning as error:
                raised.append(error.what)

        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        return raised

    assert running(either, body) == ["effect()"]


# Keys of calls outside.


def test_a_key_is_the_same_for_one_request_and_step(on_sqlite: Caller) -> None:
    """In each attempt: here a retry."""
    seen: list[list[str]] = []

    @budgeted(budget="tenant:b", estimate=1)
    @on_sqlite.shop.app.task(name="shop.charge", shared=False, bind=True, max_retries=1)
    def charge(self: Any) -> None:
        seen.append([usage.idempotency_key(step) for step in ("charge", "charge", "refund")])
        attempt = current_attempt()
        assert attempt is not None
        if self.request.retries == 0:
            raise self.retry(countdown=0)

    for _ in range(2):
        charge.apply()
    (one, two), (other, _) = seen[:2], seen[2:]
    assert one == two
    assert one[0] == one[1] != one[2]
    assert not {*one} & {*other}
    for key in one:
        assert str(uuid.UUID(key)) == key
        assert uuid.UUID(key).version == 5


# Settings.


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ({"budget_effect_retention_seconds": 60}, "budget_park_seconds"),
        ({"broker_transport_options": {"visibility_timeout": 10**6}}, "visibility_timeout"),
        (
            {"budget_effect_retention_seconds": 600, "budget_park_seconds": 60},
            "visibility_timeout a message may come again after 3600",
        ),
    ],
)
def test_effects_are_kept_for_as_long_as_messages_may_come(conf: dict[str, Any], said: str) -> None:
    budget = installed_on(make_app(budget_database_url="sqlite:////tmp/none.db", **conf))
    with pytest.raises(ConfigurationError, match=said):
        budget.settings  # noqa: B018 - it is read there
