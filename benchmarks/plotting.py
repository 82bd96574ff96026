"""Plots as SVG, both axes in powers of ten; nothing but text is needed for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Line", "plot"]

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 40, 48
#: Told apart by people who do not see all colours, too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#333333")


@dataclass(frozen=True)
class Line:
    """Points with positive coordinates, from left to right."""

    name: str
    points: Sequence[tuple[float, float]]


def plot(title: str, across: str, up: str, lines: Sequence[Line]) -> str:
    """Return a plot of lines, named at its right, with ``across`` and ``up`` at the axes."""
    shown = [line for line in lines if line.points]
    xs = [x for line in shown for x, _ in line.points]
    ys = [y for line in shown for _, y in line.points]
    wide, high = _Scale(xs, LEFT, WIDTH - RIGHT), _Scale(ys, HEIGHT - BOTTOM, TOP)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="12" role="img">'
        ),
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, title, 'font-size="14"'),
        *_grid(wide, high),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, across, 'text-anchor="middle"'),
        _text(14, TOP - 8, up),
    ]
    for number, line in enumerate(shown):
        colour = COLOURS[number % len(COLOURS)]
        at = [(wide.at(x), high.at(y)) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in at]
        y = TOP + 18 * number + 10
        parts.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{y - 9}" width="10" height="10" '
                     f'fill="{colour}"/>')  # fmt: skip
        parts.append(_text(WIDTH - RIGHT + 30, y, line.name))
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Scale:
    """Where a value is between two ends, on a scale of whole powers of ten."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        logs = [math.log10(value) for value in values] or [0.0]
        self.low = math.floor(min(logs))
        self.high = max(math.ceil(max(logs)), self.low + 1)
        self._begin, self._end = begin, end

    def at(self, value: float) -> float:
        part = (math.log10(value) - self.low) / (self.high - self.low)
        return self._begin + part * (self._end - self._begin)

    @property
    def marks(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


def _grid(wide: _Scale, high: _Scale) -> Iterator[str]:
    for value in wide.marks:
        x = wide.at(value)
        yield _rule(x, TOP, x, HEIGHT - BOTTOM)
        yield _text(x, HEIGHT - BOTTOM + 16, f"{value:,.0f}", 'text-anchor="middle"')
    for value in high.marks:
        y = high.at(value)
        yield _rule(LEFT, y, WIDTH - RIGHT, y)
        yield _text(LEFT - 6, y + 4, f"{value:,g}", 'text-anchor="end"')


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'
