"""What gets in the way of a soak: kills, copies of messages, results that are evicted."""

from __future__ import annotations

import random
import signal
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import psutil
import redis
import sqlalchemy as sa

from celery_budget.integration.publisher import KombuPublisher
from celery_budget.store.outbox import message_of
from celery_budget.store.schema import outbox, reservations
from tests.cluster import Cluster, Process

__all__ = ["Chaos"]

#: How many requests end between two of them: by that, and not by time, a slow machine gets on.
EVERY = (2, 8)
PAUSE = 0.1


class Chaos:
    """Makes trouble.

    :param cluster: whose processes are killed, each of which comes back.
    :ivar done: how often it did what.
    """

    def __init__(self, cluster: Cluster, results_url: str, seed: int) -> None:
        self._cluster = cluster
        self._results = redis.Redis.from_url(results_url)
        self._chance = random.Random(seed)
        self._ending = threading.Event()
        self._publisher = KombuPublisher(cluster.app)
        self._processes: dict[str, Process] = {}
        self.done: Counter[str] = Counter()

    def start_processes(self, workers: int) -> None:
        """Start the workers and the relay."""
        for number in range(workers):
            self._processes[f"worker {number}"] = self._cluster.worker()
        self._processes["relay"] = self._cluster.relay()

    def run(self) -> None:
        """Make trouble until it is stopped."""
        due = 0
        while not self._ending.wait(PAUSE):
            if self._ended() < due:
                continue
            due = self._ended() + self._chance.randint(*EVERY)
            what = self._chance.choice(["child", "child", "worker", "relay", "copies", "evict"])
            getattr(self, f"_{what}")()
        self._publisher.reset()
        self._results.close()

    def stop(self) -> None:
        """Have it end: what was killed is back then."""
        self._ending.set()

    def _ended(self) -> int:
        """Return how many requests have ended."""
        query = sa.select(sa.func.count()).where(reservations.c.ended_us.is_not(None))
        return self._cluster.budget.store.read(
            lambda connection: int(connection.execute(query).scalar_one())
        )

    def _child(self) -> None:
        """Kill one of a worker's processes."""
        name = self._one_of("worker")
        with suppress(psutil.Error, IndexError):
            self._chance.choice(self._processes[name].children()).send_signal(signal.SIGKILL)
            self.done["children killed"] += 1

    def _worker(self) -> None:
        """Kill a worker, with all its processes."""
        name = self._one_of("worker")
        self._processes[name].kill()
        self._processes[name] = self._cluster.worker()
        self.done["workers killed"] += 1

    def _relay(self) -> None:
        self._processes["relay"].kill()
        self._processes["relay"] = self._cluster.relay()
        self.done["relays killed"] += 1

    def _one_of(self, kind: str) -> str:
        return self._chance.choice([name for name in self._processes if name.startswith(kind)])

    def _copies(self) -> None:
        """Publish messages once more that have been published."""
        query = sa.select(outbox).where(outbox.c.state == "published").limit(5)
        rows: list[Any] = self._cluster.budget.store.read(lambda found: list(found.execute(query)))
        for row in rows:
            answers = self._publisher.publish_all([message_of(row)])
            self.done["copies"] += answers.count(None)

    def _evict(self) -> None:
        """Have the result backend forget some results."""
        for key in list(self._results.scan_iter("celery-task-meta-*", count=50))[:5]:
            self.done["results evicted"] += int(self._results.delete(key))
