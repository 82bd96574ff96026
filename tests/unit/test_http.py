"""Refusals as answers of web applications, by plain WSGI and ASGI callables."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any
from wsgiref.handlers import SimpleHandler
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import pytest

from celery_budget.errors import (
    BudgetExceeded,
    OutboxFull,
    PolicyError,
    QueueFull,
    StoreError,
    UnknownBudget,
)
from celery_budget.http import ASGIRefusals, Refusal, WSGIRefusals, refusal_of


def exceeded(retry_after: float | None, reason: str = "exhausted") -> BudgetExceeded:
    return BudgetExceeded("tenant:acme", "tokens", 9, 5, 10, 5, 0, reason, 10, retry_after)


ANSWERS: list[Any] = [
    (exceeded(12.2), (429, 13, "over_budget", "exhausted")),
    (exceeded(0.2, "held"), (429, 1, "over_budget", "held")),
    (exceeded(0.0), (429, 1, "over_budget", "exhausted")),
    (exceeded(None, "blocked"), (429, None, "over_budget", "blocked")),
    (OutboxFull(7, 5, 2.5), (503, 3, "overloaded", None)),
    (OutboxFull(7, 5), (503, None, "overloaded", None)),
    (QueueFull("llm", "jobs", 7, 5, 5, 2.5), (503, 3, "overloaded", None)),
    (QueueFull("llm", "heavy", 7, 0, 5), (429, None, "too_heavy", None)),
]


@pytest.mark.parametrize(("error", "wanted"), ANSWERS, ids=[str(n) for n in range(len(ANSWERS))])
def test_what_a_refusal_is_answered(error: BaseException, wanted: tuple[Any, ...]) -> None:
    refusal = refusal_of(error)
    assert refusal == Refusal(*wanted)
    headers = dict(refusal.headers)
    assert headers.get("Retry-After") == (None if wanted[1] is None else str(wanted[1]))
    assert headers["Content-Length"] == str(len(refusal.body))
    told = json.loads(refusal.body)
    assert told["error"] == wanted[2]
    assert told.get("retry_after") == wanted[1]
    # Whose budget it was is nobody else's.
    assert b"acme" not in refusal.body


def test_a_fault_that_may_pass_is_answered_as_well() -> None:
    refusal = refusal_of(StoreError("gone", True))
    assert refusal is not None
    assert (refusal.status, refusal.code) == (503, "unavailable")
    assert refusal.retry_after is not None
    assert 5 <= refusal.retry_after <= 7


FAULTS = [StoreError("broken"), UnknownBudget("b"), PolicyError("x"), ValueError("x")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_what_is_no_refusal_is_the_servers_fault(fault: Exception) -> None:
    assert refusal_of(fault) is None
    with pytest.raises(type(fault)):
        serve(lambda environ, start: fail(fault))
    with pytest.raises(type(fault)):
        serve_async(failing_async(fault))


def fail(error: BaseException) -> Any:
    raise error


class Caught(SimpleHandler):
    """Shows what an application raised."""

    raised: BaseException | None = None

    def log_exception(self, exc_info: Any) -> None:
        self.raised = exc_info[1]


def serve(app: Callable[..., Any]) -> tuple[int, dict[str, str], bytes]:
    """Answer one request by the standard library's server, whose validator watches both sides."""
    import io

    environ: dict[str, Any] = {}
    setup_testing_defaults(environ)
    environ["QUERY_STRING"] = ""
    out, errors = io.BytesIO(), io.StringIO()
    handler = Caught(io.BytesIO(), out, errors, environ)
    handler.run(validator(WSGIRefusals(app)))
    if handler.raised is not None:
        raise handler.raised
    head, _, body = out.getvalue().partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in rest)
    return int(first.split()[1]), headers, body


def ok(environ: Any, start: Any) -> list[bytes]:
    start("200 OK", [("Content-Type", "text/plain")])
    return [b"fine"]


def refuse_in_generator(environ: Any, start: Any) -> Iterator[bytes]:
    raise exceeded(12.2)
    yield b""


def refuse_before_sending(environ: Any, start: Any) -> Iterator[bytes]:
    start("200 OK", [("Content-Type", "text/plain")])
    raise exceeded(12.2)
    yield b""


@pytest.mark.parametrize(
    "app",
    [lambda environ, start: fail(exceeded(12.2)), refuse_in_generator, refuse_before_sending],
    ids=["call", "generator", "headers"],
)
def test_a_wsgi_application_answers_429(app: Callable[..., Any]) -> None:
    status, headers, body = serve(app)
    assert (status, headers["Retry-After"]) == (429, "13")
    assert json.loads(body) == {
        "error": "over_budget",
        "reason": "exhausted",
        "retry_after": 13,
    }


class Pieces:
    """An answer in pieces, that knows whether it was closed."""

    def __init__(self, *pieces: Any) -> None:
        self.pieces = iter(pieces)
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        piece = next(self.pieces)
        return fail(piece) if isinstance(piece, BaseException) else piece

    def close(self) -> None:
        self.closed += 1


def test_other_answers_pass_as_they_are() -> None:
    assert serve(ok)[::2] == (200, b"fine")
    pieces = Pieces(b"a", b"b", b"c")

    def app(environ: Any, start: Any) -> Pieces:
        start("200 OK", [("Content-Type", "text/plain")])
        return pieces

    assert serve(app)[::2] == (200, b"abc")
    assert pieces.closed == 1


def test_an_answer_that_is_refused_is_closed() -> None:
    pieces = Pieces(exceeded(12.2))
    answer = WSGIRefusals(lambda environ, start: pieces)({}, lambda *given: None)
    assert json.loads(b"".join(answer))["retry_after"] == 13
    assert pieces.closed == 1


def test_an_answer_that_has_begun_is_not_another_one() -> None:
    pieces = Pieces(b"a", exceeded(12.2))
    answer = iter(WSGIRefusals(lambda environ, start: pieces)({}, lambda *given: None))
    assert next(answer) == b"a"
    with pytest.raises(BudgetExceeded):
        next(answer)


def serve_async(app: Any, kind: str = "http") -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(ASGIRefusals(app)({"type": kind}, receive, send))
    return sent


def failing_async(error: BaseException, *first: dict[str, Any]) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in first:
            await send(message)
        raise error

    return app


def test_an_asgi_application_answers_429() -> None:
    start, body = serve_async(failing_async(exceeded(12.2)))
    assert (start["type"], start["status"]) == ("http.response.start", 429)
    headers = dict(start["headers"])
    assert headers[b"retry-after"] == b"13"
    assert headers[b"content-length"] == str(len(body["body"])).encode()
    assert json.loads(body["body"])["reason"] == "exhausted"


def test_an_asgi_answer_that_has_begun_or_is_none_is_left() -> None:
    begun = {"type": "http.response.start", "status": 200, "headers": []}
    with pytest.raises(BudgetExceeded):
        serve_async(failing_async(exceeded(12.2), begun))
    with pytest.raises(BudgetExceeded):
        serve_async(failing_async(exceeded(12.2)), kind="websocket")
    assert serve_async(passing) == [begun]


async def passing(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
