"""Recording a provider's reply on the attempt that got it."""

from __future__ import annotations

import hashlib

from celery_budget import metering
from celery_budget.metering import Reply
from celery_budget.settings import Settings
from celery_budget.settlement import Attempt, fits_as_key

__all__ = ["id_of", "record_reply"]


def id_of(reply: Reply) -> str | None:
    """Return a reply's own id as the key of its record; of one that cannot be a key, a digest."""
    if reply.id is None or fits_as_key(reply.id):
        return reply.id
    return hashlib.sha256(reply.id.encode("utf-8", "surrogatepass")).hexdigest()


def record_reply(attempt: Attempt, reply: Reply, key: object) -> bool:
    """Record a reply in every unit that the task draws on; false where it was recorded before.

    :raises UnknownPrice: where it has no price and the task pays in money; all else is recorded,
        and in money the estimate.
    """
    settings: Settings = attempt.settings
    used, unpriced = metering.counted(reply, settings.money_unit, settings.prices)
    added, units = attempt.write(used, id_of(reply) if key is None else key)
    if unpriced is not None and settings.money_unit in units:
        raise unpriced
    return added
