"""Streams of replies: passed on chunk by chunk, and recorded when they end, die or are left."""

from __future__ import annotations

import inspect
import threading
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any, TypeVar

from celery.exceptions import SoftTimeLimitExceeded

from celery_budget import metering
from celery_budget.core.identity import new_id
from celery_budget.errors import BudgetError, InvalidKey
from celery_budget.events import Logger
from celery_budget.integration.replies import id_of, record_reply
from celery_budget.metering import Reply
from celery_budget.settlement import MAX_KEY_LENGTH, Attempt, fits_as_key

__all__ = ["Either", "Reading", "pass_on", "pass_on_async"]

logger = Logger(__name__)

T = TypeVar("T")

NOTHING = Reply(None, None, None, None, None, whole=False)


class Reading:
    """A reply that is being read.

    :param how: how it is to be read; as for :func:`celery_budget.metering.read`.
    """

    def __init__(self, attempt: Attempt, key: str | None, how: dict[str, Any]) -> None:
        self._attempt = attempt
        if key is not None and not fits_as_key(key):
            raise InvalidKey(repr(key), MAX_KEY_LENGTH)
        # Of its own, for replies without an id: recording it again must add nothing.
        self._key, self._own_key = key, f"stream-{new_id()}"
        self._how = how
        self._gathered = metering.Gathered()
        self._lock = threading.Lock()
        self._begun = self._over = False
        self._at_end = self._give_up
        attempt.unfinished.append(self._at_end)

    def begin(self) -> None:
        """Note that somebody reads: there is something to pay for."""
        self._begun = True

    def add(self, chunk: object) -> None:
        """Take in a chunk; one that cannot be read is passed on all the same."""
        try:
            self._gathered.add(chunk)
        except Exception:
            logger.exception("reply.unreadable", reservation_id=self._attempt.reservation_id)

    def finish(self, died: bool) -> None:
        """Record what has arrived; once.

        :raises BudgetError: as ``usage.record`` for a whole reply, unless the stream has died and
            raises for itself. What it used is recorded then, by the estimate if need be.
        """
        with self._lock:
            if self._over:
                return
            error = self._record(died) if self._begun else None
            self._over = True
            if self._at_end in self._attempt.unfinished:
                self._attempt.unfinished.remove(self._at_end)
        if error is not None and not died:
            raise error
        if error is not None:
            logger.event("reply.unfinished", error=error)

    def _give_up(self) -> None:
        """Do so at the end of the task's call, which nothing of a stream that was left holds up."""
        try:
            self.finish(died=True)
        except SoftTimeLimitExceeded:
            raise
        except Exception:
            logger.exception("reply.unrecorded", reservation_id=self._attempt.reservation_id)
            self._attempt.unfinished.remove(self._at_end)

    def _record(self, died: bool) -> Exception | None:
        """Record the reply as far as it is there; return what is wrong with it."""
        reply: Reply = NOTHING
        unread: Exception | None = None
        whole = self._gathered.finished or not died
        try:
            reply = metering.read(self._gathered.reply, whole=whole, **self._how)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, there is something to pay for
            unread = error
        key = self._key or id_of(reply) or self._own_key
        try:
            record_reply(self._attempt, reply, key)
        except BudgetError as error:
            return unread or error
        return unread


def pass_on(reading: Reading, chunks: Iterable[T]) -> Iterator[T]:
    """Yield ``chunks``, and record them at their end, or where the reader leaves them."""
    reading.begin()
    died = True
    try:
        for chunk in chunks:
            reading.add(chunk)
            yield chunk
        died = False
    finally:
        try:
            reading.finish(died)
        finally:
            if died and callable(close := getattr(chunks, "close", None)):
                closing = close()
                if inspect.iscoroutine(closing):
                    # Of one that can be read in both ways; nobody would await it.
                    closing.close()


async def pass_on_async(reading: Reading, chunks: AsyncIterable[T]) -> AsyncIterator[T]:
    """Do as :func:`pass_on` for an asynchronous iterator."""
    reading.begin()
    died = True
    try:
        async for chunk in chunks:
            reading.add(chunk)
            yield chunk
        died = False
    finally:
        try:
            reading.finish(died)
        finally:
            for name in ("aclose", "close"):
                if died and callable(close := getattr(chunks, name, None)):
                    closing = close()
                    if inspect.isawaitable(closing):
                        await closing
                    break


class Either:
    """Chunks that can be read in both ways, as LiteLLM's: in the one in which they are read."""

    def __init__(self, reading: Reading, chunks: Any) -> None:
        self._reading, self._chunks = reading, chunks
        self._reader: Any = None

    def __iter__(self) -> Iterator[Any]:
        self._reader = self._reader or pass_on(self._reading, self._chunks)
        reader: Iterator[Any] = self._reader
        return reader

    def __next__(self) -> Any:
        return next(iter(self))

    def __aiter__(self) -> AsyncIterator[Any]:
        self._reader = self._reader or pass_on_async(self._reading, self._chunks)
        reader: AsyncIterator[Any] = self._reader
        return reader

    async def __anext__(self) -> Any:
        return await anext(aiter(self))

    def close(self) -> None:
        """Leave it, where it is read with ``for``."""
        if self._reader is not None:
            self._reader.close()

    async def aclose(self) -> None:
        """Leave it, where it is read with ``async for``."""
        if self._reader is not None:
            await self._reader.aclose()
