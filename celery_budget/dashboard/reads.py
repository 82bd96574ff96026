"""Reads of the ledger: in threads of their own, and one for all who ask the same."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

__all__ = ["Reads", "Seen"]

T = TypeVar("T")

#: For how long what was read is shown, in seconds: fifty who look cost as much as one.
FRESH_SECONDS = 1.0
#: And as many times as long as reading it took, so that a large ledger is not read all the time;
#: but no longer than this.
REST, MOST_SECONDS = 10, 30.0
#: How many different reads are remembered.
REMEMBERED = 64
#: How many run at once; what an application has threads for that mounts this is not taken from it.
THREADS = 4


@dataclass(frozen=True)
class Seen(Generic[T]):
    """What was read.

    :ivar at: when, in seconds since the epoch.
    """

    value: T
    at: float


@dataclass
class _Slot:
    """The last answer to one question: a value or an error, and until when it is given."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    until: float = 0.0
    seen: Seen[Any] | None = None
    error: Exception | None = None


class Reads:
    """Reads of one dashboard. For one event loop; no read is ever made on it.

    A failure is remembered as an answer is, so that a database that is down is asked once a second,
    not by each who looks.

    :param clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()
        self._threads = ThreadPoolExecutor(THREADS, "budget-dashboard")

    async def get(self, key: Hashable, read: Callable[[], T]) -> Seen[T]:
        """Return what ``read`` gives, or gave a moment ago to who asked by the same key.

        :raises Exception: what it raised.
        """
        slot = self._slots.setdefault(key, _Slot())
        self._slots.move_to_end(key)
        if len(self._slots) > REMEMBERED:
            self._slots.popitem(last=False)
        async with slot.lock:
            if self._clock() >= slot.until:
                await self._fill(slot, read)
            if slot.error is not None:
                raise slot.error
            assert slot.seen is not None  # noqa: S101 - one of the two was just written
            return slot.seen

    async def _fill(self, slot: _Slot, read: Callable[[], Any]) -> None:
        began = self._clock()
        loop = asyncio.get_running_loop()
        fresh = FRESH_SECONDS
        try:
            value = await loop.run_in_executor(self._threads, read)
        except Exception as error:  # noqa: BLE001 - it is raised to all who ask
            slot.seen, slot.error = None, error
        else:
            slot.seen, slot.error = Seen(value, time.time()), None
            fresh = min(max(fresh, REST * (self._clock() - began)), MOST_SECONDS)
        slot.until = self._clock() + fresh
