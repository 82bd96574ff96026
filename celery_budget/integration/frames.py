"""A message as AMQP's frames: to the byte what the amqp library writes, in less of the time.

That writes each value by itself, and sends each message by a call of the system's: for a relay, the
largest part of its work. What Celery's headers are made of is written here: texts, numbers, none,
and tables and lists of them. Whatever else is in them that library writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from types import NoneType
from typing import Any

from amqp import Message, spec
from amqp.serialization import dumps

__all__ = ["framed", "method"]

#: Of how many names and methods what was written is kept.
MOST_KNOWN = 1024
#: What fits into 32 bits; what is larger, either way, takes 64.
MOST_INTEGER = 2**31 - 1
#: What a frame has besides its payload.
OVERHEAD = 8

_FRAME = Struct(">BHI")
_CONTENT = Struct(">HHQ")
_METHOD = Struct(">HH")
_LONG = Struct(">I")
_TEXT = Struct(">cI")
_INTEGER = Struct(">ci")
_BIG = Struct(">cq")
_SHORT = Struct(">H")
_OCTET = Struct("B")
_END = b"\xce"
_METHOD_FRAME, _HEADER_FRAME, _BODY_FRAME = 1, 2, 3

#: Each property's bit, its name and how it is written, in the order in which they are.
_PROPERTIES = tuple(
    (1 << (15 - number), name, form) for number, (name, form) in enumerate(Message.PROPERTIES)
)


@lru_cache(MOST_KNOWN)
def method(exchange: str, routing_key: str, mandatory: bool, immediate: bool) -> bytes:
    """Return the payload of the method that publishes a message.

    :raises struct.error: where a name is too long.
    """
    values = (0, exchange, routing_key, mandatory, immediate)
    arguments: bytes = dumps("Bssbb", values)
    return _METHOD.pack(*spec.Basic.Publish) + arguments


def framed(
    channel: int, most: int, publish: bytes, properties: Mapping[str, Any], body: bytes
) -> list[bytes]:
    """Return the frames of a message, in pieces.

    :param channel: the channel's number.
    :param most: how large a frame may be, as broker and client have agreed.
    :param publish: what :func:`method` has returned.
    :param properties: as the amqp library names them; those that are none are left out.
    :raises struct.error: where a value is too long, or too large.
    :raises amqp.exceptions.FrameSyntaxError: where a header's value is nothing that AMQP has.
    """
    header = _properties(properties)
    size = len(body)
    begin = _CONTENT.pack(spec.Basic.CLASS_ID, 0, size)
    pieces = [
        _FRAME.pack(_METHOD_FRAME, channel, len(publish)),
        publish,
        _END + _FRAME.pack(_HEADER_FRAME, channel, len(begin) + len(header)),
        begin,
        header,
        _END,
    ]
    for at in range(0, size, most - OVERHEAD):
        part = body[at : at + most - OVERHEAD]
        pieces += (_FRAME.pack(_BODY_FRAME, channel, len(part)), part, _END)
    return pieces


def _properties(properties: Mapping[str, Any]) -> bytes:
    flags = 0
    pieces = [b""]
    for flag, name, form in _PROPERTIES:
        value = properties.get(name)
        if value is None:
            continue
        flags |= flag
        if form == "F":
            pieces.append(_table(value))
        elif form == "s" and type(value) is str:
            pieces.append(_name(value))
        else:
            pieces.append(dumps(form, (value,)))
    pieces[0] = _SHORT.pack(flags)
    return b"".join(pieces)


def _table(values: Mapping[str, Any]) -> bytes:
    pieces = [b""]
    for key, value in values.items():
        write = _WRITERS.get(type(value))
        if write is None:
            # A table of this one, without its length.
            pieces.append(dumps("F", ({key: value},))[_LONG.size :])
        else:
            pieces += (_key(key), write(value))
    return _sized(pieces)


def _array(values: Sequence[Any]) -> bytes:
    pieces = [b""]
    for value in values:
        write = _WRITERS.get(type(value))
        # An array of this one, without its length.
        pieces.append(dumps("A", ([value],))[_LONG.size :] if write is None else write(value))
    return _sized(pieces)


def _sized(pieces: list[bytes]) -> bytes:
    """Return what is in an array or a table, behind its length, for which there is a place."""
    pieces[0] = _LONG.pack(sum(map(len, pieces)))
    return b"".join(pieces)


def _integer(value: int) -> bytes:
    fits = -MOST_INTEGER <= value <= MOST_INTEGER
    return _INTEGER.pack(b"I", value) if fits else _BIG.pack(b"L", value)


def _text(value: str) -> bytes:
    raw = _encode(value)
    return _TEXT.pack(b"S", len(raw)) + raw


#: How a value in a table or an array is written, by its type.
_WRITERS: dict[type, Callable[[Any], bytes]] = {
    str: _text,
    NoneType: lambda value: b"V",
    bool: lambda value: b"t\1" if value else b"t\0",
    int: _integer,
    dict: lambda value: b"F" + _table(value),
    list: lambda value: b"A" + _array(value),
}


def _name(value: str) -> bytes:
    raw = _encode(value)
    return _OCTET.pack(len(raw)) + raw


#: Names of headers, which are the same in all messages.
_key = lru_cache(MOST_KNOWN)(_name)


def _encode(value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")
