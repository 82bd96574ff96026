"""The crash matrix: runs its cells one after another on servers of its own."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import sqlalchemy as sa
from typing_extensions import Self

from celery_budget.integration.context import installed_on
from tests.crash.points import CELLS, Fault
from tests.crash.run import LIMIT, Run, Wrong
from tests.crash.tasks import ESTIMATE, LEDGER, make_app
from tests.services.base import Service, ServiceUnavailable
from tests.services.guardian import guardian
from tests.services.postgres import PostgresServer
from tests.services.rabbitmq import RabbitServer
from tests.services.redis import RedisServer

__all__ = ["Matrix", "Outcome"]

#: At which time that its place is passed a fault strikes that is only watched for.
NEVER = 1_000_000_000

#: What fits only one step of a chain.
TIGHT = ESTIMATE

SETTINGS = {
    "budget_poll_seconds": 0.1,
    "budget_sweep_seconds": 0.2,
    "budget_lease_seconds": 2,
    "budget_republish_seconds": 3,
    "budget_publish_seconds": 2,
    "budget_lock_seconds": 2,
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    "worker_prefetch_multiplier": 1,
    "worker_enable_remote_control": False,
    "worker_lost_wait": 0.5,
}


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

    def __init__(self, stripes: int = 1) -> None:
        self._stripes = stripes
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
        guardian.watch_folder(folder)
        run = None
        try:
            run = Run(folder, self._conf(broker, folder), faults)
            run.start()
            if orderly is not None:
                for at, fault in enumerate(faults):
                    run.strike(at, fault, self._server(broker, fault.victim), orderly)
            run.recover()
            outcome.problems += run.problems(meddle)
        except ServiceUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - the other cells have their turn
            outcome.problems.append(str(error) if isinstance(error, Wrong) else repr(error))
        finally:
            if run is not None:
                run.stop()
                outcome.counts = run.counts()
                outcome.logs = run.processes.logs() if outcome.problems else ""
            shutil.rmtree(folder, ignore_errors=True)
            guardian.forget_folder(folder)
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
            budget.set("tenant:a", limit=LIMIT, unit="tokens", stripes=self._stripes)
            budget.set("tenant:tight", limit=TIGHT, unit="tokens", stripes=self._stripes)
            with budget.store.transaction() as connection:
                connection.execute(sa.text("CREATE TABLE work (word TEXT)"))
            budget.store.dispose()
            self._template = url.rpartition("/")[2]
        return self._template
