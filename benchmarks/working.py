"""How many tasks that do nothing a worker gets through, with a budget and without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from celery import Celery
from redis import Redis

from benchmarks.application import SIZE, TENANT, fund, make_app
from benchmarks.measure import Comparison, Effort, Side, Target, compare
from benchmarks.processes import next_mark, worker
from benchmarks.relaying import drain
from benchmarks.servers import Servers
from celery_budget.integration.context import installed_on
from celery_budget.integration.publisher import KombuPublisher

__all__ = ["run"]

#: Tasks in a block: about as long for both, and long enough to be timed.
PLAIN_TASKS, BUDGETED_TASKS = 500, 200

#: What a budget may make of a worker's rate: two round trips to the ledger, each with its flush.
AT_LEAST = 0.4

#: Where a block's messages wait until they are complete, and where the worker looks for them.
STAGE, QUEUE = "stage", "work"


def run(servers: Servers, effort: Effort) -> Comparison:
    """Compare budgeted tasks with a plain one that is acknowledged late, in one worker."""
    conf = {
        "broker_url": servers.redis.database_url(2),
        "budget_database_url": servers.postgres.create_database(),
        "task_default_queue": STAGE,
    }
    app = servers.enter_context(closing(make_app(**conf)))
    budget = installed_on(app)
    servers.callback(budget.store.dispose)
    fund(budget)
    publisher = KombuPublisher(app)
    servers.callback(publisher.reset)
    client = servers.enter_context(Redis.from_url(conf["broker_url"], socket_timeout=None))
    servers.enter_context(worker(servers.folder, conf, QUEUE))

    def side(name: str, task: str, count: int, *against: str | Target) -> Side:
        return Side(name, _block(app, client, publisher, f"bench.{task}", count), against)

    plain = "plain task, acks_late"
    sides = [
        side(plain, "plain", PLAIN_TASKS),
        side(
            "budgeted task that records nothing",
            "budgeted",
            BUDGETED_TASKS,
            Target(plain, at_least=AT_LEAST),
        ),
        side("budgeted task with one usage.record", "recording", BUDGETED_TASKS, plain),
    ]
    return compare(
        "worker",
        "one worker with one pool process, in tasks a second",
        "1/s",
        f"{PLAIN_TASKS} plain or {BUDGETED_TASKS} budgeted tasks, from a full "
        "queue; Redis, PostgreSQL with fsync, no result backend.",
        sides,
        effort,
    )


def _block(
    app: Celery, client: Redis, publisher: KombuPublisher, name: str, count: int
) -> Callable[[], list[float]]:
    """Put tasks between two marks into the queue at once; the worker tells when it was there."""
    task, mark = app.tasks[name], app.tasks["bench.mark"]

    def block() -> list[float]:
        mark.delay()
        for _ in range(count):
            task.delay(SIZE, tenant=TENANT)
        drain(app, publisher)
        mark.delay()
        assert client.llen(STAGE) == count + 2
        client.rename(STAGE, QUEUE)
        begin, end = (next_mark(client) for _ in range(2))
        return [count / (end - begin)]

    return block
