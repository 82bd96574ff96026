"""What one ended request adds to the figures of a report."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from celery_budget.core.tallies import (
    DAY_US,
    Key,
    add,
    bin_of,
    contribution,
    failure_of,
    quantile,
    top_of,
)
from celery_budget.reconcile import figures

TIMES = [*range(300), *(2**n + d for n in range(9, 62) for d in (-1, 0, 1))]


@pytest.mark.parametrize("us", TIMES)
def test_a_bin_ends_at_most_a_twentieth_above_each_of_its_times(us: int) -> None:
    top = top_of(bin_of(us))
    assert us <= top <= us * 1.05
    assert bin_of(top) == bin_of(us)
    assert bin_of(top + 1) == bin_of(us) + 1


def test_a_time_of_a_clock_that_was_set_back_is_none() -> None:
    assert top_of(bin_of(-5)) == 0


@pytest.mark.parametrize("hundredths", [50, 95, 99])
def test_a_quantile_is_the_end_of_the_bin_of_its_rank(hundredths: int) -> None:
    chosen = random.Random(hundredths)
    for size in (1, 2, 19, 20, 21, 100, 101, 500):
        times = [chosen.randrange(10**9) for _ in range(size)]
        bins: dict[int, int] = {}
        for us in times:
            bins[bin_of(us)] = bins.get(bin_of(us), 0) + 1
        true = sorted(times)[-(-size * hundredths // 100) - 1]
        assert quantile(bins, hundredths) == top_of(bin_of(true))
    assert quantile({}, hundredths) is None


FAILURES = [
    ("lost", None, "uncertain", "uncertain"),
    ("lost", "max_attempts", "uncertain", "uncertain"),
    ("released", "cancelled", None, None),
    ("released", "revoked", None, None),
    ("released", "ignored", None, None),
    ("released", "not_claimed", None, None),
    ("released", "predecessor", None, None),
    ("released", "result stored", None, None),
    ("released", "expired", None, "expired"),
    ("released", "deadline", None, "expired"),
    ("released", "park_expired", None, "expired"),
    ("released", "wait_expired", None, "expired"),
    ("released", "unpublishable", None, "permanent"),
    ("released", "unpublishable, requeued as 1", None, "permanent"),
    ("released", "undelivered", None, "permanent"),
    ("released", "worker_lost", None, "permanent"),
    ("settled", None, "returned", None),
    ("settled", None, "replaced", None),
    ("settled", None, "ignored", None),
    ("settled", None, "raised", "permanent"),
    ("settled", "failed, discarded", "raised", "permanent"),
    ("settled", None, "rejected", "permanent"),
    ("settled", "max_attempts", "raised", "exhausted"),
    ("settled", "retry_within, discarded", "retried", "exhausted"),
    ("settled", "deadline", "retried", "exhausted"),
    ("settled", "expired", "retried", "exhausted"),
    ("settled", "park_expired", "retried", "exhausted"),
    ("settled", "worker_lost", "retried", "permanent"),
    ("settled", "cancelled", "retried", None),
    ("settled", "cancelled", "raised", None),
    ("settled", "looked_up", "uncertain", "uncertain"),
]


@pytest.mark.parametrize(("state", "reason", "outcome", "failure"), FAILURES)
def test_how_a_request_failed(
    state: str, reason: str | None, outcome: str | None, failure: str | None
) -> None:
    assert failure_of(state, reason, outcome) == failure


def request(**changes: Any) -> Any:
    values = {
        "owner": "acme", "stage": "draft", "task_name": "shop.draft", "estimator": "words",
        "estimator_version": "2", "lane": None, "state": "settled", "reason": None,
        "admitted": True, "attempts": 1, "over": False, "unmetered": False, "unreserved": False,
        "created_us": 5 * DAY_US + 7, "due_us": None, "shadows": None,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def line(budget: str = "acme", settled: int = 7, **changes: Any) -> Any:
    values = {"budget": budget, "unit": "tokens", "estimate": 5, "extended": 0, "settled": settled}
    return SimpleNamespace(**{**values, **changes})


def attempt(number: int = 1, outcome: str = "returned", at: int = 0, lasted: int = 3) -> Any:
    started = 5 * DAY_US + 7 + at
    return SimpleNamespace(
        attempt=number, outcome=outcome, started_us=started, ended_us=started + lasted
    )


KEY = Key("", "", "", 5, "draft", "shop.draft", "words", "2", "")


def test_a_request_adds_to_all_to_its_owner_and_to_each_budget_it_draws_on() -> None:
    found = contribution(
        request(over=True), [line(), line("root"), line("root", 1, estimate=2)], [attempt(at=4)]
    )
    once = {
        "settled": 1,
        "over": 1,
        "wait.4": 1,
        "run.3": 1,
        "measured": 1,
        "promised": 5,
        "used": 7,
    }
    assert found == {
        KEY: once,
        KEY._replace(owner="acme"): once,
        KEY._replace(budget="acme", unit="tokens", owner="acme"): {
            **once, "requests": 1, "estimated": 5, "charged": 7, "excess": 2, "exceeded": 1,
        },
        KEY._replace(budget="root", unit="tokens", owner="acme"): {
            **once, "requests": 1, "estimated": 7, "charged": 8, "excess": 1, "exceeded": 1,
        },
    }  # fmt: skip


def test_what_was_released_draws_on_nothing() -> None:
    released = request(state="released", reason="expired", attempts=0)
    found = contribution(released, [line(settled=0)], [])
    wanted = {"released": 1, "expired": 1, "failed.expired": 1}
    assert set(map(len, found)) == {len(KEY)}
    assert list(found.values()) == [wanted] * 3


def test_what_was_given_up_was_never_admitted() -> None:
    given_up = request(state="released", reason="deadline", attempts=0, admitted=False)
    assert contribution(given_up, [], [])[KEY] == {"given_up": 1, "failed.expired": 1}


def test_attempts_before_the_last_failed_and_were_followed() -> None:
    of = [
        attempt(1, "retried", 1, 2),
        attempt(2, "uncertain", 10, 9),
        attempt(3, "raised", 30, 5),
        attempt(4, "refused", 40, 0),
    ]
    refused = request(reason="max_attempts", attempts=4)
    assert contribution(refused, [line()], of)[KEY] == {
        "settled": 1, "failed.exhausted": 1, "failed.transient": 2, "wait.1": 1, "run.2": 1,
        "run.5": 1,
    }  # fmt: skip


def test_a_wait_begins_when_the_message_is_due() -> None:
    due = contribution(request(due_us=5 * DAY_US + 17), [line()], [attempt(at=30)])
    assert "wait.20" in due[KEY]
    early = contribution(request(due_us=1), [line()], [attempt(at=30)])
    assert "wait.30" in early[KEY]


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ({"unmetered": True}, attempt()),
        ({}, attempt(outcome="raised")),
        ({"state": "lost"}, attempt()),
    ],
)
def test_only_what_was_measured_is_compared(changes: dict[str, Any], last: Any) -> None:
    assert "measured" not in contribution(request(**changes), [line()], [last])[KEY]


def test_shadows_are_compared_where_it_ran_once() -> None:
    asked = {"shadows": '{"words:3": 6}'}
    once = contribution(request(**asked), [line()], [attempt()])[KEY]
    assert once["shadow.requests.words:3"] == 1
    assert (once["shadow.estimated.words:3"], once["shadow.actual.words:3"]) == (6, 7)
    twice = [attempt(1, "retried"), attempt(2)]
    found = contribution(request(**asked, attempts=2), [line()], twice)[KEY]
    assert found["measured"] == 1
    assert "shadow.requests.words:3" not in found


def test_what_is_added_can_be_taken_away() -> None:
    total = {"a": 1}
    add(total, {"a": 2, "b": 1})
    add(total, {"a": 3, "b": 1}, -1)
    assert total == {}


def test_keys_are_told_apart_however_their_parts_are_cut() -> None:
    ones = [KEY._replace(stage="a", task_name="bc"), KEY._replace(stage="ab", task_name="c")]
    assert len({key.digest() for key in (KEY, *ones)}) == 3
    assert KEY.digest() == KEY._replace().digest()


def test_the_page_tells_what_is_counted_as_each_failure() -> None:
    page = Path(__file__).parents[2] / "docs" / "tallies.md"
    _, _, section = page.read_text("utf-8").partition("## Failures")
    rows = re.findall(r"^\| `(\w+)` \| (\w*)", section, re.MULTILINE)
    assert {name for name, _ in rows} == set(figures.FAILURES)
    # By the states in which the cases above end as that failure.
    told = {(name, state) for name, state in rows if state in ("settled", "released", "lost")}
    assert told == {(failure, state) for state, _, _, failure in FAILURES if failure is not None}
