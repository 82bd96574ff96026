"""Budgets and their balances, and what their names may be."""

from __future__ import annotations

import reprlib
import unicodedata
from dataclasses import dataclass

from celery_budget.errors import InvalidName

__all__ = ["TOTAL", "Balance", "check_name", "check_text", "check_unit"]

MAX_NAME_LENGTH = 255

#: The only period so far: one window that never closes. Its window starts at 0.
TOTAL = "total"


def check_name(name: object) -> str:
    """Return ``name`` if a budget may be called so.

    Names are case-sensitive, NFC-normalised text of 1 to 255 characters without control
    characters. They are compared, not normalised: two spellings that look alike must not become
    one budget behind the caller's back.

    :raises InvalidName: otherwise.
    """
    return check_text(name, "a budget's name")


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
        raise InvalidName(f"{what} is text, not {text!r} ({type(text).__name__})")
    if not 1 <= len(text) <= MAX_NAME_LENGTH:
        raise InvalidName(
            f"{what} has 1 to {MAX_NAME_LENGTH} characters; {reprlib.repr(text)} has {len(text)}"
        )
    if not unicodedata.is_normalized("NFC", text):
        raise InvalidName(f"{what} is in Unicode form NFC; {text!r} is not")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise InvalidName(f"{what} has no control characters; {text!r} does")
    return text


@dataclass(frozen=True)
class Balance:
    """One budget's standing in one window. Amounts are integers in ``unit``.

    ``limit`` is none for an unlimited budget; ``available`` is none then too, and negative where
    more was used than the limit allows.
    """

    budget: str
    unit: str
    limit: int | None
    reserved: int
    spent: int

    @property
    def available(self) -> int | None:
        """What a new request may still reserve: ``limit - reserved - spent``."""
        return None if self.limit is None else self.limit - self.reserved - self.spent
