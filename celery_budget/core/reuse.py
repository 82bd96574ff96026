"""Reuse: calls of the same work, by the same owner, that are one request for some time."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery_budget.core.deadlines import MOST_SECONDS
from celery_budget.core.identity import Fingerprint
from celery_budget.errors import PolicyError

__all__ = ["PREFIX", "Reuse"]

#: How request ids begin that were made for calls to join; the rest tells one run from the next.
PREFIX = "reuse/"

_WRITTEN = re.compile(r"(\d+)([smhd])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class Reuse:
    """That calls join one that is in flight, or has succeeded.

    :ivar kept_us: for how long after its end.
    :ivar version: of what the task does; calls of another one do not join.
    """

    kept_us: int
    version: str

    @classmethod
    def given(cls, reuse: Any, version: Any = "1") -> Reuse | None:
        """Return what was given as ``reuse=`` and ``version=``; none without the first.

        :raises PolicyError: for what is no time above 0, or no version.
        """
        if reuse is None:
            return None
        if type(version) not in (str, int) or version == "":
            raise PolicyError(f"version= is {version!r}; give text, or an integer")
        kept_us = _microseconds(reuse)
        if not 0 < kept_us <= MOST_SECONDS * 1_000_000:
            raise PolicyError(
                f"reuse= is {reuse!r}; give a time above 0 as '24h' ('30s', '15m', '7d'), seconds "
                "or a timedelta"
            )
        return cls(kept_us, str(version))

    def key(self, fingerprint: Fingerprint) -> str:
        """Return what makes two calls of one owner the same.

        :raises PolicyError: where the arguments have values of which nobody can tell whether they
            are the same.
        """
        if fingerprint.opaque:
            raise PolicyError(
                "reuse= needs arguments that can be compared, and some of them have no stable "
                "written form; pass numbers, text, dates, lists and dictionaries of those, or take "
                "reuse= away"
            )
        return hashlib.sha256(f"{fingerprint.digest} {self.version}".encode()).hexdigest()


def _microseconds(reuse: Any) -> int:
    """Return a time in microseconds; 0 for what is none."""
    if isinstance(reuse, timedelta):
        return max(0, reuse // _MICROSECOND)
    if isinstance(reuse, str):
        written = _WRITTEN.fullmatch(reuse)
        # Longer ones are no time either, and not worth the arithmetic.
        if written is None or len(reuse) > 12:
            return 0
        return int(written[1]) * _SECONDS[written[2]] * 1_000_000
    is_number = isinstance(reuse, (int, float)) and not isinstance(reuse, bool)
    return int(reuse * 1_000_000) if is_number and math.isfinite(reuse) else 0
