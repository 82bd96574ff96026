"""Tasks that declare how long they are tried, in a real worker on the embedded default."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from typing import Any

import pytest
from celery import chain, chord, states
from celery.exceptions import ChordError, MaxRetriesExceededError, TaskRevokedError

from celery_budget import AttemptsSpent, ResultNotReady, UnknownRequest
from tests.apps import trying
from tests.cluster import Cluster, embedded_in, eventually
from tests.integration.support import current
from tests.integration.tenant import WAIT, Tenant


@pytest.fixture(scope="module")
def embedded_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker with a relay on SQLite, the filesystem transport and results in files."""
    folder = tmp_path_factory.mktemp("trying")
    cluster = Cluster(folder, embedded_in(folder, imports=[trying.__name__]))
    try:
        cluster.worker("--budget-relay", concurrency=2)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def tenant(embedded_cluster: Cluster) -> Tenant:
    return Tenant(embedded_cluster)


def task(tenant: Tenant, name: str) -> Any:
    return tenant.cluster.app.tasks[f"trying.{name}"]


def kept(tenant: Tenant, task_id: str) -> dict[str, Any]:
    tenant.story(task_id)
    return tenant.cluster.budget.quarantined(task_id).as_dict()


def succeeded(tenant: Tenant, result: Any) -> None:
    """Wait for a success; a result that has told of a failure asks no more."""
    eventually(lambda: tenant.cluster.app.AsyncResult(result.id).state, states.SUCCESS.__eq__)


def failed(tenant: Tenant, result: Any, error: type[Exception]) -> dict[str, Any]:
    """Wait for a failure; what is kept of it."""
    with pytest.raises(error):
        result.get(timeout=WAIT)
    return kept(tenant, result.id)


def test_attempts_are_counted_and_the_last_error_stands(tenant: Tenant) -> None:
    name = f"go-{tenant.name}"
    result = chain(
        task(tenant, "limited").s(tenant.name, name).on_error(task(tenant, "told").s()),
        task(tenant, "after").s(),
    ).apply_async()
    first = result.parent
    one = failed(tenant, first, ValueError)
    assert (one["reason"], one["error"], one["attempts"], one["used"]) == (
        "max_attempts",
        f"ValueError('{name}')",
        2,
        {tenant.budget: 4},
    )
    assert one["args"] == f"({tenant.name!r}, {name!r})"
    assert "in limited\n" in one["traceback"]
    assert tenant.outcomes(first.id) == ["retried", "raised"]
    tenant.spent(4)
    eventually(lambda: f"told {first.id}" in tenant.cluster.journal())
    assert result.state == states.FAILURE, "as Celery stores it for what follows"

    # Again in vain, then with success: each a new request, with attempts and retries of its own.
    tenant.cluster.budget.requeue(first.id)
    eventually(lambda: len(tenant.cluster.budget.explain(first.id)), lambda many: many == 2)
    again = kept(tenant, first.id)
    assert (again["reason"], again["attempts"]) == ("max_attempts", 2)
    assert again["quarantine_id"] != one["quarantine_id"]
    tenant.spent(8)
    tenant.cluster.release(name)
    tenant.cluster.budget.requeue(again["quarantine_id"])
    succeeded(tenant, first)
    succeeded(tenant, result)
    assert f"after {name}" in tenant.cluster.journal()
    tenant.spent(10)
    runs = [line for line in tenant.cluster.journal() if line.startswith(f"limited {name}")]
    assert [line[-1] for line in runs] == ["0", "1", "0", "1", "0"]


def test_a_terminal_error_is_not_retried(tenant: Tenant) -> None:
    result = task(tenant, "hopeless").delay(tenant.name)
    one = failed(tenant, result, KeyError)
    assert (one["reason"], one["attempts"]) == ("terminal", 1)
    assert tenant.outcomes(result.id) == ["raised"]
    tenant.spent(0)


def test_what_would_start_too_late_is_not_retried(tenant: Tenant) -> None:
    result = task(tenant, "timed").delay(tenant.name, 61)
    one = failed(tenant, result, ZeroDivisionError)
    assert (one["reason"], one["attempts"]) == ("retry_within", 1)
    tenant.spent(1)


def test_a_retry_without_an_error_ends_as_celery_ends_it(tenant: Tenant) -> None:
    result = task(tenant, "bare_once").delay(tenant.name)
    assert failed(tenant, result, MaxRetriesExceededError)["reason"] == "max_attempts"
    result = task(tenant, "bare").delay(tenant.name)
    one = failed(tenant, result, MaxRetriesExceededError)
    assert (one["reason"], one["attempts"]) == ("failed", 2), "by Celery's own max_retries"


def test_a_killed_worker_counts(tenant: Tenant) -> None:
    result = task(tenant, "dies").delay(tenant.name)
    with pytest.raises(AttemptsSpent) as caught:
        result.get(timeout=90)
    assert caught.value.args == (result.id, 2, "max_attempts")
    one = kept(tenant, result.id)
    assert (one["reason"], one["attempts"]) == ("max_attempts", 2)
    assert tenant.outcomes(result.id) == ["uncertain", "uncertain", "refused"]
    assert tenant.cluster.journal().count(f"dies {result.id}") == 2
    assert tenant.story(result.id).reservation["state"] == "lost"
    # The second one is charged its estimate: what became of it is not known.
    tenant.spent(7)


def test_a_chord_hears_of_the_failure_alone(tenant: Tenant) -> None:
    name = f"chord-{tenant.name}"
    limited, after = task(tenant, "limited"), task(tenant, "after")
    body = chord([limited.s(tenant.name, name), after.s(1)])(after.s())
    with pytest.raises((ChordError, ValueError)):
        body.get(timeout=WAIT)
    member = body.parent.results[0]
    # Without a counter of its own this backend has a task that looks at the members' results.
    body_state = partial(getattr, tenant.cluster.app.AsyncResult(body.id), "state")
    eventually(body_state, states.FAILURE.__eq__)
    kept(tenant, member.id)
    tenant.cluster.release(name)
    tenant.cluster.budget.requeue(member.id)
    succeeded(tenant, member)
    tenant.spent(6)
    assert body_state() == states.FAILURE


def test_a_run_in_place_ends_as_well_and_is_not_kept(tenant: Tenant) -> None:
    with current(tenant.cluster.app):
        result = task(tenant, "limited").apply((tenant.name, "never"))
    assert (result.state, str(result.result)) == (states.FAILURE, "never")
    assert tenant.outcomes(result.id) == ["retried", "raised"]
    tenant.spent(4)
    assert result.id not in [one.task_id for one in tenant.cluster.budget.quarantine()]


@pytest.mark.redis
@pytest.mark.postgres
def test_where_members_are_counted_one_that_runs_again_is_not(cluster: Cluster) -> None:
    tenant = Tenant(cluster)
    name = f"counted-{tenant.name}"
    limited, after = task(tenant, "limited"), task(tenant, "after")
    # The last one to end is the one that succeeds: its chord is told of the failure by then.
    body = chord([limited.s(tenant.name, name), after.s(1).set(countdown=2)])(after.s())
    state = partial(getattr, cluster.app.AsyncResult(body.id), "state")
    eventually(state, states.FAILURE.__eq__)
    member = body.parent.results[0]
    kept(tenant, member.id)
    client = cluster.app.backend.client
    [key] = client.scan_iter(f"*{body.parent.id}.j*")
    counted = client.zrange(key, 0, -1)
    assert len(counted) == 2
    cluster.release(name)
    cluster.budget.requeue(member.id)
    succeeded(tenant, member)
    tenant.spent(6)
    assert state() == states.FAILURE
    assert client.zrange(key, 0, -1) == counted


def test_a_retry_beyond_the_deadline_is_turned_away(tenant: Tenant) -> None:
    result = task(tenant, "hurried").apply_async((tenant.name, 3600), deadline=600)
    with pytest.raises(ZeroDivisionError):
        result.get(timeout=WAIT)
    assert tenant.outcomes(result.id) == ["raised"]
    tenant.spent(1)
    [line] = [one for one in tenant.cluster.journal() if one.startswith(f"hurried {result.id}")]
    assert 0 < float(line.split()[2]) <= 600


def test_a_worker_does_not_start_what_comes_after_its_deadline(tenant: Tenant) -> None:
    past = datetime(2020, 1, 1, tzinfo=timezone.utc)
    result = task(tenant, "hurried").apply_async((tenant.name, 0), deadline=past)
    with pytest.raises(TaskRevokedError, match="deadline"):
        result.get(timeout=WAIT)
    assert tenant.story(result.id).reservation["reason"] == "deadline"
    tenant.spent(0)


def test_a_chain_has_one_deadline_from_its_first_call(tenant: Tenant) -> None:
    """By the ledger's clock; behind a task without a budget by that of who has called."""
    step, after = task(tenant, "next"), task(tenant, "after")
    chained = chain(step.s(0, tenant.name), step.s(tenant.name), after.s(), step.s(tenant.name))
    before = time.time()
    result = chained.apply_async(deadline=600)
    third = result.parent
    deadline = datetime.fromisoformat(third.parent.get(timeout=WAIT)).timestamp()
    assert third.parent.parent.get(timeout=WAIT) == third.parent.get(timeout=WAIT)
    assert before + 599 < deadline <= time.time() + 600
    last = datetime.fromisoformat(result.get(timeout=WAIT)).timestamp()
    assert before + 600 <= last <= deadline + 1, "not anew from the step without a budget"


def test_a_job_is_seen_from_its_start_to_its_result(tenant: Tenant) -> None:
    budget, name = tenant.cluster.budget, f"watch-{tenant.name}"
    result = task(tenant, "watched").delay(tenant.name, name)
    eventually(lambda: f"watched {name}" in tenant.cluster.journal())
    job = budget.job(result.id, owner=tenant.budget)
    assert (job.state, job.progress) == ("running", {"done": 1, "of": 2})
    assert (job.usage, job.attempts, job.ended) == ({"tokens": 2}, 1, None)
    with pytest.raises(ResultNotReady, match="is running"):
        budget.result(result.id, owner=tenant.budget)
    tenant.cluster.release(name)
    tenant.story(result.id)
    job = budget.job(result.id, owner=tenant.budget)
    assert (job.state, job.progress, job.usage) == ("succeeded", None, {"tokens": 3})
    assert job.has_ended
    assert budget.result(result.id, owner=tenant.budget) == name
    unknown = []
    for some_id, owner in ((result.id, "tenant:other"), ("never-seen", tenant.budget)):
        for ask in (budget.job, budget.result):
            with pytest.raises(UnknownRequest) as raised:
                ask(some_id, owner=owner)
            unknown.append(str(raised.value).replace(some_id, "ID"))
    assert len(set(unknown)) == 1, "no oracle"


def test_a_job_that_fails_raises_what_it_raised(tenant: Tenant) -> None:
    result = task(tenant, "hopeless").delay(tenant.name)
    tenant.story(result.id)
    budget = tenant.cluster.budget
    assert budget.job(result.id, owner=tenant.budget).state == "quarantined"
    with pytest.raises(KeyError, match="nothing"):
        budget.result(result.id, owner=tenant.budget)


def test_calls_of_the_same_work_are_one_run(tenant: Tenant) -> None:
    """In flight, finished, and where the result backend has dropped the result."""
    budget, name, reused = tenant.cluster.budget, f"reuse-{tenant.name}", task(tenant, "reused")
    with ThreadPoolExecutor(4) as pool:
        ids = {one.id for one in pool.map(lambda _: reused.delay(tenant.name, name), range(4))}
    [task_id] = ids
    eventually(lambda: f"reused {name}" in tenant.cluster.journal())
    assert reused.delay(tenant.name, name).id == task_id
    tenant.cluster.release(name)
    tenant.story(task_id)
    assert reused.delay(tenant.name, name).get(timeout=WAIT) == [name]
    tenant.spent(2)
    tenant.cluster.app.AsyncResult(task_id).forget()
    assert budget.result(task_id, owner=tenant.budget) == [name], "from the ledger"
    with pytest.raises(UnknownRequest):
        budget.result(task_id, owner="tenant:other")

    assert not budget.forget(reused, (tenant.name, name), owner="tenant:other")
    assert budget.forget(reused, (tenant.name, name), owner=tenant.budget)
    again = reused.delay(tenant.name, name)
    assert again.id != task_id
    assert again.get(timeout=WAIT) == [name]
    tenant.spent(4)
    assert tenant.cluster.journal().count(f"reused {name}") == 2
