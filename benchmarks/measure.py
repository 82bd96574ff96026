"""Sides that are compared, run in turns, and what is said about them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["Check", "Comparison", "Effort", "Side", "Spread", "Target", "compare"]


@dataclass(frozen=True)
class Effort:
    """How much is run: at most ``rounds``, and no new one after ``seconds``.

    :ivar history: how many requests the longest history, or backlog, is of; none for as many as are
        claimed.
    """

    rounds: int
    seconds: float
    history: int | None = None


@dataclass(frozen=True)
class Target:
    """What the ratio of a side to another is to be: one of both bounds, or none.

    :ivar base: the other side's name.
    """

    base: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def text(self) -> str | None:
        """What a person reads of it; none where the ratio is only told."""
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return None if self.at_least is None else f"at least {self.at_least:g}"

    def holds(self, value: float) -> bool:
        """Tell whether the target is reached."""
        return (self.at_most is None or value <= self.at_most) and (
            self.at_least is None or value >= self.at_least
        )


@dataclass(frozen=True)
class Check:
    """One figure and what it is to be; a line of ``benchmarks/results/latest.json``.

    :ivar value: what was measured, in ``unit``.
    :ivar ratio: how it compares to what it was measured beside; none where it stands alone.
    :ivar target: what the ratio, or the value, is to be; none where it is only told.
    :ivar ok: whether it is.
    """

    name: str
    value: float
    unit: str
    ratio: float | None = None
    target: str | None = None
    ok: bool = True


@dataclass(frozen=True)
class Side:
    """One way to do the work.

    :ivar block: does a block of it and returns what was measured: one number or one for each call.
    :ivar against: the sides whose ratio to this one is told, by name or as a :class:`Target`.
    """

    name: str
    block: Callable[[], Sequence[float]]
    against: tuple[str | Target, ...] = ()


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and the 95th of a hundred parts of some samples."""

    samples: int
    lower: float
    median: float
    upper: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        if len(samples) == 1:
            return cls(1, samples[0], samples[0], samples[0], samples[0])
        *_, high = statistics.quantiles(samples, n=20, method="inclusive")
        return cls(len(samples), *statistics.quantiles(samples, n=4, method="inclusive"), high)


@dataclass(frozen=True)
class Ratio:
    """How ``side`` compares to ``base``: their blocks' medians, divided round by round."""

    side: str
    base: str
    spread: Spread
    target: Target

    @property
    def ok(self) -> bool:
        """Whether the median ratio is what it is to be."""
        return self.target.holds(self.spread.median)


@dataclass(frozen=True)
class Comparison:
    """What one benchmark found.

    :ivar unit: of the sides' numbers.
    :ivar setting: what a block of a side is, and under which circumstances.
    :ivar blocks: the median of each block, round by round: shows what grows or drifts.
    :ivar more: figures that are no ratio of two sides, as a difference or an amount of memory.
    """

    name: str
    title: str
    unit: str
    setting: str
    rounds: int
    sides: dict[str, Spread]
    ratios: tuple[Ratio, ...]
    blocks: dict[str, list[float]]
    more: tuple[Check, ...] = ()

    def with_checks(self, *checks: Check) -> Comparison:
        """Return the same with more figures."""
        return replace(self, more=(*self.more, *checks))

    @property
    def checks(self) -> tuple[Check, ...]:
        """Every side's median, each ratio with its target, and what else was checked."""
        sides = (
            Check(f"{self.name}: {name}", spread.median, self.unit)
            for name, spread in self.sides.items()
        )
        ratios = (
            Check(
                f"{self.name}: {one.side} : {one.base}",
                self.sides[one.side].median,
                self.unit,
                one.spread.median,
                one.target.text,
                one.ok,
            )
            for one in self.ratios
        )
        return (*sides, *ratios, *self.more)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
        """A table for a terminal."""
        rows = [(name, spread, ",.0f", "") for name, spread in self.sides.items()]
        rows += [
            (f"{one.side} : {one.base}", one.spread, ".2f", _verdict(one.target.text, one.ok))
            for one in self.ratios
        ]
        width = max(len(name) for name, *_ in rows)
        lines = [f"{self.name}: {self.title}", f"{self.rounds} rounds of {self.setting}", ""]
        lines.append(f"  {'':{width}}  {'median':>8}  {'p95':>8}    quartiles")
        for number, (name, spread, form, verdict) in enumerate(rows):
            if number == len(self.sides):
                lines.append("")
            lines.append(
                f"  {name:{width}}  {format(spread.median, form):>8}"
                f"  {format(spread.high, form):>8}"
                f"    {format(spread.lower, form)} to {format(spread.upper, form)}{verdict}"
            )
        lines += [
            f"  {one.name}: {one.value:,.4g} {one.unit}{_verdict(one.target, one.ok)}"
            for one in self.more
        ]
        return "\n".join(lines)


def compare(
    name: str, title: str, unit: str, setting: str, sides: Sequence[Side], effort: Effort
) -> Comparison:
    """Run rounds of one block of each side, after one that does not count.

    Each round has another order, the same in each run, so that no side always follows the same
    one: what a block leaves behind (dirty pages, a full log) is paid by all.
    """
    order = random.Random(1)
    end = time.monotonic() + effort.seconds
    samples: dict[str, list[float]] = {side.name: [] for side in sides}
    blocks: dict[str, list[float]] = {side.name: [] for side in sides}
    for side in sides:
        side.block()
    rounds = 0
    while rounds == 0 or (rounds < effort.rounds and time.monotonic() < end):
        for side in order.sample(sides, len(sides)):
            measured = side.block()
            samples[side.name].extend(measured)
            blocks[side.name].append(statistics.median(measured))
        rounds += 1
    ratios = tuple(
        Ratio(side.name, base.base, Spread.of(_divided(blocks[side.name], blocks[base.base])), base)
        for side in sides
        for base in map(_target, side.against)
    )
    spreads = {key: Spread.of(measured) for key, measured in samples.items()}
    return Comparison(name, title, unit, setting, rounds, spreads, ratios, blocks)


def _target(against: str | Target) -> Target:
    return against if isinstance(against, Target) else Target(against)


def _verdict(target: str | None, ok: bool) -> str:
    return "" if target is None else f"    {'ok' if ok else 'MISSED'}: {target}"


def _divided(side: list[float], base: list[float]) -> list[float]:
    return [one / other for one, other in zip(side, base, strict=True)]
