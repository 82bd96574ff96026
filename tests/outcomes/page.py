"""The tables of ``docs/outcomes.md``, made of the rows.

``python -m tests.outcomes.page`` writes them into the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.apps.ends import ESTIMATE, USED
from tests.outcomes.rows import ACKS, BROKERS, POOLS, ROWS, THEN, End, Row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "outcomes.md"
#: Tables stand between such comments.
BETWEEN = re.compile(r"(<!-- (\w+) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
BROKER_NAMES = {"redis": "Redis", "rabbitmq": "RabbitMQ"}
HEADER = (
    "the task, or its worker",
    "acknowledged",
    "ends as",
    "attempts",
    f"charged, {USED} recorded a run",
    "charged, nothing recorded",
    "its result",
    "what follows",
)


def outcomes() -> str:
    """Return the table of all rows."""
    return _table(HEADER, (line for row in ROWS for line in _lines(row)))


def follows() -> str:
    """Return what the words of its last column mean."""
    header = ("what follows", "a chain's next step", "errbacks", "a chord's body")
    return _table(
        header,
        (
            (word, f"`{of.step}`", "called once" if of.errback else "not called", f"`{of.chord}`")
            for word, of in THEN.items()
        ),
    )


def _lines(row: Row) -> Iterable[Sequence[str]]:
    where = [*row.pools] if row.pools != POOLS else []
    where += [BROKER_NAMES[name] for name in row.brokers] if row.brokers != BROKERS else []
    happens = f"{row.happens} ({', '.join(where)})" if where else row.happens
    if row.late == row.early:
        yield happens, "either", *_cells(row.late)
    else:
        for ack in ACKS:
            yield happens, ack, *_cells(row.end(ack))


def _cells(end: End) -> Sequence[str]:
    return (
        f"`{end.state}`" + (f", {end.reason}" if end.reason else ""),
        ", ".join(end.outcomes) or "none",
        str(end.charged),
        f"{end.unrecorded}" + (", the estimate" if end.unrecorded == ESTIMATE else ""),
        f"`{end.result}`" + (f", `{end.error}`" if end.error else ""),
        end.then,
    )


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


TABLES = {"outcomes": outcomes, "follows": follows}


def written(text: str) -> str:
    """Return the page's text with the tables that the rows make."""
    return BETWEEN.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
