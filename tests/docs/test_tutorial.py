"""The tutorial, done as it says: its files, its commands, and what they print."""

from __future__ import annotations

import doctest
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster import WAIT, eventually
from tests.docs.pages import ROOT, Block, blocks_of, write_files

PAGE = ROOT / "docs" / "tutorial.md"
#: Commands that only look: what they show may take a moment to be so.
LOOKS = ("budget list", "budget report", "budget explain", "budget reconcile", "budget suggest")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def steps() -> list[tuple[str, str]]:
    """Return each command of the page with what it is to print."""
    found: list[tuple[str, str]] = []
    for block in blocks_of(PAGE):
        if block.language == "console" and not block.marked:
            for part in block.text.split("$ ")[1:]:
                command, _, printed = part.partition("\n")
                found.append((command, printed))
    return found


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
        for process in self.started:
            process.terminate()
        for process in self.started:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    yield made
    made.stop()


@pytest.mark.timeout(900)
def test_the_tutorial_prints_what_it_says(reader: Reader) -> None:
    write_files(PAGE, reader.folder)
    assert {path.name for path in reader.folder.iterdir()} == {"shop.py", "ask.py", "answers.py"}
    checker = doctest.OutputChecker()
    for command, printed in steps():
        if " worker " in command:
            reader.start(command)
            continue
        if any(look in command for look in LOOKS):
            eventually(
                lambda command=command: reader.do(command),
                until=lambda said, printed=printed: checker.check_output(printed, said, FLAGS),
                what=f"what the page says of {command!r}",
            )
        else:
            said = reader.do(command)
            assert checker.check_output(printed, said, FLAGS), (command, printed, said)


def test_the_tutorial_has_a_refusal_and_a_report() -> None:
    told = dict(steps())
    assert "is refused: budget 'tenant:acme'" in told["python ask.py order-1 order-2 order-3"]
    assert "refused           1" in told["celery -A shop budget report"]
    assert [one for one in told if one.startswith("celery -A shop worker")]


def test_a_block_is_left_out_only_with_a_reason() -> None:
    left: list[Block] = [block for block in blocks_of(PAGE) if block.marked]
    assert [block.text.splitlines()[0] for block in left] == ["$ python -m venv .venv"]
