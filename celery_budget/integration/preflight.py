"""Who consumes queues, as preflight asks it: AMQP's broker, or else the workers themselves."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from celery import Celery

from celery_budget.events import Logger
from celery_budget.integration.queues import REST_SECONDS, KombuQueues

__all__ = ["CeleryWorkers"]

logger = Logger(__name__)

#: How long workers are given to answer.
PING_SECONDS = 1.0

#: What is said of workers that cannot be asked, as far as the application here tells.
_DEAF = ", or none can say so: worker_enable_remote_control is off (turn it on, or preflight off)"


class _Enough(Exception):
    """All that was to be heard was heard."""


class CeleryWorkers:
    """Finds out whether queues have workers; see :class:`celery_budget.preflight.Workers`.

    An AMQP broker says how many consumers a queue has. Any other does not: there workers are asked
    by Celery's remote control which queues they consume. A worker answers that only while its
    consumer runs, so not where ``worker_enable_remote_control`` is off; with the pool ``solo`` not
    while a task runs either, which the lease of that task makes up for.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._queues = KombuQueues(app)
        self._rests: dict[str, tuple[float, str]] = {}

    def missing(self, broker: str, queues: tuple[str, ...], works: bool) -> str | None:
        """Return why work for these queues would wait, in words; none where all have workers."""
        until, told = self._rests.get(broker, (0.0, ""))
        if time.monotonic() < until:
            return told
        try:
            return self._missing(broker, queues, works)
        # Whatever a transport raises, the lane is asleep until it is known to be awake.
        except Exception as error:  # noqa: BLE001
            name = f"broker {broker!r}" if broker else "the broker"
            said = " ".join(str(error).split()) or repr(error)
            told = f"{name} cannot be asked: {said}"
            logger.event("broker.unasked", broker=broker, error=said)
            self._rests[broker] = (time.monotonic() + REST_SECONDS, told)
            return told

    def _missing(self, broker: str, queues: tuple[str, ...], works: bool) -> str | None:
        consumed: set[str] | None = None
        for queue in queues:
            for name in self._names(queue):
                consumers = self._queues.consumers(broker, name)
                if consumers is None and not works:
                    wanted = {one for each in queues for one in self._names(each)}
                    consumed = self._consumed(broker, wanted) if consumed is None else consumed
                    consumers = int(name in consumed)
                if consumers == 0:
                    missing = f"no worker consumes queue {name!r}"
                    return missing if consumed is None else missing + self._deaf()
        return None

    def _deaf(self) -> str:
        """Return why workers that were asked may not have heard it; empty where they should."""
        return "" if self._app.conf.worker_enable_remote_control else _DEAF

    def _names(self, queue: str) -> set[str]:
        """Return the names of queues for what a lane calls a queue: their routing key, or name."""
        known = self._app.amqp.queues
        if queue in known:
            return {queue}
        keyed = {one.name for one in known.values() if one.routing_key == queue}
        return keyed or {queue}

    def _consumed(self, broker: str, wanted: set[str]) -> set[str]:
        """Return the queues that some worker consumes, as those say that answer in time.

        As soon as all that are ``wanted`` are among them. By a connection of its own: what hangs
        on one is gone with it.
        """
        found: set[str] = set()

        def heard(answer: dict[str, Any]) -> None:
            for queues in answer.values():
                found.update(str(queue["name"]) for queue in queues)
            if wanted <= found:
                raise _Enough

        with self._queues.opened(broker) as connection, suppress(_Enough):
            self._app.control.broadcast(
                "active_queues",
                reply=True,
                timeout=PING_SECONDS,
                connection=connection,
                callback=heard,
            )
        return found

    def close(self) -> None:
        """Drop all connections."""
        with suppress(Exception):
            self._queues.close()
