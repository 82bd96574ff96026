"""What makes each error of the package happen, by public calls alone; see ``catalogue.toml``.

Time that has passed, and what another process has done, is written into the ledger.
"""

from __future__ import annotations

import sqlite3
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from celery_budget import BudgetedTask, CeleryBudget, budgeted, effect, usage
from celery_budget.integration.context import current_attempt, installed_on
from celery_budget.integration.service import RelayService
from celery_budget.store import schema
from tests.integration.support import Shop, make_app

PAST = datetime(2020, 1, 1, tzinfo=timezone.utc)


@dataclass
class Scene:
    """What a cause has to work with."""

    make: Callable[..., Shop]
    patch: pytest.MonkeyPatch
    folder: Path
    #: Starts the server with the first call.
    postgres: Callable[[], str]

    @property
    def shop(self) -> Shop:
        """A shop whose budget ``tenant:a`` has 10 tokens."""
        return self.make()

    def run(self, body: Callable[[], Any], shop: Shop | None = None, **terms: Any) -> Any:
        """Run a body in a task with a budget, in this process; what it raises is raised."""
        return declared(shop or self.shop, body, **terms).apply(throw=True)


Cause = Callable[[Scene], Any]
CAUSES: dict[str, Cause] = {}


def cause(run: Cause) -> Cause:
    CAUSES[run.__name__] = run
    return run


def declared(shop: Shop, body: Callable[..., Any] | None = None, **terms: Any) -> Any:
    """The task ``draft``, which asks 6 tokens of ``tenant:a``."""

    def nothing() -> None:
        pass

    given = body or nothing

    def work(*args: Any) -> Any:
        # Celery reads a task's arguments from its source, which a lambda's line is not.
        return given(*args)

    asks = {"budget": "tenant:a", "estimate": 6, **terms}
    made = shop.app.task(base=BudgetedTask, name="draft", lazy=False, **asks)
    return made(work)


# Where it is published.


@cause
def more_than_is_left(scene: Scene) -> None:
    declared(scene.shop, estimate=11).delay()


@cause
def held_by_others(scene: Scene) -> None:
    draft = declared(scene.shop)
    draft.delay()
    draft.delay()


@cause
def a_closed_budget(scene: Scene) -> None:
    shop = scene.shop
    shop.budget.close("tenant:a")
    declared(shop).delay()


@cause
def a_limit_of_nothing(scene: Scene) -> None:
    shop = scene.shop
    shop.budget.set("tenant:a", limit=0)
    declared(shop).delay()


@cause
def too_much_is_parked(scene: Scene) -> None:
    draft = declared(scene.make(budget_max_parked=1), estimate=11, on_refused="park", park_for=60)
    draft.delay()
    draft.delay()


@cause
def the_outbox_is_full(scene: Scene) -> None:
    shop = scene.make(budget_max_outbox=1)
    draft = declared(shop, estimate=1)
    draft.delay()
    draft.delay()
    # The time of its last count is over.
    shop.sql(schema.backlog.update().values(counted_us=1))
    draft.delay()


@cause
def a_full_lane(scene: Scene) -> None:
    shop = scene.shop
    shop.budget.lanes.set(
        "llm", queues=[shop.app.conf.task_default_queue], max_waiting_jobs=1, max_queued_jobs=1
    )
    draft = declared(shop, estimate=1)
    for _ in range(3):
        draft.delay()


@cause
def nobody_made_the_budget(scene: Scene) -> None:
    declared(scene.shop, budget="tenant:b").delay()


@cause
def a_budget_of_somebody_else(scene: Scene) -> None:
    declared(scene.shop, authorize=lambda draw: draw.caller == "a").delay()


@cause
def one_id_for_two_requests(scene: Scene) -> None:
    draft = declared(scene.shop, lambda *text: None, estimate=1)
    for text in "ab":
        draft.apply_async((text,), request_id="order-1")


@cause
def an_estimate_that_is_no_integer(scene: Scene) -> None:
    declared(scene.shop, estimate=lambda: 1.5).delay()


@cause
def an_estimator_that_raises(scene: Scene) -> None:
    declared(scene.shop, estimate=lambda: 1 // 0).delay()


@cause
def an_estimate_beyond_its_bounds(scene: Scene) -> None:
    from celery_budget import estimator

    @estimator("catalogue.draft", version="2", at_most=5)
    def seven() -> int:
        return 7

    declared(scene.shop, estimate=seven).delay()


@cause
def a_budget_of_an_argument_it_does_not_take(scene: Scene) -> None:
    declared(scene.shop, budget="tenant:{tenant}").delay()


@cause
def a_name_with_a_line_break(scene: Scene) -> None:
    scene.shop.budget.set("tenant\n", limit=1, unit="tokens")


@cause
def an_old_protocol(scene: Scene) -> None:
    declared(scene.make(task_protocol=1)).delay()


@cause
def an_application_without_a_ledger(scene: Scene) -> None:
    app = make_app(budget=False, task_always_eager=True)
    try:

        def draft() -> None:
            pass

        task = app.task(name="draft", shared=False)(draft)
        budgeted(budget="b", estimate=1)(task).delay()
    finally:
        app.close()


@cause
def a_second_ledger(scene: Scene) -> None:
    CeleryBudget(scene.shop.app)


@cause
def no_database_is_named(scene: Scene) -> None:
    app = make_app()
    try:
        declared(Shop(app, installed_on(app))).delay()
    finally:
        app.close()


@cause
def a_setting_of_the_wrong_kind(scene: Scene) -> None:
    app = make_app(
        budget_database_url=f"sqlite:///{scene.folder}/ledger.db", budget_lease_seconds="soon"
    )
    try:
        declared(Shop(app, installed_on(app))).delay()
    finally:
        app.close()


@cause
def tables_that_nobody_made(scene: Scene) -> None:
    declared(scene.make(init=False)).delay()


@cause
def tables_of_a_later_release(scene: Scene) -> None:
    shop = scene.shop
    shop.sql(sa.text("update budget_alembic_version set version_num = '9999'"))
    shop.budget.check()


@cause
def a_folder_that_is_not_there(scene: Scene) -> None:
    scene.make(budget_database_url=f"sqlite:///{scene.folder}/no/ledger.db")


@cause
def a_server_that_does_not_answer(scene: Scene) -> None:
    # The password must not be told.
    scene.make(budget_database_url="postgresql+psycopg://shop:hush@127.0.0.1:1/shop")


@cause
def a_replica_that_does_not_answer(scene: Scene) -> None:
    url = "postgresql+psycopg://shop:hush@127.0.0.1:1/shop"
    shop = scene.make(budget_database_url=scene.postgres(), budget_report_url=url)
    shop.budget.report()


@cause
def an_extra_that_is_not_installed(scene: Scene) -> None:
    scene.patch.setitem(sys.modules, "prometheus_client", None)
    RelayService(scene.shop.budget, metrics_port=1).start()


@cause
def a_connection_to_another_database(scene: Scene) -> None:
    other = sqlite3.connect(scene.folder / "other.db")
    try:
        with scene.shop.budget.enlist(other):
            pass
    finally:
        other.close()


@cause
def a_connection_to_another_kind_of_database(scene: Scene) -> None:
    other = psycopg.connect(scene.postgres().replace("+psycopg", ""))
    try:
        with scene.shop.budget.enlist(other):
            pass
    finally:
        other.close()


# Where a budget is changed.


@cause
def a_new_budget_without_a_unit(scene: Scene) -> None:
    scene.shop.budget.set("tenant:b", limit=1)


@cause
def a_parent_that_is_not_there(scene: Scene) -> None:
    scene.shop.budget.set("tenant:b", limit=1, unit="tokens", parent="all")


@cause
def no_such_period(scene: Scene) -> None:
    scene.shop.budget.set("tenant:b", limit=1, unit="tokens", period="fortnight")


@cause
def no_such_grouping(scene: Scene) -> None:
    scene.shop.budget.report(by="moon")


@cause
def a_lane_without_a_queue(scene: Scene) -> None:
    scene.shop.budget.lanes.set("llm", queues=[])


@cause
def no_such_lane(scene: Scene) -> None:
    scene.shop.budget.lanes.pause("llm")


@cause
def closing_what_is_held(scene: Scene) -> None:
    shop = scene.shop
    declared(shop).delay()
    shop.budget.close("tenant:a")


@cause
def a_key_of_another_grant(scene: Scene) -> None:
    ledger = scene.shop.budget
    for amount in (1, 2):
        ledger.grant("tenant:a", amount, key="spring")


@cause
def distributing_a_file(scene: Scene) -> None:
    scene.shop.budget.init(distributed=True)


@cause
def an_invoice_that_is_no_table(scene: Scene) -> None:
    path = scene.folder / "usage.csv"
    path.write_text("x\n1\n")
    scene.shop.budget.compare_invoice(path)


# What becomes of requests.


@cause
def a_task_that_nobody_knows(scene: Scene) -> None:
    scene.shop.budget.cancel("6f0c")


@cause
def cancelling_what_has_run(scene: Scene) -> None:
    shop = scene.shop
    shop.budget.cancel(declared(shop).apply().id)


@cause
def a_message_that_is_not_in_quarantine(scene: Scene) -> None:
    scene.shop.budget.discard("6f0c")


@cause
def a_request_that_does_not_wait(scene: Scene) -> None:
    scene.shop.budget.discard_parked("6f0c")


@cause
def a_result_before_its_time(scene: Scene) -> None:
    shop = scene.shop
    shop.budget.result(declared(shop).delay().id, owner="tenant:a")


@cause
def a_result_after_its_time(scene: Scene) -> None:
    shop = scene.shop
    task_id = declared(shop).apply().id
    shop.sql(schema.reservations.update().values(ended_us=1))
    shop.budget.result(task_id, owner="tenant:a")


@cause
def running_again_what_has_failed_just_now(scene: Scene) -> None:
    from tests.contract.support import Ledger
    from tests.contract.test_spent import FAILED

    shop = scene.shop
    request, attempt = Ledger(shop.budget.store, shop.budget.settings).start(6, budget="tenant:a")
    attempt.end(FAILED)
    shop.budget.requeue(request.task_id)


@cause
def a_deadline_before_it_runs(scene: Scene) -> None:
    declared(scene.shop).apply(deadline=PAST, throw=True)


@cause
def a_worker_that_went_away(scene: Scene) -> None:
    shop = scene.shop

    def slow() -> None:
        shop.sql(schema.attempts.update().values(lease_until_us=0, suspected_us=1))
        shop.sweep()

    scene.run(slow, shop)


@cause
def a_retry_after_the_deadline(scene: Scene) -> None:
    shop = scene.shop

    def again(self: Any) -> None:
        # It passes between the retry's request and its own claim.
        shop.sql(schema.reservations.update().values(deadline_us=1))
        self.retry(countdown=0)

    declared(shop, again, bind=True, estimate=1).apply(deadline=60).get()


# In a running task.


@cause
def extending_beyond_the_budget(scene: Scene) -> None:
    scene.run(lambda: usage.extend(5))


@cause
def an_unreadable_reply(scene: Scene) -> None:
    scene.run(lambda: usage.record({"model": "gpt-5", "usage": {}}, provider="nobody"))


@cause
def a_price_that_nobody_knows(scene: Scene) -> None:
    shop = scene.shop
    shop.budget.set("money:a", limit=10, unit="micro-usd")
    reply = {"model": "m-1", "usage": {"input_tokens": 1, "output_tokens": 1}}

    def record() -> None:
        usage.record(reply, provider="anthropic", key="r-1")

    scene.run(record, shop, budget="money:a")


@cause
def more_than_is_held(scene: Scene) -> None:
    scene.run(lambda: usage.record(7), stop_at_hold=True)


@cause
def a_deadline_while_it_runs(scene: Scene) -> None:
    def body() -> None:
        attempt = current_attempt()
        assert attempt is not None
        attempt.until = 0.0
        usage.check()

    declared(scene.shop, body).apply(deadline=60, throw=True)


@cause
def another_attempt_in_its_place(scene: Scene) -> None:
    def body() -> None:
        attempt = current_attempt()
        assert attempt is not None
        mine, attempt.claim_id = attempt.claim_id, uuid.uuid4()
        try:
            usage.extend(1)
        finally:
            attempt.claim_id = mine

    scene.run(body)


@cause
def an_effect_outside_of_a_task(scene: Scene) -> None:
    effect(None, "mail")


@cause
def an_effect_without_a_key(scene: Scene) -> None:
    scene.run(lambda: usage.idempotency_key(""))


@cause
def a_usage_key_that_is_none(scene: Scene) -> None:
    scene.run(lambda: usage.record(1, key=""))


@cause
def a_stream_with_a_key_that_is_none(scene: Scene) -> None:
    scene.run(lambda: list(usage.stream([], key="")))
