"""Every way a task can end, and what becomes of it: the rows of ``docs/outcomes.md``.

The tests of this package are made of these rows, and so is the page's table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

POOLS = ("prefork", "threads", "gevent", "solo")
BROKERS = ("redis", "rabbitmq")
ACKS = ("late", "early")


@dataclass(frozen=True)
class End:
    """What a request comes to.

    :ivar state: of its reservation.
    :ivar outcomes: of its attempts.
    :ivar charged: where each run recorded 2 of an estimate of 6.
    :ivar unrecorded: where none recorded anything.
    :ivar result: the state in the result backend.
    :ivar error: the type of the result, where that is an error.
    :ivar then: what becomes of the rest; a key of :data:`THEN`.
    :ivar reason: why its reservation ended so.
    """

    state: str
    outcomes: tuple[str, ...]
    charged: int
    unrecorded: int
    result: str
    then: str
    error: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Follows:
    """What becomes of what follows a request.

    :ivar step: the result of a chain's next step.
    :ivar errback: whether an errback is called.
    :ivar chord: the result of a chord's body.
    """

    step: str
    errback: bool
    chord: str


THEN = {
    "goes on": Follows("SUCCESS", False, "SUCCESS"),
    "fails": Follows("FAILURE", True, "FAILURE"),
    "is revoked": Follows("PENDING", False, "FAILURE"),
    "stops": Follows("PENDING", False, "PENDING"),
}

SUCCESS = End("settled", ("returned",), 2, 6, "SUCCESS", "goes on")
AGAIN = End("settled", ("uncertain", "returned"), 4, 6, "SUCCESS", "goes on")


@dataclass(frozen=True)
class Row:
    """One way to end.

    :ivar name: its id.
    :ivar happens: what happens, in words.
    :ivar way: what the task does; a name in ``tests.apps.ends``.
    :ivar late: what becomes of it where the task is acknowledged late.
    :ivar early: the same where it is acknowledged early.
    :ivar where: the worker it runs in: ``main`` for the one that runs most; there also what is
        ``revoked`` before it comes, ``stopped`` while it runs, or waits while it is ``busy``;
        one that is ``killed``, ``quit`` or ``terminated``; ``quit-waits`` where that waits for its
        tasks; ``absent`` for what is published before there is any.
    :ivar pools: where it can happen.
    :ivar variant: of the task.
    :ivar options: how it is published.
    """

    name: str
    happens: str
    way: str
    late: End
    early: End
    where: str = "main"
    pools: tuple[str, ...] = POOLS
    brokers: tuple[str, ...] = BROKERS
    variant: str = ""
    options: dict[str, float] = field(default_factory=dict)

    def end(self, ack: str) -> End:
        return self.late if ack == "late" else self.early


def same(name: str, happens: str, way: str, end: End, **more: object) -> Row:
    """A row that ends in the same way however it is acknowledged."""
    return Row(name, happens, way, end, end, **more)  # type: ignore[arg-type]


FAILED = End("settled", ("raised",), 2, 0, "FAILURE", "fails", "ValueError")
LIMITED = End("lost", ("uncertain",), 6, 6, "FAILURE", "fails", "TimeLimitExceeded")
KILLED = End("lost", ("uncertain",), 6, 6, "FAILURE", "fails", "WorkerLostError")
LOST = End("lost", ("uncertain",), 6, 6, "FAILURE", "stops", "AttemptLost")
EXPIRED = End("released", (), 0, 0, "REVOKED", "is revoked", "TaskRevokedError", "expired")

KILLABLE = ("prefork",)
#: What can stop a task from outside.
STOPPABLE = ("prefork", "gevent")

ROWS = (
    same("success", "it returns", "succeed", SUCCESS),
    same("failure", "it raises", "fail", FAILED),
    same(
        "failure-not-acknowledged",
        "it raises, with `acks_on_failure_or_timeout=False`",
        "fail",
        FAILED,
        variant=".unacked",
    ),
    same(
        "retry",
        "it retries (`self.retry(countdown=…)`), then returns",
        "retry_once",
        End("settled", ("retried", "returned"), 4, 6, "SUCCESS", "goes on"),
    ),
    same(
        "autoretry",
        "it raises what `autoretry_for` names, then returns",
        "autoretry_once",
        End("settled", ("retried", "returned"), 4, 6, "SUCCESS", "goes on"),
    ),
    same(
        "retries-exceeded",
        "it retries beyond `max_retries` (2)",
        "retry_on_and_on",
        End("settled", ("retried", "retried", "raised"), 6, 0, "FAILURE", "fails", "ValueError"),
    ),
    same(
        "ignore",
        "it raises `Ignore`",
        "ignore",
        End("settled", ("ignored",), 2, 0, "PENDING", "stops"),
    ),
    same(
        "reject",
        "it raises `Reject(requeue=False)`",
        "reject",
        End("settled", ("rejected",), 2, 0, "FAILURE", "fails", "Reject"),
    ),
    same(
        "reject-requeue",
        "it raises `Reject(requeue=True)`, then returns",
        "reject_once",
        End("settled", ("rejected", "returned"), 4, 6, "SUCCESS", "goes on"),
    ),
    same(
        "soft-limit",
        "its soft time limit strikes",
        "work_on",
        End("settled", ("raised",), 2, 0, "FAILURE", "fails", "SoftTimeLimitExceeded"),
        pools=KILLABLE,
        options={"soft_time_limit": 5},
    ),
    same(
        "hard-limit",
        "its hard time limit strikes",
        "work_on",
        LIMITED,
        pools=STOPPABLE,
        options={"time_limit": 8},
    ),
    same(
        "hard-limit-not-acknowledged",
        "the same, with `acks_on_failure_or_timeout=False`",
        "work_on",
        LIMITED,
        pools=STOPPABLE,
        variant=".unacked",
        options={"time_limit": 8},
    ),
    same(
        "revoked",
        "it is revoked while it waits",
        "succeed",
        End("released", (), 0, 0, "REVOKED", "is revoked", "TaskRevokedError", "revoked"),
        where="revoked",
    ),
    same(
        "revoked-terminate",
        "it is revoked with `terminate=True` while it runs",
        "work_on",
        End("lost", ("uncertain",), 6, 6, "REVOKED", "is revoked", "TaskRevokedError"),
        where="stopped",
        pools=STOPPABLE,
    ),
    same(
        "expired-in-worker",
        "it expires in a worker that is busy",
        "succeed",
        EXPIRED,
        where="busy",
        # The others hand everything to their pool at once.
        pools=("prefork",),
        options={"expires": 8},
    ),
    same(
        "expired-at-worker",
        "it expires in the broker, and a worker gets it",
        "succeed",
        EXPIRED,
        where="absent",
        brokers=("redis",),
        options={"expires": 15},
    ),
    same(
        "expired-in-broker",
        "it expires in the broker, which drops it",
        "succeed",
        replace(EXPIRED, then="stops"),
        where="absent",
        brokers=("rabbitmq",),
        options={"expires": 15},
    ),
    same(
        "unknown",
        "the worker does not know the task",
        "succeed",
        End("released", (), 0, 0, "FAILURE", "stops", "NotRegistered", "not_registered"),
        variant=".unknown",
    ),
    Row(
        "child-killed",
        "its pool child is killed",
        "die",
        AGAIN,
        KILLED,
        pools=KILLABLE,
    ),
    Row(
        "child-killed-requeue",
        "the same, with `task_reject_on_worker_lost`",
        "die",
        AGAIN,
        KILLED,
        pools=KILLABLE,
        variant=".requeued",
    ),
    same(
        "child-killed-retry",
        "the same, with `task_retry_on_worker_lost`",
        "die",
        AGAIN,
        pools=KILLABLE,
        variant=".retried",
    ),
    Row(
        "child-exits",
        "it calls `sys.exit`, then returns",
        "leave",
        AGAIN,
        KILLED,
        pools=KILLABLE,
    ),
    Row(
        "main-killed",
        "its worker is killed",
        "hold",
        AGAIN,
        LOST,
        where="killed",
    ),
    same(
        "sigterm",
        "its worker is sent SIGTERM (warm shutdown)",
        "hold",
        SUCCESS,
        where="terminated",
    ),
    Row(
        "sigquit",
        "its worker is sent SIGQUIT (cold shutdown)",
        "hold",
        AGAIN,
        LOST,
        where="quit",
        pools=STOPPABLE,
    ),
    same(
        "sigquit-waits",
        "the same, where a pool cannot stop its tasks",
        "hold",
        SUCCESS,
        where="quit-waits",
        pools=("threads",),
    ),
    same(
        "sigquit-solo",
        "the same, with the solo pool",
        "hold",
        End("settled", ("raised",), 2, 0, "FAILURE", "fails", "NotImplementedError"),
        where="quit",
        pools=("solo",),
    ),
)


def cases(broker: str) -> Iterator[tuple[str, Row, str]]:
    """Yield pool, row and acknowledgement of each that can happen on a broker."""
    for pool in POOLS:
        for row in ROWS:
            if pool in row.pools and broker in row.brokers:
                for ack in ACKS:
                    yield pool, row, ack
