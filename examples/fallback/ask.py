"""Ask twelve questions of an assistant with a free lane and a paid one: ``python ask.py``.

Nothing has to run on this machine: ledger, messages and results are files in a temporary folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import assistant

from celery_budget import BudgetExceeded

HERE = Path(__file__).resolve().parent
QUESTIONS = ["hard: why?", *(f"easy: what is {number} + 1?" for number in range(11))]
DEADLINE_SECONDS = 60.0
STOP_SECONDS = 20.0


@contextmanager
def worker(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run one worker for both lanes' queues, with a relay in it; end it in any case."""
    environment = {**os.environ, assistant.FOLDER: str(folder), "PYTHONPATH": str(HERE)}
    with (folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "celery", "-A", "assistant", "worker"),
                *("-P", "solo", "-Q", "free,paid", "--budget-relay", "-l", "INFO"),
                *("--without-gossip", "--without-mingle", "--without-heartbeat"),
            ],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask() -> dict[str, Any]:
    """Ask all questions, before any worker runs; return the results of those that were admitted."""
    results = {}
    for question in QUESTIONS:
        try:
            results[question] = assistant.answer.delay(question, "acme")
        except BudgetExceeded as refusal:
            print(f"refused: {question} ({refusal.budget} has {refusal.available} left)")
    for lane, count in assistant.budget.report().lanes.items():
        print(f"admitted in lane {lane}: {count}")
    return results


def wait(process: subprocess.Popen[bytes], results: dict[str, Any]) -> Counter[str]:
    """Wait for all answers and for the ledger to close them; return how often each was given."""
    end = time.monotonic() + DEADLINE_SECONDS
    while any(assistant.budget.reconcile().open_work.values()) or not all(
        result.ready() for result in results.values()
    ):
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit("the questions were not answered")
        time.sleep(0.1)
    return Counter(result.get() for result in results.values())


def main() -> int:
    """Run the example; return the exit status."""
    for variable in [name for name in os.environ if name.startswith("CELERY_")]:
        # These would override the example's own settings.
        del os.environ[variable]
    with tempfile.TemporaryDirectory(prefix="celery-budget-fallback-") as name:
        folder = Path(name)
        assistant.configure(folder)
        assistant.declare()
        try:
            results = ask()
            with worker(folder) as process:
                answers = wait(process, results)
            for text, count in sorted(answers.items()):
                print(f"{count} x {text}")
            for budget in ("free", "paid"):
                balance = assistant.budget.balance(budget)
                print(f"{budget}: {balance.spent} of {balance.limit} tokens spent")
            verdict = assistant.budget.reconcile()
        finally:
            assistant.budget.store.dispose()
    print("the ledger adds up" if verdict.ok else "\n".join(verdict.mismatches))
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
