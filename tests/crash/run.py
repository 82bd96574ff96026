"""One run of the crash matrix: its processes, a fault, and the recovery from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from celery_budget.errors import StoreError
from celery_budget.integration.context import installed_on
from celery_budget.store import reports
from celery_budget.store.schema import reservations
from tests.crash.checks import Ledger
from tests.crash.faults import passed, released, struck
from tests.crash.points import Fault
from tests.crash.processes import Processes
from tests.crash.tasks import make_app
from tests.services.base import Service

__all__ = ["LIMIT", "Run", "Wrong"]

#: Seconds until a fault has to have struck, and until all has to be over.
WAIT = 150
#: What everything fits.
LIMIT = 1000


class Wrong(Exception):
    """What ends a run before its end."""


class Run:
    """One run: its processes, and the application by which it is looked at."""

    def __init__(self, folder: Path, conf: dict[str, Any], faults: Sequence[Fault]) -> None:
        self._folder = folder
        self._app = make_app(conf)
        self._budget = installed_on(self._app)
        self._ledger = Ledger(self._app, folder)
        self._faults = faults
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
        # A worker may find out about a child that is gone when all is over.
        self._until(
            lambda: there.exists() or (not fault.then and self._is_over()),
            f"{fault.place} was not passed",
        )
        if not there.exists():
            raise Wrong(f"{fault.place} was not passed")
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
            raise Wrong(f"the client ended with {client.exitcode}")
        self._until(self._is_over, "it is not over")

    def _until(self, there: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WAIT
        while not there():
            if time.monotonic() > end:
                raise Wrong(f"{what} after {WAIT} s; open: {self._open()}; {self._seen()}")
            time.sleep(0.1)

    def _open(self) -> dict[str, int]:
        try:
            found = self._budget.store.read(reports.open_work, self._budget.settings.root)
        except StoreError as error:
            raise Wrong(str(error)) from error
        return {name: count for name, count in found.items() if count}

    def _seen(self) -> str:
        rows = self._ledger.rows(reservations)
        return ", ".join(sorted(f"{row.task_name} {row.state}" for row in rows))

    def _is_over(self) -> bool:
        """Tell whether all requests are there, and nothing is open.

        The limit is raised where work waits for that.
        """
        found = self._open()
        if found.get("parked") and not self._raised:
            with suppress(StoreError):
                self._budget.set("tenant:tight", limit=LIMIT)
                self._raised = True
        return not found and self._ledger.is_complete()

    def problems(self, meddle: Callable[[sa.Connection], None]) -> list[str]:
        """Return what does not hold, once ``meddle`` had its way with the ledger."""
        with self._budget.store.transaction() as connection:
            meddle(connection)
        return self._ledger.problems()

    def counts(self) -> list[int]:
        """Return how often the place of each fault was passed."""
        files = [passed(self._folder, at) for at in range(len(self._faults))]
        return [file.stat().st_size if file.exists() else 0 for file in files]
