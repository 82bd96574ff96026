"""``celery -A proj beat -S budget``: the relay in its own thread beside any scheduler."""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.utils.imports import load_extension_class_names, symbol_by_name
from kombu.messaging import ChannelPromise
from kombu.utils.objects import cached_property

from celery_budget.integration.context import installed_on
from celery_budget.integration.service import RelayService

__all__ = ["BudgetScheduler"]


def BudgetScheduler(app: Celery, *args: Any, **kwargs: Any) -> Any:  # noqa: N802 - stands for a class
    """Return the scheduler set by ``budget_beat_scheduler``, with the relay beside it.

    A factory, since the scheduler to build upon is known only from the configuration. It is named
    as for ``beat -S``: a class, or what a package calls its own (``django``).
    """
    known = dict(load_extension_class_names("celery.beat_schedulers"))
    inner = symbol_by_name(installed_on(app).settings.beat_scheduler, aliases=known)
    scheduler = type(f"Budget{inner.__name__}", (_WithRelay, inner), {})
    return scheduler(app, *args, **kwargs)


class _WithRelay:
    """Starts the relay with the first tick and stops it on close.

    Not at construction: beat builds a second, lazy instance for its banner. Beat closes a
    scheduler twice.
    """

    app: Celery
    _service: RelayService | None = None
    # Of Celery's own scheduler.
    Producer: Any
    connection: Any
    _ensure_connected: Any

    @cached_property
    def producer(self) -> Any:
        """What beat publishes by: connected when something is published by it, not before.

        Entries of budgeted tasks go to the ledger: a broker that is down or has stalled does not
        hold them up.
        """
        producer = self.Producer(self.connection, auto_declare=False)
        producer.revive(ChannelPromise(lambda: self._ensure_connected().default_channel))
        return producer

    def tick(self, *args: Any, **kwargs: Any) -> Any:
        if self._service is None:
            self._service = RelayService(installed_on(self.app))
            self._service.start()
        return super().tick(*args, **kwargs)  # type: ignore[misc]

    def close(self) -> None:
        if self._service is not None:
            self._service.stop()
        super().close()  # type: ignore[misc]
