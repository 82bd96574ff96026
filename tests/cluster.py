"""Real workers, beat and relay processes for tests, and waiting for what they do.

A :class:`Cluster` belongs to one test: one configuration, one folder, and the processes started
from it, which it ends by their process ids.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from celery_budget.integration.context import installed_on
from celery_budget.integration.install import CeleryBudget
from tests.apps import shop
from tests.services.guardian import guardian

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
#: Seconds after which a test gives up waiting: far more than a busy machine takes.
WAIT = 120
#: Leases as short as they may be with what else is as short.
SHORT_LEASES = {
    "budget_lease_seconds": 2,
    "budget_publish_seconds": 2,
    "budget_lock_seconds": 2,
}


def embedded_in(folder: Path, **more: Any) -> dict[str, Any]:
    """Return settings of the embedded default, all of it in this folder, and these besides.

    That is SQLite, the filesystem transport and results in files.
    """
    folders = {name: folder / name for name in ("queue", "processed", "control", "results")}
    for one in folders.values():
        one.mkdir()
    return {
        "broker_url": "filesystem://",
        "broker_transport_options": {
            "data_folder_in": str(folders["queue"]),
            "data_folder_out": str(folders["queue"]),
            "processed_folder": str(folders["processed"]),
            "control_folder": str(folders["control"]),
            "polling_interval": 0.05,
        },
        "result_backend": f"file://{folders['results']}",
        "budget_database_url": f"sqlite:///{folder / 'budget.db'}",
        **more,
    }


def eventually(
    probe: Callable[[], T], until: Callable[[T], bool] = bool, seconds: float = WAIT, what: str = ""
) -> T:
    """Return ``probe()`` once ``until`` holds for it; fail, showing the last value, if never."""
    end = time.monotonic() + seconds
    while True:
        value = probe()
        if until(value):
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what or 'the awaited state'} did not come; last: {value!r}")
        time.sleep(0.05)


def end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask sessions' leaders to end, all at once; kill the session of one that does not."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Process:
    """One ``celery`` process with its log."""

    def __init__(self, cluster: Cluster, name: str, *arguments: str) -> None:
        self.log = cluster.folder / f"{name}.log"
        self._asked = False
        self._file = self.log.open("ab")
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", cluster.module.__name__, *arguments],
            cwd=cluster.folder,
            env={
                **os.environ,
                cluster.module.CONF: json.dumps(cluster.conf),
                "PYTHONPATH": str(ROOT),
            },
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        guardian.watch_process(self.pid, signal.SIGTERM)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def says(self, text: str, seconds: float = WAIT) -> None:
        """Wait until ``text`` is in the log."""

        def look() -> str:
            if self.popen.poll() is not None and text not in self.text():
                raise AssertionError(f"{self.log.name}: it ended:\n{self.text()[-4000:]}")
            return self.text()

        eventually(look, lambda log: text in log, seconds, f"{text!r} in {self.log.name}")

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        """Return the pool's processes."""
        found: list[psutil.Process] = psutil.Process(self.pid).children()
        return found

    def kill(self) -> None:
        """SIGKILL it with its children, as the end of their machine would, where any is left."""
        if self._file.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait()
        guardian.forget_process(self.pid)
        self._file.close()

    def ask_to_end(self) -> None:
        """Send SIGTERM, once: a second one means something else to a worker."""
        if self.popen.poll() is None and not self._asked:
            self.popen.send_signal(signal.SIGTERM)
            self._asked = True

    def terminate(self, seconds: float = WAIT) -> int:
        """Ask it to end; kill it if it does not."""
        self.ask_to_end()
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(seconds)
        self.kill()
        return int(self.popen.returncode)


class Cluster:
    """One application's processes in one folder.

    :param conf: the broker, result backend and ledger, and anything else to be set.
    :param module: has the application: ``make_app`` of a configuration, which processes get in the
        variable that ``CONF`` names.
    """

    def __init__(self, folder: Path, conf: dict[str, Any], module: Any = shop) -> None:
        self.module = module
        self.folder = folder
        self.journal_path = folder / "journal"
        self.journal_path.touch()
        self.conf = {
            "budget_poll_seconds": 0.05,
            "budget_sweep_seconds": 0.2,
            "budget_lease_seconds": 3,
            "budget_republish_seconds": 5,
            "budget_publish_seconds": 3,
            "budget_lock_seconds": 3,
            "broker_connection_retry_on_startup": True,
            "broker_connection_max_retries": None,
            "worker_prefetch_multiplier": 1,
            "worker_enable_remote_control": False,
            # How long a worker looks for the result of a child that is gone; ten by default.
            "worker_lost_wait": 1.0,
            "shop_journal": str(self.journal_path),
            **conf,
        }
        self.app = module.make_app(self.conf)
        self.budget: CeleryBudget = installed_on(self.app)
        self.budget.init()
        self._processes: list[Process] = []

    def start(self, name: str, *arguments: str) -> Process:
        process = Process(self, f"{name}-{len(self._processes)}", *arguments)
        self._processes.append(process)
        return process

    def worker(self, *arguments: str, concurrency: int = 2, pool: str = "prefork") -> Process:
        """Start a worker and wait until it is ready."""
        number = len(self._processes)
        process = self.start(
            "worker",
            *("worker", "-n", f"w{number}@test", "-c", str(concurrency), "-P", pool, "-l", "INFO"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat", *arguments),
        )
        process.says(" ready.")
        return process

    def beat(self) -> Process:
        """Start beat with the relay in it, and wait for the relay."""
        process = self.start(
            "beat", "beat", "-S", "budget", "-l", "INFO", "-s", str(self.folder / "schedule")
        )
        process.says("budget relay started")
        return process

    def relay(self) -> Process:
        """Start ``budget relay`` and wait until it relays."""
        process = self.start("relay", "budget", "relay")
        process.says("budget relay started")
        return process

    def task(self, name: str) -> Any:
        return self.app.tasks[f"shop.{name}"]

    def journal(self) -> list[str]:
        """Return what the task bodies have noted so far."""
        return self.journal_path.read_text().split("\n")[:-1]

    def release(self, name: str) -> None:
        """Let the tasks that wait for ``name`` go on."""
        (self.folder / name).touch()

    def counts(self) -> dict[str, int]:
        return self.budget.report().counts

    def settle(self, seconds: float = WAIT) -> None:
        """Wait until nothing is open in the ledger, then check that it adds up."""
        eventually(
            lambda: self.budget.reconcile().open_work,
            lambda open_work: not any(open_work.values()),
            seconds,
            "a ledger with nothing open",
        )
        assert self.budget.reconcile().mismatches == ()

    def stop(self) -> None:
        """Leave nothing. A test that wants an end in good order, which takes seconds, asks."""
        for process in self._processes:
            process.kill()
        # A result that a test still holds would ask for its server, long gone, when it is freed.
        getattr(getattr(self.app.backend, "result_consumer", None), "subscribed_to", set()).clear()
        self.app.close()
        self.budget.store.dispose()
