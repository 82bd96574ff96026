"""The atoms of every table, and a renderable turned into text."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
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

#: Between two columns of a table.
_GAP = 3
#: To how little a column of words is folded. No word is broken for it: ids and names stay whole.
_WORD = 9
#: Into how many tables one is split; where that would take more, a row is a list.
_PARTS = 3


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
    """Return :func:`moment` for people: to the second, as a day where that is midnight (UTC)."""
    written = moment(microseconds)
    return written[:19].replace("T", " ").removesuffix(" 00:00:00") if "T" in written else written


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
) -> RenderableType:
    """Return a table; where a terminal is too narrow for it, text is folded and nothing is cut.

    Where that is not enough it is several tables, each with what names a row and some numbers.
    Where a word, such as an id, would have to be broken, or that takes many tables, each row is a
    list of its own, with a line for each column.

    :param columns: the headings; a column without heading or content is left out.
    :param numbers: columns that are right-aligned and never folded.
    """
    return _Folding(columns, [list(row) for row in rows], numbers)


class _Folding:
    """What :func:`table_of` returns: laid out when the width is known."""

    def __init__(
        self, columns: Sequence[str], rows: list[list[Text | str]], numbers: Collection[str]
    ) -> None:
        self._rows = rows
        self._shown = [
            at for at, name in enumerate(columns) if name or any(row[at] for row in rows)
        ]
        self._columns = columns
        self._widths = [
            max(cell_len(str(one)) for one in (name, *(row[at] for row in rows)))
            for at, name in enumerate(columns)
        ]
        self._numbers = [at for at in self._shown if columns[at] in numbers]
        self._words = [
            min(width, max(_WORD, cell_len(name), *(_longest(row[at]) for row in rows), 0))
            for at, (name, width) in enumerate(zip(columns, self._widths, strict=True))
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = self._parts(options.max_width)
        for part, columns in enumerate(parts):
            if part:
                yield Text()
            yield self._table(columns, options.max_width)
        if parts:
            return
        for at, row in enumerate(self._rows):
            if at:
                yield Text()
            yield self._record(row)

    def _parts(self, width: int) -> list[list[int]]:
        """Return the columns of each table: those that name a row, and numbers as there is room.

        None where there is no room for a number beside the words, or too little, or where nothing
        before the numbers says what each row is of.
        """
        first = min(self._numbers, default=len(self._columns))
        before = [at for at in self._shown if at < first]
        after = [at for at in self._shown if at > first and at not in self._numbers]
        room = width - sum(self._words[at] + _GAP for at in (*before, *after)) + _GAP
        if room < max((self._widths[at] + _GAP for at in self._numbers), default=0):
            return []
        parts: list[list[int]] = [[]]
        for at in self._numbers:
            taken = sum(self._widths[one] + _GAP for one in parts[-1])
            if parts[-1] and taken + self._widths[at] + _GAP > room:
                parts.append([])
            parts[-1].append(at)
        parts[-1] += after
        if len(parts) > (_PARTS if before else 1):
            return []
        return [sorted(before + part) for part in parts]

    def _record(self, row: Sequence[Text | str]) -> Table:
        grid = Table.grid(padding=(0, 2))
        heading = max(cell_len(self._columns[at]) for at in self._shown)
        grid.add_column(style="bold", min_width=heading)
        grid.add_column(overflow="fold")
        for at in self._shown:
            if str(row[at]):
                grid.add_row(self._columns[at], row[at])
        return grid

    def _table(self, columns: Sequence[int], width: int) -> Table:
        widths = self._fitted(columns, width)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
        for at in columns:
            number = at in self._numbers
            table.add_column(
                self._columns[at],
                justify="right" if number else "left",
                overflow="fold",
                min_width=widths[at] if number else len(self._columns[at]),
                width=None if number else widths[at],
            )
        for row in self._rows:
            table.add_row(*(row[at] for at in columns))
        return table

    def _fitted(self, columns: Sequence[int], width: int) -> dict[int, int]:
        """Return how wide columns are, the widest words folded first."""
        widths = {at: self._widths[at] for at in columns}
        words = [at for at in columns if at not in self._numbers]
        beyond = sum(widths.values()) + _GAP * (len(widths) - 1) - width
        while beyond > 0 and words:
            widest = max(words, key=lambda at: widths[at])
            if widths[widest] <= self._words[widest]:
                words.remove(widest)
                continue
            widths[widest] -= 1
            beyond -= 1
        return widths


def _longest(text: Text | str) -> int:
    """Return how long the longest word of a text is."""
    return max(map(cell_len, str(text).split()), default=0)


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
