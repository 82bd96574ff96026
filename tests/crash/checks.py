"""What has to be true when a run is over, whatever was killed in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from celery import Celery

from celery_budget.integration.context import installed_on
from celery_budget.store.attempts import NOBODY
from celery_budget.store.schema import attempts, lines, outbox, reservations
from tests.crash.client import requests
from tests.crash.tasks import ESTIMATE, WORK

__all__ = ["HAD", "WORKS", "Ledger"]


@dataclass(frozen=True)
class Work:
    """What has to become of each request for one task.

    :ivar count: how many there are.
    :ivar used: what each is charged.
    :ivar results: what they return, of all of them.
    """

    count: int
    used: int
    results: Counter[Any]


WORKS = {
    "early": Work(1, 2, Counter(["early"])),
    "order": Work(1, 3, Counter(["order"])),
    "child": Work(2, 1, Counter(["in the body", "in the effect"])),
    "part": Work(2, 2, Counter([1, 2])),
    "total": Work(1, 1, Counter([3])),
    "retried": Work(1, 2, Counter(["retried"])),
    "settling": Work(1, 2, Counter(["settled"])),
    "follow": Work(
        4,
        1,
        Counter(["order, followed", "retried, followed", "first, followed"])
        + Counter(["first, followed, followed"]),
    ),
}
HAD = Counter(["order", "settling", "part 1", "part 2", "in the body", "in the effect"])
CALLED = {"order", "part 1", "part 2"}


class Ledger:
    """The ledger of a run and what else it has left, for whoever looks at it."""

    def __init__(self, app: Celery, folder: Path) -> None:
        self._app = app
        self._budget = installed_on(app)
        self._folder = folder

    def rows(self, table: Any) -> list[Any]:
        """Return all rows of a table."""
        with self._budget.store.snapshot() as connection:
            return list(connection.execute(sa.select(table)))

    def is_complete(self) -> bool:
        """Tell whether all requests are there, with all that follows from them."""
        return len(self.rows(reservations)) >= sum(work.count for work in WORKS.values())

    def problems(self) -> list[str]:
        """Return what does not hold."""
        return [
            *self._budget.reconcile().mismatches,
            *self._of_requests(),
            *self._of_effects(),
            *self._of_answers(),
            *self._of_balances(),
            *self._of_workers(),
        ]

    def _of_requests(self) -> list[str]:
        """Every request ended once, as its own success, charged what it used."""
        found: list[str] = []
        charged = {row.reservation_id: row.settled for row in self.rows(lines)}
        returned = Counter(
            row.reservation_id for row in self.rows(attempts) if row.outcome == "returned"
        )
        rows = self.rows(reservations)
        for name, work in WORKS.items():
            mine = [row for row in rows if row.task_name == f"crash.{name}"]
            if len(mine) != work.count:
                found.append(f"{len(mine)} requests of {name} instead of {work.count}")
            results: Counter[Any] = Counter()
            for row in mine:
                meta = self._app.backend.get_task_meta(row.task_id)
                if name == "early" and row.state == "lost":
                    # Nobody asked for a second run: charged what was promised, and told.
                    if meta["status"] != "FAILURE" or charged[row.reservation_id] != ESTIMATE:
                        found.append(f"{name} is lost and {meta['status']}")
                    results = work.results
                    continue
                if row.state != "settled" or returned[row.reservation_id] != 1:
                    times = returned[row.reservation_id]
                    found.append(f"{name} is {row.state} ({row.reason}), returned {times} times")
                if meta["status"] != "SUCCESS":
                    found.append(f"the result of {name} is {meta['status']}: {meta['result']!r}")
                if charged[row.reservation_id] != work.used:
                    found.append(f"{name} was charged {charged[row.reservation_id]}")
                results[meta["result"] if meta["status"] == "SUCCESS" else None] += 1
            if results != work.results:
                found.append(f"{name} returned {dict(results)}")
        return found

    def _of_effects(self) -> list[str]:
        """Each effect had once; each outside call under one key."""
        found: list[str] = []
        had = Counter(row.word for row in self.rows(WORK))
        if had != HAD:
            found.append(f"effects: {dict(had)}")
        keys = set((self._folder / "journal").read_text().splitlines())
        called = Counter(line.rpartition(" ")[0] for line in keys)
        if called != Counter(CALLED):
            found.append(f"keys of calls: {dict(called)}")
        return found

    def _of_answers(self) -> list[str]:
        """Every request was answered, each time with the same task."""
        found: list[str] = []
        answers: dict[str, set[str]] = {}
        for line in (self._folder / "answers").read_text().splitlines():
            request_id, _, task_id = line.partition(" ")
            answers.setdefault(request_id, set()).add(task_id)
        if answers.keys() != requests(self._app).keys():
            found.append(f"answered were {sorted(answers)}")
        found += [
            f"{request_id} has the ids {sorted(task_ids)}"
            for request_id, task_ids in answers.items()
            if len(task_ids) != 1
        ]
        return found

    def _of_balances(self) -> list[str]:
        """No hold is left, no message, and what was charged is what was spent."""
        found = [
            f"{balance.budget} holds {balance.reserved}"
            for balance in self._budget.balances()
            if balance.reserved
        ]
        spent = sum(balance.spent for balance in self._budget.balances())
        charged = sum(row.settled for row in self.rows(lines))
        if spent != charged:
            found.append(f"{spent} spent and {charged} charged")
        left = [row.task_name for row in self.rows(outbox) if row.reservation_id is not None]
        if left:
            found.append(f"messages are left: {left}")
        return found

    def _of_workers(self) -> list[str]:
        """Each worker is known by an id of its own, as those are that nothing has forked."""
        names: dict[Any, set[str]] = {}
        for row in self.rows(attempts):
            if row.boot_id != NOBODY:
                names.setdefault(row.boot_id, set()).add(row.worker.partition("/")[0])
        return [f"workers {sorted(same)} are one" for same in names.values() if len(same) > 1]
