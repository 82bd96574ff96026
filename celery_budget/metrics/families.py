"""What one scrape gives: the catalogue's metrics with their values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from celery_budget.metrics.catalogue import BY_NAME, CATALOGUE, OTHER, PREFIX, Metric

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

__all__ = ["Bins", "Families", "Highest", "Labels", "empty"]

Key = tuple[str, ...]
V = TypeVar("V")


class Labels:
    """Which names have series of their own, at most so many; one that has had its own keeps it.

    All others are one, called :data:`~celery_budget.metrics.catalogue.OTHER`, so that the sum over
    all is right and a counter never moves from one series to another.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: set[str] = set()

    def keep(self, names: Iterable[str]) -> Labels:
        """Let those have their own that come first, as far as there is room."""
        for name in names:
            if len(self._kept) >= self._most:
                break
            self._kept.add(name)
        return self

    def of(self, name: str) -> str:
        """Return the label of a name."""
        return name if name in self._kept else OTHER


class Bins:
    """A histogram's counts: how many were up to each bound, and the sum of all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum_us = 0

    def add(self, us: int, count: int) -> None:
        """Count so many that took so long, in microseconds: their sum is exact, in any order."""
        seconds = us / 1_000_000
        place = next((n for n, bound in enumerate(self._bounds) if seconds <= bound), -1)
        self._counts[place] += count
        self._sum_us += us * count

    @property
    def values(self) -> tuple[float, ...]:
        """The counts up to each bound and up to any, then the sum."""
        counts, total = [], 0
        for count in self._counts:
            total += count
            counts.append(float(total))
        return (*counts, self._sum_us / 1_000_000)

    @property
    def bounds(self) -> tuple[str, ...]:
        """The bounds as labels."""
        return (*(str(float(bound)) for bound in self._bounds), "+Inf")


class Highest:
    """The highest value that each counter has shown, below which none is shown again.

    A count may be taken back for a moment, as where usage comes late and a request is counted
    anew. A counter that falls reads as one that began at 0.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[str, Key], tuple[float, ...]] = {}

    def of(self, name: str, labels: Key, values: tuple[float, ...]) -> tuple[float, ...]:
        """Return the values, each at least what it was."""
        before = self._values.get((name, labels))
        if before is not None:
            values = tuple(map(max, before, values))
        self._values[name, labels] = values
        return values


class Families:
    """The values of one scrape, added one by one; those with the same labels are summed."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Key, float]] = {metric.name: {} for metric in CATALOGUE}
        self._bins: dict[str, dict[Key, Bins]] = {metric.name: {} for metric in CATALOGUE}

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add a value to a series.

        :param name: without the prefix that all have.
        """
        values = self._series(self._values, name, labels)
        values[labels] = values.get(labels, 0) + value

    def most(self, name: str, value: float, *labels: str) -> None:
        """Let a series have at least this value: of several the greatest."""
        values = self._series(self._values, name, labels)
        values[labels] = max(values.get(labels, value), value)

    def bins(self, name: str, bounds: Sequence[float], *labels: str) -> Bins:
        """Return the histogram of these labels."""
        return self._series(self._bins, name, labels).setdefault(labels, Bins(bounds))

    @staticmethod
    def _series(of: dict[str, dict[Key, V]], name: str, labels: Key) -> dict[Key, V]:
        """Return the series of a metric, which has to be in the catalogue, with these labels."""
        metric = BY_NAME[PREFIX + name]
        if len(metric.labels) != len(labels):
            raise ValueError(f"{metric.name} has the labels {metric.labels}, not {labels}")
        return of[metric.name]

    def made(self, highest: Highest) -> Iterator[Family]:
        """Return them as the library has them, in the order of the catalogue."""
        for metric in CATALOGUE:
            family = empty(metric)
            for labels, value in sorted(self._values[metric.name].items()):
                if metric.kind == "info":
                    family.add_metric((), dict(zip(metric.labels, labels, strict=True)))
                elif metric.kind == "counter":
                    family.add_metric(labels, *highest.of(metric.name, labels, (value,)))
                else:
                    family.add_metric(labels, value)
            for labels, bins in sorted(self._bins[metric.name].items()):
                *counts, total = highest.of(metric.name, labels, bins.values)
                family.add_metric(labels, list(zip(bins.bounds, counts, strict=True)), total)
            yield family


def empty(metric: Metric) -> Any:
    """Return a metric without values, as the library has it."""
    from prometheus_client import metrics_core as core

    if metric.kind == "info":
        return core.InfoMetricFamily(metric.name.removesuffix("_info"), metric.help)
    kinds = {
        "gauge": core.GaugeMetricFamily,
        "counter": core.CounterMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    return kinds[metric.kind](metric.name, metric.help, labels=metric.labels)
