"""What can be done with the lanes of an application's ledger."""

from __future__ import annotations

from typing import Any, Protocol

from celery_budget import reconcile as shown
from celery_budget.core.lanes import Lane
from celery_budget.settings import Settings
from celery_budget.store import Store, lanes

__all__ = ["Lanes"]


class _Kept(Protocol):
    @property
    def settings(self) -> Settings: ...

    @property
    def store(self) -> Store: ...


class Lanes:
    """The lanes of one ledger."""

    def __init__(self, kept: _Kept) -> None:
        self._kept = kept

    def set(self, name: str, **terms: Any) -> Lane:
        """Make the lane ``name`` or change it; only the terms that are given change.

        :param terms: those of :class:`~celery_budget.Lane`, but for ``paused``.
        :return: the lane as it is then.
        :raises InvalidLane, InvalidName, InvalidAmount: for terms that cannot be, and where
            another lane feeds one of its queues. Nothing was changed.
        ``budgets`` may be given as text: ``["free-tokens", "free-requests=1"]``.
        """
        if "queues" in terms and isinstance(terms["queues"], list):
            terms["queues"] = tuple(terms["queues"])
        return self._kept.store.run(lanes.declare, self._kept.settings.root, name, terms)

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
        return shown.lane_standings(self._kept.store, self._kept.settings)

    def show(self, name: str) -> shown.LaneStanding:
        """Return how the lane ``name`` stands.

        :raises UnknownLane: where there is none.
        """
        return shown.lane_standings(self._kept.store, self._kept.settings, name)[0]
