"""What an expression of PromQL names: enough of the language to hold files against metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["OF_COUNTERS", "OF_GAUGES", "Named", "read"]

#: Functions and words that the files may use; what else stands alone is a metric.
WORDS = frozenset(
    {
        *("absent", "and", "by", "delta", "histogram_quantile", "increase", "max", "min", "offset"),
        *("or", "rate", "sum", "time", "topk", "unless", "vector", "without"),
    }
)
#: Functions that only make sense of counters, and those that only do of gauges.
OF_COUNTERS, OF_GAUGES = ("rate", "increase"), ("delta",)

_TOKEN = re.compile(
    r"""
    (?P<text>"(?:[^"\\]|\\.)*")
  | (?P<range>\[[^\]]*\])
  | (?P<number>[0-9][0-9.]*(?:[smhdw](?![a-z_]))?)
  | (?P<name>[A-Za-z_:][A-Za-z0-9_:]*)
  | (?P<sign>[=!]~|[=!<>]=|[-+*/(){},=<>])
  | (?P<space>\s+)
    """,
    re.VERBOSE,
)


@dataclass
class Named:
    """What an expression names.

    :ivar matched: each metric with a label that is matched of it.
    :ivar functions: each metric with the function around it.
    :ivar by: labels behind the ``by`` of the aggregation it begins with; none where it begins
        otherwise.
    :ivar grouped: labels behind any ``by``.
    :ivar dropped: labels behind any ``without``.
    """

    metrics: set[str] = field(default_factory=set)
    matched: set[tuple[str, str]] = field(default_factory=set)
    functions: set[tuple[str, str]] = field(default_factory=set)
    by: set[str] | None = None
    grouped: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)


def tokens(expression: str) -> list[tuple[str, str]]:
    """Split it; what is no token is an error."""
    found, at = [], 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            raise ValueError(f"{expression[at:]!r} in {expression!r}")
        if match.lastgroup != "space":
            found.append((str(match.lastgroup), match[0]))
        at = match.end()
    return found


def read(expression: str) -> Named:
    """Return what it names."""
    named = Named()
    metric = last = ""
    # What the parentheses stand behind that are open, a brace being one.
    behind = [""]
    for number, (kind, text) in enumerate(tokens(expression)):
        if text in ("(", "{"):
            behind.append(last if text == "(" else text)
            if number == 2 and last == "by":
                named.by = named.grouped
        elif text in (")", "}"):
            if behind.pop() == "by" and named.by is named.grouped:
                named.by = set(named.grouped)
        elif kind != "name":
            pass
        elif behind[-1] == "{":
            named.matched.add((metric, text))
        elif behind[-1] in ("by", "without"):
            (named.grouped if behind[-1] == "by" else named.dropped).add(text)
        elif text not in WORDS:
            metric = text
            named.metrics.add(metric)
            named.functions.add((metric, behind[-1]))
        last = text
    return named
