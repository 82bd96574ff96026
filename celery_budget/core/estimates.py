"""What was used of late, as numbers: quantiles by rank, exact to the unit."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from celery_budget.errors import InvalidAmount

__all__ = ["checked_quantile", "quantile"]


def checked_quantile(value: object) -> Decimal:
    """Return a quantile above 0, up to 1 (an ``int``, ``float``, ``Decimal`` or text).

    A float stands for what it is written as: ``0.95`` is 95 of 100 exactly.

    :raises InvalidAmount: for anything else.
    """
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
            raise InvalidOperation
        found = Decimal(str(value))
        if not found.is_finite() or not 0 < found <= 1:
            raise InvalidOperation
    except InvalidOperation:
        raise InvalidAmount(
            f"a quantile is a number above 0, up to 1, such as 0.95; not {value!r}; give one"
        ) from None
    return found


def quantile(amounts: Sequence[int], of: Decimal) -> int:
    """Return the least of ``amounts``, at least one, that a share ``of`` them does not exceed.

    By the nearest rank: always one of them, and no arithmetic on them.
    """
    numerator, denominator = of.as_integer_ratio()
    rank = -(-numerator * len(amounts) // denominator)
    return sorted(amounts)[rank - 1]
