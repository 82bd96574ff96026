"""What runs beside beat or as ``budget relay``: relay, parked work, sweep, inquiries, preflight,
alerts.

A thread each, so that a result backend that hangs under the sweep never holds up a message, nor
does a task's own function that is asked about a lost attempt hold up the sweep, nor a broker that
does not say who consumes a queue the relay, nor a callable that is told of an alert anything else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from celery_budget import inquiry, metrics, parking, recovery, relay, tallying
from celery_budget.errors import StoreError
from celery_budget.events import Logger
from celery_budget.integration.alerts import alerting_of
from celery_budget.integration.inquiries import TaskInquiries
from celery_budget.integration.preflight import CeleryWorkers
from celery_budget.integration.publisher import KombuPublisher
from celery_budget.integration.queues import KombuQueues
from celery_budget.integration.results import BackendResults
from celery_budget.integration.signals import park_expired
from celery_budget.preflight import Preflight
from celery_budget.store import wakeup
from celery_budget.suspicion import Suspicion
from celery_budget.upkeep import Upkeep

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = ["RelayService", "look_at_parked", "sweep", "sweep_alone"]

logger = Logger(__name__)

#: How often it is looked whether a lane's workers are to be asked.
PREFLIGHT_SECONDS = 0.25
#: How long the batch in hand may take to be finished once the relay is to stop.
FINISH_SECONDS = 0.7
#: How long it may take to give that batch back where a broker that has stalled keeps it.
HAND_BACK_SECONDS = 0.5


class RelayService:
    """The relay and the sweep of one application. Starting and stopping twice does no harm.

    :param metrics_port: where metrics are served instead of on ``budget_metrics_port``.
    :param metrics_host: and instead of ``budget_metrics_host``.
    """

    def __init__(
        self,
        budget: CeleryBudget,
        metrics_port: int | None = None,
        metrics_host: str | None = None,
    ) -> None:
        self._budget = budget
        self._metrics = metrics_port, metrics_host
        self._running: _Running | None = None

    def start(self) -> None:
        """Start the threads.

        :raises SchemaError: where ``budget init`` has not been run.
        :raises ConfigurationError: where the broker's options forbid what a relay needs, or
            ``budget_on_alert`` names nothing that can be called.
        :raises MissingExtra: where metrics are to be served and prometheus-client is missing.
        """
        if self._running is not None:
            return
        try:
            self._budget.check()
        except StoreError as error:
            logger.event(
                "store.unreachable", error=error, consequence="the relay starts and waits for it"
            )
        self._running = _Running(self._budget, *self._metrics)
        self._running.start()
        logger.event("relay.started", store=self._budget.store.url)

    def stop(self) -> None:
        """Stop them within two seconds, whatever holds them up.

        The batch in hand is finished or, where the broker keeps its message for too long, given
        back. What hangs ends with the process.
        """
        running, self._running = self._running, None
        if running is not None:
            running.stop()
            logger.event("relay.stopped", store=self._budget.store.url)

    @property
    def alive(self) -> bool:
        """Whether all of them run."""
        return self._running is not None and self._running.alive


class _Running:
    """The threads from one start to one stop; what still hangs of them is never revived."""

    def __init__(self, budget: CeleryBudget, port: int | None, host: str | None) -> None:
        self._budget = budget
        self._stop = threading.Event()
        self._passes = metrics.Passes()
        self._address = (
            host or budget.settings.metrics_host,
            budget.settings.metrics_port if port is None else port,
        )
        self._collector = (
            metrics.BudgetCollector(budget, self._passes) if self._address[1] else None
        )
        self._publisher = KombuPublisher(budget.app)
        self._publisher.check()
        self._relay = _Counted(
            budget.store, budget.settings, self._publisher, BackendResults(budget.app).ended
        )
        self._relay.passes = self._passes
        self._sleeper = wakeup.sleeper(budget.store, budget.settings)
        self._relaying = _thread("relay", self._run_relay)
        self._alerts = alerting_of(budget)
        self._others = [
            _thread("sweep", self._run_sweep),
            _thread("parked", self._run_parking),
            _thread("inquiries", self._run_inquiries),
            _thread("preflight", self._run_preflight),
            _thread("alerts", self._run_alerts),
        ]
        if self._collector is not None:
            self._others.append(_thread("metrics", self._run_metrics))

    def start(self) -> None:
        self._relaying.start()
        for thread in self._others:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        end = time.monotonic() + FINISH_SECONDS
        self._relaying.join(FINISH_SECONDS)
        if self._relaying.is_alive():
            logger.event("relay.handed_back", store=self._budget.store.url, seconds=FINISH_SECONDS)
            handing = _thread("hand-back", self._hand_back)
            handing.start()
            handing.join(HAND_BACK_SECONDS)
        for thread in self._others:
            thread.join(max(0.0, end - time.monotonic()))

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in (self._relaying, *self._others))

    def _run_relay(self) -> None:
        relay.run(self._relay, self._budget.settings, self._sleeper, self._stop)
        self._leave()
        self._publisher.reset()

    def _hand_back(self) -> None:
        """Do in place of the relay's thread, which hangs, what that would do before its end."""
        try:
            self._relay.hand_back()
        except StoreError as error:
            logger.event(
                "store.unreachable",
                error=error,
                consequence="what was not published is due again in a while",
            )
        self._leave()

    def _leave(self) -> None:
        try:
            self._sleeper.close()
        except StoreError as error:
            logger.event(
                "store.unreachable", error=error, consequence="the relay could not sign off"
            )

    def _run_sweep(self) -> None:
        budget = self._budget
        upkeep = Upkeep(budget.store, budget.settings)
        queues = KombuQueues(budget.app)
        suspicion = Suspicion(budget.store, budget.settings, queues)
        kept = recovery.Kept()
        self._again_and_again("the sweep", lambda: sweep(budget, upkeep, suspicion, kept))
        queues.close()

    def _run_parking(self) -> None:
        """Look for room as often as an idle relay looks for messages, while anything waits.

        While nothing does, as often as the sweep.
        """
        settings = self._budget.settings
        while not self._stop.is_set():
            wait = settings.sweep_seconds
            try:
                looked = look_at_parked(self._budget)
                if looked.waits:
                    wait = 0.0 if looked.more else min(wait, settings.poll_seconds)
            except Exception:
                logger.exception("step.failed", step="the look at parked work")
            self._stop.wait(wait)

    def _run_inquiries(self) -> None:
        store, settings = self._budget.store, self._budget.settings
        tasks = TaskInquiries(self._budget)
        # A task's own function finds its application as it does in a worker.
        self._budget.app.set_current()
        self._again_and_again("inquiries", lambda: inquiry.run_once(store, settings, tasks))

    def _run_preflight(self) -> None:
        workers = CeleryWorkers(self._budget.app)
        preflight = Preflight(self._budget.store, self._budget.settings, workers)
        self._again_and_again("preflight", preflight.run_once, PREFLIGHT_SECONDS)
        workers.close()

    def _run_metrics(self) -> None:
        if self._collector is not None:
            metrics.serve(*self._address, self._collector.exposition, self._stop)

    def _run_alerts(self) -> None:
        self._again_and_again("alerts", self._alerts.run_once, self._budget.settings.alert_seconds)

    def _again_and_again(
        self, what: str, step: Callable[[], object], every: float | None = None
    ) -> None:
        while not self._stop.is_set():
            try:
                step()
            except Exception:
                logger.exception("step.failed", step=what)
            self._stop.wait(every or self._budget.settings.sweep_seconds)


class _Counted(relay.Relay):
    """A relay whose passes are counted."""

    passes: metrics.Passes

    def run_once(self, stop: threading.Event, told: bool = False) -> relay.Relayed:
        """As :meth:`celery_budget.relay.Relay.run_once`."""
        begun, done = time.monotonic(), None
        try:
            done = super().run_once(stop, told)
        finally:
            self.passes.count(begun, done)
        return done


def _thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """Return a thread that ends with the process, at the latest."""
    return threading.Thread(target=run, name=f"budget-{name}", daemon=True)


def look_at_parked(budget: CeleryBudget) -> parking.Looked:
    """Make one pass over parked work; the signal ``park_expired`` tells what was given up."""
    return parking.run_once(
        budget.store,
        budget.settings,
        lambda given_up: park_expired.send(sender=budget.app, given_up=given_up),
    )


def sweep(
    budget: CeleryBudget,
    upkeep: Upkeep,
    suspicion: Suspicion,
    kept: recovery.Kept | None = None,
) -> None:
    """Run every periodic step once: windows, parked work, recovery, then tallies.

    One that fails does not keep the others from their work; the first error is raised afterwards.
    """
    results = BackendResults(budget.app)
    steps: tuple[Callable[[], object], ...] = (
        upkeep.run_once,
        lambda: look_at_parked(budget),
        lambda: recovery.run_once(budget.store, budget.settings, results, suspicion, kept),
        lambda: tallying.run_once(budget.store, budget.settings),
    )
    first: Exception | None = None
    for step in steps:
        try:
            step()
        except Exception as error:
            if first is not None:
                logger.exception("step.failed", step="another step of the sweep")
            first = first or error
    if first is not None:
        raise first


def sweep_alone(budget: CeleryBudget) -> None:
    """Run every periodic step once, for who runs no service."""
    queues = KombuQueues(budget.app)
    try:
        suspicion = Suspicion(budget.store, budget.settings, queues)
        sweep(budget, Upkeep(budget.store, budget.settings), suspicion)
    finally:
        queues.close()
