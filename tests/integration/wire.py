"""What is compared of two messages, of which one went through the gate."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from celery import Celery
from kombu import serialization

from celery_budget.integration.context import HEADER

UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")


def stop_clock(app: Celery, now: datetime) -> None:
    """Give each application the same time, and the same address to reply to."""
    app.now = lambda: now
    app._local.oid = "replies"


def view(message: Any) -> dict[str, Any]:
    """Everything in a message that is not random or the moment's.

    The body is the bytes that were sent, decompressed by kombu, unless it has callbacks: their ids
    are the one thing in it that the gate adds.
    """
    headers = {name: value for name, value in message.headers.items() if name != HEADER}
    properties = {
        name: value
        for name, value in message.properties.items()
        if name not in ("delivery_tag", "delivery_info", "expiration", "application_headers")
    }
    where = {
        name: message.delivery_info.get(name)
        for name in ("exchange", "routing_key", "priority")
        if name in message.delivery_info
    }
    return {
        "headers": headers,
        "properties": properties,
        "where": where,
        "type": (message.content_type, message.content_encoding),
        "body": _body(message),
        "expires": "expiration" in message.properties,
    }


def _body(message: Any) -> Any:
    raw = message.body if isinstance(message.body, bytes) else message.body.encode()
    kind = message.content_type
    args, kwargs, embed = serialization.loads(raw, kind, message.content_encoding, accept={kind})
    links = {kind: embed[kind] for kind in ("callbacks", "errbacks") if embed.get(kind)}
    if not links:
        return raw
    return repr([args, kwargs, {**embed, **without_link_ids(links)}])


def without_link_ids(value: Any) -> Any:
    """Drop the ids of callbacks that were given none; ``fixed`` was given."""
    if isinstance(value, dict):
        if "subtask_type" in value and value["options"].get("task_id") != "fixed":
            value = {**value, "options": {**value["options"], "task_id": None}}
            del value["options"]["task_id"]
        return {name: without_link_ids(one) for name, one in value.items()}
    return [without_link_ids(one) for one in value] if isinstance(value, list) else value


def renamed(value: Any, names: dict[str, str] | None = None) -> Any:
    """Number all UUIDs in ``value`` by when they first appear, so that two runs can be compared."""
    names = {} if names is None else names
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if isinstance(value, str):
        return UUID.sub(lambda found: names.setdefault(found[0], f"id-{len(names)}"), value)
    if isinstance(value, dict):
        return {name: renamed(one, names) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [renamed(one, names) for one in value]
    return value
