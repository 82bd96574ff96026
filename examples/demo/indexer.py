"""The demo's application: two budgeted tasks that read text, on the embedded default.

Everything lives in one folder: the ledger is a SQLite database, the broker Celery's filesystem
transport, and results are files. Workers and beat find the folder in ``BUDGET_DEMO_FOLDER``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from celery import Celery

from celery_budget import CeleryBudget, budgeted, usage

FOLDER = "BUDGET_DEMO_FOLDER"
PART_CHARACTERS = 20_000

app = Celery("indexer")
budget = CeleryBudget(app)


def configure(folder: Path) -> None:
    """Keep everything the application needs in ``folder``."""
    messages = folder / "messages"
    results = folder / "results"
    for path in (messages, results):
        path.mkdir(exist_ok=True)
    app.conf.update(
        broker_url="filesystem://",
        broker_transport_options={
            "data_folder_in": str(messages),
            "data_folder_out": str(messages),
            "processed_folder": str(folder / "processed"),
            "control_folder": str(folder / "control"),
            "polling_interval": 0.05,
        },
        result_backend=f"file://{results}",
        worker_enable_remote_control=False,
        worker_prefetch_multiplier=1,
        budget_database_url=f"sqlite:///{folder / 'ledger.db'}",
        budget_poll_seconds=0.05,
    )


def estimate_outline(text: str) -> int:
    """Expect a token of a heading for every 200 characters."""
    return len(text) // 200 + 10


def estimate_index(text: str) -> int:
    """Expect a token for every three characters."""
    return len(text) // 3 + 20


@budgeted(budget="tenant:{tenant}", estimate=estimate_outline, stage="outline")
@app.task(acks_late=True)
def outline(name: str, text: str, tenant: str) -> int:
    """Read the headings of a Markdown text; return how many tokens that took."""
    headings = [line for line in text.splitlines() if line.startswith("#")]
    used = len(tokens("\n".join(headings)))
    usage.record(used, key="headings")
    return used


@budgeted(budget="tenant:{tenant}", estimate=estimate_index, stage="index")
@app.task(acks_late=True)
def index(name: str, text: str, tenant: str) -> int:
    """Read a text part by part; return how many tokens that took."""
    total = 0
    for number, part in enumerate(parts(text)):
        used = len(tokens(part))
        # A provider's id of the response would be the key; the part's number stands for it here.
        usage.record(used, key=f"part {number}")
        total += used
    return total


def tokens(text: str) -> list[str]:
    """Return the words and signs of a text."""
    return re.findall(r"\w+|[^\w\s]", text)


def parts(text: str) -> Iterator[str]:
    """Cut a text into parts that end with a line, or are full."""
    start = 0
    while start < len(text):
        end = min(start + PART_CHARACTERS, len(text))
        line_end = text.rfind("\n", start, end) + 1
        end = line_end if end < len(text) and line_end > start else end
        yield text[start:end]
        start = end


if FOLDER in os.environ:
    configure(Path(os.environ[FOLDER]))
