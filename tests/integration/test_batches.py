"""Batches as blocks: what has ended takes nothing, and nothing is lost or doubled."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from celery import chord, group
from celery.exceptions import Ignore
from sqlalchemy import event

from celery_budget import BudgetExceeded, NotInstalled, PolicyError, StoreError, budgeted
from celery_budget.store import schema
from tests.integration.support import Shop, make_app


@pytest.fixture
def shop(on_both: Shop) -> Shop:
    """A shop with ``work`` (3 of 10 tokens) and ``plain``."""
    app = on_both.app

    @budgeted(budget="tenant:{tenant}", estimate=3)
    @app.task(name="shop.work", shared=False)
    def work(number: Any, tenant: str = "a") -> Any:
        return number

    @app.task(name="shop.plain", shared=False)
    def plain(number: Any) -> Any:
        return number

    return on_both


def names(shop: Shop) -> list[str]:
    """The tasks in the outbox."""
    return sorted(row.task_name for row in shop.rows(schema.outbox))


def test_what_a_context_publishes_after_the_block_goes_out_by_itself(shop: Shop) -> None:
    work = shop.task("shop.work")
    with shop.budget.batch():
        later = contextvars.copy_context()
    later.run(work.delay, 1)
    assert names(shop) == ["shop.work"]


def test_a_thread_that_outlives_the_block_is_told(shop: Shop) -> None:
    """It had the batch in hand when the block ended."""
    work = shop.task("shop.work")
    errors: list[Exception] = []
    in_hand, ended = threading.Event(), threading.Event()

    def publish() -> None:
        def stand_still(**_: Any) -> None:
            in_hand.set()
            ended.wait(30)

        from celery.signals import before_task_publish

        before_task_publish.connect(stand_still, weak=False, dispatch_uid="stand still")
        try:
            work.delay(1)
        except PolicyError as error:
            errors.append(error)
        finally:
            before_task_publish.disconnect(dispatch_uid="stand still")

    with shop.budget.batch():
        thread = threading.Thread(target=contextvars.copy_context().run, args=(publish,))
        thread.start()
        assert in_hand.wait(30)
    ended.set()
    thread.join()
    assert [str(error).startswith("the batch that this") for error in errors] == [True]
    assert names(shop) == []


def test_a_block_that_ends_out_of_turn_revives_none(shop: Shop) -> None:
    work = shop.task("shop.work")

    def generator() -> Iterator[None]:
        with shop.budget.batch():
            yield

    held = generator()
    next(held)
    with shop.budget.batch():
        work.delay(1)
        held.close()
        work.delay(2)
    work.delay(3)
    assert names(shop) == ["shop.work"] * 3


def test_a_block_that_a_replaced_task_ends_is_admitted(shop: Shop) -> None:
    work = shop.task("shop.work")
    for number, error in enumerate((Ignore(), ValueError("x"))):
        with pytest.raises(type(error)), shop.budget.batch():
            _publish_and_raise(work, number, error)
    assert names(shop) == ["shop.work"]


def _publish_and_raise(task: Any, number: int, error: Exception) -> None:
    task.delay(number)
    raise error


@contextmanager
def answer_lost_once(shop: Shop) -> Iterator[None]:
    """Have the answer to the next commit that writes a message be lost."""
    engine = shop.budget.store._engine
    lost: list[bool] = []

    @event.listens_for(engine, "commit")
    def commit(connection: sa.Connection) -> None:
        if not lost and connection.info.pop("wrote", False):
            lost.append(True)
            connection.connection.dbapi_connection.commit()  # type: ignore[union-attr]
            raise sa.exc.OperationalError("COMMIT", {}, ConnectionError("lost"), None)  # type: ignore[arg-type]

    @event.listens_for(engine, "before_cursor_execute")
    def execute(connection: sa.Connection, _: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("INSERT INTO budget_outbox"):
            connection.info["wrote"] = True

    try:
        yield
    finally:
        event.remove(engine, "commit", commit)
        event.remove(engine, "before_cursor_execute", execute)
    assert lost


@pytest.mark.parametrize("how", ["group", "batch", "ordered"])
def test_a_lost_answer_doubles_no_message(shop: Shop, how: str) -> None:
    if shop.budget.store.dialect == "sqlite":
        pytest.skip("nothing lies between SQLite and its file")
    work, plain = shop.task("shop.work"), shop.task("shop.plain")
    with answer_lost_once(shop):
        if how == "group":
            group(work.s(1), plain.s(2)).apply_async()
        elif how == "batch":
            with shop.budget.batch():
                work.delay(1)
                plain.delay(2)
        else:
            work.delay(1)
            plain.apply_async((2,), order_key="k")
    assert names(shop) == ["shop.plain", "shop.work"]


@pytest.mark.parametrize("where", ["alone", "batch", "partial"])
def test_a_canvas_again_runs_none_of_its_tasks_twice(shop: Shop, where: str) -> None:
    work, plain = shop.task("shop.work"), shop.task("shop.plain")

    def nightly() -> None:
        canvas = group(work.s(1), work.s(2), plain.s(3))
        if where == "batch":
            with shop.budget.batch():
                canvas.apply_async(request_id="r")
        else:
            canvas.apply_async(request_id="r", partial=where == "partial")

    for _ in range(2):
        nightly()
    assert names(shop) == ["shop.plain", "shop.work", "shop.work"]


def test_of_units_that_share_a_request_each_says_why(shop: Shop) -> None:
    work = shop.task("shop.work")
    with shop.budget.batch(partial=True) as batch:
        group(work.s(1).set(task_id="same"), work.s(2, "nobody")).apply_async()
        work.apply_async((1,), task_id="same")
    assert len(batch.refused) == 3
    assert names(shop) == []


def test_a_database_that_is_away_is_an_error_at_once(shop: Shop) -> None:
    plain = shop.task("shop.plain")
    shop.budget.store.dispose()
    shop.app.conf.budget_database_url = "postgresql+psycopg://nobody@127.0.0.1:1/nowhere"
    other = make_app("away", budget_database_url=shop.app.conf.budget_database_url)
    other.tasks.register(plain)
    with pytest.raises(StoreError):
        other.send_task("shop.plain", (1,), order_key="k")
    other.close()


@pytest.mark.parametrize("key", [3, "", [1], 2**70, "a\0b", object()])
def test_an_order_key_is_text(shop: Shop, key: Any) -> None:
    for name in ("work", "plain"):
        with pytest.raises(PolicyError, match="order_key="):
            shop.task(f"shop.{name}").apply_async((1,), order_key=key)
    assert names(shop) == []


def test_options_of_a_whole_are_checked_where_it_is_published(shop: Shop) -> None:
    work, plain = shop.task("shop.work"), shop.task("shop.plain")
    before = shop.ledger()
    for wrong in (
        lambda: (plain.s(1) | work.s()).apply_async(reserve="chain"),
        lambda: (group(work.s(1), work.s(2)) | work.s()).apply_async(reserve="chain"),
        lambda: chord([work.s(1)], work.s()).apply_async(reserve="chain"),
        lambda: (work.s(1) | work.s()).apply_async(partial=True),
        lambda: work.apply_async((1,), partial=True),
        (work.s(1) | work.s().set(request_id="r")).apply_async,
        lambda: group(group(work.s(1)).set(request_id="r"), work.s(2)).apply_async(),
        lambda: chord([work.s(1)], work.s().set(request_id="r")).apply_async(),
    ):
        with pytest.raises(PolicyError):
            wrong()
    assert shop.ledger() == before


def test_what_is_set_for_the_whole_reaches_no_message(shop: Shop) -> None:
    work = shop.task("shop.work")
    result = group(work.s(number) for number in range(4)).set(partial=True).apply_async()
    assert [type(one.error) for one in result.refused] == [BudgetExceeded]
    assert all("partial" not in row.envelope for row in shop.rows(schema.outbox))
    assert group(shop.task("shop.plain").s(1)).apply_async(partial=True).refused == ()


def test_an_amqp_class_that_comes_too_late_is_told() -> None:
    app = make_app("late", budget_database_url="sqlite:////nowhere/ledger.db")

    @budgeted(budget="b", estimate=1)
    @app.task(name="late.work", shared=False)
    def work() -> None: ...

    app.amqp_cls = "celery.app.amqp:AMQP"
    with pytest.raises(NotInstalled, match="amqp_cls"):
        work.delay()
    app.close()
