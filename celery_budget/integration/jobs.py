"""Jobs: how a request stands, and its result, for the application that has asked for it.

The ledger says how it stands. The result backend is asked for what it alone knows: the progress of
what runs, what a task without a budget came to that has taken its place, and results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import states
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import TaskRevokedError

from celery_budget.core import jobs
from celery_budget.core.deadlines import moment
from celery_budget.core.jobs import Job, job_state
from celery_budget.errors import RequestNotRun, ResultGone, ResultNotReady, UnknownRequest
from celery_budget.events import Logger
from celery_budget.integration.outcomes import read_value
from celery_budget.store import jobs as store_jobs
from celery_budget.store import reuse
from celery_budget.store.jobs import Known

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = ["find", "result"]

logger = Logger(__name__)

#: What a job is whose result is another task's, by the state that Celery has stored.
BY_RESULT = {
    states.SUCCESS: jobs.SUCCEEDED,
    states.FAILURE: jobs.FAILED,
    states.REVOKED: jobs.CANCELLED,
}

#: States that are Celery's own; a task gives itself others, with what it tells of its progress.
OF_CELERY = {*states.ALL_STATES, states.IGNORED, states.REJECTED}


def find(budget: CeleryBudget, task_id: str, owner: str) -> Job:
    """Return how a job stands; see :meth:`CeleryBudget.job`."""
    known = _known(budget, task_id, owner)
    state = job_state(
        known.state,
        known.reason,
        known.outcome,
        parked=known.parked,
        quarantined=known.quarantined,
    )
    progress = None
    if state in (None, jobs.RUNNING):
        meta = _stored(budget, task_id)
        told = None if meta is None else meta["status"]
        if state is None:
            state = BY_RESULT.get(str(told), jobs.RUNNING)
        if meta is not None and told not in OF_CELERY:
            progress = meta["result"]
    return Job(
        task_id=known.task_id,
        task_name=known.task_name,
        owner=known.owner,
        state=state,
        reason=known.reason,
        progress=progress,
        position=known.position,
        usage=known.usage,
        attempts=known.attempts,
        created=moment(known.created_us),
        started=None if known.started_us is None else moment(known.started_us),
        ended=None if known.ended_us is None else moment(known.ended_us),
        deadline=None if known.deadline_us is None else moment(known.deadline_us),
    )


def result(budget: CeleryBudget, task_id: str, owner: str) -> Any:
    """Return, or raise, what a job came to; see :meth:`CeleryBudget.result`."""
    known = _known(budget, task_id, owner)
    state = job_state(
        known.state,
        known.reason,
        known.outcome,
        parked=known.parked,
        quarantined=known.quarantined,
    )
    if state is not None and state not in jobs.ENDED:
        raise ResultNotReady(task_id, state)
    if state == jobs.SUCCEEDED:
        kept = budget.store.read(reuse.kept, budget.settings.root, task_id, owner)
        if kept is not None:
            return read_value(kept)
    if known.ended_for_us is not None and known.ended_for_us > budget.settings.result_us:
        raise ResultGone(task_id)
    if state in (jobs.CANCELLED, jobs.EXPIRED) and known.reason not in jobs.GIVEN_UP:
        raise TaskRevokedError(known.reason or known.outcome or state)
    meta = _stored(budget, task_id, quietly=False)
    told = None if meta is None else meta["status"]
    if meta is not None and told == states.SUCCESS:
        return meta["result"]
    if meta is not None and told in states.EXCEPTION_STATES and told != states.RETRY:
        raise meta["result"]
    if state is None or known.unfinished:
        # It has ended, and what it came to is being stored.
        raise ResultNotReady(task_id, state or jobs.RUNNING)
    if known.state == "released":
        raise RequestNotRun(task_id, known.reason or state)
    raise ResultGone(task_id)


def _known(budget: CeleryBudget, task_id: str, owner: str) -> Known:
    known = budget.store.read(store_jobs.find, budget.settings.root, task_id, owner)
    if known is None:
        raise UnknownRequest(task_id)
    return known


def _stored(budget: CeleryBudget, task_id: str, *, quietly: bool = True) -> dict[str, Any] | None:
    """Return what the result backend has of a task; none where there is none that can tell.

    :param quietly: none as well where it does not answer.
    """
    backend = budget.app.backend
    if isinstance(backend, (DisabledBackend, RPCBackend)):
        return None
    try:
        meta: dict[str, Any] = backend.get_task_meta(task_id)
    except Exception:
        if not quietly:
            raise
        logger.exception("result.unreadable", task_id=task_id)
        return None
    return meta
