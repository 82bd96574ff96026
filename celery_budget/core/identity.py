"""Who a request is: its ids and its fingerprint.

A repeat of a request must come out as the same task. Ids that are derived are therefore UUIDv5
over names, and what must be the same is compared by a fingerprint over the task and its arguments.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from datetime import time as clock_time
from decimal import Decimal
from enum import Enum

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
    chunks = _chunks([task_name, dict(arguments)])
    digest = hashlib.sha256(b"".join(chunks)).hexdigest()
    return Fingerprint(f"1:{digest}", any(chunk is _OPAQUE for chunk in chunks))


_OPAQUE = b"?;"


def _chunks(value: object) -> list[bytes]:
    """Return ``value`` in a written form that is unique: a type tag, then length or content."""
    chunks: list[bytes] = []
    _write(value, chunks)
    return chunks


def _write(value: object, to: list[bytes]) -> None:
    if type(value) is str:
        _text("s", value, to)
    elif isinstance(value, Enum):
        # Before str and int: an enum's members may be both.
        _text("e", f"{type(value).__qualname__}.{value.name}", to)
    elif value is None:
        to.append(b"n;")
    elif isinstance(value, bool):
        to.append(b"b1;" if value else b"b0;")
    elif isinstance(value, int):
        # In hexadecimal: Python bounds the length of a decimal one.
        _text("i", hex(value), to)
    elif isinstance(value, float):
        _text("f", value.hex(), to)
    elif isinstance(value, str):
        _text("s", value, to)
    elif isinstance(value, (bytes, bytearray, memoryview)):
        raw = bytes(value)
        to += (b"y%d:" % len(raw), raw)
    elif isinstance(value, Decimal):
        _text("d", str(value), to)
    elif isinstance(value, uuid.UUID):
        _text("u", value.hex, to)
    elif isinstance(value, (datetime, date, clock_time)):
        _text("t", f"{type(value).__name__} {value.isoformat()}", to)
    elif isinstance(value, (list, tuple)):
        to.append(b"l%d:" % len(value))
        for item in value:
            _write(item, to)
    elif isinstance(value, (set, frozenset)):
        _sorted(b"S", [_chunks(item) for item in value], to)
    elif isinstance(value, Mapping):
        _sorted(b"m", [_chunks(pair) for pair in value.items()], to)
    else:
        to.append(_OPAQUE)


def _text(tag: str, text: str, to: list[bytes]) -> None:
    raw = text.encode("utf-8", "surrogatepass")
    to += (b"%s%d:" % (tag.encode(), len(raw)), raw)


def _sorted(tag: bytes, items: list[list[bytes]], to: list[bytes]) -> None:
    to.append(tag + b"%d:" % len(items))
    for chunks in sorted(items, key=b"".join):
        to += chunks
