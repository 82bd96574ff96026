"""Each example, as its README says: the one command, what it prints, and the commands by hand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import WAIT, eventually
from tests.programs import Programs

ROOT = Path(__file__).resolve().parents[2]
#: The demo has tests of its own.
NAMES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/run.py"))
NAMES.remove("demo")


def page(name: str) -> str:
    return (ROOT / "examples" / name / "README.md").read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page(name), re.MULTILINE | re.DOTALL)


class Run(Programs):
    """One run of an example."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "EXAMPLE_FOLDER")

    def start(self, name: str) -> subprocess.Popen[str]:
        return self.launch("-u", "-m", f"examples.{name}.run", cwd=ROOT)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    with made.ended():
        yield made


@pytest.mark.parametrize("name", NAMES)
def test_it_does_what_its_readme_says(name: str, run: Run) -> None:
    process = run.start(name)
    said, complained = process.communicate(timeout=2 * WAIT)
    assert (process.returncode, complained) == (0, ""), said
    (promised,) = blocks(name, "text")
    assert said.splitlines() == promised.splitlines()
    assert run.nothing_is_left()


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_prepared_by_hand(name: str, tmp_path: Path) -> None:
    """What is run once, before the servers are started in terminals of their own."""
    command, prepare, *_ = blocks(name, "sh")
    assert command == f"make example NAME={name}\n"
    assert "budget init" in prepare or ".declare(" in prepare
    done = subprocess.run(
        ["sh", "-e", "-c", prepare.replace("/tmp/example", str(tmp_path / "example"))],  # noqa: S108
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_signal_leaves_nothing(run: Run) -> None:
    process = run.start("pipeline")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("raven: refused"):
            break
    # The worker is the next thing that it starts.
    eventually(lambda: len(run.processes()) > 0, what="the worker")
    process.send_signal(signal.SIGTERM)
    _, complained = process.communicate(timeout=WAIT)
    assert (process.returncode, complained) == (128 + signal.SIGTERM, "")
    assert run.nothing_is_left()


def test_a_worker_that_dies_fails_the_example(run: Run) -> None:
    process = run.start("pipeline")
    (worker,) = eventually(run.processes, what="the worker")
    worker.kill()
    _, complained = process.communicate(timeout=WAIT)
    assert complained.startswith("the example failed: worker ended with status -9")
    assert process.returncode == 1
    assert run.nothing_is_left()


@pytest.mark.parametrize("name", NAMES)
def test_it_is_named_where_users_look(name: str) -> None:
    assert f"examples/{name}/README.md" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"examples/{name}/README.md" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
