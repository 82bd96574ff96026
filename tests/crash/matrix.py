"""One cell of the crash matrix: a fault, its recovery, and what has to be true then."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import sqlalchemy as sa
from typing_extensions import Self

from celery_budget.errors import StoreError
from celery_budget.integration.context import installed_on
from celery_budget.store import reports
from celery_budget.store.attempts import NOBODY
from celery_budget.store.schema import attempts, lines, outbox, reservations
from tests.crash.client import requests
from tests.crash.faults import passed, released, struck
from tests.crash.points import CELLS, Fault
from tests.crash.processes import Processes
from tests.crash.tasks import ESTIMATE, LEDGER, WORK, make_app
from tests.services.base import Service
from tests.services.postgres import PostgresServer
from tests.services.rabbitmq import RabbitServer
from tests.services.redis import RedisServer

__all__ = ["Matrix", "Outcome"]

#: Seconds until a fault has to have struck, and until all has to be over.
WAIT = 150

#: At which time that its place is passed a fault strikes that is only watched for.
NEVER = 1_000_000_000

LIMIT = 1000
#: What fits only one step of a chain.
TIGHT = ESTIMATE

SETTINGS = {
    "budget_poll_seconds": 0.1,
    "budget_sweep_seconds": 0.2,
    "budget_lease_seconds": 2,
    "budget_republish_seconds": 3,
    "budget_publish_seconds": 2,
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    "worker_prefetch_multiplier": 1,
    "worker_enable_remote_control": False,
    "worker_lost_wait": 0.5,
}


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


@dataclass
class Outcome:
    """What came of a cell.

    :ivar problems: what was wrong; empty where all held.
    :ivar counts: how often the place of each fault was passed.
    :ivar logs: of all processes, where something was wrong.
    """

    number: int
    seed: int
    what: str
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    counts: list[int] = field(default_factory=list)
    logs: str = ""

    def __str__(self) -> str:
        told = "ok" if not self.problems else "; ".join(self.problems)
        return f"{self.number:4} seed {self.seed}  {self.seconds:5.1f} s  {self.what}: {told}"


class Matrix(AbstractContextManager["Matrix"]):
    """Runs cells one after another on servers of its own."""

    def __init__(self) -> None:
        # What a killed server has written is with the system; it need not be on the disk.
        self._postgres = PostgresServer(settings={"fsync": "off"})
        self._redis = RedisServer()
        self._rabbitmq = RabbitServer()
        self._template = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for server in (self._postgres, self._redis, self._rabbitmq):
            server.stop()

    def start(self, broker: str = "rabbitmq") -> None:
        """Start the servers that are needed with ``broker``, or those of them that do not run.

        :raises ServiceUnavailable: where one cannot be had.
        """
        wanted: list[Service] = [self._postgres, self._redis]
        if broker == "rabbitmq":
            wanted.append(self._rabbitmq)
        for server in wanted:
            if not server.port:
                server.start()
            elif not server.alive:
                server.restart()

    def run(self, number: int, seed: int) -> Outcome:
        """Run the cell ``number``; ``seed`` chooses at which time that its step is passed."""
        cell = CELLS[number]
        chance = random.Random(f"{number} {seed}")
        faults = cell.faults(chance.randint(1, cell.step.times))
        orderly = cell.victim in ("store", "broker") and chance.random() < 0.3
        how = f"{cell}, the {faults[-1].nth}. time{', in good order' if orderly else ''}"
        outcome = Outcome(number, seed, how)
        return self._run(outcome, cell.broker, faults, orderly)

    def run_calm(
        self,
        broker: str,
        faults: Sequence[Fault] = (),
        meddle: Callable[[sa.Connection], None] = lambda connection: None,
    ) -> Outcome:
        """Run without a fault.

        :param faults: whose places are watched, to count how often they are passed.
        :param meddle: changes the ledger behind its back before it is checked.
        """
        watched = [replace(fault, nth=NEVER) for fault in faults]
        return self._run(Outcome(-1, 0, f"{broker}: undisturbed"), broker, watched, None, meddle)

    def _run(
        self,
        outcome: Outcome,
        broker: str,
        faults: Sequence[Fault],
        orderly: bool | None,
        meddle: Callable[[sa.Connection], None] = lambda connection: None,
    ) -> Outcome:
        began = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="celery-budget-crash-"))
        run = _Run(folder, self._conf(broker, folder), faults)
        try:
            run.start()
            if orderly is not None:
                for at, fault in enumerate(faults):
                    run.strike(at, fault, self._server(broker, fault.victim), orderly)
            run.recover()
            outcome.problems += run.problems(meddle)
        except Exception as error:  # noqa: BLE001 - the other cells have their turn
            outcome.problems.append(str(error) if isinstance(error, _Wrong) else repr(error))
        finally:
            run.stop()
            if outcome.problems:
                outcome.logs = run.processes.logs()
            counted = [passed(folder, at) for at in range(len(faults))]
            outcome.counts = [file.stat().st_size if file.exists() else 0 for file in counted]
            shutil.rmtree(folder, ignore_errors=True)
            outcome.seconds = time.monotonic() - began
        return outcome

    def _server(self, broker: str, victim: str) -> Service | None:
        if victim == "store":
            return self._postgres
        if victim == "broker":
            return self._redis if broker == "redis" else self._rabbitmq
        return None

    def _conf(self, broker: str, folder: Path) -> dict[str, Any]:
        """Return the configuration of a run, with servers that run and are empty."""
        self.start(broker)
        self._redis.flush()
        url = self._redis.database_url(0) if broker == "redis" else self._rabbitmq.create_vhost()
        return {
            **SETTINGS,
            "broker_url": url,
            "result_backend": self._redis.database_url(1),
            LEDGER: self._postgres.create_database(template=self._ledger()),
            "crash_journal": str(folder / "journal"),
            "crash_answers": str(folder / "answers"),
        }

    def _ledger(self) -> str:
        """Return the name of a database with a new ledger, to be copied."""
        if not self._template:
            url = self._postgres.create_database()
            app = make_app({**SETTINGS, LEDGER: url, "crash_journal": ""})
            budget = installed_on(app)
            budget.init()
            budget.set("tenant:a", limit=LIMIT, unit="tokens")
            budget.set("tenant:tight", limit=TIGHT, unit="tokens")
            with budget.store.transaction() as connection:
                connection.execute(sa.text("CREATE TABLE work (word TEXT)"))
            budget.store.dispose()
            self._template = url.rpartition("/")[2]
        return self._template


class _Wrong(Exception):
    """What ends a run before its end."""


class _Run:
    """One run: its processes, and the application by which it is looked at."""

    def __init__(self, folder: Path, conf: dict[str, Any], faults: Sequence[Fault]) -> None:
        self._folder = folder
        self._app = make_app(conf)
        self._budget = installed_on(self._app)
        self.processes = Processes(folder, conf, [fault.as_dict() for fault in faults])
        self._missing: list[str] = []
        self._raised = False

    def stop(self) -> None:
        self.processes.kill()
        self._app.close()
        self._budget.store.dispose()

    def start(self) -> None:
        """Start everybody; the client when the worker is there, so that nothing is sent twice."""
        self.processes.start("worker")
        self.processes.start("relay")
        self._until(lambda: self.processes.says("worker", " ready."), "the worker is not ready")
        self.processes.start("client")

    def strike(self, at: int, fault: Fault, server: Service | None, orderly: bool) -> None:
        """Wait until a fault strikes; restart the server, or note who has to come in."""
        there = struck(self._folder, at)
        self._until(lambda: there.exists() or self._is_over(), "nothing happens and it is not over")
        if not there.exists():
            raise _Wrong(f"{fault.place} was not passed")
        if server is not None:
            if not orderly:
                server.kill()
            server.restart()
            released(self._folder, at).touch()
        elif fault.victim == "process" and fault.role == "worker":
            pass  # A child: its main process sees to that.
        else:
            self.processes.of(fault.role).join(WAIT)
            self._missing.append(fault.role)

    def recover(self) -> None:
        """Have others come in for those that died, and wait until all is over."""
        for role in self._missing:
            self.processes.start(role)
        client = self.processes.of("client")
        self._until(lambda: client.exitcode is not None, "the client has not ended")
        if client.exitcode:
            raise _Wrong(f"the client ended with {client.exitcode}")
        self._until(self._is_over, "it is not over")

    def _until(self, there: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WAIT
        while not there():
            if time.monotonic() > end:
                raise _Wrong(f"{what} after {WAIT} s; open: {self._open()}; {self._seen()}")
            time.sleep(0.1)

    def _open(self) -> dict[str, int]:
        try:
            found = self._budget.store.read(reports.open_work, self._budget.settings.root)
        except StoreError as error:
            raise _Wrong(str(error)) from error
        return {name: count for name, count in found.items() if count}

    def _seen(self) -> str:
        return ", ".join(sorted(f"{row.task_name} {row.state}" for row in self._rows(reservations)))

    def _is_over(self) -> bool:
        """Tell whether all requests are there, and nothing is open.

        The limit is raised where work waits for that.
        """
        found = self._open()
        if found.get("parked") and not self._raised:
            with suppress(StoreError):
                self._budget.set("tenant:tight", limit=LIMIT)
                self._raised = True
        wanted = sum(work.count for work in WORKS.values())
        return not found and len(self._rows(reservations)) >= wanted

    def _rows(self, table: Any) -> list[Any]:
        with self._budget.store.snapshot() as connection:
            return list(connection.execute(sa.select(table)))

    def problems(self, meddle: Callable[[sa.Connection], None]) -> list[str]:
        """Return what does not hold, once ``meddle`` had its way."""
        with self._budget.store.transaction() as connection:
            meddle(connection)
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
        charged = {row.reservation_id: row.settled for row in self._rows(lines)}
        returned = Counter(
            row.reservation_id for row in self._rows(attempts) if row.outcome == "returned"
        )
        rows = self._rows(reservations)
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
        had = Counter(row.word for row in self._rows(WORK))
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
        charged = sum(row.settled for row in self._rows(lines))
        if spent != charged:
            found.append(f"{spent} spent and {charged} charged")
        left = [row.task_name for row in self._rows(outbox) if row.reservation_id is not None]
        if left:
            found.append(f"messages are left: {left}")
        return found

    def _of_workers(self) -> list[str]:
        """Each worker is known by an id of its own, as those are that nothing has forked."""
        names: dict[Any, set[str]] = {}
        for row in self._rows(attempts):
            if row.boot_id != NOBODY:
                names.setdefault(row.boot_id, set()).add(row.worker.partition("/")[0])
        return [f"workers {sorted(same)} are one" for same in names.values() if len(same) > 1]
