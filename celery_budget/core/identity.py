"""Who a request is: its ids and its fingerprint.

A repeat of a request must come out as the same task. Ids that are derived are therefore UUIDv5
over names, and what must be the same is compared by a fingerprint over the task and its arguments.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from datetime import time as clock_time
from decimal import Decimal
from enum import Enum
from typing import Any

from celery_budget.core.budgets import check_text
from celery_budget.errors import InvalidName, PolicyError

__all__ = ["Fingerprint", "checked_id", "derived_id", "fingerprint", "new_id", "task_id_of"]

_NAMESPACE = uuid.UUID("6d1f7c0e-55f0-5a4c-9a53-0d1c8a1e2b70")


def new_id() -> uuid.UUID:
    """Return a new UUIDv7: 48 bits of milliseconds, 12 of their fraction, then 62 random ones.

    RFC 9562, section 6.2, method 3. Ids made later sort later, to a quarter of a microsecond:
    inserts stay at the end of their index, and messages leave in the order they came.
    """
    milliseconds, nanoseconds = divmod(time.time_ns(), 1_000_000)
    value = (milliseconds & (2**48 - 1)) << 80 | 0x7 << 76
    value |= (nanoseconds * 4096 // 1_000_000) << 64 | 0x2 << 62
    value |= int.from_bytes(os.urandom(8), "big") >> 2
    return uuid.UUID(int=value)


def checked_id(what: str, value: object) -> str:
    """Return an id if the ledger can hold it: text without control characters.

    :raises PolicyError: otherwise.
    """
    try:
        return check_text(value, what)
    except InvalidName as exc:
        raise PolicyError(str(exc)) from exc


def derived_id(*names: str) -> uuid.UUID:
    """Return the UUIDv5 of ``names``; lengths are part of it, so that no two lists meet."""
    return uuid.uuid5(_NAMESPACE, "".join(f"{len(name)}:{name}" for name in names))


def task_id_of(owner: str, request_id: str) -> str:
    """Return the task id that ``request_id`` of ``owner`` stands for, always the same one."""
    return str(derived_id("request", owner, request_id))


@dataclass(frozen=True)
class Fingerprint:
    """What makes two requests the same.

    :ivar digest: version, colon, and SHA-256 in hex.
    :ivar opaque: whether values were left out because they have no stable written form.
    """

    digest: str
    opaque: bool


def fingerprint(task_name: str, arguments: Mapping[str, object]) -> Fingerprint:
    """Return the fingerprint of a call of ``task_name`` with its bound ``arguments``.

    Types are part of it (``1``, ``1.0``, ``True`` and ``"1"`` differ), a tuple equals a list
    (a serializer turns one into the other), sets and mappings do not depend on order. A value of
    any other type is left out and the fingerprint is flagged as opaque; nothing is pickled.
    """
    left_out: list[object] = []
    written = b"l2:" + _written(task_name, left_out) + _written(arguments, left_out)
    return Fingerprint(f"1:{hashlib.sha256(written).hexdigest()}", bool(left_out))


def _written(value: object, left_out: list[object]) -> bytes:
    """Return ``value`` in a written form that is unique: a type tag, then length or content.

    :param left_out: takes what has none.
    """
    write = _OF_TYPES.get(type(value))
    if write is not None:
        return write(value, left_out)
    if isinstance(value, Enum):
        # Before str and int: an enum's members may be both.
        return _text(b"e", f"{type(value).__qualname__}.{value.name}")
    for kinds, write in _OF_KINDS:
        if isinstance(value, kinds):
            return write(value, left_out)
    left_out.append(value)
    return b"?;"


def _text(tag: bytes, text: str) -> bytes:
    return _raw(tag, text.encode("utf-8", "surrogatepass"))


def _raw(tag: bytes, raw: bytes) -> bytes:
    return b"%b%d:%b" % (tag, len(raw), raw)


def _list(value: Any, left_out: list[object]) -> bytes:
    items = [_written(item, left_out) for item in value]
    return b"l%d:%b" % (len(items), b"".join(items))


def _set(value: Any, left_out: list[object]) -> bytes:
    items = sorted([_written(item, left_out) for item in value])
    return b"S%d:%b" % (len(items), b"".join(items))


def _mapping(value: Any, left_out: list[object]) -> bytes:
    items = sorted(
        [b"l2:" + _written(key, left_out) + _written(item, left_out) for key, item in value.items()]
    )
    return b"m%d:%b" % (len(items), b"".join(items))


_Write = Callable[[Any, list[object]], bytes]
#: How values are written, by what they are an instance of; the first counts.
_OF_KINDS: tuple[tuple[type | tuple[type, ...], _Write], ...] = (
    (type(None), lambda value, _: b"n;"),
    (bool, lambda value, _: b"b1;" if value else b"b0;"),
    # In hexadecimal: Python bounds the length of a decimal one.
    (int, lambda value, _: _raw(b"i", hex(value).encode())),
    (float, lambda value, _: _raw(b"f", value.hex().encode())),
    (str, lambda value, _: _text(b"s", value)),
    ((bytes, bytearray, memoryview), lambda value, _: _raw(b"y", bytes(value))),
    (Decimal, lambda value, _: _text(b"d", str(value))),
    (uuid.UUID, lambda value, _: _raw(b"u", value.hex.encode())),
    (
        (datetime, date, clock_time),
        lambda value, _: _text(b"t", f"{type(value).__name__} {value.isoformat()}"),
    ),
    ((list, tuple), _list),
    ((set, frozenset), _set),
    (Mapping, _mapping),
)
#: The same for the types that most values are of, which need not be asked one after another.
_OF_TYPES: Mapping[type, _Write] = {
    kind: write
    for kinds, write in _OF_KINDS
    for kind in (kinds if isinstance(kinds, tuple) else (kinds,))
    if kind is not Mapping
} | {dict: _mapping}
