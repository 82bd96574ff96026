"""What a provider's own export says was used, read line by line.

An export is a CSV file with a line of headers. Its columns are told by the headers that providers
give them, or by the caller. Amounts are exact: tokens are integers, money is a decimal in dollars.
What cannot be read is an error that names its line; nothing is guessed.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timezone, tzinfo
from decimal import Context, Decimal, InvalidOperation
from functools import reduce

from celery_budget.errors import InvoiceError

__all__ = ["EXACT", "MEASURES", "MOST_LINE", "SHAPES", "Billed", "Shape", "read"]

#: What is compared, in order: tokens, of which cached ones are a part of those that went in, and
#: dollars.
MEASURES = ("input", "cached", "output", "cost")
#: What else a column may be.
FIELDS = ("day", "model", *MEASURES, "currency")

#: An amount of more digits, before or behind the point, is a slip.
MOST_DIGITS = 30
#: Adds such amounts up to the last digit.
EXACT = Context(prec=120)
#: No line of an export is longer, in characters.
MOST_LINE = 65_536

_CURRENCIES = {"usd", "$", ""}
_EPOCH_SECONDS = re.compile(r"[0-9]{9,11}")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
#: What stands for no day, or for any, is told and not compared with all that there ever was.
FIRST_DAY, LAST_DAY = date(1970, 1, 1), date(9998, 12, 31)


@dataclass(frozen=True)
class Shape:
    """One kind of export, by its headers.

    :ivar columns: by field the headers that add up to it; of a day and a model the first counts.
    :ivar provider: whose export it is, by the package's id; none where that does not tell.
    :ivar distinct: whether each of its lines stands for something else, so that two that are the
        same are one that is there twice.
    """

    name: str
    columns: Mapping[str, tuple[str, ...]]
    provider: str | None = None
    distinct: bool = False

    def fits(self, headers: Iterable[str]) -> bool:
        """Tell whether all of its headers are there."""
        return {one for names in self.columns.values() for one in names} <= set(headers)


#: Known exports; the first that fits counts.
SHAPES = (
    Shape(
        "OpenAI usage",
        {
            "day": ("start_time_iso",),
            "model": ("model",),
            "input": ("input_tokens",),
            "cached": ("input_cached_tokens",),
            "output": ("output_tokens",),
        },
        "openai",
        distinct=True,
    ),
    Shape(
        "OpenAI costs",
        {
            "day": ("start_time_iso",),
            "model": ("line_item",),
            "cost": ("amount_value",),
            "currency": ("amount_currency",),
        },
        "openai",
        distinct=True,
    ),
    Shape(
        "Anthropic usage",
        {
            "day": ("usage_date_utc",),
            "model": ("model_version",),
            "input": (
                "usage_input_tokens_no_cache",
                "usage_input_tokens_cache_write_5m",
                "usage_input_tokens_cache_write_1h",
                "usage_input_tokens_cache_read",
            ),
            "cached": ("usage_input_tokens_cache_read",),
            "output": ("usage_output_tokens",),
        },
        "anthropic",
        distinct=True,
    ),
    Shape(
        "Anthropic cost",
        {"day": ("usage_date_utc",), "model": ("model",), "cost": ("cost_usd",)},
        "anthropic",
        distinct=True,
    ),
)

#: Of any other export: what a field may be called.
NAMES = {
    "day": ("day", "date", "usage_date", "usage_date_utc", "start_time_iso", "timestamp"),
    "model": ("model", "model_version", "model_name"),
    "input": ("input", "input_tokens", "prompt_tokens", "n_context_tokens_total"),
    "cached": ("cached", "cached_tokens", "input_cached_tokens", "cache_read_tokens"),
    "output": ("output", "output_tokens", "completion_tokens", "n_generated_tokens_total"),
    "cost": ("cost", "cost_usd", "amount_usd", "amount_value"),
    "currency": ("currency", "amount_currency"),
}


@dataclass(frozen=True)
class Billed:
    """One line of an export.

    :ivar model: empty where it names none.
    :ivar amounts: by measure; none of those that the export does not have. Empty for a line that
        only says that there was nothing.
    """

    line: int
    day: date
    model: str
    amounts: Mapping[str, Decimal]


def read(
    lines: Iterable[str | bytes], name: str, zone: tzinfo, columns: Mapping[str, str] | None = None
) -> tuple[Shape, Iterator[Billed]]:
    """Read an export; return its shape, and its lines, read as they are asked for.

    :param lines: of text, or of its bytes in UTF-8.
    :param name: what it is called in errors.
    :param zone: whose days count, where it tells instants.
    :param columns: headers by field, where they are not those that are known. Several are joined by
        ``+``, and add up.
    :raises InvoiceError: where it has no such columns; while lines are asked for, where one cannot
        be read.
    """
    source = _Lines(lines, name)
    head = source.next_line()
    while head is not None and not head.strip():
        head = source.next_line()
    if head is None:
        raise InvoiceError(name, source.number, "there is no line of headers")
    dialect = max(",;\t", key=head.count)
    try:
        headers = [one.strip() for one in next(csv.reader([head], delimiter=dialect))]
    except csv.Error as error:
        raise InvoiceError(name, source.number, str(error)) from error
    _check_once(headers, name, source.number)
    shape = _shape(headers, name, source.number, columns)
    return shape, _billed(source, dialect, headers, shape, zone)


class _Lines:
    """Lines of text, counted; what is no text is an error of its line."""

    def __init__(self, lines: Iterable[str | bytes], name: str) -> None:
        self._lines = iter(lines)
        self.name = name
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self.next_line()
        if line is None:
            raise StopIteration
        return line

    def next_line(self) -> str | None:
        """Return the next line; none at the end."""
        self.number += 1
        try:
            line = next(self._lines, None)
            if isinstance(line, bytes):
                line = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvoiceError(
                self.name, self.number, "it is not UTF-8 text; save the file as 'CSV UTF-8'"
            ) from error
        if line is None:
            return None
        if "\0" in line or len(line) >= MOST_LINE:
            raise InvoiceError(self.name, self.number, "this is no line of a CSV file")
        return line.removeprefix("\ufeff") if self.number == 1 else line


def _check_once(headers: list[str], name: str, line: int) -> None:
    for one in headers:
        if one and headers.count(one) > 1:
            raise InvoiceError(name, line, f"the header {one!r} is there twice")


def _shape(headers: list[str], name: str, line: int, columns: Mapping[str, str] | None) -> Shape:
    """Return which columns are what.

    :raises InvoiceError: where a day is missing, or all that could be compared.
    """
    if columns is not None:
        named = {field: tuple(one.split("+")) for field, one in columns.items()}
        for field, given in named.items():
            if field not in FIELDS:
                known = ", ".join(FIELDS)
                raise InvoiceError(name, line, f"{field!r} is no column to map; give {known}")
            missing = [one for one in given if one not in headers]
            if missing:
                raise InvoiceError(
                    name, line, f"there is no header {missing[0]!r}, but {_listed(headers)}"
                )
        shape = Shape("columns as given", named)
    else:
        known_shape = next((one for one in SHAPES if one.fits(headers)), None)
        shape = known_shape or _by_names(headers)
    if "day" not in shape.columns or not shape.columns.keys() & set(MEASURES):
        raise InvoiceError(
            name,
            line,
            f"no column is known for the day, or none for tokens or cost, among "
            f"{_listed(headers)}; say which they are by --columns (columns=): "
            "day=HEADER,model=HEADER,input=HEADER,output=HEADER,cost=HEADER",
        )
    return shape


def _by_names(headers: list[str]) -> Shape:
    by_name = {one.lower().replace(" ", "_"): one for one in headers}
    known = {field: [one for one in names if one in by_name] for field, names in NAMES.items()}
    columns = {field: (by_name[found[0]],) for field, found in known.items() if found}
    return Shape("columns by their names", columns)


def _listed(headers: list[str]) -> str:
    return ", ".join(repr(one) for one in headers[:20]) or "nothing"


def _billed(
    source: _Lines, dialect: str, headers: list[str], shape: Shape, zone: tzinfo
) -> Iterator[Billed]:
    rows = csv.reader(source, delimiter=dialect, strict=True)
    seen: set[int] = set()
    while True:
        line = source.number + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise InvoiceError(source.name, line, str(error)) from error
        if not any(one.strip() for one in row):
            continue
        if len(row) != len(headers):
            raise InvoiceError(
                source.name, line, f"it has {len(row)} fields, and there are {len(headers)} headers"
            )
        values = {header: one.strip() for header, one in zip(headers, row, strict=True)}
        if list(values.values()) == headers:
            raise InvoiceError(
                source.name, line, "the headers come again: are these two files in one?"
            )
        billed = _line(source.name, line, values, shape, zone)
        if shape.distinct and billed.amounts:
            # Of a line no more than this is kept, however long it is.
            one = hash(tuple(row))
            if one in seen:
                raise InvoiceError(
                    source.name, line, "this line is there twice: it would count twice"
                )
            seen.add(one)
        yield billed


def _line(name: str, line: int, values: Mapping[str, str], shape: Shape, zone: tzinfo) -> Billed:
    def of(field: str) -> list[str]:
        return [values[one] for one in shape.columns.get(field, ())]

    day = _day(name, line, of("day")[0], zone)
    amounts = {}
    for measure in MEASURES:
        told = [one for one in of(measure) if one]
        if told:
            numbers = [_number(name, line, measure, one) for one in told]
            amounts[measure] = reduce(EXACT.add, numbers)
    currency = next(iter(of("currency")), "").lower()
    if "cost" in amounts and currency not in _CURRENCIES:
        raise InvoiceError(name, line, f"the cost is in {currency!r}, and the ledger's in dollars")
    # OpenAI's costs name a model and a kind of token: 'gpt-4o-2024-08-06, cached input'.
    model = next(iter(of("model")), "").partition(", ")[0]
    return Billed(line, day, model, amounts)


def _day(name: str, line: int, text: str, zone: tzinfo) -> date:
    try:
        day = _day_of(text, zone)
    except (ValueError, OverflowError, OSError):
        day = None
    if day is None or not FIRST_DAY <= day <= LAST_DAY:
        raise InvoiceError(
            name, line, f"{text[:40]!r} is no day; give one like 2026-11-30, or an instant"
        )
    return day


def _day_of(text: str, zone: tzinfo) -> date | None:
    """Return the day that a text means; none where it has another form than they are given in."""
    if _EPOCH_SECONDS.fullmatch(text):
        return datetime.fromtimestamp(int(text), zone).date()
    if _DAY.fullmatch(text):
        return date.fromisoformat(text)
    if not _DAY.match(text):
        # Newer versions of Python take 20261130 for midnight in no zone.
        return None
    # Python 3.10 does not know the letter.
    when = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
    return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).astimezone(zone).date()


def _number(name: str, line: int, measure: str, text: str) -> Decimal:
    """Return an amount, exactly.

    :raises InvoiceError: for what is none, and for parts of a token.
    """
    try:
        number = Decimal(text)
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite() or number.adjusted() > MOST_DIGITS:
        raise InvoiceError(
            name,
            line,
            f"{text[:40]!r} is no number of {measure}; give digits, with a point for parts",
        )
    exponent = number.as_tuple().exponent
    if isinstance(exponent, int) and exponent < -MOST_DIGITS:
        raise InvoiceError(name, line, f"{text[:40]!r} has more digits than any {measure}")
    if measure != "cost" and (number < 0 or number != number.to_integral_value()):
        raise InvoiceError(
            name, line, f"{text[:40]!r} is no number of tokens; it is an integer from 0"
        )
    return number
