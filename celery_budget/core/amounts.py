"""Amounts: integers from 0 to 2^63-1 in a unit's smallest part."""

from __future__ import annotations

from celery_budget.errors import InvalidAmount

__all__ = ["MAX_AMOUNT", "check_amount", "check_limit", "shown"]

#: The largest amount, limit, balance and total: what a signed 64-bit column holds.
MAX_AMOUNT = 2**63 - 1

#: So many characters of a value are shown in an error.
MOST_SHOWN = 200


def check_amount(value: object, what: str) -> int:
    """Return ``value`` if it is an amount.

    :param what: names the value in the error, such as ``"the estimate of shop.draft"``.
    :raises InvalidAmount: for anything but an ``int`` from 0 to 2^63-1; ``bool`` is not a number
        here, and a float is refused even where it is whole.
    """
    if type(value) is not int:
        raise InvalidAmount(
            f"{what} is {shown(value)} ({type(value).__name__}); an amount is an integer "
            "from 0 to 2^63-1"
            "; give one"
        )
    if not 0 <= value <= MAX_AMOUNT:
        raise InvalidAmount(
            f"{what} is {shown(value)}; an amount is an integer from 0 to 2^63-1; give one"
        )
    return value


def shown(value: object) -> str:
    """Return what an error shows of a value that can be anything."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - it is the value's own code
        # Python writes no integers of more than 4,300 digits, for one.
        return "a value that cannot be shown"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def check_limit(value: object, what: str) -> int | None:
    """Return ``value`` if it is a limit: an amount, or none for unlimited.

    :raises InvalidAmount: as :func:`check_amount`.
    """
    return None if value is None else check_amount(value, what)
