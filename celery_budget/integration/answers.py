"""What a broker's errors say: of one message, or of the broker."""

from __future__ import annotations

import struct

from amqp import exceptions as amqp_errors

from celery_budget.relay import BrokerDown, Rejected, Unpublishable

__all__ = ["Unbound", "is_unroutable", "refusal"]

#: AMQP's codes: nobody to take it, no such exchange.
UNROUTABLE = (312, 404)
#: Its number of queue.declare: there 404 says that the node which has the queue is down, for now.
QUEUE_DECLARE = (50, 10)
#: The broker ends a connection for what it was sent: no frame, or more than it was told to expect.
BROKEN_FRAMES = (501, 502, 505)


class Unbound(Exception):
    """No queue is bound to a message's exchange by its routing key."""


def refusal(
    exc: Exception, connection_errors: tuple[type[Exception], ...]
) -> BrokerDown | Unpublishable | Rejected:
    """Return what an error says of a message, or of the broker."""
    said = str(exc) or repr(exc)
    if is_unroutable(exc):
        return Unpublishable("unroutable", said)
    if _oversize(exc):
        return Unpublishable("oversize", said)
    if isinstance(exc, amqp_errors.MessageNacked):
        return Rejected("the broker did not take it; is its queue full?")
    # Redis: out of memory, read-only, not authorised: it refuses all messages alike.
    if type(exc).__module__.startswith("redis."):
        return BrokerDown(f"{type(exc).__name__}: {exc}", sent=True)
    if isinstance(exc, connection_errors):
        return BrokerDown(repr(exc), sent=True)
    return Rejected(repr(exc))


def is_unroutable(exc: Exception) -> bool:
    """Whether no queue takes the message, or its exchange is missing."""
    if getattr(exc, "method_sig", None) == QUEUE_DECLARE:
        return False
    return getattr(exc, "reply_code", None) in UNROUTABLE or isinstance(exc, Unbound)


def _oversize(exc: Exception) -> bool:
    """Whether the message, or a part of it, is larger than AMQP or this broker can have it."""
    if isinstance(exc, amqp_errors.PreconditionFailed):
        return "message size" in str(exc)
    oversize = (amqp_errors.ContentTooLarge, amqp_errors.FrameSyntaxError, struct.error)
    return isinstance(exc, oversize) or getattr(exc, "reply_code", None) in BROKEN_FRAMES
