"""The client of the crash matrix: asks for each piece of work until it has an answer.

Each has a request id, so that one that is asked for again is had once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from celery import Celery, chord

from tests.crash.tasks import note

__all__ = ["main", "requests"]

#: How often a request is made before the client gives up.
TRIES = 30


def requests(app: Celery) -> dict[str, Callable[[], Any]]:
    """Return how each piece of work is asked for, by its request id."""

    def one(name: str, *args: Any) -> Any:
        return app.tasks[f"crash.{name}"].s(*args)

    follow = one("follow", "a")
    parts = [one("part", number, "a") for number in (1, 2)]
    return {
        "early": lambda: one("early", "a").apply_async(request_id="early"),
        "chain": lambda: (one("order", "a") | follow).apply_async(request_id="chain"),
        "chord": lambda: chord(parts, one("total", "a")).apply_async(request_id="chord"),
        "retried": lambda: one("retried", "a").apply_async(
            request_id="retried", link=[follow, one("plain")]
        ),
        "settling": lambda: one("settling", "a").apply_async(
            request_id="settling", link=one("plain")
        ),
        # What follows does not fit until somebody raises the limit.
        "parked": lambda: (one("follow", "first", "tight") | one("follow", "tight")).apply_async(
            request_id="parked"
        ),
    }


def main(app: Celery) -> None:
    """Make all requests, and write down which of them were answered, and how."""
    answers = app.conf["crash_answers"]
    for request_id, ask in requests(app).items():
        for left in reversed(range(TRIES)):
            try:
                result = ask()
            except Exception:
                if not left:
                    raise
                time.sleep(0.1)
            else:
                note(answers, f"{request_id} {result.id}")
                break
