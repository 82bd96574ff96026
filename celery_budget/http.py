"""Refusals as answers of a web application: 429 and 503, with Retry-After.

For any framework: :func:`refusal_of` says what to answer to an error, and two small middlewares,
for WSGI and for ASGI, answer so where an application lets a refusal pass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from celery_budget.core.backpressure import spread
from celery_budget.errors import (
    BudgetError,
    BudgetExceeded,
    NotAuthorized,
    OutboxFull,
    QueueFull,
    StoreError,
)

__all__ = ["ASGIRefusals", "Refusal", "WSGIRefusals", "refusal_of"]

FORBIDDEN, TOO_MANY, UNAVAILABLE = 403, 429, 503
PHRASES = {
    FORBIDDEN: "Forbidden",
    TOO_MANY: "Too Many Requests",
    UNAVAILABLE: "Service Unavailable",
}
#: After a fault of the ledger's database that may pass, where the error says nothing.
STORE_SECONDS = 5.0


@dataclass(frozen=True)
class Refusal:
    """What to answer to a request that was refused.

    :ivar status: 403 where its caller may not draw on a budget, 429 where one was short or the
        request too heavy, 503 where it is not the
        request's fault.
    :ivar retry_after: in whole seconds; none where trying again makes no sense.
    :ivar code: what happened, for programs: ``over_budget``, ``too_heavy``, ``overloaded``,
        ``unavailable`` or ``not_authorized``.
    :ivar reason: of ``over_budget``: ``exhausted``, ``held``, ``queued``, ``blocked``, ``draining``
        or ``closed``.
    """

    status: int
    retry_after: int | None
    code: str
    reason: str | None = None

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The headers of the answer."""
        after = [] if self.retry_after is None else [("Retry-After", str(self.retry_after))]
        length = str(len(self.body))
        return [("Content-Type", "application/json"), ("Content-Length", length), *after]

    @property
    def body(self) -> bytes:
        """The answer's body, in JSON; names and amounts of budgets are not for everybody."""
        told = {"error": self.code, "reason": self.reason, "retry_after": self.retry_after}
        return json.dumps({name: one for name, one in told.items() if one is not None}).encode()


def refusal_of(error: BaseException) -> Refusal | None:
    """Return what to answer to an error; none where it is no refusal, but a fault of the server's.

    ``BudgetExceeded``, and what is too heavy for its lane, is 429, with Retry-After unless trying
    again makes no sense; ``NotAuthorized`` is 403; ``OutboxFull``, ``QueueFull`` and a
    ``StoreError`` that may pass are 503.
    """
    if isinstance(error, NotAuthorized):
        return Refusal(FORBIDDEN, None, "not_authorized")
    if isinstance(error, BudgetExceeded):
        return Refusal(TOO_MANY, _whole(error.retry_after), "over_budget", error.reason)
    if isinstance(error, QueueFull) and error.reason == "heavy":
        return Refusal(TOO_MANY, None, "too_heavy")
    if isinstance(error, (OutboxFull, QueueFull)):
        return Refusal(UNAVAILABLE, _whole(error.retry_after), "overloaded")
    if isinstance(error, StoreError) and error.retryable:
        after = error.retry_after
        return Refusal(
            UNAVAILABLE, _whole(spread(STORE_SECONDS) if after is None else after), "unavailable"
        )
    return None


def _whole(seconds: float | None) -> int | None:
    """Return whole seconds, not earlier, and at least one."""
    return None if seconds is None else max(1, math.ceil(seconds))


class WSGIRefusals:
    """A WSGI application that answers refusals which another one lets pass.

    :param app: that one. What it raises once its answer has begun is raised further, as is every
        other error.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self.app = app

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        try:
            body = self.app(environ, start_response)
            if isinstance(body, (list, tuple)):
                return body
            # What a generator raises it raises at its first piece.
            return _begun(body)
        except BudgetError as error:
            refusal = refusal_of(error)
            if refusal is None:
                raise
            status = f"{refusal.status} {PHRASES[refusal.status]}"
            # Where headers were given and not sent, these take their place.
            start_response(status, refusal.headers, (type(error), error, error.__traceback__))
            return [refusal.body]


class _Closing:
    """An answer whose first piece was taken, that is closed as the application's own."""

    def __init__(self, pieces: Iterator[bytes], close: Callable[[], object]) -> None:
        self._pieces = pieces
        self.close = close

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces


def _begun(body: Iterable[bytes]) -> Iterable[bytes]:
    close = getattr(body, "close", None)
    pieces = iter(body)
    try:
        first = list(_first(pieces))
    except BaseException:
        if close is not None:
            close()
        raise
    joined = chain(first, pieces)
    return joined if close is None else _Closing(joined, close)


def _first(pieces: Iterator[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        return


Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ASGIRefusals:
    """An ASGI application that answers refusals which another one lets pass.

    ``app.add_middleware(ASGIRefusals)`` for Starlette and FastAPI.

    :param app: that one. What it raises once its answer has begun, or where it is no HTTP request,
        is raised further, as is every other error.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except BudgetError as error:
            refusal = refusal_of(error)
            if refusal is None or begun or scope.get("type") != "http":
                raise
            headers = [
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in refusal.headers
            ]
            start = {"type": "http.response.start", "status": refusal.status, "headers": headers}
            await send(start)
            await send({"type": "http.response.body", "body": refusal.body})
