"""The collector: reads the ledger for a scrape, and says so where it cannot."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

from celery_budget.errors import MissingExtra
from celery_budget.events import Logger
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

logger = Logger(__name__)

#: How long a scrape waits for a reading: less than Prometheus waits for a scrape.
WAIT_SECONDS = 8.0
#: For so many times as long as it took to read something it is not read again: of a large ledger
#: too, metrics take two tenths of one connection's time at most.
REST = 9


class Ledger(Protocol):
    """What is needed of a :class:`~celery_budget.CeleryBudget`."""

    @property
    def settings(self) -> Settings: ...
    @property
    def reading(self) -> Store: ...


class BudgetCollector:
    """For a registry of prometheus-client: ``registry.register(BudgetCollector(budget))``.

    What it gives is read from the ledger, so that it is the same in whichever process it runs, and
    needs no directory for several processes. One reading answers all scrapes for
    ``budget_metrics_seconds``, or for nine times as long as it took; so it is, for itself, with
    what was added up since the ledger began. One at a time is made. No scrape fails:
    ``celery_budget_up`` says whether the ledger could be read. Registering it reads nothing.

    :param passes: of this process' relay.
    :raises MissingExtra: where prometheus-client is not installed.
    """

    def __init__(self, budget: Ledger, passes: Passes | None = None) -> None:
        _check_library()
        self._budget = budget
        self._passes = passes
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._highest = Highest()
        self._errors: Counter[str] = Counter()
        self._series: Series | None = None
        self._reading: Reading | None = None
        self._seconds = 0.0
        self._until = 0.0
        self._sums_until = 0.0
        self._keep_seconds = 0.0

    def describe(self) -> Iterable[Family]:
        """Return every metric without values, for the registry."""
        return [empty(metric) for metric in CATALOGUE]

    def collect(self) -> Iterable[Family]:
        """Return every metric with its values, or only those that need no ledger."""
        reader = self._due()
        if reader is not None:
            reader.join(WAIT_SECONDS)
        with self._lock:
            # What has been read is old by now, if a reading still goes on.
            shown = None if reader is not None and reader.is_alive() else self._reading
            families = Families()
            self._add_to(families, shown)
            return list(families.made(self._highest))

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

    def _due(self) -> threading.Thread | None:
        """Return who reads, or begins to since it is time; none where the last reading will do.

        In a thread of its own: a database that does not answer must not keep a scrape waiting for
        longer than whoever scrapes waits.
        """
        with self._lock:
            reads = self._reader is not None and self._reader.is_alive()
            if not reads and time.monotonic() < self._until:
                return None
            if not reads:
                self._reader = threading.Thread(
                    target=self._read, name="budget-metrics-reading", daemon=True
                )
                self._reader.start()
            return self._reader

    def _read(self) -> None:
        begun = time.monotonic()
        reading, added_up = None, 0.0
        try:
            settings = self._budget.settings
            self._keep_seconds = settings.metrics_seconds
            before = self._reading.sums if self._reading and begun < self._sums_until else None
            reading = look(self._budget.reading, settings, before)
            added_up = 0.0 if reading.sums is before else reading.sums.seconds
        except Exception as error:  # noqa: BLE001 - whatever it is, the scrape is answered
            with self._lock:
                self._errors[type(error).__name__] += 1
            logger.event("store.unreachable", error=error, consequence="metrics do without it")
        ended = time.monotonic()
        with self._lock:
            self._reading = reading
            self._seconds = ended - begun
            # After a failure it is tried again soon, however long that took.
            rest = 0.0 if reading is None else REST * (self._seconds - added_up)
            self._until = ended + max(self._keep_seconds, rest)
            if added_up:
                self._sums_until = ended + REST * added_up

    def _add_to(self, families: Families, reading: Reading | None) -> None:
        families.add("up", reading is not None)
        families.add("read_duration_seconds", self._seconds)
        for error, count in self._errors.items():
            families.add("read_errors_total", count, error)
        if self._passes is not None:
            self._passes.add_to(families)
        if reading is not None:
            settings = self._budget.settings
            families.add("build_info", 1, settings.root, version("celery-budget"))
            if self._series is None:
                self._series = Series(settings.metrics_labels)
            self._series.add_to(families, reading)


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
