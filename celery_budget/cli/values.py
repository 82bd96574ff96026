"""What is written on the command line, turned into what it means.

What cannot be is wrong use (exit status 2), told with what to write instead.
"""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import click

from celery_budget.core.alerts import parse_thresholds
from celery_budget.core.amounts import check_amount
from celery_budget.core.budgets import AUTO, MOST_STRIPES, Limit, Share, parts_per_million
from celery_budget.errors import BudgetError, InvalidBudget

# click.ParamType takes a type argument in its newer releases only.

__all__ = [
    "AMOUNT",
    "COUNT",
    "COUNT_OR_NONE",
    "DURATION",
    "INSTANT",
    "MAYBE_AMOUNT",
    "NO_LIMIT",
    "RATIO",
    "SECONDS",
    "WHEN",
    "limit_of",
    "parent_of",
    "stripes_of",
    "thresholds_of",
]

_NONE = "none"
#: What is written as ``none`` where an option that is not given is None.
NO_LIMIT = object()
#: Decimal digits, in which ``_`` may group them: what int() takes beyond that (signs, blanks, the
#: digits of other scripts) is more likely a slip than an amount.
_DIGITS = re.compile(r"[0-9]+(_[0-9]+)*")
_DURATION = re.compile(r"([0-9]{1,12})([smhdw])")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
#: A year: what waits takes no number that is none, nor one that has no end.
_MOST_SECONDS = 31_536_000
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def _amount(text: str) -> int:
    """Return the amount that ``text`` writes.

    :raises ValueError: for anything else.
    """
    if not _DIGITS.fullmatch(text):
        raise ValueError(text)
    # int() refuses thousands of digits by a ValueError of its own.
    return check_amount(int(text), "it")


def limit_of(text: str) -> Limit:
    """Return the limit that ``text`` writes; none for ``none``.

    :raises click.BadParameter: for anything else.
    """
    if text.lower() == _NONE:
        return None
    try:
        return Share.parse(text, "it") if text.endswith("%") else _amount(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a limit; give an integer from 0 to 2^63-1 in the budget's unit, a "
            "share of the parent's such as '10%', or 'none' for unlimited",
            param_hint="'--limit'",
        ) from None


def parent_of(text: str) -> str | None:
    """Return the parent that ``text`` names; none for ``none``."""
    return None if text.lower() == _NONE else text


def stripes_of(text: str) -> int | None:
    """Return over how many rows a budget is to be spread; none for ``auto``."""
    if text == AUTO:
        return None
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= MOST_STRIPES:
        raise click.BadParameter(
            f"{text!r} is not a number of stripes; give one from 1 to {MOST_STRIPES}, or {AUTO}",
            param_hint="--stripes",
        )
    return int(text)


def thresholds_of(text: str) -> str:
    """Return ``text`` if it writes thresholds.

    :raises click.BadParameter: otherwise.
    """
    try:
        parse_thresholds(text, "it")
    except InvalidBudget as exc:
        raise click.BadParameter(str(exc), param_hint="'--alert-at'") from exc
    return text


class _Amount(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    name = "amount"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return _amount(value)
        except ValueError:
            self.fail(
                f"{value!r} is not an amount; give an integer from 0 to 2^63-1 in the budget's "
                "unit, as 1000000 or 1_000_000",
                param,
                ctx,
            )


class _Ratio(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    name = "ratio"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Decimal:
        try:
            parts_per_million(value, "it")
        except BudgetError:
            self.fail(
                f"{value!r} is not a ratio; give one from 0 to 1 with at most six decimal places, "
                "such as 0.8",
                param,
                ctx,
            )
        return Decimal(value)


class _Seconds(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        # Not true of nan either.
        if not 0 < seconds <= _MOST_SECONDS:
            self.fail(
                f"{value!r} is not a number of seconds above 0, such as 1.5, and up to "
                f"{_MOST_SECONDS:,}"
                "; give one",
                param,
                ctx,
            )
        return seconds


class _Duration(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        found = _DURATION.fullmatch(value)
        try:
            if found is None:
                raise OverflowError
            return timedelta(**{_UNITS[found[2]]: int(found[1])})
        except OverflowError:
            self.fail(
                f"{value!r} is not a duration; give a number and a unit: 45s, 30m, 12h, 7d or 2w",
                param,
                ctx,
            )


class _Instant(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        try:
            # Python 3.10 does not know Z.
            when = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", value))
        except ValueError:
            when = None
        if when is None or when.utcoffset() is None:
            self.fail(
                f"{value!r} is not a time with a time zone; give it in ISO 8601, such as "
                "2030-01-31T12:00:00Z or 2030-01-31T12:00:00+01:00",
                param,
                ctx,
            )
        return when


class _When(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    name = "when"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime | timedelta:
        if _DAY.fullmatch(value):
            try:
                return datetime.combine(date.fromisoformat(value), time(), timezone.utc)
            except ValueError:
                self.fail(
                    f"there is no day {value!r}"
                    "; give one that the calendar has, such as 2030-01-31",
                    param,
                    ctx,
                )
        try:
            of: click.ParamType = DURATION if _DURATION.fullmatch(value) else INSTANT  # type: ignore[type-arg, unused-ignore]
            found: datetime | timedelta = of.convert(value, param, ctx)
        except click.BadParameter:
            self.fail(
                f"{value!r} is no time; give a time before now (7d, 12h), a day (2030-01-31, from "
                "its midnight UTC on), or an instant with a time zone (2030-01-31T12:00:00Z)",
                param,
                ctx,
            )
        return found


class _MaybeAmount(_Amount):
    name = "limit"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return NO_LIMIT if str(value).lower() == _NONE else super().convert(value, param, ctx)


AMOUNT = _Amount()
#: An amount, or :data:`NO_LIMIT` for ``none``.
MAYBE_AMOUNT = _MaybeAmount()
RATIO = _Ratio()
DURATION = _Duration()
INSTANT = _Instant()
#: How many of something: no more than a database takes for it, with some to spare.
COUNT, COUNT_OR_NONE = click.IntRange(1, 1_000_000_000), click.IntRange(0, 1_000_000_000)
#: A number of seconds, as a float.
SECONDS = _Seconds()
#: A time before now, or an instant.
WHEN = _When()
