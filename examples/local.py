"""What the examples share: everything in one folder, and the processes that use it.

An application calls :func:`keep_in` where it would configure its servers, and a ``run.py`` runs in
:func:`folder` what it needs in processes of their own. Nothing of this belongs into an application
of yours.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from celery import Celery

T = TypeVar("T")

#: Where the processes of an example find the folder.
FOLDER = "EXAMPLE_FOLDER"
ROOT = Path(__file__).resolve().parent.parent
DEADLINE_SECONDS = 120.0
STOP_SECONDS = 20.0


class Failed(Exception):
    """An example cannot go on."""


def settings(folder: Path) -> dict[str, Any]:
    """Return what Celery is told to keep ledger, messages and results in a folder."""
    messages, results = folder / "messages", folder / "results"
    for path in (messages, results):
        path.mkdir(parents=True, exist_ok=True)
    return {
        "broker_url": "filesystem://",
        "broker_transport_options": {
            "data_folder_in": str(messages),
            "data_folder_out": str(messages),
            "processed_folder": str(folder / "processed"),
            "control_folder": str(folder / "control"),
            "polling_interval": 0.05,
        },
        "result_backend": f"file://{results}",
        "worker_enable_remote_control": False,
        "budget_database_url": f"sqlite:///{folder / 'ledger.db'}",
        "budget_poll_seconds": 0.05,
    }


def keep_in(app: Celery, folder: Path | None = None) -> None:
    """Have an application keep everything in a folder: in the one of ``EXAMPLE_FOLDER``, if any."""
    if folder is None and FOLDER in os.environ:
        folder = Path(os.environ[FOLDER]).resolve()
    if folder is not None:
        app.conf.update(settings(folder))


class Stopped(Exception):
    """A signal has asked to stop."""


class Signals:
    """Notes signals; they take effect where :meth:`check` is called, never halfway a step."""

    def __init__(self) -> None:
        self.number: int | None = None

    def watch(self) -> None:
        """Note Ctrl-C and SIGTERM from here on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.number = number

    def check(self) -> None:
        """Stop here if a signal asked for it.

        :raises Stopped: then.
        """
        if self.number is not None:
            raise Stopped


signals = Signals()


@contextmanager
def folder() -> Iterator[Path]:
    """Give an example a folder of its own, which is removed at the end."""
    for variable in [name for name in os.environ if name.startswith("CELERY_")]:
        # These would override the example's own settings.
        del os.environ[variable]
    with tempfile.TemporaryDirectory(prefix="celery-budget-example-") as name:
        os.environ[FOLDER] = name
        try:
            yield Path(name)
        finally:
            del os.environ[FOLDER]


class Process:
    """A process of an example, with its output in a file."""

    def __init__(self, name: str, command: Sequence[str], **options: Any) -> None:
        self._name = name
        folder = Path(os.environ[FOLDER])
        self._log = folder / f"{name}.log"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "NO_PROXY": "127.0.0.1",
        }
        given = {"cwd": folder, "env": environment, **options}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **given,
            )

    def check(self) -> None:
        """Check that it runs.

        :raises Failed: with the end of what it said.
        """
        if self._process.poll() is not None:
            said = self._log.read_text(errors="replace")[-2000:]
            raise Failed(f"{self._name} ended with status {self._process.returncode}:\n{said}")

    def wait(self, probe: Callable[[], T]) -> T:
        """Return what ``probe`` returns once that is true.

        :raises Failed: where the process ends before, or it takes too long.
        :raises Stopped: after a signal.
        """
        end = time.monotonic() + DEADLINE_SECONDS
        while not (found := probe()):
            signals.check()
            self.check()
            if time.monotonic() > end:
                said = self._log.read_text(errors="replace")[-2000:]
                raise Failed(f"{self._name} has not done its work in time:\n{said}")
            time.sleep(0.05)
        return found

    def stop(self) -> None:
        """End it, and what is left of its session."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def process(name: str, *command: str, **options: Any) -> Iterator[Process]:
    """Run ``python -m COMMAND`` while a block runs.

    :param options: of :class:`subprocess.Popen`.
    """
    started = Process(name, command, **options)
    try:
        yield started
    finally:
        started.stop()


@contextmanager
def worker(module: str, *options: str) -> Iterator[Process]:
    """Run a worker of an application, with a relay in it, while a block runs."""
    with process(
        "worker",
        *("celery", "-A", module, "worker", "-P", "solo", "--budget-relay", "-l", "INFO"),
        *("--without-gossip", "--without-mingle", "--without-heartbeat"),
        *options,
    ) as started:
        yield started


def closed(budget: Any) -> bool:
    """Tell whether nothing is open in a ledger any more."""
    return not any(budget.reconcile().open_work.values())


def verdict(budget: Any) -> int:
    """Say whether a ledger adds up; return the exit status."""
    found = budget.reconcile()
    print("the ledger adds up" if found.ok else "\n".join(found.mismatches))
    return 0 if found.ok else 1


def run(main: Callable[[], int]) -> NoReturn:
    """Run an example and exit by its status: 1 where it fails, 128 + N after signal N."""
    signals.watch()
    status = 0
    try:
        status = main()
    except Stopped:
        pass
    except Failed as failure:
        status = 1
        if signals.number is None:
            print(f"the example failed: {failure}", file=sys.stderr)
    raise SystemExit(status if signals.number is None else 128 + signals.number)
