"""Shared tasks that have effects in the ledger's own database, and may die on the way.

A worker of ``tests.apps.shop`` gets them by the setting ``imports``.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from celery import current_app, shared_task

from celery_budget import budgeted, effect, settle, usage
from tests.apps.shop import wait_for
from tests.apps.steps import note, plain

TENANT = "tenant:{tenant}"
ORDERS = sa.table("orders", sa.column("word"))


def engine() -> sa.Engine:
    """Connections to the ledger's database that are the application's own."""
    url = sa.make_url(current_app.conf["budget_database_url"])
    if url.get_backend_name() == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    return sa.create_engine(url)


def die_once(point: str) -> None:
    """Kill this process where the first one gets that is to die there."""
    if current_app.conf.get("shop_die_at") != point:
        return
    try:
        Path(current_app.conf["shop_journal"] + ".died").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="effects.child", acks_late=True)
def child(tenant: str) -> None:
    """What an order leads to."""
    usage.record(1)
    note("child")


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="effects.order", acks_late=True, bind=True)
def order(self: Any, tenant: str, settles: bool) -> str:
    """Write an order once, with what it leads to; with its settlement too if that is wanted."""
    note(f"order {usage.idempotency_key('charge')}")
    usage.record(2, key="reply")
    made = engine()
    with made.begin() as connection:
        with effect(connection, "order") as first:
            note(f"first {bool(first)}")
            if first:
                connection.execute(ORDERS.insert().values(word="order"))
                child.delay(tenant)
                plain.delay("sent")
                first.store("stored")
        usage.record(3, key="inside")
        if settles:
            settle(connection, first.value)
        die_once("effect")
    die_once("commit")
    made.dispose()
    return str(first.value)


@budgeted(budget=TENANT, estimate=6)
@shared_task(name="effects.held", acks_late=True)
def held(tenant: str, name: str) -> str:
    """Have an effect, and keep its transaction open until the file ``name`` appears."""
    made = engine()
    with made.begin() as connection, effect(connection, "held") as first:
        note(f"first {bool(first)}")
        if first:
            connection.execute(ORDERS.insert().values(word="held"))
            wait_for(Path(current_app.conf["shop_journal"]).parent / name)
    note("committed")
    made.dispose()
    return "done"
