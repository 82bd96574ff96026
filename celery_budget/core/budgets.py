"""Budgets as they are declared, their balances, and what their names may be."""

from __future__ import annotations

import functools
import re
import reprlib
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from celery_budget.core.amounts import MAX_AMOUNT, check_amount
from celery_budget.core.periods import Period
from celery_budget.errors import InvalidBudget, InvalidName

__all__ = [
    "AUTO",
    "DEFAULT",
    "MILLION",
    "MOST_STRIPES",
    "MOST_THRESHOLDS",
    "MOST_WEIGHT",
    "NONE",
    "TOP",
    "WILDCARD",
    "Balance",
    "Budget",
    "Limit",
    "Share",
    "check_name",
    "check_own_name",
    "check_text",
    "check_unit",
    "filled",
    "is_template",
    "match",
    "most",
    "parts_per_million",
    "percent",
    "thresholds_text",
    "with_terms",
]

MAX_NAME_LENGTH = 255

#: A ratio of one in the form ratios are kept in: integers, parts per million.
MILLION = 1_000_000

#: How much one budget may weigh in a lane.
MOST_WEIGHT = 1_000_000
#: Over how many rows a window's counters may be spread.
MOST_STRIPES = 128
#: What is written where that is to be found.
AUTO = "auto"

#: How many thresholds one budget may have, and up to which part of the limit, in parts per million.
MOST_THRESHOLDS = 10
TOP = 10 * MILLION

#: What is written for no thresholds, and for those of the setting.
NONE = "none"
DEFAULT = "default"

#: Stands in a template's name for one or more characters other than ``/``.
WILDCARD = "*"


def check_name(name: object) -> str:
    """Return ``name`` if a budget or a template may be called so.

    Names are case-sensitive, NFC-normalised text of 1 to 255 characters without control
    characters. They are compared, not normalised: two spellings that look alike must not become
    one budget behind the caller's back.

    :raises InvalidName: otherwise.
    """
    return check_text(name, "a budget's name")


def check_own_name(name: object) -> str:
    """Return ``name`` if a request may draw on it: a budget's name, not a template's.

    :raises InvalidName: otherwise.
    """
    return _known_own(name) if type(name) is str else _own_name(name)


def _own_name(name: object) -> str:
    checked = check_name(name)
    if is_template(checked):
        raise InvalidName(
            f"{checked!r} names a template: '{WILDCARD}' stands for other names, and a request "
            "draws on a budget"
            "; name that one"
        )
    return checked


#: Most requests are of budgets that were drawn on before.
_known_own = functools.lru_cache(maxsize=1024)(_own_name)


def check_unit(unit: object) -> str:
    """Return ``unit`` if it can name what a budget counts (``tokens``, ``micro-usd``).

    :raises InvalidName: under the rules of :func:`check_name`.
    """
    return check_text(unit, "a budget's unit")


def check_text(text: object, what: str) -> str:
    """Return ``text`` if it follows the rules of :func:`check_name`.

    :param what: names it in the error.
    :raises InvalidName: otherwise.
    """
    if not isinstance(text, str):
        raise InvalidName(f"{what} is text, not {text!r} ({type(text).__name__}); give text")
    if not 1 <= len(text) <= MAX_NAME_LENGTH:
        raise InvalidName(
            f"{what} has 1 to {MAX_NAME_LENGTH} characters; {reprlib.repr(text)} has {len(text)}"
            "; give a shorter one, or one that is not empty"
        )
    if not text.isascii() and not unicodedata.is_normalized("NFC", text):
        raise InvalidName(f"{what} is in Unicode form NFC; {text!r} is not; normalize it")
    # What is printable has neither.
    if not text.isprintable() and any(
        unicodedata.category(character) in ("Cc", "Cs") for character in text
    ):
        raise InvalidName(f"{what} has no control characters; {text!r} does; take them out")
    return text


def is_template(name: str) -> bool:
    """Tell whether a name is a template's: one with a ``*``."""
    return WILDCARD in name


def match(template: str, name: str) -> tuple[str, ...] | None:
    """Return what the wildcards of ``template`` stand for in ``name``; none where it does not fit.

    Each stands for one or more characters other than ``/``, the earlier ones for as few as will
    do, so that ``tenant:*`` is not the template of ``tenant:acme/user:7``.
    """
    first, *literals = template.split(WILDCARD)

    # Remembered, and no regular expression: with several wildcards that would try more ways than
    # anybody waits for, and names come from outside.
    @functools.cache
    def values(number: int, begin: int) -> tuple[str, ...] | None:
        """Return what the wildcards from ``number`` on stand for in the name from ``begin`` on."""
        if number == len(literals):
            return () if begin == len(name) else None
        for end in range(begin + 1, len(name) + 1):
            if name[end - 1] == "/":
                return None
            if name.startswith(literals[number], end):
                others = values(number + 1, end + len(literals[number]))
                if others is not None:
                    return name[begin:end], *others
        return None

    return values(0, len(first)) if name.startswith(first) else None


def filled(template: str, values: tuple[str, ...]) -> str:
    """Return ``template`` with its wildcards replaced by the first of ``values``, in order."""
    first, *rest = template.split(WILDCARD)
    return first + "".join(f"{value}{part}" for value, part in zip(values, rest, strict=False))


def parts_per_million(value: object, what: str) -> int:
    """Return a ratio from 0 to 1 (an ``int``, ``float``, ``Decimal`` or text) in millionths.

    A float stands for what it is written as: ``0.8`` is 800,000 exactly.

    :raises InvalidBudget: for anything else, and for more than six decimal places.
    """
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
            raise InvalidOperation
        parts = Decimal(str(value)) * MILLION
        if not 0 <= parts <= MILLION or parts != int(parts):
            raise InvalidOperation
    # Also what a decimal number cannot hold.
    except (ArithmeticError, ValueError):
        raise InvalidBudget(
            f"{what} is {value!r}; give a ratio from 0 to 1 with at most six decimal places"
        ) from None
    return int(parts)


@dataclass(frozen=True)
class Share:
    """A limit that is a share of the parent's limit in force, in parts per million of it."""

    parts: int

    def __post_init__(self) -> None:
        if type(self.parts) is not int or not 0 <= self.parts <= MILLION:
            raise InvalidBudget(
                f"a share is from 0% to 100% of the parent's, not {self.parts!r}; give one of these"
            )

    @classmethod
    def parse(cls, text: str, what: str) -> Share:
        """Return the share that ``text`` writes, such as ``"10%"`` or ``"12.5%"``.

        :raises InvalidBudget: for anything else, and for more than four decimal places.
        """
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", text, re.ASCII)
        parts = Decimal(found[1]) * 10_000 if found and len(found[1]) < 20 else Decimal(-1)
        if not 0 <= parts <= MILLION or parts != int(parts):
            raise InvalidBudget(
                f"{what} is {text!r}; a share is written '10%', from 0% to 100% with at most four "
                "decimal places"
                "; write it so"
            )
        return cls(int(parts))

    def __str__(self) -> str:
        return percent(self.parts)


Limit = int | Share | None


@dataclass(frozen=True)
class Budget:
    """A budget as it is declared; with a ``*`` in its name, a template for budgets yet unseen.

    :ivar unit: what it counts; the parent counts the same.
    :ivar limit: an amount in ``unit``, where 0 blocks everything; a :class:`Share` of the parent's
        limit; or none for unlimited.
    :ivar parent: the budget that every request on this one draws on as well. A template's parent
        may have wildcards, filled from the left with what those of the name stood for.
    :ivar period: how long a window is, and when it begins.
    :ivar soft_stop: up to which part of the limit new work is admitted, in parts per million.
    :ivar hard_stop: up to which part work is admitted that continues what was started.
    :ivar stripes: over how many rows the counters of one window are spread, from 1 to
        :data:`MOST_STRIPES`; none for as many as turn out to be of use.
    :ivar weight: its share of a lane beside that of others, from 0 to :data:`MOST_WEIGHT`; with 0
        its work goes last.
    :ivar alert_at: at which parts of its limit it gives an alert, in parts per million, rising;
        none for those of ``budget_alert_at``.
    :raises InvalidName: for what cannot be a name or a unit.
    :raises InvalidAmount: for what cannot be a limit.
    :raises InvalidBudget: for terms that cannot be met together.
    """

    name: str
    unit: str
    limit: Limit = None
    parent: str | None = None
    period: Period = field(default_factory=Period)
    soft_stop: int = MILLION
    hard_stop: int = MILLION
    stripes: int | None = None
    weight: int = 1
    alert_at: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        check_unit(self.unit)
        if self.limit is not None and not isinstance(self.limit, Share):
            check_amount(self.limit, f"the limit of {self.name!r}")
        self._check_parent()
        for stop in (self.soft_stop, self.hard_stop):
            if type(stop) is not int or not 0 <= stop <= MILLION:
                raise InvalidBudget(
                    f"a stop of {self.name!r} is {stop!r}; give a ratio from 0 to 1"
                )
        if self.soft_stop > self.hard_stop:
            raise InvalidBudget(
                f"the soft stop of {self.name!r} ({self.soft_stop / MILLION:g}) is above its hard "
                f"stop ({self.hard_stop / MILLION:g}); new work stops no later than other work"
                "; lower the soft stop or raise the hard one"
            )
        if self.stripes is not None and (
            type(self.stripes) is not int or not 1 <= self.stripes <= MOST_STRIPES
        ):
            raise InvalidBudget(
                f"the stripes of {self.name!r} are {self.stripes!r}; give an integer from 1 to "
                f"{MOST_STRIPES}, or leave it out to have them found"
            )
        if type(self.weight) is not int or not 0 <= self.weight <= MOST_WEIGHT:
            raise InvalidBudget(
                f"the weight of {self.name!r} is {self.weight!r}; give an integer from 0 (goes "
                f"last) to {MOST_WEIGHT:_}"
            )
        self._check_thresholds()

    def _check_thresholds(self) -> None:
        given = self.alert_at
        if given is None:
            return
        if (
            type(given) is not tuple
            or not all(type(one) is int for one in given)
            or list(given) != sorted(set(given))
            or len(given) > MOST_THRESHOLDS
            or not all(0 < one <= TOP for one in given)
        ):
            raise InvalidBudget(
                f"the thresholds of {self.name!r} are {given!r}; give at most {MOST_THRESHOLDS} "
                "parts per million of its limit, rising"
            )

    def _check_parent(self) -> None:
        if self.parent is None:
            if isinstance(self.limit, Share):
                raise InvalidBudget(
                    f"the limit of {self.name!r} is {self.limit} of its parent's, and it has none"
                    "; give it one"
                )
            return
        check_name(self.parent)
        if self.parent == self.name:
            raise InvalidBudget(f"budget {self.name!r} cannot be its own parent; name another one")
        if self.parent.count(WILDCARD) > self.name.count(WILDCARD):
            raise InvalidBudget(
                f"the parent {self.parent!r} of {self.name!r} has more wildcards than that name "
                "could fill"
                "; use only those of the name"
            )

    def made_for(self, name: str) -> Budget | None:
        """Return the budget called ``name`` that this template stands for; none if it does not."""
        values = match(self.name, name)
        if values is None:
            return None
        parent = None if self.parent is None else filled(self.parent, values)
        return Budget(
            name,
            self.unit,
            self.limit,
            parent,
            self.period,
            self.soft_stop,
            self.hard_stop,
            self.stripes,
            self.weight,
            self.alert_at,
        )


def with_terms(before: Budget | None, name: str, terms: Mapping[str, Any]) -> Budget:
    """Return ``before``, or a new budget ``name``, with ``terms``; what is not given stays.

    :param terms: ``unit``, ``limit``, ``parent``, ``soft_stop``, ``hard_stop``, ``stripes``,
        ``weight``, ``alert_at``, as those of :class:`Budget`; ``period``, ``timezone``,
        ``anchor_day``, as those of :class:`~celery_budget.core.periods.Period`. Another period has
        its own anchor day. A hard stop that is given alone takes a soft stop above it along.
    :raises InvalidName, InvalidAmount, InvalidPeriod, InvalidBudget: for what cannot be.
    """
    given = dict(terms)
    if before is None and given.get("unit") is None:
        raise InvalidBudget(f"budget {name!r} is new; say what it counts with unit= (--unit)")
    old = Period() if before is None else before.period
    kind = given.pop("period", old.kind)
    anchor = old.anchor_day if kind == old.kind else 1
    given["period"] = Period(
        kind, given.pop("timezone", old.timezone), given.pop("anchor_day", anchor)
    )
    if "hard_stop" in given and "soft_stop" not in given:
        soft = MILLION if before is None else before.soft_stop
        given["soft_stop"] = min(soft, given["hard_stop"])
    return Budget(name=name, **given) if before is None else replace(before, **given)


@dataclass(frozen=True)
class Balance:
    """One budget's standing in one window. Amounts are integers in ``unit``.

    ``limit`` is the one in force, grants included, none for an unlimited budget; ``available`` is
    none then too, and negative where more was used than the limit allows.

    :ivar start_us: when the window began, in microseconds since the epoch; 0 where it always was.
    :ivar end_us: when it ends; none where it never does.
    :ivar state: ``open``, ``draining`` (takes nothing new, is closed when nothing is held any
        more) or ``closed``.
    """

    budget: str
    unit: str
    limit: int | None
    reserved: int
    spent: int
    parent: str | None = None
    period: str = "total"
    start_us: int = 0
    end_us: int | None = None
    state: str = "open"

    @property
    def available(self) -> int | None:
        """What a new request may still reserve: ``limit - reserved - spent``."""
        return None if self.limit is None else self.limit - self.reserved - self.spent


def percent(parts: int) -> str:
    """Return parts per million as they are written: ``80%``."""
    return f"{(Decimal(parts) / 10_000).normalize():f}%"


def thresholds_text(alert_at: tuple[int, ...] | None) -> str:
    """Return thresholds as they are written: ``80%,95%``, ``none`` or ``default``."""
    if alert_at is None:
        return DEFAULT
    return ",".join(map(percent, alert_at)) or NONE


def most(limit: int | None, stop: int) -> int:
    """Return up to what a limit may be filled that stops at ``stop`` parts per million."""
    return MAX_AMOUNT if limit is None else limit * stop // MILLION
