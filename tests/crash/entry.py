"""Where a process of the crash matrix begins, forked from one that has imported most of it.

Not ``celery_budget``: its processes tell themselves apart by what they make when it is imported.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["CONF", "PRELOADED", "begin"]

#: What is imported before the fork.
PRELOADED = [
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.celery",
    "celery.concurrency.prefork",
    "celery.fixups.django",
    "alembic",
    "kombu.transport.pyamqp",
    "kombu.transport.redis",
    "psycopg",
    "redis",
    "sqlalchemy.dialects.postgresql.psycopg",
    "tests.crash.entry",
]
#: What a process is to be, as JSON.
CONF = "CRASH_CONF"


def begin(log: str, conf: dict[str, Any], arguments: list[str]) -> None:
    """Be ``celery`` with these arguments, or the client where there are none.

    In a session of its own, whose processes can be killed together.
    """
    os.setsid()
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
