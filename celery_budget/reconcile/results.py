"""Whether the result backend has the results of requests that have ended."""

from __future__ import annotations

from typing import Protocol

from celery_budget.settings import Settings
from celery_budget.store import Store, pending

__all__ = ["Stored", "unstored"]

#: What the last attempt came to, in words.
_CAME_TO = {"returned": "has returned", "raised": "has failed", "uncertain": "was lost"}


class Stored(Protocol):
    """What can be seen of the result backend."""

    @property
    def kept_seconds(self) -> float | None:
        """For how long it keeps a result; none for as long as it likes."""

    def is_stored(self, task_id: str, task_name: str) -> bool | None:
        """Tell whether a task's result is stored; none where none is to be, or nobody can tell."""


def unstored(
    store: Store, settings: Settings, stored: Stored, limit: int
) -> tuple[int, tuple[str, ...]]:
    """Look up the results of requests that have ended; return how many, and what is not there.

    Of those admitted last, with nothing still to be stored of them, and not longer ago than results
    are kept. The backend is asked with no transaction open.
    """
    kept = stored.kept_seconds
    age_us = None if kept is None else int(kept * 1_000_000)
    looked_up, missing = 0, []
    for _, task_id, task_name, outcome in store.read(pending.settled, settings.root, limit, age_us):
        found = stored.is_stored(task_id, task_name)
        looked_up += found is not None
        if found is False:
            missing.append(
                f"task {task_id} ({task_name}) {_CAME_TO[outcome]}, and the result backend has no "
                "result of it"
            )
    return looked_up, tuple(missing)
