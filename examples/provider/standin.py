"""A server that answers as OpenAI's and Anthropic's APIs do, and calls nobody.

    python -m examples.provider.standin 8080

It speaks ``/v1/chat/completions``, ``/v1/responses`` and ``/v1/messages``, each whole and as a
stream. The answer is the prompt in capitals, at a token a word. A word in brackets that the prompt
begins with makes it fail:

- ``[busy]``: 429 with Retry-After, the first time;
- ``[down]``: 503, the first time;
- ``[wrong]``: 400, each time;
- ``[cut]``: of a stream, the connection ends in the middle, each time.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

Json = dict[str, Any]

RETRY_SECONDS = 1


@dataclass(frozen=True)
class Answer:
    """What is answered to a prompt.

    :ivar number: which of the server's answers it is; ids are made of it.
    :ivar tokens_in: what the prompt counts.
    """

    number: int
    model: str
    words: list[str]
    tokens_in: int

    @property
    def text(self) -> str:
        """All of it."""
        return " ".join(self.words)

    @property
    def tokens_out(self) -> int:
        """What it counts."""
        return len(self.words)


class Shape(Protocol):
    """How a provider's requests and replies look."""

    @staticmethod
    def prompt(asked: Json) -> str:
        """Return what was asked."""

    @staticmethod
    def whole(answer: Answer) -> Json:
        """Return a whole reply."""

    @staticmethod
    def events(answer: Answer) -> Iterator[tuple[str | None, Json]]:
        """Return the events of a stream, each with its name, if it has one."""

    @staticmethod
    def error(kind: str, message: str) -> Json:
        """Return the body of an error."""


class ChatCompletions:
    """The shape of OpenAI's chat completions, and of all that imitate it."""

    @staticmethod
    def prompt(asked: Json) -> str:
        """Return what was asked."""
        return str(asked["messages"][-1]["content"])

    @staticmethod
    def whole(answer: Answer) -> Json:
        """Return a whole reply."""
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {
            "id": f"chatcmpl-{answer.number}",
            "object": "chat.completion",
            "created": 1_800_000_000,
            "model": answer.model,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": _chat_usage(answer),
        }

    @staticmethod
    def events(answer: Answer) -> Iterator[tuple[str | None, Json]]:
        """Return the events of a stream; the last one tells the usage."""
        frame: Json = {
            "id": f"chatcmpl-{answer.number}",
            "object": "chat.completion.chunk",
            "created": 1_800_000_000,
            "model": answer.model,
            "usage": None,
        }
        for word in answer.words:
            delta = {"role": "assistant", "content": f"{word} "}
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            yield None, {**frame, "choices": [choice]}
        choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
        yield None, {**frame, "choices": [choice]}
        yield None, {**frame, "choices": [], "usage": _chat_usage(answer)}

    @staticmethod
    def error(kind: str, message: str) -> Json:
        """Return the body of an error."""
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _chat_usage(answer: Answer) -> Json:
    return {
        "prompt_tokens": answer.tokens_in,
        "completion_tokens": answer.tokens_out,
        "total_tokens": answer.tokens_in + answer.tokens_out,
    }


class Responses:
    """The shape of OpenAI's responses."""

    @staticmethod
    def prompt(asked: Json) -> str:
        """Return what was asked."""
        return str(asked["input"])

    @staticmethod
    def whole(answer: Answer, status: str = "completed") -> Json:
        """Return a whole reply, or one that has only begun."""
        reply: Json = {
            "id": f"resp_{answer.number}",
            "object": "response",
            "created_at": 1_800_000_000,
            "model": answer.model,
            "status": status,
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": None,
        }
        if status != "completed":
            return reply
        part = {"type": "output_text", "text": answer.text, "annotations": []}
        message = {
            "id": f"msg_{answer.number}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [part],
        }
        usage = {
            "input_tokens": answer.tokens_in,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.tokens_out,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.tokens_in + answer.tokens_out,
        }
        return {**reply, "output": [message], "usage": usage}

    @staticmethod
    def events(answer: Answer) -> Iterator[tuple[str | None, Json]]:
        """Return the events of a stream; the last one has the whole reply."""
        begun = {"response": Responses.whole(answer, "in_progress"), "sequence_number": 0}
        yield "response.created", begun
        place = {"item_id": f"msg_{answer.number}", "output_index": 0, "content_index": 0}
        for number, word in enumerate(answer.words, 1):
            delta = {"delta": f"{word} ", "logprobs": [], "sequence_number": number}
            yield "response.output_text.delta", {**place, **delta}
        ended = {"response": Responses.whole(answer), "sequence_number": len(answer.words) + 1}
        yield "response.completed", ended

    @staticmethod
    def error(kind: str, message: str) -> Json:
        """Return the body of an error."""
        return ChatCompletions.error(kind, message)


class Messages:
    """The shape of Anthropic's messages."""

    @staticmethod
    def prompt(asked: Json) -> str:
        """Return what was asked."""
        return str(asked["messages"][-1]["content"])

    @staticmethod
    def whole(answer: Answer) -> Json:
        """Return a whole reply."""
        return {
            **Messages._begun(answer),
            "content": [{"type": "text", "text": answer.text}],
            "stop_reason": "end_turn",
            "usage": {"input_tokens": answer.tokens_in, "output_tokens": answer.tokens_out},
        }

    @staticmethod
    def _begun(answer: Answer) -> Json:
        return {
            "id": f"msg_{answer.number}",
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": answer.tokens_in, "output_tokens": 1},
        }

    @staticmethod
    def events(answer: Answer) -> Iterator[tuple[str | None, Json]]:
        """Return the events of a stream: what went in first, what came out at the end."""
        yield "message_start", {"message": Messages._begun(answer)}
        block = {"type": "text", "text": ""}
        yield "content_block_start", {"index": 0, "content_block": block}
        for word in answer.words:
            delta = {"type": "text_delta", "text": f"{word} "}
            yield "content_block_delta", {"index": 0, "delta": delta}
        yield "content_block_stop", {"index": 0}
        ended = {"stop_reason": "end_turn", "stop_sequence": None}
        yield "message_delta", {"delta": ended, "usage": {"output_tokens": answer.tokens_out}}
        yield "message_stop", {}

    @staticmethod
    def error(kind: str, message: str) -> Json:
        """Return the body of an error."""
        return {"type": "error", "error": {"type": kind, "message": message}}


SHAPES: dict[str, type[Shape]] = {
    "/v1/chat/completions": ChatCompletions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
}


class StandIn(ThreadingHTTPServer):
    """The server.

    :ivar tokens: what it has counted, for whole replies and for streams that were not cut.
    :ivar calls: how often it was asked.
    """

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.tokens = 0
        self.calls = 0
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def called(self, prompt: str) -> tuple[int, bool]:
        """Note a call; return its number, and whether this prompt came for the first time."""
        with self._lock:
            self.calls += 1
            first = prompt not in self._seen
            self._seen.add(prompt)
            return self.calls, first

    def count(self, answer: Answer) -> None:
        """Count what a call is charged."""
        with self._lock:
            self.tokens += answer.tokens_in + answer.tokens_out


class Handler(BaseHTTPRequestHandler):
    """Answers one connection's requests."""

    server: StandIn
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        shape = SHAPES.get(self.path.partition("?")[0])
        if shape is None:
            self._whole(404, {"error": {"message": "no such address"}})
            return
        prompt = shape.prompt(asked)
        number, first = self.server.called(prompt)
        if prompt.startswith("[busy]") and first:
            error = shape.error("rate_limit_error", "too many requests")
            self._whole(429, error, {"Retry-After": str(RETRY_SECONDS)})
        elif prompt.startswith("[down]") and first:
            self._whole(503, shape.error("api_error", "overloaded"))
        elif prompt.startswith("[wrong]"):
            self._whole(400, shape.error("invalid_request_error", "not like this"))
        else:
            words = prompt.upper().split()
            answer = Answer(number, asked["model"], words, len(words))
            if asked.get("stream"):
                self._stream(list(shape.events(answer)), answer, cut=prompt.startswith("[cut]"))
            else:
                self.server.count(answer)
                self._whole(200, shape.whole(answer))

    def _whole(self, status: int, body: Json, headers: dict[str, str] | None = None) -> None:
        written = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(written)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(written)

    def _stream(self, events: list[tuple[str | None, Json]], answer: Answer, cut: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for name, event in events[: len(events) // 2] if cut else events:
            data = json.dumps(event if name is None else {"type": name, **event})
            self._chunk(f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n")
        if cut:
            # Without the last chunk: the client is told that something is missing.
            self.close_connection = True
            return
        self.server.count(answer)
        if events[-1][0] is None:
            self._chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, text: str) -> None:
        written = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(written), written))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Say nothing."""


@contextmanager
def running() -> Iterator[StandIn]:
    """Run a stand-in in a thread while a block runs."""
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def main() -> None:
    """Run one until Ctrl-C."""
    with StandIn(int(sys.argv[1]) if len(sys.argv) > 1 else 0) as server:
        print(f"OPENAI_BASE_URL={server.url}/v1 ANTHROPIC_BASE_URL={server.url}", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    main()
