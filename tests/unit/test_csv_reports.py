"""CSV: the same columns always, exact, by RFC 4180, and no formula."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest

from celery_budget.reconcile import Report
from celery_budget.reconcile.figures import Group, Refusals
from celery_budget.render.csv_reports import COLUMNS, report_csv
from tests.unit.sample import BALANCES, BIG, BY_TENANT, FORMULA, HOSTILE, REPORT


def read(report: Report) -> list[dict[str, str]]:
    written = report_csv(report)
    return list(csv.DictReader(io.StringIO(written, newline=""), strict=True))


@pytest.mark.parametrize("report", [REPORT, BY_TENANT, Report((), {})], ids=["all", "by", "empty"])
def test_columns_are_the_same_always_and_lines_end_as_they_should(report: Report) -> None:
    written = report_csv(report)
    assert written.splitlines()[0] == ",".join(COLUMNS)
    assert len(set(COLUMNS)) == len(COLUMNS)
    assert written.count("\n") == written.count("\r\n")
    assert all(None not in row and None not in row.values() for row in read(report))


def test_the_whole_has_a_row_for_each_budget() -> None:
    rows = {row["budget"]: row for row in read(REPORT)}
    acme = rows["tenant:acme"]
    assert {name: acme[name] for name in ("by", "group", "unit", "requests", "estimated",
            "charged", "over_use", "requests_over")} == {
        "by": "", "group": "", "unit": "tokens", "requests": "12500", "estimated": "7500000",
        "charged": "8000000", "over_use": "1250000", "requests_over": "2",
    }  # fmt: skip
    assert (acme["admitted"], acme["refused"], acme["reserved"]) == ("48211", "1204", "5")
    assert (acme["balance_limit"], acme["balance_reserved"]) == ("12000000", "800000")
    assert (acme["balance_available"], acme["balance_period"]) == ("1288596", "month")
    assert (acme["failed_transient"], acme["waits_p50_seconds"]) == ("310", "0.08")
    assert (acme["refusals"], acme["refusals_held"]) == ("100", "100")
    # An unlimited budget has no limit, and one that nobody drew on has nothing charged.
    assert rows["tenant:umbrella"]["balance_limit"] == ""
    assert rows["tenant:umbrella"]["charged"] == "0"
    assert len(rows) == len(BALANCES)


def test_a_reason_without_a_column_is_in_the_sum() -> None:
    odd = replace(REPORT, refusals=(Refusals("org", "a new one", 3), Refusals("org", "held", 4)))
    [row] = [row for row in read(odd) if row["budget"] == "org"]
    assert (row["refusals"], row["refusals_held"]) == ("7", "4")


def test_groups_have_a_row_for_each_budget_with_the_figures_of_the_group() -> None:
    rows = read(BY_TENANT)
    assert len(rows) == 4 * 4
    mine = [row for row in rows if row["group"] == "tenant:initech"]
    assert [row["budget"] for row in mine] == ["org", "tenant:acme", "money", HOSTILE]
    assert {(row["by"], row["admitted"], row["failed_refused"]) for row in mine} == {
        ("tenant", "1800", "14")
    }
    assert [row["charged"] for row in mine] == ["11000", "6400", "9007199254740993", "2"]
    # What is not counted by group is not known, which is not nothing.
    assert {row["balance_limit"] for row in rows} == {""}
    assert {row["parked"] for row in rows} == {""}


def test_a_group_that_charged_nothing_has_a_row() -> None:
    [row] = read(replace(BY_TENANT, groups=(Group("a", {"refused": 3}),)))
    assert (row["group"], row["budget"], row["refused"], row["charged"]) == ("a", "", "3", "0")


def test_amounts_are_exact() -> None:
    rows = {row["budget"]: row for row in read(REPORT)}
    assert rows["money"]["balance_limit"] == str(BIG)
    assert rows["money"]["charged"] == str(2**53 + 1)


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\uff1d"])
def test_no_name_is_a_formula(sign: str) -> None:
    name = f"{sign}cmd|' /C calc'!A0"
    rows = read(replace(REPORT, balances=(replace(BALANCES[1], budget=name, unit=name),)))
    assert rows[0]["budget"] == rows[0]["unit"] == f"'{name}"
    [group] = read(replace(BY_TENANT, by="stage", groups=(Group(name, {}),)))
    assert group["group"] == f"'{name}"


def test_a_negative_amount_is_a_number() -> None:
    rows = {row["budget"]: row for row in read(REPORT)}
    assert rows["tenant:initech"]["balance_available"] == "-210000"
    assert rows[f"'{FORMULA}"]["balance_limit"] == "0"


def test_names_are_quoted() -> None:
    name = 'a,"b"\u2028c'
    [row] = read(replace(Report((), {}), balances=(replace(BALANCES[0], budget=name),)))
    assert row["budget"] == name
