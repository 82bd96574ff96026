"""The worker's side beside the task's call: leases, closing, and what ends without a call."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import bootsteps, signals
from celery.utils.imports import symbol_by_name
from celery.worker import state
from celery.worker.request import Request

from celery_budget import settlement
from celery_budget.closings import flush_all
from celery_budget.errors import BudgetError, StoreError
from celery_budget.events import Logger
from celery_budget.integration import info  # noqa: F401 - registers what workers answer
from celery_budget.integration.asking import asking
from celery_budget.integration.context import (
    BOOT_ID,
    DIGEST,
    HEADER,
    attempt_of,
    find_installed,
    parse_header,
)
from celery_budget.integration.gated import GatedTask
from celery_budget.integration.inline import upgrade_inline
from celery_budget.integration.install import CeleryBudget
from celery_budget.integration.leases import renew_until
from celery_budget.integration.releases import announce_cancelled
from celery_budget.integration.spooling import (
    keep_lost,
    prepare,
    replay_of,
    start_replaying,
    stopping,
    worker_of,
)
from celery_budget.integration.task import BudgetedTask, signature_of, upgrade_marked
from celery_budget.integration.unclaimed import safe

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["BudgetRequest", "LeaseStep"]

logger = Logger(__name__)


@signals.worker_shutting_down.connect
def _on_shutting_down(**_: Any) -> None:
    # Before any step is stopped: solo runs its task where that would be done.
    stopping.set()


class LeaseStep(bootsteps.StartStopStep):
    """Keeps the leases of this worker's attempts alive, from a thread of its main process.

    There it is not held up by a task that keeps the interpreter lock in a pool child.
    """

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        budget = find_installed(parent.app)
        if budget is not None:
            # Before the pool is forked.
            prepare(budget, getattr(parent, "pool_cls", None))

    def start(self, parent: Any) -> None:
        """Check tasks and ledger, then start renewing.

        :raises PolicyError, SchemaError: the worker must not start on them.
        """
        budget = find_installed(parent.app)
        if budget is None:
            return
        _check(budget)
        # The worker's own, since a process may have one after another; of one that is terminated
        # no signal tells.
        stopped = parent.blueprint.shutdown_complete
        wait, open_here = partial(_wait, stopped), partial(_active_task_ids, parent.app, stopped)
        threading.Thread(
            target=renew_until,
            args=(budget, wait, open_here, partial(_living, parent)),
            name="budget-leases",
            daemon=True,
        ).start()
        start_replaying(budget, stopped)

    def stop(self, parent: Any) -> None:
        """Go on: steps are stopped before the pool has ended its tasks, whose leases must live.

        They wait for the ledger no more.
        """
        stopping.set()

    terminate = stop


def _check(budget: CeleryBudget) -> None:
    upgrade_marked(budget.app)
    upgrade_inline(budget.app)
    for task in budget.app.tasks.values():
        if isinstance(task, GatedTask):
            _upgrade_request(task)
        if isinstance(task, BudgetedTask):
            signature_of(task)
    try:
        budget.check()
    except StoreError as error:
        logger.event("store.unreachable", error=error, consequence="tasks will wait for it")


def _upgrade_request(task: GatedTask) -> None:
    """Have a task's own class of requests do what the ledger's does, before its own.

    Celery builds the class that it uses on this one, when its consumer starts.
    """
    own, cls = symbol_by_name(task.Request), type(task)
    if not issubclass(own, BudgetRequest):
        both: Any = type(own.__name__, (BudgetRequest, own), {"__module__": own.__module__})
        cls.Request = both


def _wait(stopped: threading.Event, seconds: float) -> None:
    """Wait so long, or until the worker has stopped."""
    if stopped.is_set():
        time.sleep(seconds)
    else:
        stopped.wait(seconds)


def _active_task_ids(app: Celery, stopped: threading.Event) -> list[str] | None:
    """Return the ids of what this worker runs under a budget; none once it and they are gone.

    What Celery counts as active is the process's, of which another worker may have been one.

    Threads run their tasks to the end, also where Celery has stopped everything else. The set may
    change while it is copied: another thread accepts and finishes tasks.
    """
    while True:
        try:
            active = list(state.active_requests)
            break
        except RuntimeError:
            continue
    task_ids = [
        str(request.id)
        for request in active
        if request.app is app and _is_gated(request.task, request)
    ]
    return None if stopped.is_set() and not task_ids else task_ids


def _living(worker: Any) -> list[int]:
    """Return the processes that run this worker's tasks and live: itself, and its pool's.

    One that has died is none of them from that moment on, also while the pool waits for what it
    may have sent before.
    """
    pool = getattr(getattr(worker, "pool", None), "_pool", None)
    children = [process.pid for process in list(getattr(pool, "_pool", None) or ())]
    return [os.getpid(), *(pid for pid in children if pid is not None and _lives(pid))]


def _lives(pid: int) -> bool:
    """Tell whether a child lives, leaving its end for the pool to find."""
    if not hasattr(os, "waitid"):
        return True
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _is_gated(task: Any, request: Any) -> bool:
    """Tell whether a request of ``task`` runs under a budget; one that cannot run at all does not.

    Celery's own map does where the task that it calls has one.
    """
    try:
        return isinstance(task, GatedTask) and task.budget_draws(request.args, request.kwargs)
    except BudgetError:
        return False


def _concerns(task: Any, request: Any, header: object) -> bool:
    """Tell whether the ledger knows a request: by its header, or since its task has admitted it."""
    return parse_header(header) is not None or _is_gated(task, request)


class BudgetRequest(Request):
    """The request of a task that may have a budget, in the worker's main process.

    When a pool child is gone, the ledger decides before Celery stores or acknowledges anything. The
    task's process gets the digest of the body that came, to be compared with what was sent; a
    header of that name counts for nothing.
    """

    def __init__(self, message: Any, *rest: Any, **options: Any) -> None:
        super().__init__(message, *rest, **options)
        if find_installed(self.app) is not None:
            self._request_dict[DIGEST] = None if self._decoded else _digest(self._body)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """Charge an attempt that the hard time limit is about to kill."""
        if not soft:
            self._worker_lost(may_rerun=False)
        super().on_timeout(soft, timeout)

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        """Have a task whose process died run again, or give its outcome again, without a result.

        It runs again where it is acknowledged late, or to be retried on a lost worker, at most
        ``budget_max_deliveries`` times: by the same request, of which Celery's own retry would be
        a repeat. The message comes from the ledger, whatever the transport does with the one that
        the worker has. A hard time limit is left to :meth:`on_timeout`, which follows: Celery would
        store the failure in both, and call errbacks twice. Everything else is Celery's.
        """
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        # A child that exits says so before it is gone.
        exits = isinstance(error, (SystemExit, KeyboardInterrupt))
        meant = self._already_cancelled or self._already_revoked
        if isinstance(error, WorkerLostError) or (exits and not meant):
            if self._worker_lost(may_rerun=True):
                state.task_ready(self)
                self.acknowledge()
                return None
        elif isinstance(error, TimeLimitExceeded):
            return None
        return super().on_failure(exc_info, send_failed_event, return_ok)

    def _retry_worker_lost(self, exc: BaseException, exc_info: Any) -> bool:
        """Retry nothing here: the ledger has decided, to which that would be a repeat."""
        if find_installed(self.app) is not None and _is_gated(self.task, self):
            return False
        return bool(super()._retry_worker_lost(exc, exc_info))

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """Revoke what the ledger lets go; a copy of what runs or has ended is dropped.

        Celery stores REVOKED from here, also for a duplicate that came after ``expires`` while the
        task runs. One that was terminated is charged before.
        """
        if terminated:
            self._worker_lost(may_rerun=False)
        if terminated or self._released("expired" if expired else "revoked"):
            super()._announce_revoked(reason, terminated, signum, expired)
            return
        state.task_ready(self)
        self.acknowledge()
        self._already_revoked = True

    def _announce_cancelled(self, emit_retry: bool = True) -> None:
        """Have a task run again that the worker ends since it goes, or lost its connection.

        Celery stores RETRY from here, also of what has ended just now, or does not come again
        since it was acknowledged early: that is lost, and told.
        """
        if _concerns(self.task, self, self.request_dict.get(HEADER)):
            self._worker_lost(may_rerun=True, tell=True)
            emit_retry = False
        announce_cancelled(self, super()._announce_cancelled, emit_retry)

    def _released(self, reason: str) -> bool:
        """Give the hold back; false where it is not this message's to give.

        Where the ledger cannot be told it is not: recovery brings the request to its end.
        """
        budget = find_installed(self.app)
        found = parse_header(self.request_dict.get(HEADER))
        if budget is None or found is None:
            return True
        try:
            return asking.ask(settlement.revoke, budget.store, *found, reason)
        except Exception:
            logger.exception("store.untold", matter="that a task was revoked")
            return False

    def _worker_lost(self, may_rerun: bool, tell: bool = False) -> bool:
        """Tell the ledger; return whether the task is not over, so that Celery stores nothing.

        Where the ledger cannot be told it is not over either: recovery decides once it can be.
        """
        budget = find_installed(self.app)
        header = self.request_dict.get(HEADER)
        if budget is None or not _concerns(self.task, self, header):
            return False
        found = parse_header(header)
        retries = int(self.request_dict.get("retries") or 0)
        reservation_id = None if found is None else found[1]
        try:
            if may_rerun:
                # It may have ended its attempt, and waited to tell so.
                asking.ask(replay_of, budget, str(self.id), reservation_id)
            return asking.ask(
                settlement.worker_lost,
                budget.store,
                budget.settings,
                str(self.id),
                BOOT_ID,
                may_rerun,
                tell,
                retries=retries,
                worker=worker_of(self),
                reservation_id=reservation_id,
            )
        except Exception:
            logger.exception("store.untold", matter="that a worker was lost")
            keep_lost(budget, self, may_rerun)
            return may_rerun


def _digest(body: Any) -> str:
    """Return SHA-256 of a body, which transports give as text or as bytes, in hex."""
    raw = body.encode("utf-8") if isinstance(body, str) else body
    return hashlib.sha256(raw).hexdigest()


@signals.task_success.connect
@safe
def _on_success(sender: Any, **_: Any) -> None:
    _close(sender)


@signals.task_failure.connect
@safe
def _on_failure(sender: Any, **_: Any) -> None:
    _close(sender)


@signals.task_postrun.connect
@safe
def _on_postrun(task: Any, state: str | None, **_: Any) -> None:
    # What was ignored or rejected stores nothing, and nothing follows a retry that has no message;
    # the others were closed above, or their result could not be stored and a replay is due.
    if state in ("IGNORED", "REJECTED", "RETRY"):
        _close(task)


def _close(task: Any) -> None:
    attempt = attempt_of(task.request) if isinstance(task, GatedTask) else None
    if attempt is not None and attempt.called and attempt.settled:
        attempt.settled = False
        attempt.close()


@signals.worker_process_shutdown.connect
@safe
def _on_process_shutdown(**_: Any) -> None:
    flush_all()


@signals.worker_shutdown.connect
@safe
def _on_shutdown(**_: Any) -> None:
    flush_all()
