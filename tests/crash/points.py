"""The steps of a request's path as data, and the cells made of them.

A step is a place in the code that a process passes, a cell one fault there: who dies, or which
server is restarted, before, within or after it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["BROKERS", "CELLS", "Cell", "Fault", "Step"]

BROKERS = ("rabbitmq", "redis")

#: Of a transaction: at its call, before its commit, after it. Of anything else: the first and last.
TRANSACTION = ("before", "inside", "after")
CALL = ("before", "after")

SERVERS = ("store", "broker")
#: Who may die, by the kind of process that is at the step: ``process`` is that one itself,
#: ``main`` a worker's main process, ``machine`` a worker with its pool.
ALONE = ("process", *SERVERS)
MAIN = ("main", "machine", *SERVERS)
CHILD = ("process", *MAIN)


@dataclass(frozen=True)
class Fault:
    """What happens to whom where the ``nth`` process passes a place.

    :ivar role: which process it is: ``client``, ``relay`` or ``worker``.
    :ivar place: ``module.function`` of a store's transaction, ``module:Class.method``, or a name
        that a task body passes.
    :ivar victim: see :data:`ALONE`, :data:`MAIN`, :data:`CHILD`.
    :ivar done: whether only a call counts that did something.
    :ivar then: whether it waits for the fault before it.
    """

    role: str
    place: str
    when: str
    victim: str
    nth: int = 1
    done: bool = False
    then: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Step:
    """One step.

    :ivar times: how often it is passed at least when nothing goes wrong; the seed chooses which.
    :ivar cause: the fault without which it is not passed; nobody comes in for who died by it until
        the step itself was passed.
    """

    name: str
    role: str
    place: str
    whens: tuple[str, ...]
    victims: tuple[str, ...]
    times: int = 1
    done: bool = False
    cause: Fault | None = None


@dataclass(frozen=True)
class Cell:
    """One fault at one step, with one broker."""

    broker: str
    step: Step
    when: str
    victim: str

    def faults(self, nth: int) -> list[Fault]:
        """Return what is to happen, in this order.

        :param nth: at which time that the step is passed.
        """
        step = self.step
        done = step.done and self.when != "before"
        last = Fault(
            step.role, step.place, self.when, self.victim, nth, done, step.cause is not None
        )
        return [last] if step.cause is None else [step.cause, last]

    def __str__(self) -> str:
        return f"{self.broker}: {self.step.name}, {self.when}, {self.victim}"


def _died(place: str, when: str, victim: str) -> Fault:
    return Fault("worker", place, when, victim)


_RUNS = _died("call", "after", "machine")
_ENDED = _died("at_once.end", "after", "machine")
_EARLY = _died("early", "after", "machine")
_DELIVER = "celery.worker.worker:WorkController._process_task"
_HANDED = _died(_DELIVER, "before", "machine")
_ACKNOWLEDGE = "celery_budget.integration.worker:BudgetRequest.acknowledge"
_BACKEND = "celery.backends.redis:RedisBackend"
_PUBLISH = "celery_budget.integration.publisher:KombuPublisher.publish_all"

STEPS = (
    # The caller's process.
    Step("admit", "client", "requests.try_reserve", CALL, ALONE, 4),
    Step("admit a canvas", "client", "admission._admit_many", TRANSACTION, ALONE),
    # The relay.
    Step("take from the outbox", "relay", "claims.claim_due", TRANSACTION, ALONE, 5),
    # Several messages at a time: as seldom as they are marked.
    Step("publish", "relay", _PUBLISH, CALL, ALONE, 3),
    Step("mark", "relay", "claims.mark_published", TRANSACTION, ALONE, 3),
    # The worker's main process.
    Step("deliver", "worker", _DELIVER, CALL, MAIN, 8),
    Step("acknowledge", "worker", _ACKNOWLEDGE, CALL, MAIN, 8),
    Step("renew leases", "worker", "attempts.renew", TRANSACTION, MAIN),
    # The process that runs the task.
    Step("claim", "worker", "at_once.claim", CALL, CHILD, 8),
    Step("call outside", "worker", "call", CALL, CHILD, 3),
    Step("run when acknowledged", "worker", "early", CALL, CHILD),
    Step("record usage", "worker", "at_once.record", CALL, CHILD, 8),
    Step("publish a child", "worker", "requests.try_reserve", CALL, CHILD),
    Step("have an effect", "worker", "effect", TRANSACTION, CHILD, 3),
    Step("settle with an effect", "worker", "settle", TRANSACTION, CHILD),
    Step("write a retry", "worker", "attempts.write_retry", TRANSACTION, CHILD),
    Step("settle", "worker", "at_once.end", CALL, CHILD, 8),
    Step("end in a retry", "worker", "attempts.end", TRANSACTION, CHILD),
    Step("publish what follows", "worker", "continuations.reserve_or_park", TRANSACTION, CHILD, 3),
    Step("publish callbacks", "worker", "admission._admit_many", TRANSACTION, CHILD),
    Step("publish without a budget", "worker", "outbox.enqueue", TRANSACTION, CHILD),
    Step("store the result", "worker", f"{_BACKEND}.store_result", CALL, CHILD, 8),
    Step("count in the chord", "worker", f"{_BACKEND}.on_chord_part_return", CALL, CHILD, 2),
    Step("publish a chord's body", "worker", "body", ("before",), CHILD),
    # Of what no claim has taken along.
    Step("close", "worker", "at_once.close", CALL, CHILD),
    # The main process, when a child of it has died.
    Step(
        "child lost before its claim",
        "worker",
        "unclaimed.lost",
        TRANSACTION,
        MAIN,
        cause=_died("at_once.claim", "before", "process"),
    ),
    Step(
        "child lost while it ran",
        "worker",
        "lapses.abandon",
        TRANSACTION,
        MAIN,
        cause=_died("call", "after", "process"),
    ),
    Step(
        "child lost when it had ended",
        "worker",
        "lapses.republish_ended",
        TRANSACTION,
        MAIN,
        cause=_died("at_once.end", "after", "process"),
    ),
    # The sweep, beside the relay.
    Step("look for lapsed leases", "relay", "lapses.suspect", TRANSACTION, ALONE, 3),
    Step("end a lapsed attempt", "relay", "lapses.abandon", TRANSACTION, ALONE, 1, True, _RUNS),
    Step("replay", "relay", "lapses.republish_ended", TRANSACTION, ALONE, 1, True, _ENDED),
    Step("publish again", "relay", "silent.republish", TRANSACTION, ALONE, 1, True, _HANDED),
    Step("take what is untold", "relay", "untold.take", TRANSACTION, ALONE, 1, True, _EARLY),
    Step("tell", "relay", f"{_BACKEND}.store_result", CALL, ALONE, cause=_EARLY),
    Step("forget what was told", "relay", "untold.forget", TRANSACTION, ALONE, cause=_EARLY),
    Step("admit what is parked", "relay", "continuations.try_parked", TRANSACTION, ALONE, 1, True),
    Step("windows ahead", "relay", "windows.ahead", TRANSACTION, ALONE, 3),
    Step("clean up messages", "relay", "outbox.prune", TRANSACTION, ALONE, 1, True),
    Step("clean up proofs", "relay", "effects.prune", TRANSACTION, ALONE, 3),
)

#: All of them; a cell is known by its place here.
CELLS = tuple(
    Cell(broker, step, when, victim)
    for step in STEPS
    for when in step.whens
    for victim in step.victims
    for broker in BROKERS
)
