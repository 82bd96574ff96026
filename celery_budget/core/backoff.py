"""Waiting longer after each failure, up to a bound."""

from __future__ import annotations

import random

__all__ = ["backoff_seconds"]


def backoff_seconds(failures: int, first: float, longest: float) -> float:
    """Return how long to wait after ``failures`` (from 1): doubling, bounded, and spread by half.

    The spread keeps many processes that failed together from coming back together.
    """
    bound = min(longest, first * 2.0 ** min(max(failures - 1, 0), 30))
    return bound * random.uniform(0.5, 1.0)  # noqa: S311 - a spread, not a secret
