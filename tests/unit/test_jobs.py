"""How a job stands, by what the ledger knows; and that the page says so."""

from __future__ import annotations

import re

import pytest

from celery_budget.core.jobs import BY_OUTCOME, BY_REASON, STATES, job_state
from celery_budget.core.reservations import TERMINAL
from tests.cluster import ROOT

PAGE = (ROOT / "docs" / "jobs.md").read_text("utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.split("| Celery |\n")[1].split("\n\n")[0].splitlines()[1:]
]


def words(cell: str) -> list[str]:
    return re.findall(r"`([a-z_]+)`", cell)


def told(job: str, why: str) -> list[dict[str, object]]:
    """What the ledger knows where the page's third column says ``why``."""
    if job == "parked":
        return [{"parked": True}]
    if job == "quarantined":
        return [{"quarantined": True, "outcome": "raised"}, {"quarantined": True}]
    known: list[dict[str, object]] = [
        {"outcome" if word in BY_OUTCOME else "reason": word} for word in words(why)
    ]
    if "any" in why:
        known += [{"reason": reason} for reason in ("undelivered", "predecessor", "whatever")]
    return known or [{}]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{words(row[0])[0]}-{row[1]}")
def test_each_row_of_the_page_is_so(row: list[str]) -> None:
    [job] = words(row[0])
    for state in [*words(row[1]), *([None] if "none" in row[1] else [])]:
        for known in told(job, row[2]):
            if state == "released" and "outcome" in known:
                # It has never run.
                known["reason"] = known.pop("outcome")
            assert job_state(state, **known) == job, (state, known)  # type: ignore[arg-type]


def test_the_page_has_all_there_is() -> None:
    assert {word for row in ROWS for word in words(row[0])} == set(STATES)
    listed = {word for row in ROWS for word in words(row[2])}
    assert listed == {*BY_REASON, *BY_OUTCOME} - {"replaced"}
    ended = {word for row in ROWS if words(row[0])[0] in STATES[3:] for word in words(row[1])}
    assert ended == set(TERMINAL)


def test_who_is_asked_of_what_was_replaced() -> None:
    assert job_state("settled", None, "replaced") is None
    assert job_state("settled", None, "replaced", parked=True) == "parked"


def test_an_outcome_tells_before_a_reason() -> None:
    assert job_state("settled", "deadline", "refused") == "failed"
    assert job_state("settled", "deadline", "retried") == "expired"
    assert job_state("settled", None, "rejected") == "failed"
    assert job_state("running", None, "returned", parked=True) == "running"


@pytest.mark.parametrize("what", ["requeued as 1", "discarded"])
def test_what_became_of_it_in_quarantine_does_not_hide_the_reason(what: str) -> None:
    assert job_state("released", f"expired, {what}") == "expired"
