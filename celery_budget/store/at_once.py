"""What a worker says of its attempts in one statement each, on PostgreSQL.

Stored functions (``migrations/versions``) do what :mod:`~celery_budget.store.attempts` and
:mod:`~celery_budget.store.usage` do, where nothing out of the ordinary follows: none is returned,
and nothing was changed, where it is for those to decide. Each is a transaction of its own. The
locks are those of the functions that they stand for.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from sqlalchemy.engine import Connection

from celery_budget.core.reservations import (
    AlreadyRecorded,
    Charge,
    Claimed,
    Closed,
    Ended,
    Exceeded,
    Missing,
    Outcome,
    Recorded,
    Replay,
    Running,
    Settlement,
    StoredOutcome,
)
from celery_budget.core.retries import Retries
from celery_budget.core.reuse import PREFIX
from celery_budget.core.usage import Used
from celery_budget.store import clock
from celery_budget.store.attempts import COMPRESSED, Delivery, as_sent
from celery_budget.store.journal import who
from celery_budget.store.prepared import (
    BIGINT,
    BIGINTS,
    BOOLEAN,
    INTEGER,
    INTEGERS,
    TEXT,
    TEXTS,
    UUID_,
    UUIDS,
    Kind,
    Statement,
)

__all__ = ["BEGUN", "Closing", "begun", "claim", "close", "end", "record"]

#: An attempt that is to be closed: its reservation, its number, its fence.
Closing = tuple[uuid.UUID, int, uuid.UUID]

#: Of an attempt that begins, and who says so.
BEGUN = {
    "worker": TEXT,
    "boot": UUID_,
    "pid": INTEGER,
    "late_ack": BOOLEAN,
    "rerun": BOOLEAN,
    "inquires": BOOLEAN,
    "claim": UUID_,
    "lease": BIGINT,
    "who": TEXT,
    "lock_ms": TEXT,
}


def begun(
    delivery: Delivery, claim_id: uuid.UUID, lease_us: int, lock_ms: int
) -> dict[str, object]:
    """Return the values of :data:`BEGUN` for an attempt that a delivery stands for."""
    return {
        "worker": delivery.worker,
        "boot": delivery.boot_id,
        "pid": delivery.pid,
        "late_ack": delivery.late_ack,
        "rerun": delivery.reruns,
        "inquires": delivery.inquires,
        "claim": claim_id,
        "lease": lease_us,
        "who": who(),
        "lock_ms": str(lock_ms),
    }


#: The task's id, or none there is where the message is not the one that the ledger has. A worker
#: has bodies without their compression; what was compressed is known by its task alone.
_AS_SENT = (
    "COALESCE((SELECT '' FROM budget_outbox o WHERE o.root = :root"
    " AND o.reservation_id = :reservation AND o.retries = CAST(:retries AS integer)"
    " AND (o.task_name <> CAST(:task_name AS text) OR (position(:compressed in o.envelope) = 0"
    " AND encode(sha256(o.body), 'hex') <> CAST(:digest AS text))) LIMIT 1), :task_id)"
)


def _claiming(task_id: str, more: dict[str, Kind]) -> Statement:
    return Statement(
        f"SELECT c.* FROM budget_claim(:root, :reservation, {task_id}, CAST(:nesting AS integer),"  # noqa: S608
        " CAST(:retries AS integer), :worker, :boot, CAST(:pid AS integer), :late_ack, :rerun,"
        " :inquires, :claim, CAST(:lease AS bigint), :limited, CAST(:most AS integer),"
        " CAST(:within AS bigint), CAST(:ids AS uuid[]), CAST(:numbers AS integer[]),"
        " CAST(:fences AS uuid[]), :who, :lock_ms) AS c",
        {
            "root": TEXT,
            "reservation": UUID_,
            "task_id": TEXT,
            "nesting": INTEGER,
            "retries": INTEGER,
            "limited": BOOLEAN,
            "most": INTEGER,
            "within": BIGINT,
            "ids": UUIDS,
            "numbers": INTEGERS,
            "fences": UUIDS,
            **more,
            **BEGUN,
        },
        {
            "outcome": TEXT,
            "attempt": INTEGER,
            "elapsed_us": BIGINT,
            "deadline_us": BIGINT,
            "left_us": BIGINT,
            "said": TEXT,
            "payload": TEXT,
            "unclosed": UUIDS,
        },
    )


_CLAIM = _claiming(":task_id", {})
_CLAIM_AS_SENT = _claiming(_AS_SENT, {"task_name": TEXT, "digest": TEXT, "compressed": TEXT})


def claim(
    connection: Connection,
    delivery: Delivery,
    claim_id: uuid.UUID,
    lease_us: int,
    retries: Retries | None = None,
    closing: Sequence[Closing] = (),
    *,
    lock_ms: int,
) -> tuple[Claimed | Replay | Running | Closed | Missing | None, list[uuid.UUID]]:
    """Claim as :func:`celery_budget.store.attempts.claim`; none where no attempt may start.

    With it attempts are closed that have ended, as by :func:`close`, after it; the reservations of
    those that are not are returned as well.
    """
    within = None if retries is None else retries.retry_within
    parameters = {
        "root": delivery.root,
        "reservation": delivery.reservation_id,
        "task_id": delivery.task_id,
        "nesting": delivery.nesting,
        "retries": delivery.retries,
        "limited": retries is not None,
        "most": None if retries is None else retries.max_attempts,
        "within": None if within is None else int(within * 1_000_000),
        **_of(closing),
        **begun(delivery, claim_id, lease_us, lock_ms),
    }
    if delivery.digest is None and delivery.task_name is None:
        row = _CLAIM.one(connection, parameters)
    elif clock.is_stable(connection):
        # A distributed ledger takes the function to a node by values alone.
        if not as_sent(connection, delivery):
            return Missing(), [one[0] for one in closing]
        row = _CLAIM.one(connection, parameters)
    else:
        compared = {
            "task_name": delivery.task_name,
            "digest": delivery.digest,
            "compressed": COMPRESSED,
        }
        row = _CLAIM_AS_SENT.one(connection, {**parameters, **compared})
    return _answer(row, claim_id), row.unclosed


def _answer(row: Any, claim_id: uuid.UUID) -> Claimed | Replay | Running | Closed | Missing | None:
    if row.outcome == "claimed":
        return Claimed(row.attempt, claim_id, row.elapsed_us, row.deadline_us, row.left_us)
    if row.outcome == "replay":
        stored = StoredOutcome(row.said, row.payload)
        return Replay(row.attempt, claim_id, stored, deadline_us=row.deadline_us)
    if row.outcome == "running":
        return Running()
    if row.outcome == "closed":
        return Closed(row.said)
    return Missing() if row.outcome == "missing" else None


_CLOSE = Statement(
    "SELECT budget_close(:root, CAST(:ids AS uuid[]), CAST(:numbers AS integer[]),"
    " CAST(:fences AS uuid[])) AS unclosed",
    {"root": TEXT, "ids": UUIDS, "numbers": INTEGERS, "fences": UUIDS},
    {"unclosed": UUIDS},
)


def close(connection: Connection, root: str, closing: Sequence[Closing]) -> list[uuid.UUID]:
    """Close attempts as :func:`celery_budget.store.attempts.close`, each unless that takes more.

    Waits for nobody. Returns the reservations of those that are left to it.
    """
    row = _CLOSE.one(connection, {"root": root, **_of(closing)})
    return list(row.unclosed)


def _of(closing: Sequence[Closing]) -> dict[str, list[uuid.UUID] | list[int]]:
    return {
        "ids": [one[0] for one in closing],
        "numbers": [one[1] for one in closing],
        "fences": [one[2] for one in closing],
    }


_END = Statement(
    "SELECT e.* FROM budget_end(:root, :reservation, CAST(:attempt AS integer), :claim, :kind,"
    " CAST(:payload AS text), CAST(:error AS text), :reuses, :close, :who, :lock_ms) AS e",
    {
        "root": TEXT,
        "reservation": UUID_,
        "attempt": INTEGER,
        "claim": UUID_,
        "kind": TEXT,
        "payload": TEXT,
        "error": TEXT,
        "reuses": TEXT,
        "close": BOOLEAN,
        "who": TEXT,
        "lock_ms": TEXT,
    },
    {
        "outcome": TEXT,
        "closed": BOOLEAN,
        "budgets": TEXTS,
        "units": TEXTS,
        "estimated": BIGINTS,
        "used": BIGINTS,
        "charged": BIGINTS,
        "was_over": BOOLEAN,
        "was_unmetered": BOOLEAN,
    },
)


def end(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    claim_id: uuid.UUID,
    outcome: Outcome,
    *,
    closes: bool,
    lock_ms: int,
) -> Ended | None:
    """End as :func:`celery_budget.store.attempts.end`, where its request is settled with it.

    None where the fence is gone, another attempt follows, the request was cancelled, or is a step
    of a chain that was reserved whole.

    :param closes: whether nothing is to be given again, so that it may be closed at once.
    """
    row = _END.one(
        connection,
        {
            "root": root,
            "reservation": reservation_id,
            "attempt": attempt,
            "claim": claim_id,
            "kind": outcome.kind,
            "payload": outcome.payload,
            "error": outcome.error,
            "reuses": PREFIX,
            "close": closes,
            "who": who(),
            "lock_ms": str(lock_ms),
        },
    )
    if row.outcome != "settled":
        return None
    columns = (row.budgets, row.units, row.estimated, row.used, row.charged)
    told = tuple(Charge(*one) for one in zip(*(column or () for column in columns), strict=True))
    settlement = Settlement(told, row.was_over, row.was_unmetered)
    return Ended("settled", closed=row.closed, settlement=settlement)


_RECORD = Statement(
    "SELECT r.* FROM budget_record(:root, :reservation, CAST(:attempt AS integer), :key,"
    " CAST(:units AS text[]), CAST(:amounts AS bigint[]), :reply, CAST(:details AS text), :who,"
    " :lock_ms) AS r",
    {
        "root": TEXT,
        "reservation": UUID_,
        "attempt": INTEGER,
        "key": TEXT,
        "units": TEXTS,
        "amounts": BIGINTS,
        "reply": BOOLEAN,
        "details": TEXT,
        "who": TEXT,
        "lock_ms": TEXT,
    },
    {
        "outcome": TEXT,
        "units": TEXTS,
        "budget": TEXT,
        "unit": TEXT,
        "used": BIGINT,
        "reserved": BIGINT,
    },
)


def record(
    connection: Connection,
    root: str,
    reservation_id: uuid.UUID,
    attempt: int,
    key: str,
    used: Used,
    *,
    lock_ms: int,
) -> Recorded | AlreadyRecorded | None:
    """Record as :func:`celery_budget.store.usage.record` what an attempt used while it runs.

    None where the request has ended, or not all is told, or it is to raise.
    """
    row = _RECORD.one(
        connection,
        {
            "root": root,
            "reservation": reservation_id,
            "attempt": attempt,
            "key": key,
            "units": list(used.amounts),
            "amounts": list(used.amounts.values()),
            "reply": used.of_reply,
            "details": used.details,
            "who": who(),
            "lock_ms": str(lock_ms),
        },
    )
    if row.outcome == "general":
        return None
    units = tuple(row.units)
    if row.outcome == "already":
        return AlreadyRecorded(units)
    exceeded = None
    if row.budget is not None:
        exceeded = Exceeded(row.budget, row.unit, row.used, row.reserved)
    return Recorded(False, exceeded is not None, units, exceeded)
