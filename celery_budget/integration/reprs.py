"""How Celery writes a task's arguments for people to read, where that is simple.

Its own way (:func:`celery.utils.saferepr.saferepr`) is made for what may be deep, long or
recursive, and takes a tenth of a call's time for two small arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["short_repr"]

#: Types of which Celery writes what :func:`repr` does.
_PLAIN = (int, float, bool, type(None))


def short_repr(arguments: Any, limit: int) -> str | None:
    """Return what Celery would write of a call's arguments; none where they are not simple.

    Simple is a tuple, list or dictionary of numbers and short texts, that is not truncated.

    :param limit: from how many characters on it may be.
    """
    kind = type(arguments)
    if kind is dict:
        keys, values = _written(arguments, limit), _written(arguments.values(), limit)
        if keys is None or values is None:
            return None
        pairs = [f"{key}: {value}" for key, value in zip(keys, values, strict=True)]
        text = f"{{{', '.join(pairs)}}}"
    elif kind is tuple or kind is list:
        values = _written(arguments, limit)
        if values is None:
            return None
        inner = ", ".join(values)
        if kind is list:
            text = f"[{inner}]"
        else:
            text = f"({inner},)" if len(values) == 1 else f"({inner})"
    else:
        return None
    return text if len(text) < limit else None


def _written(values: Iterable[Any], limit: int) -> list[str] | None:
    written = []
    for value in values:
        kind = type(value)
        if kind is str and len(value) < limit:
            escaped = value.replace("'", "\\'")
            written.append(f"'{escaped}'")
        elif kind in _PLAIN:
            written.append(repr(value))
        else:
            return None
    return written
