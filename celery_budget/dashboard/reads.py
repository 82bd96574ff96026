"""Reads of the ledger: in threads of their own, and one for all who ask the same."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from celery_budget.errors import StoreError

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
#: How long an answer is waited for.
PATIENCE_SECONDS = 10.0


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
    not by each who looks. One that hangs is not waited for: who asks is told, and what hangs keeps
    its thread, and no end of the process back.

    :param clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()
        self._free = asyncio.Semaphore(THREADS)

    async def get(self, key: Hashable, read: Callable[[], T]) -> Seen[T]:
        """Return what ``read`` gives, or gave a moment ago to who asked by the same key.

        :raises StoreError: where it takes longer than anybody waits.
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
        fresh = FRESH_SECONDS
        try:
            value = await asyncio.wait_for(self._in_thread(read), PATIENCE_SECONDS)
        except asyncio.TimeoutError:
            told = f"the ledger did not answer within {PATIENCE_SECONDS:g} s"
            slot.seen, slot.error = None, StoreError(told, True)
        except Exception as error:  # noqa: BLE001 - it is raised to all who ask
            slot.seen, slot.error = None, error
        else:
            slot.seen, slot.error = Seen(value, time.time()), None
            fresh = min(max(fresh, REST * (self._clock() - began)), MOST_SECONDS)
        slot.until = self._clock() + fresh

    async def _in_thread(self, read: Callable[[], T]) -> T:
        """Return what ``read`` gives, run in a thread that no end of the process waits for.

        The thread is free for others once it has ended, whether or not anybody still waits for it.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def end(value: T | None, error: Exception | None) -> None:
            self._free.release()
            if done.done():
                return
            if error is None:
                done.set_result(cast(T, value))
            else:
                done.set_exception(error)

        def run() -> None:
            value, failed = None, None
            try:
                value = read()
            except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
                failed = error
            # There is no loop any more where the server has ended meanwhile.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(end, value, failed)

        await self._free.acquire()
        threading.Thread(target=run, name="budget-dashboard", daemon=True).start()
        return await done
