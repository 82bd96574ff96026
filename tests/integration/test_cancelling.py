"""Cancelling by ``budget.cancel`` and by its command: what waits, and what a real worker runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import chord, group, states
from celery.app.task import Context
from celery.exceptions import ChordError, TaskRevokedError

from celery_budget import RequestRuns, UnknownRequest, budgeted, usage
from celery_budget.integration import install
from celery_budget.integration.context import attach
from celery_budget.integration.execution import AttemptBackend
from celery_budget.store import schema
from tests.cluster import Cluster, eventually
from tests.contract.support import RETRIED, Ledger
from tests.integration.commands import Run, runner
from tests.integration.support import Shop
from tests.integration.tenant import WAIT, Tenant


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def declare(shop: Shop, body: Callable[..., Any], **options: Any) -> Any:
    task = shop.app.task(name="cancelled.task", shared=False, **options)(body)
    return budgeted(budget="tenant:a", estimate=6)(task)


def nothing() -> None:
    pass


@pytest.mark.parametrize("published", [False, True])
def test_the_command_ends_what_has_not_started(on_both: Shop, run: Run, published: bool) -> None:
    task_id = declare(on_both, nothing).delay().id
    if published:
        on_both.relay()
    done = run(on_both.app, "cancel", task_id)
    assert (done.code, done.out, done.err) == (0, f"{task_id} was cancelled\n", "")
    again = run(on_both.app, "cancel", task_id, "--terminate", "--json").json
    assert again == {"cancelled": task_id, "outcome": "ended"}
    assert on_both.amounts("tenant:a") == (0, 0, 10)
    assert on_both.app.AsyncResult(task_id).state == states.REVOKED


def test_the_command_says_what_cannot_be_cancelled(shop: Shop, run: Run) -> None:
    assert run(shop.app, "cancel", "nothing").failed(1, "no request 'nothing'")
    assert run(shop.app, "cancel").failed(2, "TASK_ID")
    result = declare(shop, nothing).apply()
    assert run(shop.app, "cancel", result.id).failed(1, "has ended")
    assert run(shop.app, "cancel", result.id).failed(1, f"explain {result.id}")


def test_outside_of_a_task_nothing_is_cancelled() -> None:
    assert usage.cancelled() is False


def test_what_runs_in_place_is_told_and_not_retried(on_both: Shop) -> None:
    seen: list[Any] = []

    def body(self: Any) -> None:
        usage.record(2)
        seen.append(usage.cancelled())
        seen.append(on_both.budget.cancel(self.request.id))
        seen.append(usage.cancelled())
        seen.append(self.request.id)
        raise self.retry(countdown=0)

    with pytest.raises(TaskRevokedError):
        declare(on_both, body, bind=True, max_retries=3).apply()
    assert seen[:-1] == [False, "requested", True]
    assert on_both.amounts("tenant:a") == (0, 2, 8)
    [story] = on_both.budget.explain(seen[-1])
    assert (story.reservation["state"], story.reservation["reason"]) == ("settled", "cancelled")
    assert on_both.budget.cancel(seen[-1]) == "ended"


def test_a_running_one_is_shown_with_its_cancellation(shop: Shop, run: Run) -> None:
    shown: dict[str, Any] = {}

    def body(self: Any) -> None:
        shown["done"] = run(shop.app, "cancel", self.request.id)
        shown["report"] = run(shop.app, "report").out
        shown["open"] = run(shop.app, "reconcile", "--json").json["open"]
        shown["story"] = run(shop.app, "explain", self.request.id).out

    result = declare(shop, body, bind=True).apply()
    assert shown["done"].out == f"{result.id} runs; it was asked to stop\n"
    assert "1 cancellation requested" in shown["report"]
    assert shown["open"]["cancelling"] == 1
    assert "cancelled while it ran" in shown["story"]
    assert shop.budget.reconcile().open_work["cancelling"] == 0


ANSWERS = {
    "terminated": [{"w@host": {"ok": "terminate: TASK"}}],
    "unknown": [{"w@host": {"ok": "terminate: tasks unknown"}}],
    "cannot": [{"w@host": {"error": "NotImplementedError()"}}],
    "nobody": [],
    "nothing": None,
}


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("answer", ANSWERS)
def test_what_a_worker_says_of_a_termination_is_told(
    shop: Shop, run: Run, answer: str, listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    def revoke(task_id: str, **options: Any) -> Any:
        sent.append((task_id, options))
        said = ANSWERS[answer]
        return said and [
            {node: {kind: text.replace("TASK", task_id) for kind, text in reply.items()}}
            for one in said
            for node, reply in one.items()
        ]

    monkeypatch.setattr(shop.app.control, "revoke", revoke)
    shop.app.conf.worker_enable_remote_control = listens
    ledger = Ledger(shop.budget.store, shop.budget.settings)
    waits = ledger.reserve(1, budget="tenant:a")
    assert shop.budget.cancel(waits.task_id, terminate=True) == "ended"
    request = ledger.reserve(1, budget="tenant:a")
    ledger.run(request, worker="w@host/123")
    assert sent == []
    done = run(shop.app, "cancel", request.task_id, "--terminate")
    options = {"destination": ["w@host"], "terminate": True, "signal": "SIGTERM", "reply": True}
    assert sent == [(request.task_id, {**options, "timeout": 3.0, "limit": 1})]
    if answer == "terminated":
        assert done.out == f"{request.task_id} runs; its worker ends the process that runs it\n"
    else:
        no_answer = "it was asked to stop, and no worker says that it ends its process"
        deaf = "" if listens else "; with worker_enable_remote_control off none can be asked"
        assert done.out == f"{request.task_id} runs; {no_answer}{deaf}\n"
    again = run(shop.app, "cancel", request.task_id, "--terminate", "--json").json
    outcome = "terminated" if answer == "terminated" else "requested"
    assert again == {"cancelled": request.task_id, "outcome": outcome}


def test_nobody_is_asked_to_end_what_runs_in_place(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(type(shop.app.control), "revoke")
    outcomes: list[str] = []

    def body(self: Any) -> None:
        outcomes.append(shop.budget.cancel(self.request.id, terminate=True))

    declare(shop, body, bind=True).apply().get()
    assert outcomes == ["requested"]


def test_one_that_was_retried_just_before_stays_revoked(on_both: Shop) -> None:
    """Its worker stores RETRY once the ledger has said so: here after REVOKED was."""
    ledger = Ledger(on_both.budget.store, on_both.budget.settings)
    backend = AttemptBackend(on_both.app.backend)
    for cancelled in (False, True):
        request, attempt = ledger.start(1, budget="tenant:a")
        ledger.retry(request, attempt)
        attempt.end(RETRIED)
        if cancelled:
            assert on_both.budget.cancel(request.task_id) == "ended"
        context = Context(id=request.task_id)
        attach(context, attempt)
        backend.mark_as_retry(request.task_id, ValueError(), None, request=context)
        state = on_both.app.AsyncResult(request.task_id).state
        assert state == (states.REVOKED if cancelled else states.RETRY)


# With a real worker


def running(tenant: Tenant, task: str, *args: Any) -> Any:
    """Publish a task; return its result once it runs."""
    result = tenant.task(task).delay(tenant.name, *args)
    eventually(lambda: f"{task} {tenant.name}" in tenant.cluster.journal(), what="its start")
    return result


@pytest.mark.redis
@pytest.mark.postgres
@pytest.mark.parametrize(("then", "ends"), [("return", states.SUCCESS), ("raise", states.FAILURE)])
def test_a_running_task_sees_it_and_ends_as_it_likes(tenant: Tenant, then: str, ends: str) -> None:
    result = running(tenant, "stoppable", then)
    assert tenant.cluster.budget.cancel(result.id) == "requested"
    result.get(timeout=WAIT, propagate=False)
    assert result.state == ends
    tenant.spent(2)
    assert tenant.story(result.id).reservation["reason"] is None
    with pytest.raises(RequestRuns, match="settled"):
        tenant.cluster.budget.cancel(result.id)


@pytest.mark.redis
@pytest.mark.postgres
@pytest.mark.parametrize("then", ["retry", "reject"])
def test_a_cancelled_task_does_not_come_again(tenant: Tenant, then: str) -> None:
    result = running(tenant, "stoppable", then)
    assert tenant.cluster.budget.cancel(result.id) == "requested"
    with pytest.raises(TaskRevokedError):
        result.get(timeout=WAIT)
    tenant.spent(2)
    assert tenant.story(result.id).reservation["reason"] == "cancelled"
    assert tenant.cluster.budget.cancel(result.id) == "ended"
    assert result.state == states.REVOKED
    assert tenant.cluster.journal().count(f"stoppable {tenant.name}") == 1


@pytest.mark.redis
@pytest.mark.postgres
def test_a_running_task_is_terminated(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "ANSWER_SECONDS", float(WAIT))
    result = running(tenant, "slow", 60)
    assert tenant.cluster.budget.cancel(result.id, terminate=True) == "terminated"
    with pytest.raises(TaskRevokedError):
        result.get(timeout=WAIT)
    tenant.spent(6)
    assert tenant.story(result.id).reservation["state"] == "lost"
    assert tenant.cluster.journal().count(f"slow {tenant.name}") == 1
    with pytest.raises(RequestRuns, match="lost"):
        tenant.cluster.budget.cancel(result.id)


@pytest.mark.redis
@pytest.mark.postgres
def test_a_retry_that_waits_is_not_started(tenant: Tenant) -> None:
    result = tenant.task("retried").delay(1, tenant.name, countdown=3600)
    eventually(lambda: result.state, lambda state: state == states.RETRY)
    assert tenant.cluster.budget.cancel(result.id) == "ended"
    with pytest.raises(TaskRevokedError):
        result.get(timeout=WAIT)
    tenant.spent(1)


@pytest.mark.redis
@pytest.mark.postgres
@pytest.mark.parametrize("member", ["eta", "waits", "runs", "rejects"])
def test_the_chord_of_a_cancelled_member_fails_as_where_celery_revokes_it(
    tenant: Tenant, member: str
) -> None:
    work, name = tenant.task("work"), tenant.name
    cancelled = {
        "eta": work.s("late", name).set(countdown=3600),
        "waits": tenant.task("retried").s(1, name, countdown=3600),
        "runs": tenant.task("stoppable").s(name, "retry"),
        "rejects": tenant.task("stoppable").s(name, "reject"),
    }
    whole = chord([work.s("early", name), cancelled[member]])(tenant.task("total").s(name))
    early, result = whole.parent.results
    early.get(timeout=WAIT)
    if member == "waits":
        eventually(lambda: result.state, lambda state: state == states.RETRY)
    elif member != "eta":
        eventually(lambda: f"stoppable {name}" in tenant.cluster.journal(), what="its start")
    runs = member in ("runs", "rejects")
    assert tenant.cluster.budget.cancel(result.id) == ("requested" if runs else "ended")
    with pytest.raises(ChordError, match="cancelled"):
        tenant.cluster.app.AsyncResult(whole.id).get(timeout=WAIT)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=WAIT)
    used = {"eta": 0, "waits": 1}.get(member, 2)
    eventually(lambda: tenant.cluster.budget.balance(tenant.budget).reserved, lambda one: one == 0)
    assert tenant.story(result.id).reservation["reason"] == "cancelled"
    [line] = tenant.story(result.id).lines
    assert line["settled"] == used
    assert tenant.cluster.journal().count(f"late {name}") == 0


@pytest.mark.parametrize("grouped", [True, False])
def test_what_tells_a_chord_is_published_once_and_draws_on_nothing(
    on_both: Shop, grouped: bool
) -> None:
    task = declare(on_both, nothing)
    countdown = task.s().set(countdown=3600)
    result = group([countdown]).apply_async().results[0] if grouped else countdown.apply_async()
    for _ in range(2):
        assert on_both.budget.cancel(result.id) == "ended"
    left = on_both.rows(schema.outbox)
    assert [(row.reservation_id, row.task_id) for row in left] == [(None, result.id)] * grouped
    assert on_both.relay().published == int(grouped)
    assert on_both.relay().published == 0
    assert [one.headers["eta"] for one in on_both.received()] == [None] * grouped
    assert on_both.amounts("tenant:a") == (0, 0, 10)
    assert on_both.rows(schema.outbox) == []


@pytest.mark.redis
@pytest.mark.postgres
def test_what_is_not_known_is_told(tenant: Tenant) -> None:
    with pytest.raises(UnknownRequest):
        tenant.cluster.budget.cancel("nothing", terminate=True)


@pytest.mark.redis
@pytest.mark.postgres
@pytest.mark.parametrize("store", ["sqlite_url", "postgres_url"])
@pytest.mark.parametrize(
    "broker", ["redis_url", pytest.param("rabbitmq_url", marks=pytest.mark.rabbitmq)]
)
def test_a_queued_one_does_not_start_though_the_broker_delivers_it(
    request: pytest.FixtureRequest, tmp_path: Path, redis_url: str, broker: str, store: str
) -> None:
    cluster = Cluster(
        tmp_path,
        {
            "broker_url": request.getfixturevalue(broker),
            "result_backend": redis_url,
            "budget_database_url": request.getfixturevalue(store),
        },
    )
    try:
        cluster.budget.set("tenant:a", limit=100, unit="tokens")
        cluster.relay()
        cancelled, kept = (cluster.task("draft").delay(size, "a") for size in (4, 5))
        eventually(cluster.counts, lambda counts: counts["published"] == 2, what="publication")
        assert cluster.budget.cancel(cancelled.id) == "ended"
        cluster.worker(concurrency=1)
        assert kept.get(timeout=WAIT) == 5
        assert cancelled.state == states.REVOKED
        assert cluster.journal() == ["draft 5"]
        cluster.settle()
        assert cluster.budget.balance("tenant:a").spent == 5
    finally:
        cluster.stop()
