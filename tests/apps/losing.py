"""Shared tasks whose worker goes away, for ``tests/fault/test_lost.py`` and ``test_leases.py``.

They run until the file named by their ``name`` is there, beside the journal. What ``lookup`` tells
is in the file ``answer-`` and that name, as JSON; while there is none nobody can tell.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

from celery import current_app, shared_task

from celery_budget import LostAttempt, budgeted, usage
from tests.apps.shop import wait_for
from tests.apps.steps import note

TENANT = "tenant:{tenant}"


def folder() -> Path:
    return Path(current_app.conf["shop_journal"]).parent


def lookup(lost: LostAttempt) -> Any:
    """Ask what is written beside the journal."""
    note(f"lookup {lost.args[0]} {lost.attempt} {lost.idempotency_key('call')}")
    answer = folder() / f"answer-{lost.args[0]}"
    return json.loads(answer.read_text()) if answer.exists() else None


def compensate(lost: LostAttempt) -> None:
    note(f"undo {lost.args[0]} {dict(lost.used)}")


def work(name: str) -> str:
    usage.record(2)
    note(f"start {name} {usage.idempotency_key('call')}")
    wait_for(folder() / name)
    usage.record(3)
    note(f"end {name}")
    return name


@budgeted(budget=TENANT, estimate=6, lookup=lookup)
@shared_task(name="losing.asked", acks_late=True)
def asked(name: str, tenant: str) -> str:
    return work(name)


@budgeted(budget=TENANT, estimate=6, lookup=lookup, compensate=compensate)
@shared_task(name="losing.asked_early")
def asked_early(name: str, tenant: str) -> str:
    return work(name)


@budgeted(budget=TENANT, estimate=6, compensate=compensate)
@shared_task(name="losing.undone", acks_late=True)
def undone(name: str, tenant: str) -> str:
    return work(name)


@budgeted(budget=TENANT, estimate=6, on_lost="charge")
@shared_task(name="losing.charged", acks_late=True)
def charged(name: str, tenant: str) -> str:
    return work(name)


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="losing.hog", acks_late=True)
def hog(seconds: int, tenant: str) -> int:
    """Keep the interpreter lock all the while: no other thread of this process runs."""
    note("start hog")
    ctypes.PyDLL(None).sleep(seconds)
    note("end hog")
    return seconds
