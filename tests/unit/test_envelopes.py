"""Stored messages are read as kombu reads them, and what many declare is made once."""

from __future__ import annotations

import uuid
from datetime import datetime, timezone
from typing import Any

import pytest
from kombu import Exchange, Queue
from kombu.utils.json import dumps, loads

from celery_budget.core.messages import WireMessage
from celery_budget.integration.capture import Envelope, read

#: What would be taken for declarations by who looks for their name alone.
DECEIVING = ', "declare": [["queue", {}]]}'


def stored(text: str) -> WireMessage:
    return WireMessage("a", "shop.draft", b"x", text, "q")


def envelope(queue: str = "q", **headers: Any) -> dict[str, Any]:
    entity = Queue(queue, Exchange("x"), routing_key="k")
    rest = Envelope("text", "utf-8", headers, {}, None, "x", "k", False, False, [])
    return {**vars(rest), "declare": [("queue", entity.as_dict(recurse=True))]}


@pytest.mark.parametrize(
    "headers",
    [
        {"task": "shop.draft", "timelimit": [None, 3], "stamps": {}},
        {"text": DECEIVING},
        {"nested": {"a": 1, "declare": [["queue", {"name": "other"}]]}},
        {"nested": {"a": {"b": 1, "declare": []}}, "after": DECEIVING},
        {"id": uuid.uuid4(), "eta": datetime(2026, 11, 30, tzinfo=timezone.utc)},
        {"text": "__type__"},
    ],
)
def test_headers_are_read_as_kombu_reads_them(headers: dict[str, Any]) -> None:
    text = dumps(envelope(**headers))
    for _ in range(2):
        found = read(stored(text))
        assert found.headers == loads(text)["headers"] == headers
        [queue] = found.declare
        assert (queue.name, queue.exchange.name, queue.routing_key) == ("q", "x", "k")


def test_what_many_declare_is_made_once() -> None:
    one, two, other = (
        read(stored(dumps(envelope(queue, id=name)))).declare
        for queue, name in (("same", "1"), ("same", "2"), ("other", "3"))
    )
    assert one is two
    assert one is not other
    # The server names this one anew.
    unnamed = dumps(envelope(""))
    assert read(stored(unnamed)).declare is not read(stored(unnamed)).declare


def test_arguments_of_a_queue_may_have_any_name() -> None:
    values = envelope()
    values["declare"][0][1]["queue_arguments"] = {"a": 1, "declare": [["queue", {"name": "n"}]]}
    text = dumps(values)
    for _ in range(2):
        [queue] = read(stored(text)).declare
        assert queue.queue_arguments == values["declare"][0][1]["queue_arguments"]


def test_where_declarations_stand_does_not_matter() -> None:
    values = envelope(id="1")
    first = {"declare": values["declare"], **values}
    assert [queue.name for queue in read(stored(dumps(first))).declare] == ["q"]


@pytest.mark.parametrize("change", [{"later": 1}, {"declare": None}, {"declare": [["queue", 1]]}])
def test_what_is_not_understood_is_an_error_each_time(change: dict[str, Any]) -> None:
    text = dumps({**envelope(), **change})
    for _ in range(2):
        with pytest.raises((TypeError, ValueError, AttributeError)):
            read(stored(text))


def test_what_lacks_something_is_an_error() -> None:
    values = envelope()
    del values["priority"]
    for text in (dumps(values), "{}", "nothing"):
        with pytest.raises((TypeError, ValueError, KeyError)):
            read(stored(text))
