"""The ledger is away, and a worker has to stop: what it could not tell is told by the next one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from celery import chain
from celery.exceptions import TimeLimitExceeded

from celery_budget.store.schema import attempts, usage
from tests.apps import early
from tests.cluster import WAIT, Cluster, Process, eventually
from tests.services.postgres import PostgresServer

pytestmark = pytest.mark.fault

MakeCluster = Callable[..., Cluster]

USED, LOST, ENDED, LOST_BUT_RERUN = "1", "2", "3", "4"
#: Far longer than any of these tests: what happens in time is not recovery's work.
LONG = 600


@pytest.fixture
def away(
    own_postgres: PostgresServer,
    redis_url: str,
    request: pytest.FixtureRequest,
    make_cluster: MakeCluster,
) -> Callable[..., Cluster]:
    """Make a cluster whose ledger can go away, with a relay."""

    def make(broker: str = "redis_url", **more: Any) -> Cluster:
        cluster = make_cluster(
            broker_url=request.getfixturevalue(broker),
            result_backend=redis_url,
            budget_database_url=own_postgres.create_database(),
            **{"budget_lease_seconds": LONG, "budget_republish_seconds": LONG, **more},
        )
        cluster.budget.set("tenant:a", limit=1000, unit="tokens")
        cluster.relay()
        return cluster

    return make


def kinds(cluster: Cluster) -> list[str]:
    """What is in the spool."""
    return sorted(path.name[0] for path in cluster.folder.glob("budget-spool/*/*.json"))


def recorded(cluster: Cluster) -> int:
    with cluster.budget.store.snapshot() as connection:
        return len(connection.execute(usage.select()).all())


def began(cluster: Cluster, task: str) -> Any:
    """Have a task run, up to where it has recorded once and waits."""
    result = cluster.task(task).delay("go", "a")
    eventually(lambda: recorded(cluster))
    return result


def ends(worker: Process) -> None:
    """Ask a worker to end, which it does: it used to wait for the ledger."""
    worker.ask_to_end()
    before = time.monotonic()
    worker.popen.wait(WAIT)
    assert time.monotonic() - before < WAIT / 2
    worker.kill()


def check(cluster: Cluster, result: Any, spent: int, journal: list[str]) -> None:
    """Check that a task's result is there, that it ran once, and what it was charged."""
    assert result.get(timeout=WAIT) == "go"
    cluster.settle()
    assert cluster.journal() == journal
    balance = cluster.budget.balance("tenant:a")
    assert (balance.reserved, balance.spent) == (0, spent)
    counts = cluster.counts()
    assert (counts["admitted"], counts["settled"]) == (1, 1)
    with cluster.budget.store.snapshot() as connection:
        assert [row.outcome for row in connection.execute(attempts.select())] == ["returned"]
    assert kinds(cluster) == []


@pytest.mark.parametrize(
    ("pool", "broker", "task", "spent"),
    [
        ("prefork", "redis_url", "held", 5),
        ("prefork", "rabbitmq_url", "held", 5),
        ("prefork", "redis_url", "held_early", 2),
        ("solo", "rabbitmq_url", "held", 5),
        ("threads", "redis_url", "held", 5),
    ],
)
def test_a_worker_that_is_told_to_stop(
    own_postgres: PostgresServer,
    away: Callable[..., Cluster],
    pool: str,
    broker: str,
    task: str,
    spent: int,
) -> None:
    cluster = away(broker)
    worker = cluster.worker(pool=pool)
    result = began(cluster, task)
    own_postgres.kill()
    cluster.release("go")
    # On disk before anybody is told to stop: the usage, or the end of what records no more.
    eventually(lambda: kinds(cluster), lambda found: found == [USED if task == "held" else ENDED])
    ends(worker)
    assert kinds(cluster) == ([USED, ENDED] if task == "held" else [ENDED])
    assert result.state == "PENDING"
    own_postgres.restart()
    cluster.worker(pool=pool)
    check(cluster, result, spent, ["start go", "end go"])


@pytest.mark.parametrize(
    ("pool", "broker", "task", "spent"),
    [
        ("prefork", "redis_url", "held_early", 2),
        ("prefork", "rabbitmq_url", "done", 4),
        ("solo", "redis_url", "done", 4),
    ],
)
def test_a_worker_that_is_killed_while_it_waits(
    own_postgres: PostgresServer,
    away: Callable[..., Cluster],
    pool: str,
    broker: str,
    task: str,
    spent: int,
) -> None:
    cluster = away(broker)
    worker = cluster.worker(pool=pool)
    result = began(cluster, task)
    own_postgres.kill()
    cluster.release("go")
    eventually(lambda: kinds(cluster), lambda found: found == [ENDED])
    worker.kill()
    assert kinds(cluster) == [ENDED]
    own_postgres.restart()
    cluster.worker(pool=pool)
    check(cluster, result, spent, ["start go", "end go"])


def test_a_child_whose_worker_is_killed_waits_no_more(
    own_postgres: PostgresServer, away: Callable[..., Cluster]
) -> None:
    cluster = away()
    worker = cluster.worker()
    result = began(cluster, "done")
    children = worker.children()
    own_postgres.kill()
    cluster.release("go")
    eventually(lambda: kinds(cluster), lambda found: found == [ENDED])
    worker.popen.kill()
    assert not psutil.wait_procs(children, WAIT)[1]
    assert kinds(cluster) == [ENDED]
    own_postgres.restart()
    cluster.worker()
    check(cluster, result, 4, ["start go", "end go"])


@pytest.mark.parametrize("known", [True, False])
def test_what_follows_is_published_by_the_next_worker(
    own_postgres: PostgresServer, away: Callable[..., Cluster], known: bool
) -> None:
    """The ledger goes away before it knows the end, or before the chain's next step is out."""
    conf = {"shop_wait_after": "end", "budget_lease_seconds": 5} if known else {}
    cluster = away(**conf)
    worker = cluster.worker()
    result = chain(cluster.task("done").s("go", "a"), cluster.task("plain").s()).delay()
    eventually(lambda: recorded(cluster))
    if known:
        cluster.release("go")
        eventually((cluster.folder / "at").exists)
    own_postgres.kill()
    cluster.release("on" if known else "go")
    worker.says("trying again")
    ends(worker)
    assert cluster.journal() == ["start go", "end go"]
    own_postgres.restart()
    cluster.worker()
    assert result.get(timeout=WAIT) == "go"
    cluster.settle()
    assert cluster.journal() == ["start go", "end go", "plain go"]
    assert cluster.budget.balance("tenant:a").spent == 4
    assert result.parent.get(timeout=WAIT) == "go"


def test_what_was_used_counts_where_the_work_was_killed(
    own_postgres: PostgresServer, away: Callable[..., Cluster]
) -> None:
    """Its end is not known: it runs again, and what it used before is charged as well."""
    cluster = away("rabbitmq_url")
    worker = cluster.worker()
    result = began(cluster, "held")
    own_postgres.kill()
    cluster.release("go")
    eventually(lambda: kinds(cluster), lambda found: found == [USED])
    # The child alone: its worker finds out while the ledger is away.
    for child in worker.children():
        child.kill()
    eventually(lambda: kinds(cluster), lambda found: found == [USED, LOST_BUT_RERUN])
    own_postgres.restart()
    assert result.get(timeout=WAIT) == "go"
    cluster.settle()
    # The second attempt's first record has the key of the first one's.
    assert cluster.budget.balance("tenant:a").spent == 2 + 3 + 3
    assert cluster.journal() == ["start go", "start go", "end go"]
    assert kinds(cluster) == []


def test_a_child_that_is_killed_when_its_task_has_ended(
    own_postgres: PostgresServer, away: Callable[..., Cluster]
) -> None:
    cluster = away()
    worker = cluster.worker()
    result = began(cluster, "done")
    own_postgres.kill()
    cluster.release("go")
    eventually(lambda: kinds(cluster), lambda found: found == [ENDED])
    for child in worker.children():
        child.kill()
    eventually(lambda: kinds(cluster), lambda found: found == [ENDED, LOST_BUT_RERUN])
    own_postgres.restart()
    check(cluster, result, 4, ["start go", "end go"])


@pytest.mark.parametrize(
    ("pool", "broker", "task", "spent"),
    [
        ("prefork", "redis_url", "draft", 3),
        ("prefork", "rabbitmq_url", "draft", 3),
        ("prefork", "redis_url", "held_early", 2),
        ("solo", "rabbitmq_url", "draft", 3),
    ],
)
def test_a_message_that_waits_for_its_claim_is_given_back(
    own_postgres: PostgresServer,
    away: Callable[..., Cluster],
    pool: str,
    broker: str,
    task: str,
    spent: int,
) -> None:
    cluster = away(broker)
    early = task == "held_early"
    result = cluster.task(task).delay(*(["go", "a"] if early else [3, "a"]))
    eventually(lambda: cluster.budget.reconcile().open_work.get("published"))
    own_postgres.kill()
    worker = cluster.worker(pool=pool)
    worker.says("trying again")
    eventually(lambda: worker.text().count("trying again"), lambda times: times > 3)
    ends(worker)
    assert kinds(cluster) == ([LOST_BUT_RERUN] if early else [])
    own_postgres.restart()
    cluster.release("go")
    cluster.worker(pool=pool)
    assert result.get(timeout=WAIT) == ("go" if early else 3)
    cluster.settle()
    assert cluster.budget.balance("tenant:a").spent == spent
    assert cluster.counts()["settled"] == 1


@pytest.mark.parametrize("how", ["raise", "retry for good"])
@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_what_ends_before_its_claim_is_given_back(
    own_postgres: PostgresServer, away: Callable[..., Cluster], pool: str, how: str
) -> None:
    """It used to wait for the ledger when the worker was told to stop, too."""
    cluster = away(imports=[early.__name__])
    result = cluster.app.tasks["early.work"].delay(how, "a")
    eventually(lambda: cluster.budget.reconcile().open_work.get("published"))
    own_postgres.kill()
    worker = cluster.worker(pool=pool)
    eventually(lambda: worker.text().count("trying again"), lambda times: times > 3)
    ends(worker)
    assert kinds(cluster) == [LOST_BUT_RERUN]
    assert result.state == "PENDING", "it may have been a copy"
    own_postgres.restart()
    cluster.worker(pool=pool)
    with pytest.raises(ValueError, match=how):
        result.get(timeout=WAIT)
    cluster.settle()
    assert cluster.counts()["released"] == 1
    assert kinds(cluster) == []


def test_a_hard_time_limit_stands(
    own_postgres: PostgresServer, away: Callable[..., Cluster]
) -> None:
    """Celery has stored the failure: the task is lost, and does not run again."""
    cluster = away()
    cluster.worker()
    result = cluster.task("held").apply_async(("go", "a"), time_limit=6)
    eventually(lambda: recorded(cluster))
    own_postgres.kill()
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=WAIT)
    assert set(kinds(cluster)) == {LOST}
    own_postgres.restart()
    eventually(lambda: kinds(cluster), lambda found: not found)
    cluster.settle()
    assert cluster.counts()["lost"] == 1
    assert cluster.budget.balance("tenant:a").spent == 6
    assert cluster.journal() == ["start go"]


def test_what_is_terminated_stays_so(
    own_postgres: PostgresServer, away: Callable[..., Cluster]
) -> None:
    cluster = away(worker_enable_remote_control=True)
    cluster.worker()
    result = began(cluster, "held")
    own_postgres.kill()
    result.revoke(terminate=True)
    eventually(lambda: result.state, lambda state: state == "REVOKED")
    assert set(kinds(cluster)) == {LOST}
    own_postgres.restart()
    eventually(lambda: kinds(cluster), lambda found: not found)
    cluster.settle()
    assert cluster.counts()["lost"] == 1
    assert cluster.budget.balance("tenant:a").spent == 6
    assert (cluster.journal(), result.state) == (["start go"], "REVOKED")


def test_a_folder_that_cannot_be_written(
    own_postgres: PostgresServer, away: Callable[..., Cluster]
) -> None:
    """What is not on disk waits, as long as it takes."""
    cluster = away()
    (cluster.folder / "budget-spool").write_text("a file")
    worker = cluster.worker()
    result = began(cluster, "done")
    own_postgres.kill()
    cluster.release("go")
    worker.says("is kept in memory")
    worker.ask_to_end()
    worker.says("Warm shutdown")
    own_postgres.restart()
    worker.popen.wait(WAIT)
    assert worker.text().count("is kept in memory") == 1
    assert result.get(timeout=WAIT) == "go"
    cluster.settle()
    assert cluster.budget.balance("tenant:a").spent == 4
