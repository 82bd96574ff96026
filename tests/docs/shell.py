"""Does what blocks of commands say, page by page: a program of its own.

``celery -A PROJ budget …`` is done on a ledger that the page's commands share, in this process;
``make`` says what it would do. What serves until it is stopped, and what belongs to others, is
taken apart by its own options elsewhere. It prints, as JSON, what failed, by block.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext

from celery_budget import CeleryBudget
from celery_budget.cli import budget as command
from celery_budget.testing import in_memory
from tests.docs.commands import lines_of, shown
from tests.docs.pages import BLOCKS, ROOT, SHELL, Block
from tests.docs.running import UNITS, in_a_copy, names_of, prepare

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
#: What a page's commands need to be there.
BUDGETS = {"org": "tokens", "acme": "tokens", "free": "tokens", "paid": "tokens", **UNITS}
#: What stands for the id of a task.
_TASK = re.compile(r"\bTASK_ID\b|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
#: A provider's invoice, as docs/reconcile.md has its columns.
BILL = "Date,SKU,Fresh,Cached,Out,USD\n2026-11-01,gpt-4o-mini,10,2,5,0.01\n"
#: Pages that tests of their own go through as a whole.
AS_A_WHOLE = ("tutorial.md", "migrate-from-celery.md")
#: What serves until it is stopped.
SERVES = (["relay"], ["dashboard"])


def main() -> None:
    """Run all, or the pages that are named."""
    failed: dict[str, Any] = {}
    pages = {block.page: None for block in BLOCKS if runs(block)}
    with tempfile.TemporaryDirectory() as place:
        empty = Path(place) / "empty.db"
        assert not in_a_copy(lambda: prepare(empty, BUDGETS), Path(place))
        for number, page in enumerate(pages):
            name = str(page.relative_to(ROOT))
            if sys.argv[1:] and name not in sys.argv[1:]:
                continue
            folder = Path(place) / str(number)
            folder.mkdir()
            blocks = [block for block in BLOCKS if block.page == page and runs(block)]
            said = in_a_copy(lambda b=blocks, f=folder: run(b, f, empty), folder)
            if said:
                failed[name] = said
    sys.stdout.write(f"{json.dumps(failed)}\n")


def runs(block: Block) -> bool:
    """Tell whether a block is run here."""
    return block.language in SHELL and not block.marked and block.page.name not in AS_A_WHOLE


def run(blocks: list[Block], folder: Path, empty: Path) -> None:
    """Do the blocks of a page, one after another."""
    os.chdir(folder)
    app = Celery("shop", broker="memory://")
    rows = folder / "rows.db"
    shutil.copyfile(empty, rows)
    app.conf.budget_database_url = f"sqlite:///{rows}"
    budget = CeleryBudget(app)
    with in_memory(app, database_url=f"sqlite:///{rows}"):
        draft = names_of(blocks[0], app, budget, rows)["draft"]
        task = draft.apply_async(("before", "acme"), request_id="order-4711")
        (folder / "bill.csv").write_text(BILL, encoding="utf-8")
        for block in blocks:
            for line in lines_of(block.text):
                said = do(app, _TASK.sub(task.id, line).replace("/var/www/", f"{folder}/"))
                wanted = shown(block.text, line)
                if wanted and said is not None:
                    fits = doctest.OutputChecker().check_output(wanted, said, FLAGS)
                    assert fits, f"{block.name}: {line}\nshown:\n{wanted}\nsaid:\n{said}"


def do(app: Celery, line: str) -> str | None:
    """Do one command, and return what it said; none where it is not run here."""
    words = shlex.split(line, comments=True)
    while words and re.match(r"^[A-Z_]+=", words[0]):
        words.pop(0)
    if words[:1] == ["make"]:
        done = subprocess.run(
            ["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return None
    if words[:2] != ["celery", "-A"] or words[3] != "budget":
        return None
    # What takes its output is another's.
    rest = words[4 : words.index("|")] if "|" in words else words[4:]
    if rest[:1] in SERVES and "--health" not in rest:
        return None
    with _terminal() as said, pytest.raises(SystemExit) as ended:
        command.main(rest, prog_name="budget", obj=CLIContext(app, no_color=True, workdir=None))
    # An invoice that differs is told so.
    good = {0, 1} if "--invoice" in rest else {0}
    assert ended.value.code in good, f"{line}\n{said.getvalue()}"
    return said.getvalue()


@contextlib.contextmanager
def _terminal() -> Iterator[io.StringIO]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield said


if __name__ == "__main__":
    main()
