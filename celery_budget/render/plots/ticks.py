"""Axes that people can read: where the ticks of a plot are, and what is written beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date

__all__ = ["amount_ticks", "day_ticks", "near", "seconds_ticks", "short", "short_day"]

_STEPS = (1, 2, 5)
_PREFIXES = ((10**18, "E"), (10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]

#: Lengths of time at which an axis may have a tick, in seconds: no gap is much above ten.
_LADDER = (
    *(step * 10.0**power for power in range(-6, 1) for step in (1,)),
    *(10.0, 60.0, 600.0, 3600.0, 21_600.0, 86_400.0, 604_800.0, 2_592_000.0, 31_536_000.0),
)


def amount_ticks(most: int, about: int = 4) -> tuple[int, ...]:
    """Return round amounts from 0 up to ``most`` or just beyond it, ``about`` as many, exact.

    The last one is the end of the axis.
    """
    step = _round_up(-(-max(most, 1) // about))
    return tuple(range(0, step * (-(-max(most, 1) // step)) + 1, step))


def _round_up(least: int) -> int:
    """Return the least of 1, 2, 5, 10, 20 … that is not below ``least``."""
    power: int = 10 ** (len(str(least)) - 1)
    return next(step * power for step in (*_STEPS, 10) if step * power >= least)


def short(amount: int) -> str:
    """Return a round amount in few characters (``250k``, ``1.5M``); an odd one is cut to three."""
    sign, size = ("-", -amount) if amount < 0 else ("", amount)
    for power, prefix in _PREFIXES:
        if size >= power:
            hundredths = size * 100 // power
            digits = 2 if size < 10 * power else 1 if size < 100 * power else 0
            text = f"{hundredths // 100}.{hundredths % 100:02d}"
            text = text[: len(text) - 2 + digits].rstrip("0").rstrip(".") if digits else text[:-3]
            return f"{sign}{text}{prefix}"
    return str(amount)


def short_day(day: date) -> str:
    """Return a day as ``30 Nov``."""
    return f"{day.day} {_MONTHS[day.month - 1]}"


def day_ticks(days: Sequence[date], about: int = 5) -> tuple[int, ...]:
    """Return the places of the days that have a tick: evenly apart, the last one among them."""
    step = max(1, -(-len(days) // about))
    return tuple(range((len(days) - 1) % step, len(days), step))


def seconds_ticks(least: float, most: float) -> tuple[float, ...]:
    """Return lengths of time, in seconds, that enclose what is measured, for a logarithmic axis."""
    low = max((at for at, one in enumerate(_LADDER) if one <= least), default=0)
    high = min((at for at, one in enumerate(_LADDER) if one >= most), default=len(_LADDER) - 1)
    high = max(high, min(low + 1, len(_LADDER) - 1))
    low = min(low, high - 1)
    return _LADDER[low : high + 1]


def near(value: float, low: float, high: float) -> float:
    """Return how far ``value`` is on a logarithmic axis, from 0 to 1; beyond it is at its end."""
    if value <= low:
        return 0.0
    return min(1.0, math.log(value / low) / math.log(high / low))
