"""Where a process of the crash matrix begins, forked from one that has imported most of it."""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from celery_budget.core.identity import new_id

__all__ = ["CONF", "PRELOADED", "begin"]

#: What is imported before the fork.
PRELOADED = [
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.celery",
    "celery.concurrency.prefork",
    "celery.fixups.django",
    "celery_budget.cli",
    "celery_budget.integration.companion",
    "celery_budget.integration.worker",
    "kombu.transport.pyamqp",
    "kombu.transport.redis",
    "psycopg",
    "redis",
    "sqlalchemy.dialects.postgresql.psycopg",
    "tests.crash.client",
    "tests.crash.entry",
    "tests.crash.tasks",
]
#: What a process is to be, as JSON.
CONF = "CRASH_CONF"


def begin(log: str, conf: dict[str, Any], arguments: list[str]) -> None:
    """Be ``celery`` with these arguments, or the client where there are none.

    In a session of its own, whose processes can be killed together.
    """
    os.setsid()
    _be_nobody_else()
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ[CONF] = json.dumps(conf)
    os.chdir(Path(log).parent)
    if arguments:
        sys.argv = ["celery", "-A", "tests.crash.app", *arguments]
        sys.exit(importlib.import_module("celery.bin.celery").main())
    app = importlib.import_module("tests.crash.app").app
    importlib.import_module("tests.crash.client").main(app)


def _be_nobody_else() -> None:
    """Give this process its own of what was made when its parent imported it."""
    random.seed()
    boot_id = new_id()
    for name, module in list(sys.modules.items()):
        if name.startswith("celery_budget.") and hasattr(module, "BOOT_ID"):
            vars(module)["BOOT_ID"] = boot_id
