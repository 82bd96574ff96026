"""How each cost grows with history, tenants and backlog: figures, plots, a text for the docs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import sqlalchemy as sa

from benchmarks.histories import History, fill, filling
from benchmarks.history import SETTINGS
from benchmarks.measure import Comparison, Effort, Side, Target, compare
from benchmarks.operations import OPERATIONS, READING, Operations, make_ledger, open_ledger
from benchmarks.plotting import Line, plot
from benchmarks.servers import Servers
from tests.contract.support import Ledger
from tests.services.postgres import PostgresServer

__all__ = ["AXES", "Point", "page", "run"]

RESULTS = Path(__file__).parent / "results"
#: What grows, by its sizes; of the others it is the smallest history, a hundred budgets, nothing.
AXES = {
    "history": (10_000, 100_000, 1_000_000, 10_000_000),
    "budgets": (10, 100, 1_000, 10_000),
    "backlog": (1_000, 10_000, 100_000, 1_000_000),
}
TITLES = {
    "history": "settled reservations",
    "budgets": "budgets",
    "backlog": "messages that wait to be published",
}
HISTORY, BUDGETS, BACKLOG = 10_000, 100, 0
#: How often each is done in a block.
CALLS = 15
MEASURED = {
    name: OPERATIONS[name] for name in ("admit", "relay", "claim", "end", "sweep")
} | READING


@dataclass(frozen=True)
class Point:
    """The cost of one operation at one size: median and quartiles, in microseconds."""

    axis: str
    size: int
    operation: str
    median: float
    lower: float
    upper: float


def run(servers: Servers, effort: Effort) -> Comparison:
    """Measure every operation at every size, in turns; write figures and plots."""
    most = effort.history or AXES["history"][-1]
    server = servers.enter_context(PostgresServer(settings=SETTINGS))
    places = [(axis, size) for axis, sizes in AXES.items() for size in sizes if size <= most]
    urls = [server.create_database() for _ in places]
    with filling(server):
        for (axis, size), url in zip(places, urls, strict=True):
            begin = time.monotonic()
            _make(url, **{axis: size})
            print(f"{size:,} {TITLES[axis]}: {time.monotonic() - begin:.0f} s", flush=True)
    sides: list[Side] = []
    first: dict[str, int] = {}
    for (axis, size), url in zip(places, urls, strict=True):
        ledger = servers.enter_context(open_ledger(url))
        does = Operations(ledger, size if axis == "budgets" else BUDGETS, CALLS)
        against = first.setdefault(axis, size)
        for name in MEASURED:
            base = (Target(_name(axis, against, name)),) if size != against else ()
            sides.append(Side(_name(axis, size, name), getattr(does, name), base))
    found = compare(
        "growth",
        "what each costs with more of one thing, against the least of it",
        "us",
        f"a block of each operation at each size; {HISTORY:,} settled requests and {BUDGETS} "
        "budgets where it is not about them; PostgreSQL with fsync.",
        sides,
        replace(effort, seconds=max(effort.seconds, 600)),
    )
    points = [
        Point(axis, size, name, spread.median, spread.lower, spread.upper)
        for axis, size in places
        for name in MEASURED
        for spread in [found.sides[_name(axis, size, name)]]
    ]
    _keep(points)
    return found


def _name(axis: str, size: int, operation: str) -> str:
    return f"{MEASURED[operation]}, {size:,} {axis}"


def _make(url: str, history: int = HISTORY, budgets: int = BUDGETS, backlog: int = BACKLOG) -> None:
    make_ledger(url, budgets)
    with open_ledger(url) as ledger:
        fill(ledger.store, ledger.root, History(history, budgets))
        if backlog:
            _wait(ledger, backlog)


def _wait(ledger: Ledger, backlog: int) -> None:
    """Have messages wait whose time has not come: what is relayed meanwhile is none of them."""
    with ledger.store.apart() as connection:
        connection.execute(sa.text(_BACKLOG), {"root": ledger.root, "backlog": backlog})
        connection.exec_driver_sql("VACUUM ANALYZE budget_outbox")


_BACKLOG = """
    INSERT INTO budget_outbox (
        root, outbox_id, task_id, task_name, retries, state, due_us, publishes, failures,
        created_us, queue, body, envelope, rank, broker)
    SELECT :root, gen_random_uuid(), 'backlog-' || n, 'shop.notify', 0, 'due',
           4611686018427387904 + n, 0, 0, n, 'celery', convert_to(repeat('x', 200), 'UTF8'),
           repeat('e', 400), 5, ''
      FROM generate_series(1, :backlog) AS n
"""


def _keep(points: Sequence[Point]) -> None:
    """Write the figures, a plot for each axis, and the page's text."""
    RESULTS.mkdir(exist_ok=True)
    written = json.dumps([asdict(point) for point in points], indent=2)
    (RESULTS / "growth.json").write_text(written + "\n")
    for axis in AXES:
        (RESULTS / f"growth-{axis}.svg").write_text(_plot(points, axis))
    (RESULTS / "growth.md").write_text(page(points))


def _plot(points: Sequence[Point], axis: str) -> str:
    lines = [
        Line(told, [(one.size, one.median / 1000) for one in _of(points, axis, name)])
        for name, told in MEASURED.items()
    ]
    return plot(f"median of each, by the number of {TITLES[axis]}", TITLES[axis], "ms", lines)


def _of(points: Sequence[Point], axis: str, operation: str) -> list[Point]:
    return [one for one in points if (one.axis, one.operation) == (axis, operation)]


def page(points: Sequence[Point]) -> str:
    """Return what the documentation shows of it: a table for each axis, medians in milliseconds."""
    parts = []
    for axis, title in TITLES.items():
        sizes = sorted({one.size for one in points if one.axis == axis})
        parts.append(f"By the number of {title}, in ms:\n\n{_table(points, axis, sizes)}")
    return "\n".join(parts)


def _table(points: Sequence[Point], axis: str, sizes: Sequence[int]) -> str:
    head = ["", *(f"{size:,}" for size in sizes), "last : first"]
    rows = [head, ["---", *["---:"] * (len(sizes) + 1)]]
    for name, told in MEASURED.items():
        by_size: Mapping[int, Point] = {one.size: one for one in _of(points, axis, name)}
        medians = [by_size[size].median for size in sizes]
        cells = [f"{median / 1000:,.2f}" for median in medians]
        rows.append([told, *cells, f"{medians[-1] / medians[0]:.2f}"])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
