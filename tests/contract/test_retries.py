"""Retries: held on top of what was used, never before their attempt has ended, else parked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_budget import admission
from celery_budget.core.reservations import Closed, Line, Parked, Reserved, Running
from tests.contract.support import RAISED, RETRIED, RETURNED, Ledger, message_of


def test_what_is_recorded_after_the_retry_was_written_lowers_no_hold(funded: Ledger) -> None:
    """As in ``try: raise self.retry() finally: usage.record(…)``."""
    request, attempt = funded.start(10)
    following, _ = funded.retry(request, attempt)
    assert attempt.record(9)
    assert attempt.extend(40)
    assert attempt.end(RETRIED)
    assert funded.line(request) == (19, 9, 0)
    assert funded.run(following).end(RETURNED)
    assert funded.line(request) == (0, 9, 19), "unmetered: the estimate, without the extension"


def test_a_retry_holds_its_estimate_on_top_of_what_was_used(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.record(7)
    following, written = funded.retry(request, attempt, 20)
    assert written == Reserved(request.reservation_id)
    assert funded.balance() == (27, 0)
    rows = funded.rows("outbox", retries=1)
    assert [(row.state, row.after_attempt) for row in rows] == [("blocked", 1)]
    assert funded.relay().published == 1, "the first message, which was due anyway"
    assert funded.deliver(following) == Running()

    assert attempt.end(RETRIED)
    assert funded.message(request).retries == 1, "the first message is gone"
    assert funded.state(request) == "waiting"
    assert funded.deliver(request) == Closed("waiting")
    assert funded.relay().published == 1
    second = funded.run(following)
    assert second.number == 2
    second.record(3)
    second.end(RETURNED)
    second.close()
    assert funded.balance() == (0, 10)
    assert funded.message(request) is None


def test_an_unmetered_success_charges_its_estimate_on_top(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.record(7)
    following, _ = funded.retry(request, attempt)
    attempt.end(RETRIED)
    funded.run(following).end(RETURNED)
    assert funded.balance() == (0, 17)


def test_a_retry_that_is_written_twice_is_one(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.record(7)
    for _ in range(2):
        assert funded.retry(request, attempt)[1] == Reserved(request.reservation_id)
    assert funded.balance() == (17, 0)
    assert len(funded.rows("outbox", retries=1)) == 1


@pytest.mark.parametrize(("amount", "held"), [(60, 60), (10, 10), (0, 0)])
def test_a_smaller_retry_holds_less(funded: Ledger, amount: int, held: int) -> None:
    request, attempt = funded.start(60)
    _, written = funded.retry(request, attempt, amount)
    assert isinstance(written, Reserved)
    assert funded.balance() == (held, 0)
    attempt.end(RETRIED)


def test_a_retry_that_does_not_fit_is_parked_and_gives_its_hold_back(funded: Ledger) -> None:
    request, attempt = funded.start(60)
    attempt.record(50)
    following, written = funded.retry(request, attempt)
    assert isinstance(written, Parked)
    assert funded.balance() == (50, 0)
    assert funded.sweep().admitted == 0
    attempt.end(RETRIED)
    assert funded.state(request) == "waiting"
    assert funded.deliver(following) == Closed("waiting"), "it holds nothing that it could use"
    assert funded.balance() == (50, 0)

    funded.set("b", 110)
    assert funded.sweep().admitted == 1
    assert funded.rows("parked") == []
    assert funded.balance() == (110, 0)
    assert funded.relay().published == 1
    funded.run(following).end(RAISED)
    assert funded.balance() == (0, 50)


def test_a_parked_retry_that_is_admitted_early_stays_blocked(funded: Ledger) -> None:
    request, attempt = funded.start(60)
    attempt.record(50)
    following, _ = funded.retry(request, attempt)
    funded.set("b", 110)
    assert funded.sweep().admitted == 1
    assert [row.state for row in funded.rows("outbox", retries=1)] == ["blocked"]
    attempt.end(RETRIED)
    funded.run(following)


def test_parked_retries_do_not_wait_for_each_other(funded: Ledger) -> None:
    started = [funded.start(50) for _ in range(2)]
    following = []
    for request, attempt in started:
        attempt.record(40)
        successor, written = funded.retry(request, attempt)
        assert isinstance(written, Parked)
        assert attempt.end(RETRIED)
        following.append(successor)
    assert funded.balance() == (80, 0)
    assert funded.sweep().admitted == 0
    funded.set("b", 130)
    assert funded.sweep().admitted == 1
    first = next(one for one in following if funded.message(one))
    [second] = [one for one in following if one is not first]
    funded.run(first).end(RAISED)
    assert funded.sweep().admitted == 1
    funded.run(second).end(RAISED)
    assert funded.balance() == (0, 80)


def test_a_retry_of_several_budgets_is_held_whole_or_not(funded: Ledger) -> None:
    for name in ("a", "c"):
        funded.set(name, 100)
    request = funded.reserve(10, ("a", 10), ("c", 10))
    attempt = funded.run(request)
    attempt.record(5)
    for name, amount in (("a", 95), ("b", 95), ("c", 96)):
        following = replace(
            request,
            retries=1,
            lines=tuple(Line(b, amount if b == name else 7) for b in ("a", "b", "c")),
        )
        written = admission.retry(
            funded.store, funded.settings, following, message_of(following), 1, attempt.claim_id
        )
        if name != "c":
            assert isinstance(written, Reserved)
        else:
            assert isinstance(written, Parked)
    assert [funded.balance(name)[0] for name in ("a", "b", "c")] == [5, 5, 5]
    attempt.end(RETRIED)
    funded.set("c", 101)
    assert funded.sweep().admitted == 1
    assert [funded.balance(name)[0] for name in ("a", "b", "c")] == [12, 12, 101]


def test_a_retry_that_names_other_budgets_keeps_those_it_has(funded: Ledger) -> None:
    funded.set("a", 100)
    request = funded.reserve(10, ("a", 10))
    attempt = funded.run(request)
    attempt.record(5)
    funded.set("b", 0)
    following = replace(request, retries=1, lines=(Line("other", 1),))
    written = admission.retry(
        funded.store, funded.settings, following, message_of(following), 1, attempt.claim_id
    )
    assert isinstance(written, Parked)
    assert (funded.balance("a"), funded.balance("b")) == ((5, 0), (5, 0))
    attempt.end(RETRIED)


@pytest.mark.parametrize("parked", [True, False])
def test_a_retry_that_was_written_takes_over_from_a_dead_worker(
    funded: Ledger, parked: bool
) -> None:
    request, attempt = funded.start(60)
    attempt.record(50)
    following, written = funded.retry(request, attempt, 60 if parked else 20)
    assert isinstance(written, Parked if parked else Reserved)
    funded.lapse(request)
    assert funded.recover().rerun == 1
    assert funded.deliver(request) == Closed("waiting")
    if parked:
        funded.set("b", None)
        assert funded.sweep().admitted == 1
    assert funded.run(following).number == 2
