"""What Celery's result backends need to know of a chord once, and what of it again.

Of a chord with a request id a backend is told when it is admitted first. Celery tells it how many
members to count, from none, before it publishes them. Told once more while the chord runs,
memcached, DynamoDB and GCS would forget whom they have counted, and Redis that the body was
published.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from celery.backends.base import Backend

from celery_budget.admission import Publication
from celery_budget.events import Logger
from celery_budget.integration.batch import Batch, current_batch
from celery_budget.integration.results import is_redis

__all__ = ["told_at_admission", "wait_for_body"]

logger = Logger(__name__)

#: What Celery calls to tell a backend of a chord. Its own, of backends that are polled, tell none
#: anything: they publish ``celery.chord_unlock``, which the gate takes, or do nothing.
TELLING = {"apply_chord": Backend.apply_chord, "set_chord_size": Backend.set_chord_size}

_KEPT = "__celery_budget_kept__"

#: Who has it publishes the body; Celery writes ``done`` there when that is done.
_CLAIM, _DONE = ".c", (b"done", "done")
#: Seconds between two looks at it.
_LOOK_SECONDS = 0.1

_batch: ContextVar[Batch | None] = ContextVar("budget_chords", default=None)


@contextmanager
def told_at_admission(backend: Any, batch: Batch) -> Iterator[None]:
    """Have a backend told of the chords that are published inside when ``batch`` is admitted."""
    for name, polled in TELLING.items():
        tell = getattr(backend, name)
        if getattr(tell, "__func__", None) is not polled and not hasattr(tell, _KEPT):
            setattr(backend, name, _kept(tell))
    token = _batch.set(batch)
    try:
        yield
    finally:
        _batch.reset(token)


def _kept(tell: Any) -> Any:
    def told(*args: Any, **kwargs: Any) -> None:
        batch = _batch.get()
        if batch is None or current_batch(batch.budget) is not batch:
            tell(*args, **kwargs)
        else:
            # Once, though the transaction may be tried again: Django's backend takes it once.
            batch.add(Publication(None, None, prepare=cache(partial(tell, *args, **kwargs))))

    setattr(told, _KEPT, True)
    return told


def wait_for_body(backend: Any, request: Any) -> None:
    """Wait until nobody is about to publish the body of the chord that ``request`` is part of.

    For a result that is stored again. On Redis the member that is counted last claims the body, for
    some twenty seconds, and publishes it. A process that dies in between leaves the claim behind:
    its member, counted once more before that is over, would publish nothing, and the chord would
    never end.
    """
    if not (request and request.chord and request.group and is_redis(backend)):
        return
    if _is_claimed(backend, request.group):
        logger.event("chord.claimed", group_id=request.group)
    while _is_claimed(backend, request.group):
        time.sleep(_LOOK_SECONDS)


def _is_claimed(backend: Any, group_id: str) -> bool:
    claim = backend.ensure(backend.get, (backend.get_key_for_group(group_id, _CLAIM),))
    return claim is not None and claim not in _DONE
