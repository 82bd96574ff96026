"""Markup of plots: elements with escaped content, and coordinates that follow the page's width.

Across, everything is placed in percent, so that a plot is as wide as its place while its text keeps
its size; lines of several points are drawn in a nested picture that is stretched to that width.
No element has a style of its own: colours come from the page's style sheet, by class.
"""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape

__all__ = ["WIDE", "line", "percent", "stretched", "tag", "text"]

#: How wide a stretched picture is in its own coordinates.
WIDE = 1000


def tag(name: str, *inside: str | Markup, **attributes: str | float) -> Markup:
    """Return an element: text inside and attributes are escaped, markup inside is not.

    :param attributes: ``class_`` stands for ``class``, and ``_`` for ``-``.
    """
    written = Markup("").join(
        Markup(' {}="{}"').format(_name(key), _number(value)) for key, value in attributes.items()
    )
    content = Markup("").join(escape(one) for one in inside)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), written, content)  # noqa: S704


def _name(key: str) -> str:
    # These keep their capitals, and none has a line below.
    return key.rstrip("_").replace("_", "-")


def _number(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def percent(part: float) -> str:
    """Return a share of the width, from 0 to 1, as a coordinate."""
    return f"{_number(100 * part)}%"


def text(words: str, x: str | float, y: float, kind: str, anchor: str = "start") -> Markup:
    """Return a line of text at a place."""
    return tag("text", words, x=x, y=y, class_=f"cb-{kind}", text_anchor=anchor)


def line(points: Iterable[tuple[float, float]], kind: str) -> Markup:
    """Return a line through points of a stretched picture: shares of its width, and heights."""
    steps = " ".join(f"{_number(x * WIDE)},{_number(y)}" for x, y in points)
    classes = f"cb-line cb-{kind}"
    return tag("polyline", points=steps, class_=classes, vector_effect="non-scaling-stroke")


def stretched(height: float, *inside: Markup) -> Markup:
    """Return a picture as wide as the one that it is in."""
    return tag(
        "svg",
        *inside,
        x=0,
        y=0,
        width="100%",
        height=height,
        viewBox=f"0 0 {WIDE} {_number(height)}",
        preserveAspectRatio="none",
    )
