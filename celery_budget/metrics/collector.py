"""The collector: reads the ledger for a scrape, and says so where it cannot."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

from celery_budget.errors import MissingExtra
from celery_budget.metrics.catalogue import CATALOGUE
from celery_budget.metrics.families import Families, Highest, empty
from celery_budget.metrics.passes import Passes
from celery_budget.metrics.reading import Reading, look
from celery_budget.metrics.series import Series
from celery_budget.settings import Settings
from celery_budget.store import Store

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

__all__ = ["BudgetCollector", "exposition"]

logger = logging.getLogger(__name__)

#: How long a scrape waits for another one's reading: less than Prometheus waits for a scrape.
BUSY_SECONDS = 8.0
#: After a reading it is not read for so many times as long as that took: of a large ledger too,
#: metrics take a tenth of one connection's time at most.
REST = 9


class Ledger(Protocol):
    """What is needed of a :class:`~celery_budget.CeleryBudget`."""

    @property
    def settings(self) -> Settings: ...
    @property
    def store(self) -> Store: ...


class BudgetCollector:
    """For a registry of prometheus-client: ``registry.register(BudgetCollector(budget))``.

    What it gives is read from the ledger, so that it is the same in whichever process it runs, and
    needs no directory for several processes. One reading answers all scrapes for
    ``budget_metrics_seconds``, or nine times as long as it took; one at a time is made. No scrape
    fails: ``celery_budget_up`` says whether the ledger could be read. Registering it reads nothing.

    :param passes: of this process' relay.
    :raises MissingExtra: where prometheus-client is not installed.
    """

    def __init__(self, budget: Ledger, passes: Passes | None = None) -> None:
        _check_library()
        self._budget = budget
        self._passes = passes
        self._lock = threading.Lock()
        self._highest = Highest()
        self._errors: Counter[str] = Counter()
        self._series: Series | None = None
        self._reading: Reading | None = None
        self._seconds = 0.0
        self._until = 0.0
        self._keep_seconds = 0.0

    def describe(self) -> Iterable[Family]:
        """Return every metric without values, for the registry."""
        return [empty(metric) for metric in CATALOGUE]

    def collect(self) -> Iterable[Family]:
        """Return every metric with its values, or only those that need no ledger."""
        if not self._lock.acquire(timeout=BUSY_SECONDS):
            families = Families()
            families.add("up", 0)
            return list(families.made(Highest()))
        try:
            if time.monotonic() >= self._until:
                self._read()
            families = Families()
            self._add_to(families)
            return list(families.made(self._highest))
        finally:
            self._lock.release()

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return the body and the content type of an answer to a scrape.

        :param accept: the scrape's header of that name: OpenMetrics where that is asked for.
        """
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):
            # A version that is none, which the library does not expect.
            encode, content_type = choose_encoder("")
        return encode(registry), content_type

    def _read(self) -> None:
        begun = time.monotonic()
        try:
            settings = self._budget.settings
            self._keep_seconds = settings.metrics_seconds
            if self._series is None:
                self._series = Series(settings.metrics_labels)
            self._reading = look(self._budget.store, settings)
        except Exception as error:  # noqa: BLE001 - whatever it is, the scrape is answered
            self._reading = None
            self._errors[type(error).__name__] += 1
            logger.warning("the ledger could not be read for metrics: %s", error)
        ended = time.monotonic()
        self._seconds = ended - begun
        self._until = ended + max(self._keep_seconds, REST * self._seconds)

    def _add_to(self, families: Families) -> None:
        families.add("up", self._reading is not None)
        families.add("read_duration_seconds", self._seconds)
        for error, count in self._errors.items():
            families.add("read_errors_total", count, error)
        if self._passes is not None:
            self._passes.add_to(families)
        if self._reading is not None and self._series is not None:
            root = self._budget.settings.root
            families.add("build_info", 1, root, version("celery-budget"))
            self._series.add_to(families, self._reading)


_COLLECTOR = "_budget_collector"
_making = threading.Lock()


def exposition(budget: Ledger, accept: str = "") -> tuple[bytes, str]:
    """Return the body and the content type of an answer to a scrape, for whoever serves it.

    :param accept: the scrape's header of that name.
    :raises MissingExtra: where prometheus-client is not installed.
    """
    with _making:
        collector: BudgetCollector | None = getattr(budget, _COLLECTOR, None)
        if collector is None:
            collector = BudgetCollector(budget)
            setattr(budget, _COLLECTOR, collector)
    return collector.exposition(accept)


def _check_library() -> None:
    try:
        import prometheus_client  # noqa: F401 - whether it is there
    except ImportError as exc:
        raise MissingExtra("a Prometheus metric", "prometheus") from exc
