"""Celery processes beside a benchmark, and what they tell it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from redis import Redis

from benchmarks.application import MARKS, make_app
from tests.services.base import end_hard
from tests.services.guardian import guardian

__all__ = ["Mark", "Talk", "next_mark", "next_start", "relay", "talking", "worker"]

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 60.0
MARK_SECONDS = 120
STOP_SECONDS = 10.0


@contextmanager
def worker(folder: Path, conf: dict[str, Any], queue: str) -> Iterator[None]:
    """A worker with one pool process on a queue, ready when entered, ended when left."""
    arguments = (
        *(
            "worker",
            "-Q",
            queue,
            "-c",
            "1",
            "-P",
            "prefork",
            "-l",
            "WARNING",
            "-n",
            f"{queue}@bench",
        ),
        *("-l", "WARNING", "--without-gossip", "--without-mingle", "--without-heartbeat"),
    )
    with _celery(folder, f"worker-{queue}", conf, *arguments) as process:
        _wait_for_worker(process, folder / f"worker-{queue}.log", conf["broker_url"], queue)
        yield


@contextmanager
def relay(folder: Path, conf: dict[str, Any], name: str) -> Iterator[None]:
    """A relay, ended when left; it may still be starting when entered."""
    with _celery(folder, f"relay-{name}", conf, "budget", "relay", "-l", "WARNING"):
        yield


class Mark(NamedTuple):
    """When a marking task began, by the machine's clock.

    :ivar begun: in its worker, which may have to ask the ledger for it first.
    :ivar entered: its own code.
    """

    begun: float
    entered: float


def next_start(client: Redis) -> Mark:
    """Return when the next marking task began."""
    found: Any = client.blpop([MARKS], timeout=MARK_SECONDS)
    if found is None:
        raise TimeoutError(f"no worker ran a marking task in {MARK_SECONDS} s")
    return Mark(*map(float, found[1].split()))


def next_mark(client: Redis) -> float:
    """Return when the next marking task began in its worker, by the machine's clock."""
    return next_start(client).begun


class Talk:
    """A process that answers each line that it is told by one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def say(self, line: str) -> None:
        """Tell it a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """Wait for its next line.

        :raises RuntimeError: where it has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} has ended")
        return line.strip()


@contextmanager
def talking(module: str, *arguments: str) -> Iterator[Talk]:
    """A process that runs a module, ended when left."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    guardian.watch_process(process.pid, signal.SIGTERM)
    try:
        yield Talk(process)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        end_hard(process)


@contextmanager
def _celery(
    folder: Path, name: str, conf: dict[str, Any], *arguments: str
) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{name}.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "benchmarks.application", *arguments],
            cwd=folder,
            env={**os.environ, "BENCH_CONF": json.dumps(conf), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    guardian.watch_process(process.pid, signal.SIGTERM)
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        end_hard(process)


def _wait_for_worker(process: subprocess.Popen[bytes], log: Path, broker: str, queue: str) -> None:
    """Wait until the worker runs a task: its log says nothing at this level."""
    with closing(make_app(broker_url=broker, task_default_queue=queue)) as app:
        app.tasks["bench.mark"].delay()
    deadline = time.monotonic() + START_SECONDS
    with Redis.from_url(broker, socket_timeout=None) as client:
        while client.blpop([MARKS], timeout=1) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the worker did not start; its log:\n{log.read_text()[-3000:]}")
