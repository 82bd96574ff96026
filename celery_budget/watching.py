"""What admission and settlement tell of their requests, by log events and metrics.

Told once the ledger has answered. In a caller's own transaction (``enlist``) that is before it is
committed, also where it is rolled back then.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from celery_budget import tracing
from celery_budget.core.reservations import (
    AlreadyReserved,
    Backlogged,
    Claimed,
    Conflict,
    Crowded,
    Ended,
    Full,
    Outcome,
    Parked,
    Recorded,
    Refused,
    Replay,
    Reserved,
    ReserveRequest,
    Settlement,
    Unknown,
)
from celery_budget.events import Logger
from celery_budget.settings import Settings
from celery_budget.tracing import Span

__all__ = ["admission", "claim", "describe", "end", "recorded", "run", "settled", "waived"]

logger = Logger(__name__)

#: Outcomes of an admission by their names in spans and metrics; of the others the class says it.
_NAMES: dict[type[Any], str] = {
    Reserved: "admitted",
    AlreadyReserved: "repeated",
    Parked: "parked",
    Refused: "refused",
}


def describe(span: Span, request: ReserveRequest, queue: str) -> None:
    """Set a span's attributes of the request that is to be admitted."""
    if not span.recording:
        return
    span.set_named(
        {
            "messaging.system": "celery",
            "messaging.operation.name": "create",
            "messaging.operation.type": "create",
            "messaging.destination.name": queue or None,
            "messaging.message.id": request.task_id,
            "celery.task_name": request.task_name,
        }
    )
    span.set(
        reservation_id=str(request.reservation_id),
        request_id=request.request_id,
        root=request.root,
        stage=request.stage,
        estimator=f"{request.estimator}:{request.estimator_version}",
        budgets=[line.budget for line in request.lines],
        estimates=[line.amount for line in request.lines],
        retries=request.retries or None,
    )


def admission(
    settings: Settings,
    request: ReserveRequest,
    outcome: object,
    began: float,
    *,
    last: bool = True,
    span: Span = tracing.NOTHING,
) -> None:
    """Tell what came of an admission.

    :param began: when it began, by :func:`time.perf_counter`.
    :param last: false where another lane is tried next: then nothing is told of a refusal.
    :param span: gets the outcome, unless it is an error.
    """
    name = _NAMES.get(type(outcome))
    if not last and name in (None, "refused"):
        return
    seconds = time.perf_counter() - began
    if isinstance(outcome, Refused):
        _refused(request, outcome)
    elif isinstance(outcome, Reserved):
        logger.event(
            "request.admitted",
            task=request.task_name,
            task_id=request.task_id,
            reservation_id=outcome.reservation_id,
            stage=request.stage,
            estimated=request.estimates,
            seconds=seconds,
        )
        if outcome.waived is not None:
            waived(settings, request, outcome.waived)
    elif isinstance(outcome, AlreadyReserved):
        logger.event(
            "request.repeated",
            task=request.task_name,
            task_id=request.task_id,
            reservation_id=outcome.reservation_id,
        )
    elif isinstance(outcome, Parked):
        logger.event(
            "request.parked",
            task=request.task_name,
            task_id=request.task_id,
            parked_id=outcome.parked_id,
            stage=request.stage,
            estimated=request.estimates,
        )
    else:
        logger.event(
            "request.turned_away",
            task=request.task_name,
            task_id=request.task_id,
            stage=request.stage,
            reason=_reason(outcome),
        )
    if span.recording and name not in (None, "refused"):
        span.set(outcome=name)
    traced = tracing.of(settings)
    reason = outcome.reason if isinstance(outcome, Refused) else None
    told = name or _reason(outcome)
    traced.count("celery_budget.admissions", 1, outcome=told, reason=reason, stage=request.stage)
    traced.measure("celery_budget.admission.duration", seconds, outcome=told)
    if isinstance(outcome, Refused):
        traced.count(
            "celery_budget.refused", outcome.requested, unit=outcome.unit, reason=outcome.reason
        )


def _reason(outcome: object) -> str:
    """Return in a word why a request was turned away for another reason than a budget."""
    if isinstance(outcome, Full):
        return "queue_full"
    if isinstance(outcome, Crowded):
        return "parking_full"
    if isinstance(outcome, Unknown):
        return "unknown_budget"
    return "conflict" if isinstance(outcome, Conflict) else "outbox_full"


def _refused(request: ReserveRequest, refused: Refused) -> None:
    logger.event(
        "request.refused",
        task=request.task_name,
        task_id=request.task_id,
        stage=request.stage,
        name=refused.budget,
        unit=refused.unit,
        requested=refused.requested,
        available=refused.limit - refused.reserved - refused.spent,
        limit=refused.limit,
        reason=refused.reason,
    )


def waived(
    settings: Settings, request: ReserveRequest, refused: Refused | Backlogged | Full
) -> None:
    """Tell what a request that was admitted would have been refused with, were it enforced."""
    short = refused if isinstance(refused, Refused) else None
    logger.event(
        "request.waived",
        task=request.task_name,
        task_id=request.task_id,
        stage=request.stage,
        name=short and short.budget,
        unit=short and short.unit,
        requested=short and short.requested,
        available=short and short.limit - short.reserved - short.spent,
        limit=short and short.limit,
        reason=short.reason if short else _reason(refused),
    )
    if short is not None:
        tracing.of(settings).count(
            "celery_budget.waived", short.requested, unit=short.unit, reason=short.reason
        )


def claim(
    settings: Settings, reservation_id: uuid.UUID, task_id: str, claimed: Claimed | Replay
) -> None:
    """Tell that an attempt was claimed, or is to be replayed."""
    if isinstance(claimed, Replay):
        logger.event("attempt.replayed", attempt=claimed.attempt, reservation_id=reservation_id)
        return
    logger.event(
        "attempt.claimed",
        attempt=claimed.attempt,
        reservation_id=reservation_id,
        task_id=task_id,
    )
    if claimed.attempt == 1:
        # Its id was made when it was asked for, and says when (UUIDv7), by that host's clock.
        waited = time.time() - (reservation_id.int >> 80) / 1000
        tracing.of(settings).measure("celery_budget.wait.duration", max(0.0, waited))


def run(span: Span, reservation_id: uuid.UUID, attempt: int, task: str, task_id: str) -> None:
    """Set a span's attributes of the attempt that it is the run of."""
    span.set_named(
        {
            "messaging.system": "celery",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.message.id": task_id,
            "celery.task_name": task,
        }
    )
    span.set(reservation_id=str(reservation_id), attempt=attempt)


def recorded(reservation_id: uuid.UUID, attempt: int, outcome: Recorded) -> None:
    """Tell of usage that came after the end, or is more than was held."""
    if outcome.late:
        logger.event("usage.late", reservation_id=reservation_id, attempt=attempt)
    over = outcome.exceeded
    if over is not None:
        logger.event(
            "usage.over",
            reservation_id=reservation_id,
            attempt=attempt,
            name=over.budget,
            unit=over.unit,
            amount=over.used,
            limit=over.reserved,
        )


def end(
    settings: Settings,
    reservation_id: uuid.UUID,
    attempt: int,
    outcome: Outcome,
    ended: Ended,
    seconds: float,
    span: Span = tracing.NOTHING,
) -> None:
    """Tell that an attempt has ended, and what its reservation was settled at, if it was.

    :param span: gets both.
    """
    logger.event(
        "attempt.ended",
        attempt=attempt,
        reservation_id=reservation_id,
        outcome=outcome.kind,
        state=ended.state,
        seconds=seconds,
    )
    tracing.of(settings).measure("celery_budget.run.duration", seconds, outcome=outcome.kind)
    if span.recording:
        span.set(state=ended.state, outcome=outcome.kind)
    if ended.settlement is not None:
        settled(settings, reservation_id, attempt, outcome, ended.settlement, span)


def settled(
    settings: Settings,
    reservation_id: uuid.UUID,
    attempt: int,
    outcome: Outcome,
    settlement: Settlement,
    span: Span = tracing.NOTHING,
) -> None:
    """Tell what a reservation was settled at."""
    charges = settlement.charges
    logger.event(
        "request.settled",
        reservation_id=reservation_id,
        attempt=attempt,
        outcome=outcome.kind,
        used=lambda: {one.budget: one.used for one in charges},
        charged=lambda: {one.budget: one.charged for one in charges},
    )
    if span.recording:
        span.set(
            budgets=[one.budget for one in charges],
            units=[one.unit for one in charges],
            estimated=[one.estimated for one in charges],
            used=[one.used for one in charges],
            charged=[one.charged for one in charges],
            over=settlement.over,
            unmetered=settlement.unmetered,
        )
    traced = tracing.of(settings)
    for one in charges:
        traced.count("celery_budget.estimated", one.estimated, unit=one.unit)
        traced.count("celery_budget.used", one.used, unit=one.unit)
        traced.count("celery_budget.charged", one.charged, unit=one.unit)
