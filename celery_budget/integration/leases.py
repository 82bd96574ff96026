"""Leases of what this process runs, renewed from a thread of it."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from celery_budget import settlement
from celery_budget.errors import StoreError
from celery_budget.events import Logger
from celery_budget.integration.context import BOOT_ID
from celery_budget.settings import Settings
from celery_budget.store import Store

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = ["Place", "kept", "renew_until"]

logger = Logger(__name__)


class Place(NamedTuple):
    """A ledger that something runs under, whatever ledger its application has later."""

    store: Store
    settings: Settings


def renew_until(
    budget: CeleryBudget | Place,
    wait: Callable[[float], object],
    open_here: Callable[[], Collection[str] | None],
    living: Callable[[], Collection[int]],
) -> None:
    """Renew the leases of the tasks that run here, again and again, until there are none any more.

    What fails is told and tried again at the next turn. It has a connection of its own: those of
    the tasks may all be taken, and waited for, for longer than a lease.

    :param wait: waits for the next turn.
    :param open_here: the ids of those tasks; none for the end.
    :param living: the processes that run them, those that live.
    """
    store = budget.store.beside()
    while True:
        wait(budget.settings.renew_seconds)
        try:
            task_ids = open_here()
            if task_ids is None:
                store.dispose()
                return
            if task_ids:
                settlement.renew(store, budget.settings, list(task_ids), BOOT_ID, list(living()))
        except StoreError as error:
            logger.event(
                "store.unreachable", error=error, consequence="leases could not be renewed"
            )
        except Exception:
            logger.exception("step.failed", step="the renewal of leases")


def _myself() -> Collection[int]:
    return (os.getpid(),)


class _InPlace:
    """What runs in place in this process, by ledger; each has a thread while anything does.

    A thread that finds nothing at its turn ends. A child that was forked meanwhile runs nothing of
    its parent's: it begins with nothing.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew; the lock may have been held by a thread that is not here."""
        self._lock = threading.Lock()
        self._open: dict[Store, dict[uuid.UUID, str]] = {}

    def add(self, place: Place, claim_id: uuid.UUID, task_id: str) -> None:
        store = place.store
        with self._lock:
            if store not in self._open:
                threading.Thread(
                    target=renew_until,
                    args=(place, time.sleep, partial(self._task_ids, store), _myself),
                    name="budget-leases-in-place",
                    daemon=True,
                ).start()
                self._open[store] = {}
            self._open[store][claim_id] = task_id

    def remove(self, store: Store, claim_id: uuid.UUID) -> None:
        with self._lock:
            self._open.get(store, {}).pop(claim_id, None)

    def _task_ids(self, store: Store) -> Collection[str] | None:
        with self._lock:
            task_ids = set(self._open[store].values())
            if not task_ids:
                del self._open[store]
        return task_ids or None


_in_place = _InPlace()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_place.forget)


@contextmanager
def kept(budget: CeleryBudget, attempt: settlement.Attempt, task_id: str) -> Iterator[None]:
    """Keep the lease of an attempt that runs in place alive while the block runs."""
    place = Place(budget.store, budget.settings)
    _in_place.add(place, attempt.claim_id, task_id)
    try:
        yield
    finally:
        _in_place.remove(place.store, attempt.claim_id)
