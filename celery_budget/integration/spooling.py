"""The spool of a worker: what tells its processes that it stops, and who replays what was left."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery_budget import settlement
from celery_budget.errors import BudgetError, SchemaError, StoreError
from celery_budget.events import Logger
from celery_budget.integration.context import BOOT_ID, HEADER, parse_header
from celery_budget.spool import Ended, Entry, Held, Lost, Usage

if TYPE_CHECKING:
    import uuid

    from celery_budget.integration.install import CeleryBudget

__all__ = [
    "gives_back",
    "keep_lost",
    "keep_unstarted",
    "prepare",
    "replay",
    "replay_of",
    "start_replaying",
    "stopping",
    "worker_of",
]

logger = Logger(__name__)

#: How soon a process of the pool hears that its worker stops, in seconds.
HEARD_SECONDS = 0.1


class Stopping:
    """Whether this worker stops; seen by the processes that its main process has forked.

    One byte that they share: a signal reaches the main process alone. Where that is gone, and they
    are not, it has stopped as well.
    """

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 1)
        self._main = os.getpid()

    def set(self) -> None:
        """Tell that it does."""
        self._shared[0] = 1

    def clear(self) -> None:
        """Take that back: this process is the main one of a worker that starts."""
        self._shared[0] = 0
        self._main = os.getpid()

    def is_set(self) -> bool:
        """Tell whether it does."""
        return self._shared[0] == 1 or self._main not in (os.getpid(), os.getppid())

    def wait(self, timeout: float, /) -> bool:
        """Wait for so many seconds, or until it does; tell whether it does."""
        end = time.monotonic() + timeout
        while not self.is_set():
            rest = end - time.monotonic()
            if rest <= 0:
                return False
            time.sleep(min(rest, HEARD_SECONDS))
        return True


stopping = Stopping()

#: One entry at a time in this process: who asks for it wants to see it told, and waits for no more.
_replaying = threading.Lock()


def replay(budget: CeleryBudget) -> BudgetError | None:
    """Tell the ledger what is in the spool, and in nobody's hands.

    An entry that the ledger will never take is moved aside.

    :return: why the rest is left, where the ledger could not be told.
    """
    return _replay(budget, lambda entry: True)


def replay_of(budget: CeleryBudget, task_id: str, reservation_id: uuid.UUID | None) -> None:
    """As :func:`replay`, of one task: its worker's consumer waits for this.

    :param reservation_id: its request; none where that is not known.
    :raises StoreError, SchemaError: where the ledger could not be told.
    """

    def is_its(entry: Entry) -> bool:
        if isinstance(entry, Usage):
            return reservation_id in (None, entry.reservation_id)
        return entry.task_id == task_id

    error = _replay(budget, is_its)
    if error is not None:
        raise error


def _replay(budget: CeleryBudget, is_wanted: Callable[[Entry], bool]) -> BudgetError | None:
    entries = budget.spool.take()
    while True:
        with _replaying:
            taken = next(entries, None)
            if taken is None:
                return None
            entry, held = taken
            if not is_wanted(entry):
                held.release()
                continue
            error = _tell(budget, entry, held)
        if error is not None:
            return error


def _tell(budget: CeleryBudget, entry: Entry, held: Held) -> BudgetError | None:
    what = _shown(entry)
    try:
        settlement.replay(budget.store, budget.settings, entry)
    except Exception as error:
        if isinstance(error, SchemaError) or (isinstance(error, StoreError) and error.retryable):
            held.release()
            return error
        logger.exception("spool.refused", entry=what)
        held.put_aside()
    else:
        held.drop()
        logger.event("spool.replayed", entry=what)
    return None


def _shown(entry: Entry) -> str:
    """Return what the log says of an entry: no value and no text of an error."""
    if isinstance(entry, Usage):
        return f"usage {entry.key!r} of reservation {entry.reservation_id}"
    if isinstance(entry, Ended):
        return f"outcome {entry.outcome.kind!r} of task {entry.task_id}"
    return f"the lost process of task {entry.task_id}"


class _Pool:
    """What this worker runs its tasks in."""

    #: Greenlets, whose numbers Celery gives for those of processes.
    is_green = False


_pool = _Pool()


def prepare(budget: CeleryBudget, pool: Any = None) -> None:
    """Note where the spool is: tasks may change the working directory.

    :param pool: the class of the worker's pool.
    """
    stopping.clear()
    _pool.is_green = bool(getattr(pool, "is_green", False))
    logger.event("spool.opened", path=str(budget.spool.folder))


def start_replaying(budget: CeleryBudget, stopped: threading.Event) -> None:
    """Replay now and again, from a thread, until the worker is gone."""

    def run() -> None:
        waits = False
        while True:
            try:
                error = replay(budget)
                if error is not None and not waits:
                    logger.event(
                        "store.unreachable",
                        error=error,
                        consequence="the spool is replayed once it is back",
                    )
                waits = error is not None
            except Exception:
                logger.exception("step.failed", step="the replay of the spool")
            if stopped.wait(budget.settings.sweep_seconds):
                return

    threading.Thread(target=run, name="budget-spool", daemon=True).start()


def worker_of(request: Any) -> str | None:
    """Return the child that has a request, as its claim names it: another may have a copy of it.

    None where that is not known, and where tasks run in the main process.
    """
    pid = getattr(request, "worker_pid", None)
    is_child = pid and pid != os.getpid() and not _pool.is_green
    return f"{request.hostname}/{pid}" if is_child else None


def keep_lost(budget: CeleryBudget, request: Any, may_rerun: bool) -> None:
    """Have the ledger told later that the process of a request is lost.

    Only of processes that run one task at a time and end with it: another attempt in the same one
    could not be told from this.

    :param request: the main process's own.
    """
    worker = worker_of(request)
    if worker is not None:
        message = request.request_dict
        retries = int(message.get("retries") or 0)
        _keep(budget, request, message.get(HEADER), worker, may_rerun, retries)


def keep_unstarted(budget: CeleryBudget, request: Any) -> None:
    """Have the message of a request published again that this process has given back.

    :param request: the task's.
    """
    retries = int(request.retries or 0)
    _keep(budget, request, getattr(request, HEADER, None), "", True, retries)


def gives_back(budget: CeleryBudget, request: Any) -> bool:
    """Give back a delivery that has not claimed, and could not tell the ledger of its end.

    Its message is published again: what it comes to is told by the next delivery.

    :param request: the task's.
    :return: whether it was; not where the worker goes on.
    """
    if not stopping.is_set():
        return False
    logger.event("delivery.given_back", task_id=request.id)
    keep_unstarted(budget, request)
    return True


def _keep(
    budget: CeleryBudget,
    request: Any,
    header: object,
    worker: str,
    may_rerun: bool,
    retries: int,
) -> None:
    found = parse_header(header)
    lost = Lost(
        budget.settings.root,
        None if found is None else found[1],
        str(request.id),
        worker,
        BOOT_ID,
        may_rerun,
        retries,
    )
    held = budget.spool.put(lost)
    if held is not None:
        held.release()
