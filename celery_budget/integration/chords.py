"""Chords with a request id: the result backend is told of one when it is admitted first.

Celery tells it how many members to count, from none, before it publishes them. Told once more while
the chord runs, memcached, DynamoDB and GCS would forget whom they have counted, and Redis that the
body was published.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from celery.backends.base import Backend

from celery_budget.admission import Publication
from celery_budget.integration.batch import Batch, current_batch

__all__ = ["told_at_admission"]

#: What Celery calls to tell a backend of a chord. Its own, of backends that are polled, tell none
#: anything: they publish ``celery.chord_unlock``, which the gate takes, or do nothing.
TELLING = {"apply_chord": Backend.apply_chord, "set_chord_size": Backend.set_chord_size}

_KEPT = "__celery_budget_kept__"

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
