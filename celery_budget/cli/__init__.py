"""``celery -A proj budget …``: parse, call, print.

Exit status: 0 where the command did what it says, 1 where it could not or where the ledger does
not add up, 2 where the command line is wrong. Errors go to the standard error stream, with
``--json`` too.
"""

from celery_budget.cli import (
    accounts,
    alerts,
    cancel,
    check,
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
from celery_budget.cli.group import budget

__all__ = [
    "accounts",
    "alerts",
    "budget",
    "cancel",
    "check",
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
