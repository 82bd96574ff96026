"""Replies that come in chunks: what they have told so far, as if they were whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from celery_budget.metering.replies import HIDDEN, plain

__all__ = ["Gathered"]

#: What each chunk repeats, or the last ones tell.
COMMON = (
    "id",
    "object",
    "model",
    "usage",
    "responseId",
    "response_id",
    "modelVersion",
    "model_version",
    "usageMetadata",
    "usage_metadata",
    HIDDEN,
)

#: The events that end a stream of OpenAI's responses.
LAST = ("response.completed", "response.incomplete", "response.failed")


class Gathered:
    """What the chunks of one reply have told so far.

    Anthropic's events tell what went in with the first and what came out with the last; OpenAI's
    and Bedrock's all of it with the last; Google's so far with each.

    :ivar reply: the reply that they make.
    :ivar finished: whether they have told all that it used.
    """

    def __init__(self) -> None:
        self.reply: dict[str, Any] = {}
        self.finished = False
        self._stopped = False

    def add(self, chunk: object) -> None:
        """Take in one chunk. What has no numbers in it changes nothing."""
        found = plain(chunk)
        if found is None:
            return
        for name in ("data", "chunk"):
            # Some clients wrap them.
            found = _part(found, name) or found
        kind = str(found.get("type") or "")
        if kind == "message_start":
            self.reply = dict(_part(found, "message") or {})
        elif kind in ("message_delta", "message_stop"):
            self._end_of_message(kind, found)
        elif kind.startswith("response."):
            self.reply = dict(_part(found, "response") or self.reply)
            self.finished = self.finished or kind in LAST
        elif any(name in found for name in ("messageStart", "messageStop", "metadata")):
            self._converse(found)
        else:
            self._common(found)

    def _end_of_message(self, kind: str, event: Mapping[str, Any]) -> None:
        # Its numbers are those of the whole message so far.
        before, now = _part(self.reply, "usage") or {}, _part(event, "usage") or {}
        told = {name: value for name, value in now.items() if value is not None}
        self.reply["usage"] = {**before, **told}
        self.reply.setdefault("type", "message")
        if kind == "message_stop" or (_part(event, "delta") or {}).get("stop_reason"):
            self.finished = True

    def _converse(self, event: Mapping[str, Any]) -> None:
        self.reply.setdefault("stopReason", None)
        usage = _part(_part(event, "metadata") or {}, "usage")
        if usage is not None:
            self.reply["usage"] = usage
            self.finished = True

    def _common(self, chunk: Mapping[str, Any]) -> None:
        for name in COMMON:
            if chunk.get(name) is not None:
                self.reply[name] = chunk[name]
        for name in ("choices", "candidates"):
            if name in chunk:
                self.reply.setdefault(name, [])
                self._stopped = self._stopped or _has_stopped(chunk[name])
        told = any(self.reply.get(name) for name in ("usage", "usageMetadata", "usage_metadata"))
        self.finished = told and self._stopped


def _part(of: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    return plain(of.get(name))


def _has_stopped(parts: object) -> bool:
    return isinstance(parts, Iterable) and any(
        found.get(name)
        for found in map(plain, parts)
        if found is not None
        for name in ("finish_reason", "finishReason")
    )
