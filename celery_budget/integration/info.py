"""What a worker says of itself to ``budget check``: the remote-control command ``budget_info``.

No secrets: where its ledger is comes as a digest.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery.worker.control import inspect_command

from celery_budget.errors import BudgetError
from celery_budget.integration.asking import asking
from celery_budget.integration.context import find_installed
from celery_budget.store import checkup, migrate

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = ["COMMAND", "ledger_digest", "package_version", "spool_error"]

#: What workers are asked.
COMMAND = "budget_info"


def package_version() -> str:
    """Return the version of this package; empty where it is not installed as one."""
    try:
        return version("celery-budget")
    except PackageNotFoundError:
        return ""


def ledger_digest(budget: CeleryBudget) -> str:
    """Return which database the ledger is in, so that it tells nothing else."""
    return hashlib.sha256(budget.store.place.encode()).hexdigest()[:16]


def spool_error(budget: CeleryBudget) -> str:
    """Return why nothing can be spooled here; empty where it can."""
    folder = Path(budget.settings.spool).absolute()
    there = next((one for one in (folder, *folder.parents) if one.exists()), None)
    if there is None or not there.is_dir():
        return f"{there or folder} is no folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written"
    return ""


@inspect_command(name=COMMAND)
def _budget_info(state: Any, **_: Any) -> dict[str, Any]:
    """Versions, root, ledger, lease and clock of the extension in this worker."""
    budget = find_installed(state.app)
    told: dict[str, Any] = {
        "installed": budget is not None,
        "version": package_version(),
        "schema": migrate.head(),
        "host": socket.gethostname(),
        **_worker(state),
    }
    if budget is not None:
        told |= _ledger(budget)
    # Last: what came before may have taken its time.
    return {**told, "now": time.time()}


def _worker(state: Any) -> dict[str, Any]:
    controller = getattr(state.consumer, "controller", None)
    pool = getattr(controller, "pool_cls", None)
    qos = getattr(state.consumer, "qos", None)
    return {
        "pool": getattr(pool, "__module__", "").rpartition(".")[2],
        "concurrency": int(getattr(controller, "concurrency", 0) or 0),
        "prefetch": int(getattr(qos, "value", 0) or 0),
    }


def _ledger(budget: CeleryBudget) -> dict[str, Any]:
    settings = budget.settings
    told: dict[str, Any] = {
        "root": settings.root,
        "ledger": ledger_digest(budget),
        "lease_seconds": settings.lease_seconds,
        "spool_error": spool_error(budget),
        "mark": None,
        "error": "",
    }
    try:
        told["mark"] = asking.ask(budget.store.read, checkup.mark, settings.root)
    except BudgetError as error:
        told["error"] = str(error)
    return told
