"""Frames are those that the amqp library would have written, to the byte, and so are the errors."""

from __future__ import annotations

import struct
from datetime import datetime, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from amqp import Message
from amqp.exceptions import FrameSyntaxError
from amqp.method_framing import frame_writer
from amqp.serialization import dumps
from amqp.spec import Basic
from hypothesis import given
from hypothesis import strategies as st

from celery_budget.integration.frames import framed, method

CHANNEL = 3
NAMES: tuple[str, str, bool, bool] = ("shop", "draft.urgent", True, False)


def theirs(most: int, properties: dict[str, Any], body: bytes) -> bytes:
    """What the library writes."""
    written: list[bytes] = []
    connection = SimpleNamespace(frame_max=most, bytes_sent=0)
    transport = SimpleNamespace(write=lambda raw: written.append(bytes(raw)))
    arguments = dumps("Bssbb", (0, *NAMES))
    content = Message(body, **properties)
    frame_writer(connection, transport)(1, CHANNEL, Basic.Publish, arguments, content)
    return b"".join(written)


def ours(most: int, properties: dict[str, Any], body: bytes) -> bytes:
    return b"".join(framed(CHANNEL, most, method(*NAMES), properties, body))


HEADERS: dict[str, Any] = {
    "lang": "py",
    "task": "shop.draft",
    "shadow": None,
    "retries": 0,
    "timelimit": [None, 30],
    "ignore_result": False,
    "stamps": {},
    "nested": {"a": {"b": ["c", {"d": True}]}},
    "\u00fcmlaut": "caf\u00e9 \U0001f40d",
    "surrogate": "\ud800",
    "largest": 2**31 - 1,
    "larger": 2**31,
    "least": -(2**31) + 1,
    "lesser": -(2**31),
    "float": 1.5,
    "bytes": b"\x00\xff",
    "decimal": Decimal("-12.50"),
    "moment": datetime(2026, 11, 30, tzinfo=timezone.utc),
    "tuple": ("a", 1),
}
PROPERTIES: dict[str, Any] = {
    "content_type": "application/json",
    "content_encoding": "utf-8",
    "application_headers": HEADERS,
    "delivery_mode": 2,
    "priority": 0,
    "correlation_id": "a" * 36,
    "reply_to": "",
    "expiration": "60000",
    "message_id": None,
    "timestamp": 1_700_000_000,
    "user_id": "guest",
    "delivery_tag": "no property of AMQP's",
}


@pytest.mark.parametrize("most", [4096, 131_072])
@pytest.mark.parametrize("size", [0, 1, 3_000, 4_087, 4_088, 4_089, 300_000])
def test_a_message_is_written_as_the_library_does(most: int, size: int) -> None:
    for properties in (PROPERTIES, {}):
        body = b"\xce" * size
        assert ours(most, properties, body) == theirs(most, properties, body)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=20), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=20), _VALUES), st.binary(max_size=50))
def test_so_is_whatever_is_in_its_headers(headers: dict[str, Any], body: bytes) -> None:
    properties = {"application_headers": headers}
    assert ours(131_072, properties, body) == theirs(131_072, properties, body)


@pytest.mark.parametrize(
    ("properties", "error"),
    [
        ({"application_headers": {"a": object()}}, FrameSyntaxError),
        ({"application_headers": {"a": {"b": object()}}}, FrameSyntaxError),
        ({"application_headers": {"a": [object()]}}, FrameSyntaxError),
        ({"application_headers": {"k" * 256: "x"}}, struct.error),
        ({"application_headers": {"a": 2**63}}, struct.error),
        ({"correlation_id": "x" * 256}, struct.error),
        ({"priority": 256}, struct.error),
    ],
)
def test_what_cannot_be_written_is_the_same_error(
    properties: dict[str, Any], error: type[Exception]
) -> None:
    for write in (theirs, ours):
        with pytest.raises(error):
            write(131_072, properties, b"")


def test_names_that_are_too_long_are_no_method() -> None:
    with pytest.raises(struct.error):
        method("x" * 256, "", True, False)
