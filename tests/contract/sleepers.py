"""Relays beside a contract test: their rows, and one at work in a thread."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from celery_budget import relay
from celery_budget.core.identity import new_id
from celery_budget.store import relays, wakeup
from celery_budget.store.schema import relays as table
from tests.contract.support import Ledger

#: Nothing is found by looking in a test that sets this.
NEVER = 3600.0


def announced(ledger: Ledger, pid: int = 7) -> uuid.UUID:
    relay_id = new_id()
    ledger.store.run(relays.announce, ledger.root, relay_id, "host", pid)
    return relay_id


def tell(ledger: Ledger, relay_id: uuid.UUID, sleeping: bool) -> bool:
    return ledger.store.run_statement(relays.tell, ledger.root, relay_id, sleeping)


def age(ledger: Ledger, by_us: int) -> None:
    """Let all relays of the ledger have been seen that much earlier."""
    with ledger.store.transaction() as connection:
        connection.execute(
            table.update()
            .where(table.c.root == ledger.root)
            .values(seen_us=table.c.seen_us - by_us)
        )


@contextmanager
def relaying(ledger: Ledger, **changes: Any) -> Iterator[list[str]]:
    """Run a relay beside the test; what it has published."""
    settings = replace(ledger.settings, **changes)
    stop, sleeper = threading.Event(), wakeup.sleeper(ledger.store, settings)
    one = relay.Relay(ledger.store, settings, ledger.broker, ledger.results.ended)
    thread = threading.Thread(target=relay.run, args=(one, settings, sleeper, stop), name="relays")
    thread.start()
    try:
        yield ledger.broker.published
    finally:
        stop.set()
        thread.join(10)
        assert not thread.is_alive()
        sleeper.close()


def sleeping(ledger: Ledger) -> list[bool]:
    return [one.sleeping for one in ledger.store.read(relays.seen, ledger.root)]
