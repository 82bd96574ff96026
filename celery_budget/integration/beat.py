"""``celery -A proj beat -S budget``: the relay in its own thread beside any scheduler."""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.utils.imports import symbol_by_name

from celery_budget.integration.context import installed_on
from celery_budget.integration.service import RelayService

__all__ = ["BudgetScheduler"]


def BudgetScheduler(app: Celery, *args: Any, **kwargs: Any) -> Any:  # noqa: N802 - stands for a class
    """Return the scheduler set by ``budget_beat_scheduler``, with the relay beside it.

    A factory, since the scheduler to build upon is known only from the configuration.
    """
    inner = symbol_by_name(installed_on(app).settings.beat_scheduler)
    scheduler = type(f"Budget{inner.__name__}", (_WithRelay, inner), {})
    return scheduler(app, *args, **kwargs)


class _WithRelay:
    """Starts the relay with the first tick and stops it on close.

    Not at construction: beat builds a second, lazy instance for its banner. Beat closes a
    scheduler twice.
    """

    app: Celery
    _service: RelayService | None = None

    def tick(self, *args: Any, **kwargs: Any) -> Any:
        if self._service is None:
            self._service = RelayService(installed_on(self.app))
            self._service.start()
        return super().tick(*args, **kwargs)  # type: ignore[misc]

    def close(self) -> None:
        if self._service is not None:
            self._service.stop()
        super().close()  # type: ignore[misc]
