"""Running the rows: many requests at once in few workers, most of which are meant to die."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain as joined
from pathlib import Path
from typing import Any
from uuid import uuid4

from celery import chain, chord

from tests.apps import ends
from tests.cluster import WAIT, Cluster, Process, eventually
from tests.outcomes.rows import ACKS, SUCCESS, Row

CONCURRENCY = {"prefork": 4, "threads": 8, "gevent": 8, "solo": 1}
#: Rows whose workers end while they run, and have queues of their own.
DOOMED = ("killed", "quit", "quit-waits", "terminated")
#: What each request may draw on.
LIMIT = 100


def expiry(requests: Sequence[Asked]) -> float:
    """Return when the last of what is published now has expired; now where none does."""
    return time.time() + max((one.row.options["expires"] for one in requests), default=0.0)


def new_name() -> str:
    return uuid4().hex[:12]


def start_worker(cluster: Cluster, name: str, queues: str, concurrency: int, pool: str) -> Process:
    """Start a worker of some queues; it is not ready yet.

    Its heart has it look for messages that the AMQP client has read already: without one, solo
    leaves them for up to ten seconds.
    """
    return cluster.start(
        "worker",
        *("worker", "-n", name, "-Q", queues, "-l", "INFO"),
        *("-c", str(concurrency), "-P", pool, "--without-gossip", "--without-mingle"),
        *("--heartbeat-interval", "1"),
    )


@dataclass(frozen=True)
class Asked:
    """One request of a row, with a budget of its own.

    :ivar records: whether its task records usage. Then it begins a chain and has an errback;
        otherwise it is a chord's member.
    :ivar next_id: the task id of the chain's next step, or of the chord's body.
    """

    row: Row
    ack: str
    records: bool
    task_id: str = field(default_factory=lambda: str(uuid4()))
    next_id: str = field(default_factory=lambda: str(uuid4()))
    tenant: str = field(default_factory=new_name)

    @property
    def budget(self) -> str:
        return f"tenant:{self.tenant}"

    @property
    def task(self) -> str:
        return f"ends.{self.ack}{self.row.variant}"

    def publish(self, cluster: Cluster, queue: str) -> None:
        cluster.budget.set(self.budget, limit=LIMIT, unit="tokens")
        tasks = cluster.app.tasks
        end = tasks[self.task].s(self.row.way, self.tenant, self.records)
        end.set(task_id=self.task_id, queue=queue, **self.row.options)
        following = tasks["ends.after"].s(self.task_id)
        following.set(task_id=self.next_id, queue=ends.FOLLOWERS)
        if self.records:
            end.on_error(tasks["ends.told"].s().set(queue=ends.FOLLOWERS))
            chain(end, following).apply_async()
        else:
            chord([end, tasks["ends.member"].s().set(queue=ends.FOLLOWERS)])(following)


class Pool:
    """One kind of pool and what is run in it, each thing once: its queues, workers and requests."""

    def __init__(self, cluster: Cluster, name: str, rows: Sequence[Row]) -> None:
        self.cluster = cluster
        self.name = name
        self._has_run = False
        self._main = f"{name}@test"
        self.asked = {
            (row.name, ack): [
                Asked(row, ack, records)
                for records in ((True,) if self._die_at_once(row.where) == 1 else (True, False))
            ]
            for row in rows
            for ack in ACKS
        }

    def _die_at_once(self, where: str) -> int:
        """Return how many requests may have their worker end under them.

        With gevent Celery stops tasks from within a signal's handler, which ends at the first.
        """
        if where in DOOMED and (self.name, where) != ("gevent", "quit"):
            return CONCURRENCY[self.name]
        return 1 if where in DOOMED else len(ACKS) * 2

    def requests(self, *where: str) -> list[Asked]:
        """Return the requests of rows that run in one of these workers; those that are lost first.

        What is delivered again then finds a worker that is not meant to die.
        """
        found = [one for one in joined(*self.asked.values()) if one.row.where in where]
        return sorted(found, key=lambda one: one.ack)

    def publish_what_expires(self) -> None:
        """Publish what no worker is to get in time; it is with the broker afterwards."""
        absent = self.requests("absent")
        self._expired_at = expiry(absent)
        for one in absent:
            one.publish(self.cluster, self.name)
        eventually(
            lambda: [self.cluster.budget.explain(one.task_id)[0].reservation for one in absent],
            lambda found: all(one["state"] == "published" for one in found),
            what="what expires with the broker",
        )

    def run_in_doomed_workers(self) -> None:
        """Have workers end while they run what is asked of them, as many at a time as they can."""
        waiting = {where: self.requests(where) for where in DOOMED}
        while any(waiting.values()):
            dying: list[tuple[str, list[Asked], Process]] = []
            for where, requests in waiting.items():
                now = requests[: self._die_at_once(where)]
                del requests[: len(now)]
                for one in now:
                    one.publish(self.cluster, self._queue(where))
                if now:
                    dying.append((where, now, self._start(f"{new_name()}@test", where)))
            for where, now, worker in dying:
                self._wait_for_run(now)
                self._end(worker, where, now)
        for where in DOOMED:
            self._release(where)

    def run_once(self) -> None:
        """Run the rest, unless it has run, and wait until everything has come to its end."""
        if self._has_run:
            return
        self._has_run = True
        eventually(lambda: time.time() > self._expired_at)
        worker = self._start(self._main, "", *DOOMED)
        worker.says(" ready.")
        self._keep_busy(worker)
        self._stop_what_runs()
        self._revoke_what_waits()
        for one in self.requests("main"):
            one.publish(self.cluster, self.name)
        for one in joined(*self.asked.values()):
            self.story(one)
        # One worker takes all that follows, in turn.
        self.cluster.app.tasks["ends.member"].apply_async(queue=ends.FOLLOWERS).get(timeout=WAIT)
        worker.kill()

    def story(self, one: Asked, seconds: float = WAIT) -> Any:
        """Wait until a request has ended and is closed; return its story."""

        def look() -> Any:
            return self.cluster.budget.explain(one.task_id)

        def ended(stories: Any) -> bool:
            return bool(stories) and all(
                story.reservation.get("ended_us")
                and all(attempt["lease_until_us"] is None for attempt in story.attempts)
                for story in stories
            )

        [story] = eventually(look, ended, seconds, f"the end of {one}")
        return story

    def _start(self, name: str, *where: str) -> Process:
        queues = ",".join(map(self._queue, where))
        return start_worker(self.cluster, name, queues, CONCURRENCY[self.name], self.name)

    def _wait_for_run(self, requests: Sequence[Asked]) -> None:
        eventually(
            self.cluster.journal,
            lambda lines: {f"run {one.task_id}" for one in requests} <= set(lines),
            what=f"runs in {self.name}",
        )

    def _end(self, worker: Process, where: str, requests: Sequence[Asked]) -> None:
        """End a worker as its rows say; nothing of it is left."""
        if where == "terminated":
            worker.ask_to_end()
            worker.says("Warm shutdown")
        elif where != "killed":
            worker.popen.send_signal(signal.SIGQUIT)
            worker.says("Hitting Ctrl+C again")
        if where in ("terminated", "quit-waits"):
            self._wait_for_renewals(requests)
            self._release(where)
        if where != "killed":
            worker.popen.wait(WAIT)
        worker.kill()
        # The next one is to hold again.
        self._gate(where).unlink(missing_ok=True)

    def _wait_for_renewals(self, requests: Sequence[Asked]) -> None:
        """Wait until all that runs has leases that it did not have when its worker was to end."""
        last = max(self._leases(requests))
        eventually(
            lambda: self._leases(requests),
            lambda leases: min(leases) > last + 2_000_000,
            what="renewed leases",
        )

    def _leases(self, requests: Sequence[Asked]) -> list[int]:
        stories = [story for one in requests for story in self.cluster.budget.explain(one.task_id)]
        return [attempt["lease_until_us"] or 0 for one in stories for attempt in one.attempts]

    def _gate(self, where: str) -> Path:
        return self.cluster.folder / f"go {self._queue(where)}"

    def _queue(self, where: str) -> str:
        return f"{self.name}-{where}" if where else self.name

    def _release(self, where: str) -> None:
        self._gate(where).touch()

    def _keep_busy(self, worker: Process) -> None:
        """Have all of a worker busy until what waits in it has expired."""
        requests = self.requests("busy")
        if not requests:
            return
        holding = Row("busy", "", "hold", SUCCESS, SUCCESS)
        busy = [Asked(holding, "early", True) for _ in range(CONCURRENCY[self.name])]
        for one in busy:
            one.publish(self.cluster, self.name)
        self._wait_for_run(busy)
        for one in requests:
            one.publish(self.cluster, self.name)
        expired_at = expiry(requests)
        for one in requests:
            worker.says(f"[{one.task_id}] received")
        eventually(lambda: time.time() > expired_at)
        self._release("")

    def _stop_what_runs(self) -> None:
        requests = self.requests("stopped")
        for one in requests:
            one.publish(self.cluster, self.name)
        self._wait_for_run(requests)
        self._revoke(requests, terminate=True)

    def _revoke_what_waits(self) -> None:
        # A worker remembers what is revoked before it comes.
        requests = self.requests("revoked")
        self._revoke(requests)
        for one in requests:
            one.publish(self.cluster, self.name)

    def _revoke(self, requests: Sequence[Asked], **options: Any) -> None:
        if requests:
            ids = [one.task_id for one in requests]
            [_] = self.cluster.app.control.revoke(
                ids, destination=[self._main], reply=True, timeout=WAIT, limit=1, **options
            )
