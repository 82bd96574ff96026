"""``celery -A proj budget …``: parse, call, print.

Exit status: 0 where the command did what it says, 1 where it could not or where the ledger does
not add up, 2 where the command line is wrong, 130 after Ctrl-C. What is asked for goes to the
standard output, and nothing else does. Notes, progress and errors go to the standard error stream,
with ``--json`` too.
"""

import os

from celery_budget.cli.streams import normalize

# Celery loads this before it reads its command line.
normalize(os.environ)

from celery_budget.cli import (  # noqa: E402 - after that
    accounts,
    alerts,
    cancel,
    check,
    completion,
    dashboard,
    declare,
    explain,
    inspect,
    lane,
    parked,
    quarantine,
    reconcile,
    relay,
    report,
    roles,
)
from celery_budget.cli.group import budget  # noqa: E402

__all__ = [
    "accounts",
    "alerts",
    "budget",
    "cancel",
    "check",
    "completion",
    "dashboard",
    "declare",
    "explain",
    "inspect",
    "lane",
    "parked",
    "quarantine",
    "reconcile",
    "relay",
    "report",
    "roles",
]
