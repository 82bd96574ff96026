"""The processes of one cell: a client, a relay, a worker, and those that come in for them.

They are forked from a process that has imported Celery already; a matrix starts thousands.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from tests.crash.entry import PRELOADED, begin
from tests.services.guardian import guardian

__all__ = ["Processes"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)

ARGUMENTS: dict[str, list[str]] = {
    "client": [],
    "relay": ["budget", "relay"],
    "worker": [
        *("worker", "-c", "2", "-P", "prefork", "-l", "INFO"),
        *("--without-gossip", "--without-mingle", "--without-heartbeat"),
    ],
}


class Processes:
    """What was started for a cell, by role.

    :param conf: the application's configuration.
    :param faults: as :class:`tests.crash.points.Fault` gives them as a dictionary.
    """

    def __init__(self, folder: Path, conf: dict[str, Any], faults: list[dict[str, Any]]) -> None:
        self._folder = folder
        self._given = {"conf": conf, "folder": str(folder), "faults": faults}
        self._all: list[tuple[str, BaseProcess, Path]] = []

    def start(self, role: str) -> BaseProcess:
        """Start a process of this role."""
        number = len(self._all)
        log = self._folder / f"{role}-{number}.log"
        name = ["-n", f"w{number}@crash"] if role == "worker" else []
        process = _context.Process(
            target=begin,
            args=(str(log), {**self._given, "role": role}, [*ARGUMENTS[role], *name]),
        )
        process.start()
        assert process.pid is not None
        guardian.watch_process(process.pid, signal.SIGTERM)
        self._all.append((role, process, log))
        return process

    def of(self, role: str) -> BaseProcess:
        """Return the last process of this role."""
        return next(process for known, process, _ in reversed(self._all) if known == role)

    def says(self, role: str, text: str) -> bool:
        """Tell whether the last process of this role has said ``text``."""
        log = next(log for known, _, log in reversed(self._all) if known == role)
        return log.exists() and text in log.read_text(errors="replace")

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-30000:]}"
            for _, _, log in self._all
            if log.exists()
        )

    def kill(self) -> None:
        """SIGKILL all that is left, with their children."""
        for _, process, _ in self._all:
            assert process.pid is not None
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            else:
                _kill_orphans(process.pid)
            process.join()
            guardian.forget_process(process.pid)


def _kill_orphans(leader: int) -> None:
    """Kill what is left of a group whose leader is dead; its number may be somebody else's now."""
    for one in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(one.pid) == leader and "crash" in " ".join(one.cmdline()):
                one.kill()
