"""Chains that are reserved whole: what is planned holds, is reserved in its turn, or given back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_budget import admission, settlement
from celery_budget.core.identity import new_id
from celery_budget.core.reservations import (
    AlreadyReserved,
    Missing,
    Outcome,
    Refused,
    Released,
    Reserved,
    ReserveRequest,
    Skipped,
    Unknown,
)
from celery_budget.store import inquiries
from tests.contract.racers import at_once
from tests.contract.support import RAISED, RETURNED, Ledger, message_of

IGNORED = Outcome("ignored")
REPLACED = Outcome("replaced")


def chain_of(ledger: Ledger, *amounts: int, budget: str = "b") -> list[ReserveRequest]:
    """The requests of a chain with these estimates."""
    head = ledger.request(amounts[0], budget=budget)
    plan = head.reservation_id
    return [
        replace(head, plan=plan, step=0),
        *(
            ledger.request(amount, budget=budget, plan=plan, step=step)
            for step, amount in enumerate(amounts[1:], 1)
        ),
    ]


def admit(ledger: Ledger, steps: list[ReserveRequest]) -> list[object]:
    publications = [
        admission.Publication(step, None if step.step else message_of(step)) for step in steps
    ]
    return list(admission.admit_many(ledger.store, ledger.settings, publications))


def planned(ledger: Ledger, *amounts: int) -> list[ReserveRequest]:
    """Admit a chain whole; it must fit."""
    steps = chain_of(ledger, *amounts)
    assert admit(ledger, steps) == [Reserved(step.reservation_id) for step in steps]
    return steps


def activate(ledger: Ledger, step: ReserveRequest) -> object:
    turn = replace(step, fingerprint="1:told", step=None)
    return admission.activate(ledger.store, ledger.settings, turn, message_of(turn))


def states(ledger: Ledger, steps: list[ReserveRequest]) -> list[str]:
    return [ledger.state(step) for step in steps]


def test_all_of_it_is_held_and_one_message_written(funded: Ledger) -> None:
    steps = planned(funded, 10, 20, 30)
    assert funded.balance() == (60, 0)
    assert states(funded, steps) == ["reserved", "planned", "planned"]
    assert [row.task_id for row in funded.rows("outbox")] == [steps[0].task_id]
    for step in steps[1:]:
        # Nobody can claim what has no message.
        assert not isinstance(funded.deliver(step), settlement.Attempt)


def test_one_that_does_not_fit_is_none(funded: Ledger) -> None:
    steps = chain_of(funded, 10, 20, 80)
    before = funded.dump()
    first, second, third = admit(funded, steps)
    assert (first, second) == (Skipped(), Skipped())
    assert isinstance(third, Refused)
    assert {**funded.dump(), "refusals": []} == before
    unknown = [*chain_of(funded, 10), replace(funded.request(1, budget="unknown"), step=1)]
    assert admit(funded, unknown) == [Skipped(), Unknown("unknown")]


def test_a_step_has_its_turn(funded: Ledger) -> None:
    steps = planned(funded, 10, 20, 30)
    attempt = funded.run(steps[0])
    attempt.end(RETURNED)
    assert activate(funded, steps[1]) == Reserved(steps[1].reservation_id)
    repeated = AlreadyReserved(steps[1].reservation_id, steps[1].task_id)
    assert activate(funded, steps[1]) == repeated
    assert attempt.close()
    assert states(funded, steps) == ["settled", "reserved", "planned"]
    assert funded.balance() == (50, 10)
    assert funded.row(steps[1]).fingerprint == "1:told"
    assert funded.message(steps[1]) is not None
    funded.run(steps[1]).end(RAISED)
    assert activate(funded, steps[1]) == repeated
    assert states(funded, steps) == ["settled", "settled", "released"]
    assert funded.balance() == (0, 10)


@pytest.mark.parametrize("outcome", [RAISED, IGNORED, REPLACED, Outcome("rejected")])
def test_an_end_without_success_gives_the_rest_back(funded: Ledger, outcome: Outcome) -> None:
    steps = planned(funded, 10, 20, 30)
    attempt = funded.run(steps[0])
    attempt.record(4)
    attempt.end(outcome)
    assert states(funded, steps) == ["settled", "released", "released"]
    assert funded.balance() == (0, 4)
    assert {funded.row(step).reason for step in steps[1:]} == {"predecessor"}
    # The chain went another way: the step is admitted like any that continues.
    assert activate(funded, steps[1]) == Missing()


@pytest.mark.parametrize("how", ["cancelled", "expired", "lost"])
def test_so_does_whatever_else_ends_a_step(funded: Ledger, how: str) -> None:
    steps = planned(funded, 10, 20)
    if how == "cancelled":
        settlement.cancel(funded.store, funded.settings, steps[0].task_id)
    elif how == "expired":
        assert settlement.revoke(funded.store, funded.root, steps[0].reservation_id, "expired")
    else:
        funded.run(steps[0], late_ack=False)
        funded.put(
            "attempts",
            {"lease_until_us": 1, "suspected_us": 1},
            reservation_id=steps[0].reservation_id,
        )
        assert funded.recover().lost == 1
    assert funded.state(steps[1]) == "released"
    assert funded.balance() == (0, 10 if how == "lost" else 0)


def test_a_retry_keeps_the_rest(funded: Ledger) -> None:
    steps = planned(funded, 10, 20)
    attempt = funded.run(steps[0])
    following, _ = funded.retry(steps[0], attempt)
    attempt.end(Outcome("retried"))
    assert states(funded, steps) == ["waiting", "planned"]
    funded.run(following).end(RETURNED)
    assert states(funded, steps) == ["settled", "planned"]


def test_a_replacement_with_a_reservation_takes_the_step_over(funded: Ledger) -> None:
    steps = planned(funded, 10, 20)
    attempt = funded.run(steps[0])
    other = replace(
        funded.request(5), task_id=steps[0].task_id, request_id=steps[0].task_id, nesting=1
    )
    assert funded.admit(other, continuation=True) == Reserved(other.reservation_id)
    attempt.end(REPLACED)
    attempt.close()
    assert funded.state(steps[1]) == "planned"
    assert funded.balance() == (25, 0)
    funded.run(other).end(RAISED)
    assert funded.state(steps[1]) == "released"


def replaced(ledger: Ledger, task: ReserveRequest) -> ReserveRequest:
    """The request that a running task puts in its place, admitted."""
    other = replace(ledger.request(5), task_id=task.task_id, request_id=task.task_id, nesting=1)
    assert ledger.admit(other, continuation=True) == Reserved(other.reservation_id)
    return other


@pytest.mark.parametrize("asked", [True, False])
def test_a_replacement_takes_over_from_a_lost_step(funded: Ledger, asked: bool) -> None:
    """Its worker died between the replacement's admission and its own end."""
    steps = planned(funded, 10, 20)
    funded.run(steps[0], rerun=False, inquires=asked)
    other = replaced(funded, steps[0])
    funded.lapse(steps[0])
    funded.recover()
    if asked:
        [seen] = funded.store.read(inquiries.due, funded.root, 10)
        how = {"park_us": 1, "answered": False, "reason": None}
        assert funded.store.run(inquiries.conclude, funded.root, seen, **how) == "lost"
    assert states(funded, [*steps, other]) == ["lost", "planned", "reserved"]
    attempt = funded.run(other)
    attempt.end(RETURNED)
    assert activate(funded, steps[1]) == Reserved(steps[1].reservation_id)
    attempt.close()
    assert funded.state(steps[1]) == "reserved"
    assert funded.results.told == []


def test_a_lost_step_that_replaced_nothing_gives_the_rest_back(funded: Ledger) -> None:
    steps = planned(funded, 10, 20)
    funded.run(steps[0], rerun=False)
    funded.lapse(steps[0])
    funded.recover()
    assert states(funded, steps) == ["lost", "released"]


def test_what_replaces_a_cancelled_task_that_is_lost_is_cancelled(funded: Ledger) -> None:
    request, _ = funded.start(10)
    settlement.cancel(funded.store, funded.settings, request.task_id)
    other = replaced(funded, request)
    funded.lapse(request)
    assert funded.recover().lost == 1
    assert states(funded, [request, other]) == ["lost", "released"]
    assert funded.balance() == (0, 10)
    assert funded.tell_all().told == 0
    assert funded.results.told == [(request.task_id, "cancelled")]


def test_a_success_that_nothing_came_of_gives_the_rest_back_when_it_is_closed(
    funded: Ledger,
) -> None:
    steps = planned(funded, 10, 20, 30)
    attempt = funded.run(steps[0])
    attempt.end(RETURNED)
    assert states(funded, steps) == ["settled", "planned", "planned"]
    attempt.close()
    assert states(funded, steps) == ["settled", "released", "released"]


def test_a_step_that_is_cancelled_stays_so(funded: Ledger) -> None:
    steps = planned(funded, 10, 20, 30)
    cancelled = settlement.cancel(funded.store, funded.settings, steps[1].task_id)
    assert cancelled == Released(steps[1].task_id, "released")
    assert states(funded, steps) == ["reserved", "released", "released"]
    attempt = funded.run(steps[0])
    attempt.end(RETURNED)
    reached = AlreadyReserved(steps[1].reservation_id, steps[1].task_id)
    assert activate(funded, steps[1]) == reached
    attempt.close()
    assert funded.rows("outbox") == []


def again(steps: list[ReserveRequest], fingerprint: str = "1:same") -> list[ReserveRequest]:
    """The same chain once more, as another call would ask for it."""
    plan = new_id()
    return [
        replace(
            step,
            reservation_id=new_id() if step.step else plan,
            plan=plan,
            fingerprint=fingerprint if step.step else step.fingerprint,
        )
        for step in steps
    ]


def test_a_repeat_of_the_whole_chain_changes_nothing(funded: Ledger) -> None:
    """Whatever has become of its steps, or was told of them since."""
    steps = planned(funded, 10, 20, 30)
    found = AlreadyReserved(steps[0].reservation_id, steps[0].task_id)

    def repeat() -> None:
        before = funded.dump()
        assert admit(funded, again(steps)) == [found] * 3
        assert admit(funded, again(steps, "1:other")) == [found] * 3
        assert funded.dump() == before

    repeat()
    funded.run(steps[0]).end(RETURNED)
    activate(funded, steps[1])
    repeat()
    funded.run(steps[1]).end(RAISED)
    repeat()


def test_a_chain_admitted_step_by_step_is_not_planned_afterwards(funded: Ledger) -> None:
    steps = chain_of(funded, 10, 20)
    funded.admit(replace(steps[0], plan=None, step=None))
    before = funded.dump()
    found = AlreadyReserved(steps[0].reservation_id, steps[0].task_id)
    assert admit(funded, again(steps)) == [found, found]
    assert funded.dump() == before


def test_a_chain_whose_step_was_cancelled_is_not_planned_anew(funded: Ledger) -> None:
    steps = planned(funded, 10, 20, 30)
    settlement.cancel(funded.store, funded.settings, steps[1].task_id)
    before = funded.dump()
    admit(funded, again(steps))
    assert funded.dump() == before
    settlement.cancel(funded.store, funded.settings, steps[0].task_id)
    # What never ran may be reserved anew, all of it.
    new = again(steps)
    assert admit(funded, new) == [Reserved(step.reservation_id) for step in new]
    assert states(funded, new) == ["reserved", "planned", "planned"]


def test_a_turn_and_a_release_at_once(racing: Ledger) -> None:
    """Either the step is reserved with its message, or it is given back and has none."""
    racing.set("b", 1000)
    seen = set()
    for _ in range(30):
        steps = planned(racing, 1, 2)
        attempt = racing.run(steps[0])
        reached = at_once([lambda: activate(racing, steps[1]), lambda: attempt.end(IGNORED)])[0]  # noqa: B023
        state = racing.state(steps[1])
        seen.add(state)
        assert (state, reached) in (
            ("reserved", Reserved(steps[1].reservation_id)),
            ("released", Missing()),
        )
        assert (racing.message(steps[1]) is not None) is (state == "reserved")
    assert seen <= {"reserved", "released"}


def test_chains_of_opposite_budgets_end_at_once(racing: Ledger) -> None:
    """The balances of a step and of all that is planned after it are locked in one order."""
    for name in ("x", "y"):
        racing.set(name, 10_000)
    for _ in range(30):
        attempts = []
        for budgets in (("x", "y"), ("y", "x")):
            head = racing.request(3, budget=budgets[0])
            steps = [
                replace(head, plan=head.reservation_id, step=0),
                racing.request(2, budget=budgets[1], plan=head.reservation_id, step=1),
            ]
            admit(racing, steps)
            attempts.append(racing.run(steps[0]))
        assert at_once([lambda one=one: one.end(RAISED) for one in attempts]) == [True, True]
    assert racing.balances("x", "y") == [(0, 0), (0, 0)]
