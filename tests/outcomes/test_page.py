"""The page of outcomes says what the rows say."""

from __future__ import annotations

import pytest

from tests.apps.ends import WAYS
from tests.outcomes import page
from tests.outcomes.rows import BROKERS, POOLS, ROWS, THEN, cases


def test_the_pages_tables_are_those_of_the_rows() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert [found[1] for found in page.BETWEEN.findall(text)] == list(page.TABLES)
    assert page.written(text) == text, "python -m tests.outcomes.page writes the tables"


@pytest.mark.parametrize("make", page.TABLES.values(), ids=list(page.TABLES))
def test_every_line_has_all_columns(make: object) -> None:
    assert callable(make)
    lines = make().splitlines()
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert not any("|  |" in line for line in lines)


def test_a_table_that_differs_is_found() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    changed = text.replace("| it returns |", "| it comes back |")
    assert changed != text
    assert page.written(changed) == text


def test_rows_are_well_formed_and_each_is_run() -> None:
    assert len({row.name for row in ROWS}) == len({row.happens for row in ROWS}) == len(ROWS)
    assert {row.way for row in ROWS} == set(WAYS)
    assert {end.then for row in ROWS for end in (row.late, row.early)} == set(THEN)
    run = {(row.name, broker) for broker in BROKERS for _, row, _ in cases(broker)}
    assert run == {(row.name, broker) for row in ROWS for broker in row.brokers}
    assert {pool for broker in BROKERS for pool, _, _ in cases(broker)} == set(POOLS)
