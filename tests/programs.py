"""Programs as a user runs them, with temporary folders that a test can look into."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

__all__ = ["Programs"]


class Programs:
    """Programs of one test, and what each of them starts, which knows its folder by a variable.

    :param folder: where the folder for temporary files is made.
    :param variable: names the folder of one run, in the environment of what that has started.
    """

    def __init__(self, folder: Path, variable: str) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._variable = variable
        self._started: list[subprocess.Popen[str]] = []

    def launch(self, *arguments: object, cwd: Path, session: bool = False) -> subprocess.Popen[str]:
        """Start Python with such arguments, in a session of its own where asked to."""
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "TMPDIR": str(self.temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=session,
        )
        self._started.append(process)
        return process

    def processes(self) -> list[psutil.Process]:
        """Return what the programs have started, and still runs."""
        found = []
        for process in psutil.process_iter():
            try:
                named = process.environ().get(self._variable, "")
            except psutil.Error:
                continue
            if named.startswith(str(self.temporary)):
                found.append(process)
        return found

    def nothing_is_left(self) -> bool:
        return not self.processes() and not list(self.temporary.iterdir())

    @contextmanager
    def ended(self) -> Iterator[None]:
        """End whatever still runs after the block."""
        try:
            yield
        finally:
            for process in self._started:
                if process.poll() is None:
                    process.kill()
            for left in self.processes():
                left.kill()
            # What it has started may have had its output as well.
            for process in self._started:
                process.communicate()
