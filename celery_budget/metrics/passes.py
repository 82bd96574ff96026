"""What the relay of this process has done so far; the ledger does not keep it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Protocol

from celery_budget.metrics.families import Families

__all__ = ["OUTCOMES", "Passes"]

#: What becomes of a message in a pass.
OUTCOMES = ("published", "failed", "released", "quarantined")


class Pass(Protocol):
    """What one pass did; see :class:`celery_budget.relay.Relayed`."""

    @property
    def published(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def released(self) -> int: ...
    @property
    def quarantined(self) -> int: ...
    @property
    def broker_down(self) -> bool: ...


class Passes:
    """Counts of a relay's passes since its process began."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: Counter[str] = Counter()
        self._passes = 0
        self._errors = 0
        self._seconds = 0.0
        self._broker_down = False

    def count(self, begun: float, done: Pass | None) -> None:
        """Count a pass.

        :param begun: when it began, by the monotonic clock.
        :param done: what it did; none where an error broke it off.
        """
        with self._lock:
            self._passes += 1
            self._seconds += time.monotonic() - begun
            if done is None:
                self._errors += 1
                return
            self._messages.update({name: getattr(done, name) for name in OUTCOMES})
            self._broker_down = done.broker_down

    def add_to(self, families: Families) -> None:
        """Add what was counted."""
        with self._lock:
            for outcome in OUTCOMES:
                families.add("relay_messages_total", self._messages[outcome], outcome)
            families.add("relay_passes_total", self._passes)
            families.add("relay_pass_seconds_total", self._seconds)
            families.add("relay_errors_total", self._errors)
            families.add("relay_broker_down", self._broker_down)
