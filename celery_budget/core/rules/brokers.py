"""Rules of brokers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from celery_budget.core.checkup import BrokerSeen, Facts
from celery_budget.core.rules.rule import RELAY_SECONDS, Seen, Skipped, named, rule

__all__: list[str] = []


@rule(
    "confirms",
    "error",
    "brokers confirm what they are sent",
    "without confirms nobody knows whether the broker has a message: it may be lost, or sent twice",
    "take confirm_publish out of broker_transport_options, or set it to True; use 'pyamqp://'",
)
def _confirms(facts: Facts) -> Iterator[Seen]:
    for broker in facts.brokers:
        if broker.transport == "amqp" and broker.driver not in ("", "py-amqp"):
            yield f"{broker} is reached by {broker.driver}, which has no confirms"
        elif broker.transport == "amqp" and not broker.confirms:
            yield f"confirm_publish is off for {broker}"


@rule(
    "broker",
    "error",
    "brokers answer",
    "nothing that is admitted is published while a broker cannot be reached",
    "start the broker, or correct broker_url (budget_brokers)",
)
def _broker(facts: Facts) -> Iterable[Seen] | Skipped:
    if all(broker.error is None for broker in facts.brokers):
        return Skipped("no broker was asked")
    return [f"{one} cannot be reached: {one.error}" for one in facts.brokers if one.error]


@rule(
    "memory-broker",
    "warning",
    "no broker lives in the memory of one process",
    "what a memory:// broker is sent is seen in that process only: no other one runs it",
    "set broker_url to RabbitMQ, Redis, or 'filesystem://' on one host",
)
def _memory(facts: Facts) -> Iterator[Seen]:
    others = any(
        (relay.host, relay.pid) != (facts.host, facts.pid) and relay.seconds <= RELAY_SECONDS
        for relay in facts.store.relays
    )
    for broker in facts.brokers:
        if broker.transport == "memory" and others:
            yield "error", f"{broker} is memory://, and a relay runs in another process"
        elif broker.transport == "memory":
            yield f"{broker} is memory://"


def _visible(facts: Facts) -> Iterator[tuple[BrokerSeen, float]]:
    for broker in facts.brokers:
        if broker.visibility_seconds is not None:
            yield broker, broker.visibility_seconds


@rule(
    "visibility-lease",
    "error",
    "brokers deliver again later than leases end",
    "a message that comes again while its task runs finds the lease alive, and is dropped: "
    "afterwards nobody has the message of a worker that is lost, and its task waits for recovery",
    "set broker_transport_options['visibility_timeout'] above budget_lease_seconds",
)
def _visibility_lease(facts: Facts) -> Iterator[Seen]:
    for broker, seconds in _visible(facts):
        if seconds < facts.lease_seconds:
            yield (
                f"{broker} delivers again after {seconds:g} s, and budget_lease_seconds is "
                f"{facts.lease_seconds:g}"
            )


@rule(
    "visibility-time-limit",
    "warning",
    "brokers deliver again later than tasks may run",
    "a task that is acknowledged late and runs longer is delivered again all the while; each copy "
    "is dropped, and takes the place of other work",
    "set time_limit (task_time_limit) below broker_transport_options['visibility_timeout']",
)
def _visibility_limit(facts: Facts) -> Iterator[Seen]:
    late = [task for task in facts.budgeted if task.acks_late]
    for broker, seconds in _visible(facts):
        limits = {task.name: task.time_limit or facts.task_time_limit for task in late}
        longer = [name for name, limit in limits.items() if limit and limit > seconds]
        if longer:
            yield f"{broker} delivers again after {seconds:g} s; {named(longer)} may run longer"
