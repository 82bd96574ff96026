"""Lost attempts whose task is asked what became of them, before anything follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from celery_budget import inquiry, reconcile, settlement
from celery_budget.core.reservations import Running
from celery_budget.core.retries import Retries
from celery_budget.core.usage import Used
from celery_budget.recovery import Recovered
from celery_budget.render.stories import stories_view
from celery_budget.render.text import as_text
from celery_budget.settlement import Attempt
from celery_budget.store import inquiries
from celery_budget.store.inquiries import Inquiry
from tests.contract.racers import at_once
from tests.contract.support import BOOT, RETRIED, RETURNED, Ledger
from tests.messages import Told


@dataclass
class Tasks:
    """Tasks that answer as they are told: with amounts, none, or by raising."""

    ledger: Ledger
    answers: list[Any] = field(default_factory=list)
    undone: list[Any] = field(default_factory=list)
    asked: list[Inquiry] = field(default_factory=list)
    on_ask: Callable[[], object] = lambda: None

    def lookup(self, seen: Inquiry) -> bool | None:
        self.asked.append(seen)
        self.on_ask()
        if not self.answers:
            return None
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, dict):
            self.ledger.store.run(
                inquiries.record_total,
                self.ledger.root,
                seen.reservation_id,
                seen.attempt,
                f"lookup:{seen.attempt}:0",
                answer,
            )
            return True
        return False

    def compensate(self, seen: Inquiry) -> bool:
        if not self.undone:
            return False
        answer = self.undone.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return True


@pytest.fixture
def tasks(funded: Ledger) -> Tasks:
    return Tasks(funded)


def lost(ledger: Ledger, *used: int, early: bool = False, told: bool = True) -> tuple[Any, Attempt]:
    """A request whose attempt recorded ``used``, and whose worker went away."""
    request = ledger.reserve(10)
    ledger.relay()
    attempt = ledger.run(request, inquires=True, late_ack=not early)
    for amount in used:
        attempt.record(amount)
    ledger.lapse(request)
    assert ledger.recover() == Recovered(asked=1, told=int(early and told))
    return request, attempt


def ask(ledger: Ledger, tasks: Tasks) -> int:
    """Ask about what there is, its time come."""
    if rows := [row for row in ledger.rows("attempts") if row.lease_until_us is not None]:
        ledger.put("attempts", {"lease_until_us": 1}, attempt=rows[-1].attempt)
    return inquiry.run_once(ledger.store, ledger.settings, tasks)


def later(ledger: Ledger, leases: int = 1) -> None:
    """Let the time for answers have passed, so many times over."""
    [row] = ledger.rows("attempts")
    since = row.ended_us - leases * ledger.settings.lookup_us
    ledger.put("attempts", {"ended_us": since})


@pytest.mark.parametrize("early", [True, False])
def test_nothing_follows_before_there_is_an_answer(
    funded: Ledger, tasks: Tasks, early: bool
) -> None:
    request, attempt = lost(funded, 4, early=early)
    assert funded.state(request) == "running"
    assert funded.balance() == (10, 0)
    assert funded.deliver(request) == Running(), "the broker's own redelivery"
    assert funded.recover() == Recovered(), "it is nobody's"
    assert settlement.renew(funded.store, funded.settings, [request.task_id], BOOT, []) == 0
    assert not attempt.end(RETURNED), "its fence is gone"
    assert not attempt.close()
    tasks.answers = [None]
    assert ask(funded, tasks) == 0
    assert funded.state(request) == "running"
    told = [(request.task_id, "lost")] if early else []
    assert funded.results.told == told


@pytest.mark.parametrize(
    ("used", "answer", "charged"),
    [((), 0, 0), ((), 7, 7), ((4,), 7, 7), ((4,), 3, 4), ((4,), 30, 30)],
)
def test_what_a_lost_attempt_used_is_charged_as_answered(
    funded: Ledger, tasks: Tasks, used: tuple[int, ...], answer: int, charged: int
) -> None:
    request, _ = lost(funded, *used, early=True)
    tasks.answers = [{None: answer}]
    assert ask(funded, tasks) == 1
    row = funded.row(request)
    assert (row.state, row.reason, row.unmetered) == ("settled", "looked up", False)
    assert funded.balance() == (0, charged)
    assert funded.message(request) is None
    assert ask(funded, tasks) == 0
    [seen] = tasks.asked
    assert (seen.task_id, seen.used) == (request.task_id, {"tokens": sum(used)} if used else {})
    assert seen.message is not None


def test_a_unit_that_is_not_answered_is_charged_its_estimate(funded: Ledger, tasks: Tasks) -> None:
    funded.set("usd", 100, "usd")
    request = funded.reserve(10, ("usd", 20))
    funded.run(request, inquires=True, late_ack=False)
    funded.lapse(request)
    funded.recover()
    tasks.answers = [{"tokens": 3}]
    assert ask(funded, tasks) == 1
    assert funded.balances("b", "usd") == [(0, 3), (0, 20)]
    assert funded.row(request).unmetered


@pytest.mark.parametrize(("answer", "late"), [(3, 5), (12, 14), (30, 32)])
def test_an_answer_takes_the_place_of_what_was_assumed(
    funded: Ledger, tasks: Tasks, answer: int, late: int
) -> None:
    """A reply that did not tell all is charged the estimate only while nobody knows better."""
    request = funded.reserve(10)
    attempt = funded.run(request, inquires=True, late_ack=False)
    attempt.write(Used({"tokens": 2}, incomplete=("tokens",)), "one")
    attempt.write(Used({"tokens": 0}, incomplete=("tokens",)), "two")
    assert funded.row(request).unmetered
    funded.lapse(request)
    assert funded.recover().asked == 1
    tasks.answers = [{None: answer}]
    assert ask(funded, tasks) == 1
    assert funded.balance() == (0, answer)
    row = funded.row(request)
    assert (row.state, row.unmetered) == ("settled", False)
    attempt.record(2)
    assert funded.balance() == (0, late)


def test_what_was_assumed_of_another_attempt_stays(funded: Ledger, tasks: Tasks) -> None:
    request = funded.reserve(10)
    funded.relay()
    first = funded.run(request)
    first.write(Used({"tokens": 2}, incomplete=("tokens",)), "one")
    funded.lapse(request)
    assert funded.recover().rerun == 1
    funded.relay()
    second = funded.run(request, inquires=True, rerun=False)
    second.write(Used({"tokens": 1}, incomplete=("tokens",)), "two")
    funded.lapse(request)
    assert funded.recover().asked == 1
    tasks.answers = [{None: 3}]
    assert ask(funded, tasks) == 1
    assert funded.balance() == (0, 13)
    assert funded.row(request).unmetered


def test_an_answer_that_tells_of_more_is_counted(funded: Ledger) -> None:
    """The one before was recorded, and its process died before it could conclude."""
    request, _ = lost(funded, early=True)
    used = []
    for total in (0, 7, 12, 12, 5):
        funded.store.run(
            inquiries.record_total,
            funded.root,
            request.reservation_id,
            1,
            "lookup:1:0",
            {None: total},
        )
        used.append(funded.line(request)[1])
    assert used == [0, 7, 12, 12, 12]
    assert len(funded.rows("usage")) == 3


@pytest.mark.parametrize(
    ("answer", "end"),
    [({None: 3}, ("settled", (0, 3), False)), (None, ("lost", (0, 10), False))],
)
def test_who_may_not_run_again_is_charged_as_answered(
    funded: Ledger, tasks: Tasks, answer: Any, end: tuple[Any, ...]
) -> None:
    """An attempt was to follow, and its turns are over."""
    request, _ = lost(funded, 2)
    if answer is None:
        later(funded)
    tasks.answers = [answer]
    assert ask(funded, tasks) == 1
    assert funded.state(request) == "waiting"
    assert funded.deliver(request, Retries(max_attempts=1)).replay.kind == "refused"
    row = funded.row(request)
    assert (row.state, funded.balance(), row.unmetered) == end
    assert [row.payload for row in funded.rows("attempts", attempt=1)] == [None]


def test_a_unit_without_an_answer_is_charged_its_estimate_there_too(
    funded: Ledger, tasks: Tasks
) -> None:
    funded.set("usd", 100, "usd")
    request = funded.reserve(10, ("usd", 20))
    funded.run(request, inquires=True)
    funded.lapse(request)
    funded.recover()
    tasks.answers = [{"tokens": 3}]
    assert ask(funded, tasks) == 1
    funded.deliver(request, Retries(max_attempts=1))
    assert funded.balances("b", "usd") == [(0, 3), (0, 20)]
    assert (funded.state(request), funded.row(request).unmetered) == ("settled", True)


def test_another_attempt_follows_an_answer(funded: Ledger, tasks: Tasks) -> None:
    request, _ = lost(funded, 4)
    tasks.answers = [{None: 7}]
    assert ask(funded, tasks) == 1
    assert (funded.state(request), funded.balance()) == ("waiting", (17, 0))
    assert funded.relay().published == 1
    funded.run(request).end(RETURNED)
    assert funded.balance() == (0, 17)
    assert [row.outcome for row in funded.rows("attempts")] == ["uncertain", "returned"]


def test_a_retry_that_was_written_takes_over_after_the_answer(funded: Ledger, tasks: Tasks) -> None:
    request = funded.reserve(10)
    attempt = funded.run(request, inquires=True)
    attempt.record(2)
    following, _ = funded.retry(request, attempt)
    funded.lapse(request)
    assert funded.recover() == Recovered(asked=1)
    assert funded.deliver(following) == Running()
    tasks.answers = [{None: 2}]
    assert ask(funded, tasks) == 1
    assert funded.state(request) == "waiting"
    funded.run(following).end(RETURNED)
    assert [row.outcome for row in funded.rows("attempts")] == ["uncertain", "returned"]
    assert RETRIED.kind not in {row.outcome for row in funded.rows("attempts")}


def test_who_raises_is_asked_again_later_and_later(funded: Ledger, tasks: Tasks) -> None:
    request, _ = lost(funded, early=True)
    waits = []
    for answer in (ConnectionError(), None, ConnectionError()):
        tasks.answers = [answer]
        assert ask(funded, tasks) == 0
        [row] = funded.rows("attempts")
        waits.append(row.lease_until_us)
        assert inquiry.run_once(funded.store, funded.settings, tasks) == 0
    assert waits == sorted(waits)
    assert len(tasks.asked) == 3
    tasks.answers = [{None: 1}]
    assert ask(funded, tasks) == 1
    assert funded.state(request) == "settled"


@pytest.mark.parametrize("answer", [None, ConnectionError()])
@pytest.mark.parametrize(
    ("undone", "reason"), [([], None), ([True], "compensated"), ([OSError()], "not compensated")]
)
def test_without_an_answer_it_is_undone_and_lost(
    funded: Ledger, tasks: Tasks, answer: Any, undone: list[Any], reason: str | None
) -> None:
    request, _ = lost(funded, 4, early=True)
    later(funded)
    tasks.answers, tasks.undone = [answer], list(undone)
    if reason == "not compensated":
        assert ask(funded, tasks) == 0, "it may be undone yet"
        later(funded)
        tasks.answers, tasks.undone = [answer], [OSError()]
    assert ask(funded, tasks) == 1
    row = funded.row(request)
    assert (row.state, row.reason) == ("lost", reason)
    assert funded.balance() == (0, 10)


def test_a_task_without_lookup_undoes_at_once(funded: Ledger, tasks: Tasks) -> None:
    request, _ = lost(funded)
    tasks.undone = [OSError(), True]
    assert ask(funded, tasks) == 0
    assert ask(funded, tasks) == 1
    assert funded.state(request) == "waiting"


def test_what_was_cancelled_meanwhile_does_not_run_again(funded: Ledger, tasks: Tasks) -> None:
    request, _ = lost(funded, 4)
    settlement.cancel(funded.store, funded.settings, request.task_id)
    tasks.answers = [{None: 5}]
    assert ask(funded, tasks) == 1
    assert (funded.state(request), funded.balance()) == ("settled", (0, 5))
    assert funded.recover().told == 1


def test_of_several_processes_one_asks(funded: Ledger, tasks: Tasks) -> None:
    request, _ = lost(funded, early=True)
    tasks.answers = [None] * 4
    asks = [lambda: inquiry.run_once(funded.store, funded.settings, tasks)] * 4
    at_once(asks)
    assert len(tasks.asked) == 1
    # However long it takes: it is nobody else's meanwhile.
    other = Tasks(funded)
    tasks.on_ask = lambda: inquiry.run_once(funded.store, funded.settings, other)
    assert ask(funded, tasks) == 0
    assert other.asked == []
    assert funded.state(request) == "running"


def test_of_several_answers_one_concludes(funded: Ledger, tasks: Tasks) -> None:
    """One that took its time finds that another has asked since."""
    request, _ = lost(funded, early=True)
    other = Tasks(funded, answers=[{None: 7}])
    tasks.answers = [{None: 7}]
    tasks.on_ask = lambda: ask(funded, other)
    assert ask(funded, tasks) == 0
    assert funded.balance() == (0, 7)
    assert funded.state(request) == "settled"
    assert len(other.asked) == 1


def test_a_process_that_dies_with_a_question_has_it_asked_again(
    funded: Ledger, tasks: Tasks
) -> None:
    request, _ = lost(funded, early=True)

    def die() -> None:
        raise SystemExit

    tasks.on_ask = die
    with pytest.raises(SystemExit):
        ask(funded, tasks)
    tasks.on_ask = lambda: None
    assert inquiry.run_once(funded.store, funded.settings, tasks) == 0, "it may live"
    tasks.answers = [{None: 3}]
    assert ask(funded, tasks) == 1
    assert (funded.state(request), funded.balance()) == ("settled", (0, 3))


@pytest.mark.parametrize("may_rerun", [True, False])
def test_a_process_that_is_known_to_be_gone(funded: Ledger, tasks: Tasks, may_rerun: bool) -> None:
    request = funded.reserve(10)
    funded.run(request, inquires=True)
    over = settlement.worker_lost(funded.store, funded.settings, request.task_id, BOOT, may_rerun)
    assert over is may_rerun, "Celery stores what is not to run again"
    assert funded.state(request) == "running"
    tasks.answers = [{None: 3}]
    assert inquiry.run_once(funded.store, funded.settings, tasks) == 1
    assert funded.state(request) == ("waiting" if may_rerun else "settled")
    assert funded.recover().told == 0


def test_a_result_that_is_stored_needs_no_question(funded: Ledger) -> None:
    request = funded.reserve(10)
    funded.run(request, inquires=True)
    funded.results.stored[request.task_id] = "returned"
    funded.lapse(request)
    assert funded.recover() == Recovered(finished=1)
    assert funded.state(request) == "settled"


def test_what_its_old_worker_records_meanwhile_is_counted_in_full(
    funded: Ledger, tasks: Tasks
) -> None:
    request, attempt = lost(funded, 4, early=True)
    attempt.record(20)
    assert funded.balance() == (24, 0)
    tasks.answers = [{None: 7}]
    assert ask(funded, tasks) == 1
    assert funded.balance() == (0, 24)
    attempt.record(1)
    assert funded.balance() == (0, 25)
    assert funded.line(request)[2] == 25


def test_many_are_asked_about_in_turn(
    funded: Ledger, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inquiry, "LIMIT", 2)
    requests = [lost(funded, early=True)[0] for _ in range(3)]
    tasks.answers = [None, None]
    assert inquiry.run_once(funded.store, funded.settings, tasks) == 0
    tasks.answers = [{None: 1}]
    assert inquiry.run_once(funded.store, funded.settings, tasks) == 1, "the others wait"
    assert sorted(map(funded.state, requests)) == ["running", "running", "settled"]


def test_a_bound_on_attempts_holds_for_those_that_were_asked_about(
    funded: Ledger, tasks: Tasks, told: Told
) -> None:
    funded.settings = replace(funded.settings, max_deliveries=1)
    request = funded.reserve(10)
    funded.run(request, inquires=True)
    funded.lapse(request)
    assert funded.recover() == Recovered(asked=1, told=1)
    tasks.answers = [{None: 2}]
    assert ask(funded, tasks) == 1
    assert (funded.state(request), funded.balance()) == ("settled", (0, 2))
    assert told("attempt.lost")


def test_it_is_shown_how_often_a_task_was_asked(funded: Ledger, tasks: Tasks) -> None:
    request, _ = lost(funded, early=True)

    def shown() -> str:
        [story] = reconcile.explain(funded.store, funded.settings, request.task_id)
        return as_text(stories_view([story]), width=200)

    tasks.answers = [None]
    ask(funded, tasks)
    assert "its task was asked 1 times what became of it, and is again at" in shown()
    tasks.answers = [{None: 3}]
    assert ask(funded, tasks) == 1
    assert "its task was asked 2 times what became of it" in shown()
