"""A reader who types what a page says, in a folder."""

from __future__ import annotations

import doctest
import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests.cluster import WAIT, end_all

#: Commands that only look: what they show may take a moment to be so.
LOOKS = ("budget list", "budget report", "budget explain", "budget reconcile", "budget suggest")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Reader:
    """Somebody who does what the page says, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if "CELERY" not in name},
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def words(self, command: str) -> list[str]:
        program, *rest = shlex.split(command)
        return [sys.executable, *(["-m", "celery"] if program == "celery" else []), *rest]

    def start(self, command: str) -> None:
        """Do it in another terminal."""
        with (self.folder / "worker.log").open("wb") as log:
            self.started.append(
                subprocess.Popen(
                    self.words(command),
                    cwd=self.folder,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def do(self, command: str) -> str:
        """Do it, and return what it prints."""
        done = subprocess.run(
            self.words(command),
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * WAIT,  # the page itself waits for a result
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def stop(self) -> None:
        end_all(self.started)
