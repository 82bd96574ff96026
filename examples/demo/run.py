"""The demo: one budgeted task for each text file, under a budget too small for all of them.

    run.py [FILE ...]

Without files it takes the project's own. It needs no server and no network: see ``indexer.py``.
A temporary folder holds everything and is removed at the end; the worker and beat processes are
ended on every way out (Ctrl-C and SIGTERM included).

Exit status: 0 where everything admitted ran and the ledger adds up, 1 where not, 2 where there is
nothing to do, 128 + N after signal N.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import indexer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from celery_budget import BudgetExceeded
from celery_budget.reconcile import Reconciliation, Report
from celery_budget.render.html import report_html
from celery_budget.render.reports import report_view
from celery_budget.render.text import as_text, literal

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OWN_FILES = ("*.md", "*.toml", "docs/**/*.md", "celery_budget/**/*.py")

TENANT = "demo"
BUDGET = f"tenant:{TENANT}"
#: The part of all estimates, in percent, that the tenant's budget allows.
SHARE_PERCENT = 60
#: How many refusals are shown one by one.
SHOWN = 10
LARGEST_BYTES = 4 * 1024 * 1024
WORKERS = 2
DEADLINE_SECONDS = 120.0
STOP_SECONDS = 10.0
STEP_SECONDS = 0.05


class Failed(Exception):
    """The demo cannot go on."""


class Interrupted(Exception):
    """A signal asked to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """Notes signals; they take effect where :meth:`check` is called, never halfway a step."""

    def __init__(self) -> None:
        self._received: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup has SIGHUP ignored, and means it.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def check(self) -> None:
        """Stop here if a signal asked for it.

        :raises Interrupted: with its number.
        """
        if self._received is not None:
            raise Interrupted(self._received)


@dataclass(frozen=True)
class Text:
    """One file's text and the task that will read it."""

    name: str
    text: str
    task: Any
    estimate: int


def read_texts(names: Sequence[str]) -> tuple[list[Text], list[tuple[str, str]]]:
    """Return the texts of the files, and the files that are skipped, each with the reason."""
    texts: list[Text] = []
    skipped: list[tuple[str, str]] = []
    seen: set[Path] = set()
    for given in names:
        name = os.fsencode(given).decode("utf-8", "backslashreplace")
        try:
            path = Path(given).resolve()
            text = _read(path, seen)
        except ValueError as error:
            skipped.append((name, str(error)))
        except OSError as error:
            skipped.append((name, error.strerror or str(error)))
        else:
            seen.add(path)
            markdown = path.suffix.lower() == ".md"
            task = indexer.outline if markdown else indexer.index
            estimate = indexer.estimate_outline if markdown else indexer.estimate_index
            texts.append(Text(name, text, task, estimate(text)))
    return texts, skipped


def _read(path: Path, seen: set[Path]) -> str:
    """Return a file's text.

    :raises ValueError: saying why it is none.
    """
    if path in seen:
        raise ValueError("given twice")
    status = path.stat()
    if not path.is_file():
        raise ValueError("not a file")
    if status.st_size > LARGEST_BYTES:
        raise ValueError(f"larger than {LARGEST_BYTES:,} bytes")
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    if not text.strip():
        raise ValueError("empty")
    return text


def own_files() -> list[str]:
    """Return the project's own text files, relative to the current folder where they are in it."""
    here = Path.cwd()
    found = {path for pattern in OWN_FILES for path in ROOT.glob(pattern) if path.is_file()}
    return [
        str(path.relative_to(here) if path.is_relative_to(here) else path)
        for path in sorted(found)
        if path.stat().st_size
    ]


class Services:
    """The demo's Celery processes, each in a session of its own, ended by their ids."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> None:
        """Start ``celery -A indexer`` with these arguments; its output goes to a file."""
        environment = {
            **os.environ,
            indexer.FOLDER: str(self._folder),
            "PYTHONPATH": str(HERE),
            "TMPDIR": str(self._folder),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "indexer", *arguments],
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def check(self) -> None:
        """Check that all of them run.

        :raises Failed: naming the one that does not, with the end of what it said.
        """
        for name, process in self._processes.items():
            if process.poll() is not None:
                said = self._log(name).read_text(errors="replace")[-2000:]
                raise Failed(f"{name} ended with status {process.returncode}:\n{said}")

    def stop(self) -> None:
        """End all of them, then kill what is left of their sessions.

        A worker that was killed leaves its pool children behind; while one of them lives, nobody
        else gets the session's id.
        """
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + STOP_SECONDS
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


@contextmanager
def services(folder: Path) -> Iterator[Services]:
    """Start the workers and beat with the relay in it; end them in any case."""
    # The transport notes its queues in a file, which two workers at once might find half written.
    with indexer.app.connection_for_write() as connection:
        indexer.app.amqp.queues[indexer.app.conf.task_default_queue](connection).declare()
    started = Services(folder)
    try:
        for number in range(1, WORKERS + 1):
            started.start(
                f"worker-{number}",
                *("worker", "-n", f"worker-{number}@demo", "-P", "prefork", "-c", "1"),
                *("-l", "INFO", "--without-gossip", "--without-mingle", "--without-heartbeat"),
            )
        started.start("beat", "beat", "-S", "budget", "-l", "INFO", "-s", str(folder / "schedule"))
        yield started
    finally:
        started.stop()


@dataclass(frozen=True)
class Dispatched:
    """What was admitted, with the results to wait for, and how many were refused."""

    results: dict[str, Any]
    refused: int


def dispatch(console: Console, signals: Signals, texts: Sequence[Text]) -> Dispatched:
    """Ask for a task for each text; the first refusals are shown, the very first one in full."""
    results: dict[str, Any] = {}
    refused = 0
    for text in texts:
        signals.check()
        try:
            results[text.name] = text.task.delay(text.name, text.text, TENANT)
        except BudgetExceeded as refusal:
            refused += 1
            if refused == 1:
                say(console, f"refused {text.name}: {refusal}")
            elif refused <= SHOWN:
                short = f"{refusal.requested:,} requested, {refusal.available:,} available"
                say(console, f"refused {text.name}: {short}")
    if refused > SHOWN:
        say(console, f"refused {refused - SHOWN:,} more")
    say(console, f"{len(results)} admitted, {refused} refused before dispatch")
    return Dispatched(results, refused)


def wait(
    console: Console, signals: Signals, running: Services, results: dict[str, Any]
) -> dict[str, int]:
    """Wait for the results and for the ledger to close them, showing progress.

    :raises Failed: where a process ends, a task fails, or it takes too long.
    """
    pending = dict(results)
    actual: dict[str, int] = {}
    end = time.monotonic() + DEADLINE_SECONDS
    with progress(console, len(results)) as show:
        while pending or any(indexer.budget.reconcile().open_work.values()):
            signals.check()
            running.check()
            if time.monotonic() > end:
                raise Failed(f"{len(pending)} tasks were not done in {DEADLINE_SECONDS:.0f} s")
            for name in [name for name, result in pending.items() if result.ready()]:
                result = pending.pop(name)
                if not result.successful():
                    raise Failed(f"the task for {name} failed: {result.result!r}")
                actual[name] = result.result
            show(len(actual))
            time.sleep(STEP_SECONDS)
    return actual


@contextmanager
def progress(console: Console, total: int) -> Iterator[Any]:
    """Give a function that shows how many are done: a bar on a terminal, otherwise lines."""
    if console.is_terminal:
        columns = (TextColumn("working"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("working", total=total)
            yield lambda done: bar.update(task, completed=done)
    else:
        shown = 0

        def show(done: int) -> None:
            nonlocal shown
            if done > shown and (done == total or done - shown >= total / 5):
                shown = done
                say(console, f"{done} of {total} done")

        yield show


def say(console: Console, text: str) -> None:
    """Print some text as it is; what could move a terminal's cursor is escaped.

    On one line, for programs; on a terminal it is wrapped between its words.
    """
    console.print(literal(text), soft_wrap=not console.is_terminal)


def show_report(console: Console, report: Report) -> None:
    """Print the report as ``celery budget report`` does."""
    text = as_text(
        report_view(report),
        width=shutil.get_terminal_size().columns if console.is_terminal else None,
        colour=console.is_terminal and not console.no_color,
        encoding=console.encoding,
    )
    sys.stdout.write(f"\n{text}")
    sys.stdout.flush()


def check(
    report: Report, proved: Reconciliation, files: int, refused: int, actual: dict[str, int]
) -> list[str]:
    """Return what does not add up, in the ledger or between it and what was seen here."""
    balance = next(one for one in report.balances if one.budget == BUDGET)
    pairs = {
        "admitted": (report.counts["admitted"], len(actual)),
        "refused": (report.counts["refused"], refused),
        "admitted and refused": (len(actual) + refused, files),
        "spent": (balance.spent, sum(actual.values())),
        "reserved": (balance.reserved, 0),
        "settled": (report.counts["settled"], len(actual)),
    }
    wrong = [
        f"{what}: {found:,}, and {expected:,} were expected"
        for what, (found, expected) in pairs.items()
        if found != expected
    ]
    return [*proved.mismatches, *wrong]


def show_page(console: Console, report: Report, page: Path | None) -> None:
    """Write the report as a page, or say how to get one.

    :raises Failed: where the file cannot be written.
    """
    if page is None:
        where = "make demo PAGE=report.html"
    else:
        try:
            page.write_text(report_html(report), encoding="utf-8")
        except OSError as error:
            raise Failed(f"{page} cannot be written: {error.strerror}") from error
        where = str(page.resolve())
    console.print()
    say(console, f"the report as a page with plots: {where}")
    say(console, "a project of yours, live in a browser: celery -A PROJ budget dashboard")


def demo(console: Console, signals: Signals, texts: Sequence[Text], page: Path | None) -> None:
    """Run the whole path once in a temporary folder.

    :param page: a file for the report as HTML.
    :raises Failed: where something does not end as it should.
    """
    estimates = [text.estimate for text in texts]
    limit = max(sum(estimates) * SHARE_PERCENT // 100, min(estimates))
    with tempfile.TemporaryDirectory(prefix="celery-budget-demo-") as name:
        folder = Path(name)
        indexer.configure(folder)
        indexer.budget.init()
        indexer.budget.set(BUDGET, limit=limit, unit="tokens")
        say(
            console,
            f"{len(texts)} files, estimated at {sum(estimates):,} tokens; "
            f"{BUDGET} has {limit:,} tokens",
        )
        # Before any worker runs: admission needs the ledger only, and what was admitted waits in
        # the outbox.
        dispatched = dispatch(console, signals, texts)
        try:
            signals.check()
            with services(folder) as running:
                actual = wait(console, signals, running, dispatched.results)
            report, proved = indexer.budget.report(), indexer.budget.reconcile()
        finally:
            indexer.budget.store.dispose()
        show_report(console, report)
        wrong = check(report, proved, len(texts), dispatched.refused, actual)
        if wrong:
            raise Failed("it does not add up:\n" + "\n".join(f"- {one}" for one in wrong))
        show_page(console, report, page)


def main() -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(
        description="Index text files under a budget too small for all of them."
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="by default the project's own")
    parser.add_argument("--page", type=Path, help="a file to write the report to, as HTML")
    given = parser.parse_args()
    names = given.files or own_files()
    signals = Signals()
    # These would override the demo's own settings.
    for variable in [name for name in os.environ if name.startswith("CELERY_")]:
        del os.environ[variable]
    console = Console()
    with suppress(AttributeError):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    texts, skipped = read_texts(names)
    for name, why in skipped:
        say(console, f"skipped {name}: {why}")
    if not texts:
        say(console, "there is no text to work on")
        return 2
    try:
        demo(console, signals, texts, given.page)
    except Failed as failure:
        print(f"the demo failed: {failure}", file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        print(f"stopped by {signal.Signals(interrupted.number).name}", file=sys.stderr)
        return 128 + interrupted.number
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
