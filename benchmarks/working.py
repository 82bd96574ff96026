"""How many tasks that do nothing a worker gets through, with a budget and without."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from celery import Celery
from redis import Redis

from benchmarks.application import MARKS, SIZE, TENANT, fund, make_app
from benchmarks.measure import Comparison, Effort, Side, compare
from benchmarks.relaying import drain
from benchmarks.servers import Servers
from celery_budget.integration.context import installed_on
from celery_budget.integration.publisher import KombuPublisher
from tests.services.base import end_hard
from tests.services.guardian import guardian

__all__ = ["run"]

ROOT = Path(__file__).resolve().parent.parent
#: Tasks in a block: about as long for both, and long enough to be timed.
PLAIN_TASKS, BUDGETED_TASKS = 500, 100
START_SECONDS = 60.0
BLOCK_SECONDS = 120
STOP_SECONDS = 10.0

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
    servers.enter_context(_worker(servers.folder, conf))

    def side(name: str, task: str, count: int, *against: str) -> Side:
        return Side(name, _block(app, client, publisher, f"bench.{task}", count), against)

    plain = "plain task, acks_late"
    sides = [
        side(plain, "plain", PLAIN_TASKS),
        side("budgeted task that records nothing", "budgeted", BUDGETED_TASKS, plain),
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
        begin, end = (_next_mark(client) for _ in range(2))
        return [count / (end - begin)]

    return block


def _next_mark(client: Redis) -> float:
    found: Any = client.blpop([MARKS], timeout=BLOCK_SECONDS)
    if found is None:
        raise TimeoutError(f"the worker did not get through a block in {BLOCK_SECONDS} s")
    return float(found[1])


@contextmanager
def _worker(folder: Path, conf: dict[str, Any]) -> Iterator[None]:
    """A worker on the queue, ready when entered, ended when left."""
    log = folder / "worker.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "celery", "-A", "benchmarks.application", "worker"),
                *("-Q", QUEUE, "-c", "1", "-P", "prefork", "-l", "WARNING", "-n", "bench@bench"),
                *("--without-gossip", "--without-mingle", "--without-heartbeat"),
            ],
            cwd=folder,
            env={**os.environ, "BENCH_CONF": json.dumps(conf), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    guardian.watch_process(process.pid, signal.SIGTERM)
    try:
        _wait_until_ready(process, log, conf["broker_url"])
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        end_hard(process)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, broker: str) -> None:
    """Wait until the worker runs a task: its log says nothing at this level."""
    with closing(make_app(broker_url=broker, task_default_queue=QUEUE)) as app:
        app.tasks["bench.mark"].delay()
    deadline = time.monotonic() + START_SECONDS
    with Redis.from_url(broker, socket_timeout=None) as client:
        while client.blpop([MARKS], timeout=1) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the worker did not start; its log:\n{log.read_text()[-3000:]}")
