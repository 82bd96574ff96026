"""The atoms of every table, and a renderable turned into text."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = [
    "UNLIMITED",
    "as_text",
    "duration",
    "facts",
    "instant",
    "literal",
    "moment",
    "number",
    "printable",
    "table_of",
]

UNLIMITED = "unlimited"

_UNITS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (0.001, "ms"))
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
#: Wider than any line: nothing is wrapped or cut where no terminal sets a width.
_NO_WIDTH = 100_000


def number(amount: int | None) -> str:
    """Return an amount with thousands separators; none is unlimited."""
    return UNLIMITED if amount is None else f"{amount:,}"


def moment(microseconds: int) -> str:
    """Return microseconds since the epoch as UTC in ISO 8601; as they are beyond the calendar."""
    try:
        when = _EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:
        return str(microseconds)
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def instant(microseconds: int) -> str:
    """Return :func:`moment` without a fraction where that is none, for people."""
    return moment(microseconds).replace(".000000Z", "Z").replace("T00:00:00Z", "")


def duration(seconds: float) -> str:
    """Return a length of time in its best unit: ``1.25 s``, ``12 ms``, ``3 h``, ``1.5 d``."""
    for size, unit in _UNITS:
        # What would be written as 60 s or 1000 ms is one of the next unit.
        if seconds >= size * (1 - 5e-4):
            return f"{_digits(seconds / size)} {unit}"
    return "0 s" if seconds <= 0 else f"{_digits(seconds / 1e-6)} µs"


def _digits(value: float) -> str:
    """Return three digits, and none behind the point that says nothing; whole ones are kept."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def literal(value: object, style: str = "") -> Text:
    """Return ``value`` as it is: no markup, and invisible characters as their escapes."""
    return Text(printable(str(value)), style, overflow="fold")


def printable(text: str) -> str:
    """Return ``text`` on one line, with invisible characters as their escapes."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def facts(of: Mapping[str, str | None]) -> Table:
    """Return one line for each fact: its name, then what it is; those without are left out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for name, value in of.items():
        if value:
            grid.add_row(name, literal(value))
    return grid


def table_of(
    columns: Sequence[str], rows: Iterable[Sequence[Text | str]], numbers: Collection[str] = ()
) -> Table:
    """Return a table; where a terminal is too narrow for it, text is folded and nothing is cut.

    :param columns: the headings; a column without heading or content is left out.
    :param numbers: columns that are right-aligned and never folded.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    table_rows = list(rows)
    shown = [at for at, name in enumerate(columns) if name or any(row[at] for row in table_rows)]
    for at in shown:
        name = columns[at]
        widest = max([cell_len(str(row[at])) for row in table_rows], default=0)
        table.add_column(
            name,
            justify="right" if name in numbers else "left",
            overflow="fold",
            min_width=max(len(name), widest if name in numbers else 0),
        )
    for row in table_rows:
        table.add_row(*(row[at] for at in shown))
    return table


def as_text(
    renderable: RenderableType,
    *,
    width: int | None = None,
    colour: bool = False,
    encoding: str = "utf-8",
) -> str:
    """Return a renderable as text that ends with a line break.

    :param width: the terminal's columns, where text is folded; none does not fold.
    :param encoding: of the stream it is for; what that cannot hold is escaped, and lines are
        drawn in ASCII where it is not a form of UTF.
    """
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding, errors="backslashreplace", newline="\n")
    Console(
        file=stream,
        width=width or _NO_WIDTH,
        color_system="auto" if colour else None,
        force_terminal=colour,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    ).print(renderable, crop=False)
    stream.flush()
    text = raw.getvalue().decode(encoding)
    return text if colour else "".join(f"{line.rstrip()}\n" for line in text.splitlines())
