"""What can be done with the lanes of an application's ledger."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

from celery_budget import reconcile as shown
from celery_budget.core.lanes import LIMITS, Lane
from celery_budget.errors import InvalidLane
from celery_budget.settings import Settings
from celery_budget.store import Store, lanes

__all__ = ["Lanes"]


#: What :meth:`Lanes.set` takes.
_TERMS = (
    "queues",
    *LIMITS,
    "max_wait_seconds",
    "max_wait_us",
    "preflight",
    "ageing",
    "budgets",
)


class _Kept(Protocol):
    @property
    def settings(self) -> Settings: ...

    @property
    def store(self) -> Store: ...

    @property
    def reading(self) -> Store: ...


class Lanes:
    """The lanes of one ledger."""

    def __init__(self, kept: _Kept) -> None:
        self._kept = kept

    def set(self, name: str, **terms: Any) -> Lane:
        """Make the lane ``name`` or change it; only the terms that are given change.

        :param terms: those of :class:`~celery_budget.Lane`, but for ``paused``;
            ``max_wait_seconds`` (or a timedelta) in place of ``max_wait_us``; ``budgets`` may be
            given as text: ``["free-tokens", "free-requests=1"]``.
        :return: the lane as it is then.
        :raises InvalidLane, InvalidName, InvalidAmount: for terms that cannot be, and where
            another lane feeds one of its queues. Nothing was changed.
        """
        given = _terms_of(name, terms)
        return self._kept.store.run(lanes.declare, self._kept.settings.root, name, given)

    def pause(self, name: str) -> Lane:
        """Have the lane ``name`` let go nothing until it is resumed.

        What it has let go before is published and runs.

        :raises UnknownLane: where there is none.
        """
        return self._kept.store.run(lanes.pause, self._kept.settings.root, name, True)

    def resume(self, name: str) -> Lane:
        """Have a paused lane let go work again.

        :raises UnknownLane: where there is none.
        """
        return self._kept.store.run(lanes.pause, self._kept.settings.root, name, False)

    def delete(self, name: str) -> None:
        """Delete the lane ``name``: its queues are fed directly, and all it holds is let go.

        :raises UnknownLane: where there is none.
        """
        self._kept.store.run(lanes.delete, self._kept.settings.root, name)

    def list(self) -> list[shown.LaneStanding]:
        """Return how all lanes stand, by name."""
        return shown.lane_standings(self._kept.reading, self._kept.settings)

    def show(self, name: str) -> shown.LaneStanding:
        """Return how the lane ``name`` stands.

        :raises UnknownLane: where there is none.
        """
        return shown.lane_standings(self._kept.reading, self._kept.settings, name)[0]


def _terms_of(name: str, terms: Mapping[str, Any]) -> dict[str, Any]:
    """Return the terms as a lane has them.

    :raises InvalidLane: for one that there is none of, and a time that is none.
    """
    given = dict(terms)
    for term in given:
        if term not in _TERMS:
            near = difflib.get_close_matches(term, _TERMS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_TERMS)}"
            if term == "paused":
                hint = "pause it by lanes.pause(name)"
            raise InvalidLane(f"lane {name!r} has no such term: {term!r}; {hint}; correct it")
    if isinstance(given.get("queues"), list):
        given["queues"] = tuple(given["queues"])
    if "max_wait_seconds" in given:
        wait = given.pop("max_wait_seconds")
        given["max_wait_us"] = None if wait is None else _microseconds(name, wait)
    return given


def _microseconds(name: str, wait: object) -> int:
    if isinstance(wait, timedelta):
        return wait // timedelta(microseconds=1)
    try:
        if isinstance(wait, (int, float)) and not isinstance(wait, bool) and wait >= 0:
            return round(wait * 1_000_000)
    except (OverflowError, ValueError):
        pass
    raise InvalidLane(
        f"max_wait_seconds of lane {name!r} is {wait!r}; give a number of seconds, a timedelta, or "
        "None for ever"
    )
