"""Run the README's application as the README says, command by command; see README.md."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from examples import local
from examples.readme import shop

HERE = Path(__file__).resolve().parent
CALL = """call shop.draft --args='["Write a haiku.", "acme"]'"""


def celery(line: str) -> subprocess.CompletedProcess[str]:
    """Run ``celery -A shop …`` to its end, after showing it."""
    print(f"$ celery -A shop {line}")
    return subprocess.run(
        [sys.executable, "-m", "celery", "-A", "shop", *shlex.split(line)],
        cwd=HERE,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def run(line: str) -> str:
    """Run a command that is to succeed; return what it said.

    :raises Failed: where it does not.
    """
    done = celery(line)
    if done.returncode:
        raise local.Failed(done.stdout + done.stderr)
    return done.stdout.strip()


def answer(folder: Path, task_id: str) -> Any:
    """Return a task's result from its file; none where it is not there yet."""
    path = folder / "results" / f"celery-task-meta-{task_id}"
    written = path.read_text(encoding="utf-8") if path.exists() else ""
    return json.loads(written)["result"] if written else None


def main() -> int:
    """Run the example; return the exit status."""
    with local.folder() as folder:
        os.environ["SHOP_FOLDER"] = str(folder)
        run("budget init")
        run("budget set tenant:acme --limit 1000 --unit tokens")
        task_id = run(CALL)
        print(celery(CALL).stderr.strip().splitlines()[-1].partition("; see")[0])
        print("$ celery -A shop worker -c 1 &\n$ celery -A shop beat -S budget &")
        shop.keep_in(folder)
        with (
            local.process("worker", "celery", "-A", "shop", "worker", "-c", "1", cwd=HERE),
            local.process("beat", "celery", "-A", "shop", "beat", "-S", "budget", cwd=HERE) as beat,
        ):
            print(beat.wait(lambda: answer(folder, task_id)))
            beat.wait(lambda: local.closed(shop.budget))
        shop.budget.store.dispose()
        print(run("budget list"))
        print(run("budget reconcile"))
    return 0


if __name__ == "__main__":
    local.run(main)
