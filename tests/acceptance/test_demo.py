"""The demo as ``make demo`` runs it, on files of the test's own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import terminal
from tests.cluster import WAIT, eventually
from tests.programs import Programs

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo" / "run.py"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with texts of both stages, and files that are none."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(5):
        (folder / f"code{number}.py").write_text(
            f"value_of_file_{number} = call_something(1, 2)\n" * (number + 3)
        )
    for number in range(3):
        (folder / f"page{number}.md").write_text(
            "# A heading\n" + "Some words.\n" * 90 * (number + 1)
        )
    (folder / "empty.py").write_text("\n")
    (folder / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    return folder


class Demo(Programs):
    """Runs of the demo."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "BUDGET_DEMO_FOLDER")
        self.folder = folder

    def start(self, *files: object) -> subprocess.Popen[str]:
        return self.launch(DEMO, *files, cwd=self.folder, session=True)

    def run(self, *files: object) -> tuple[int, str, str]:
        process = self.start(*files)
        said, complained = process.communicate(timeout=WAIT)
        return process.returncode, said, complained


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    made = Demo(tmp_path)
    with made.ended():
        yield made


def tokens(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


def actual(path: Path) -> int:
    """Work out what the task for a file uses."""
    text = path.read_text()
    if path.suffix == ".md":
        return sum(tokens(line) for line in text.splitlines() if line.startswith("#"))
    return tokens(text)


def count(said: str, name: str) -> int:
    """Return the number of a row of the report."""
    row = re.search(rf"^{name} +([\d,]+)", said, re.MULTILINE)
    assert row is not None, said
    return int(row[1].replace(",", ""))


def test_the_figures_are_those_of_the_files(demo: Demo, texts: Path) -> None:
    files = sorted(texts.iterdir())
    given = [*files, files[0], texts / "missing.py", texts]
    page = demo.folder / "report.html"
    status, said, complained = demo.run("--page", page, *given)
    assert (status, complained) == (0, ""), said
    assert f"the report as a page with plots: {page}\n" in said
    assert "tenant:demo" in page.read_text(encoding="utf-8")
    skipped = dict(re.findall(r"^skipped (.+): (.+)$", said, re.MULTILINE))
    assert skipped == {
        str(texts / "empty.py"): "empty",
        str(texts / "image.png"): "not UTF-8 text",
        str(files[0]): "given twice",
        str(texts / "missing.py"): "No such file or directory",
        str(texts): "not a file",
    }
    refused = re.findall(r"^refused (.+?): ", said, re.MULTILINE)
    assert "were requested; see" in said
    work = [path for path in files if path.suffix in (".py", ".md") and path.name != "empty.py"]
    admitted = [path for path in work if str(path) not in refused]
    assert refused
    assert admitted
    assert (count(said, "admitted"), count(said, "refused")) == (len(admitted), len(refused))
    assert len(admitted) + len(refused) == len(work) == 8
    balance = re.search(r"^tenant:demo +tokens +([\d, ]+)$", said, re.MULTILINE)
    assert balance is not None
    limit, reserved, spent, available = (int(one.replace(",", "")) for one in balance[1].split())
    assert spent == sum(map(actual, admitted))
    assert (reserved, available) == (0, limit - spent)
    assert f"{len(admitted)} requests, nothing open" in said
    assert demo.nothing_is_left()


def test_on_a_terminal_it_is_read_in_80_columns(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    environment = {**os.environ, "TERM": "xterm", "TMPDIR": str(tmp_path)}
    files = sorted(map(str, texts.glob("*.*")))
    status, seen = terminal.run([sys.executable, str(DEMO), *files], tmp_path, environment)
    assert status == 0, seen
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", plain)]
    assert [line for line in lines if len(line) > 80] == []
    assert not re.search("Traceback|WARNING|Warning:", plain)
    # The command to see more is not broken within a word.
    assert "'celery -A PROJ budget explain --budget tenant:demo'" in " ".join(lines)
    assert "tenant:demo" in plain


def test_it_runs_again_and_several_at_once(demo: Demo, texts: Path) -> None:
    files = sorted(texts.glob("*.py"))
    for process in [demo.start(*files) for _ in range(2)]:
        said, complained = process.communicate(timeout=WAIT)
        assert (process.returncode, complained) == (0, ""), said
    assert demo.nothing_is_left()


def test_without_text_there_is_nothing_to_do(demo: Demo, texts: Path) -> None:
    status, said, complained = demo.run(texts / "empty.py")
    assert (status, complained) == (2, "")
    assert said.endswith("there is no text to work on\n")


@pytest.fixture
def many(texts: Path) -> list[Path]:
    """Enough files to be interrupted in the middle."""
    for number in range(60):
        (texts / f"more{number}.py").write_text("some_function_call(argument)\n" * 10)
    return sorted(texts.glob("more*"))


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the demo ended without saying {text!r}")


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, " estimated at "),
        (signal.SIGTERM, " refused before dispatch"),
        (signal.SIGINT, " done"),
        (signal.SIGTERM, " done"),
    ],
)
def test_a_signal_leaves_nothing(
    demo: Demo, many: list[Path], number: signal.Signals, moment: str
) -> None:
    process = demo.start(*many)
    read_until(process, moment)
    began = time.monotonic()
    process.send_signal(number)
    _, complained = process.communicate(timeout=WAIT)
    assert complained == f"stopped by {number.name}\n"
    assert process.returncode == 128 + number
    # Ten seconds at most for its processes, and some for a machine that is busy.
    assert time.monotonic() - began < 60
    assert demo.nothing_is_left()


def test_a_worker_that_dies_fails_the_demo(demo: Demo, many: list[Path]) -> None:
    process = demo.start(*many)
    read_until(process, " done")
    worker = next(
        one
        for one in psutil.Process(process.pid).children()
        if "worker-1@demo" in " ".join(one.cmdline())
    )
    worker.kill()
    _, complained = process.communicate(timeout=WAIT)
    assert complained.startswith("the demo failed: worker-1 ended with status -9")
    assert process.returncode == 1
    eventually(demo.nothing_is_left, what="an end of all processes")
