"""Groups, chords and chains as one admission: all or none, in part, whole, named, repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import chain, chord, group
from sqlalchemy import event

from celery_budget import BudgetExceeded, RequestConflict, UnknownBudget, budgeted
from celery_budget.errors import PolicyError
from celery_budget.store import schema
from tests.integration.support import Shop


@pytest.fixture
def shop(on_both: Shop) -> Shop:
    """A shop with ``work`` (3 tokens of its tenant) and others."""
    app = on_both.app

    @budgeted(budget="tenant:{tenant}", estimate=3)
    @app.task(name="shop.work", shared=False)
    def work(number: Any, tenant: str = "a") -> Any:
        return number

    @budgeted(budget="tenant:{tenant}", estimate=lambda size: size)
    @app.task(name="shop.sized", shared=False)
    def sized(number: Any, size: int, tenant: str = "a") -> Any:
        return number

    @budgeted(budget="tenant:a", estimate=lambda size: size)
    @app.task(name="shop.grown", shared=False)
    def grown(size: int) -> int:
        return size

    @app.task(name="shop.plain", shared=False)
    def plain(number: Any) -> Any:
        return number

    on_both.budget.set("tenant:b", limit=10, unit="tokens")
    return on_both


@contextmanager
def transactions(shop: Shop) -> Iterator[list[str]]:
    """Collect what is said to the database."""
    said: list[str] = []

    def note(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        said.append(statement)

    engine = shop.budget.store._engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield said
    finally:
        event.remove(engine, "before_cursor_execute", note)


def outbox(shop: Shop) -> list[tuple[str, str]]:
    """The tasks in the outbox with their ids."""
    return [(row.task_name, row.task_id) for row in shop.rows(schema.outbox)]


def states(shop: Shop) -> list[str]:
    """The states of all reservations, by the order they were made in."""
    rows = sorted(shop.rows(schema.reservations), key=lambda row: row.reservation_id)
    return [row.state for row in rows]


# Groups.


def test_a_group_is_admitted_as_a_whole(shop: Shop) -> None:
    work = shop.task("shop.work")
    result = group(work.s(number) for number in range(3)).apply_async()
    assert shop.amounts("tenant:a") == (9, 0, 1)
    assert sorted(outbox(shop)) == sorted(("shop.work", one.id) for one in result.results)


def test_a_group_that_does_not_fit_leaves_nothing(shop: Shop) -> None:
    work, plain = shop.task("shop.work"), shop.task("shop.plain")
    before = shop.ledger("budget_refusals")
    with pytest.raises(BudgetExceeded) as refused:
        group([plain.s(0), *(work.s(number) for number in range(4)), work.s(1, "b")]).apply_async()
    # The whole can never fit, though what there is would do for a part of it.
    assert (refused.value.budget, refused.value.requested) == ("tenant:a", 12)
    assert (refused.value.reason, refused.value.reserved) == ("exhausted", 0)
    assert shop.ledger("budget_refusals") == before
    assert shop.received() == []


def test_a_member_that_cannot_be_worked_out_leaves_nothing(shop: Shop) -> None:
    work = shop.task("shop.work")
    before = shop.ledger()
    with pytest.raises(UnknownBudget):
        group(work.s(1), work.s(2, "nobody")).apply_async()
    with pytest.raises(TypeError):
        group(work.s(1), work.s()).apply_async()
    assert shop.ledger() == before


def test_the_number_of_statements_does_not_depend_on_that_of_members(shop: Shop) -> None:
    work = shop.task("shop.work")
    shop.budget.set("tenant:a", limit=10_000)
    work.delay(0)
    shop.sql(schema.backlog.update().values(counted_us=2**62))
    counts = []
    for members in (2, 200):
        with transactions(shop) as said:
            group(work.s(number) for number in range(members)).apply_async()
        counts.append(len(said))
    assert counts[0] == counts[1] <= 14, counts


def test_a_group_in_part(shop: Shop) -> None:
    work = shop.task("shop.work")
    signatures = [work.s(1), work.s(2), work.s(3), work.s(4), work.s(5, "b"), work.s(6, "nobody")]
    result = group(signatures).apply_async(partial=True)
    assert [type(one.error) for one in result.refused] == [BudgetExceeded, UnknownBudget]
    assert {one.task_name for one in result.refused} == {"shop.work"}
    assert len(result.results) == 4
    assert not {one.id for one in result.results} & {one.task_id for one in result.refused}
    assert {task_id for _, task_id in outbox(shop)} == {one.id for one in result.results}
    assert shop.amounts("tenant:a") == (9, 0, 1)


def test_of_a_group_in_part_a_chord_is_one(shop: Shop) -> None:
    work, plain = shop.task("shop.work"), shop.task("shop.plain")
    fits = chord([work.s(1), work.s(2)], plain.s())
    result = group([work.s(0), chord([work.s(1), work.s(2), work.s(3)], plain.s()), fits])
    applied = result.apply_async(partial=True)
    assert len(applied.results) == 2
    assert {type(one.error) for one in applied.refused} == {BudgetExceeded}
    assert shop.amounts("tenant:a") == (9, 0, 1)


def test_a_group_in_part_that_fits_is_whole(shop: Shop) -> None:
    result = group(shop.task("shop.work").s(1)).apply_async(partial=True)
    assert (result.refused, len(result.results)) == ((), 1)


@pytest.mark.parametrize("partial", ["yes", 1, None])
def test_partial_is_true_or_false(shop: Shop, partial: Any) -> None:
    with pytest.raises(PolicyError, match="partial="):
        group(shop.task("shop.work").s(1)).apply_async(partial=partial)


def test_an_application_without_budgets_is_left_alone(shop: Shop) -> None:
    from tests.integration.support import make_app

    other = make_app("other", budget=False)

    @other.task(name="other.plain", shared=False)
    def plain() -> None: ...

    group(plain.s(), plain.s()).apply_async()
    assert outbox(shop) == []
    other.close()


# Chords.


def test_a_chord_is_admitted_as_a_whole(shop: Shop) -> None:
    work, plain = shop.task("shop.work"), shop.task("shop.plain")
    with pytest.raises(BudgetExceeded):
        chord([work.s(number) for number in range(4)], plain.s()).apply_async()
    assert outbox(shop) == []
    assert shop.received() == []
    chord([work.s(number) for number in range(3)], plain.s()).apply_async()
    names = [name for name, _ in outbox(shop)]
    assert names.count("shop.work") == 3


def test_a_chord_in_part_makes_no_sense(shop: Shop) -> None:
    work = shop.task("shop.work")
    with pytest.raises(PolicyError, match="its body waits"):
        chord([work.s(1)], work.s()).apply_async(partial=True)
    assert outbox(shop) == []


# Chains reserved whole.


def test_a_chain_reserved_whole(shop: Shop) -> None:
    work, sized = shop.task("shop.work"), shop.task("shop.sized")
    chain(work.s(1), sized.s(2), sized.si(0, 4, "b")).apply_async(reserve="chain")
    assert shop.amounts("tenant:a") == (5, 0, 5)
    assert shop.amounts("tenant:b") == (4, 0, 6)
    assert states(shop) == ["reserved", "planned", "planned"]
    assert [name for name, _ in outbox(shop)] == ["shop.work"]
    assert shop.budget.reconcile().mismatches == ()


def test_a_chain_that_does_not_fit_whole_leaves_nothing(shop: Shop) -> None:
    work = shop.task("shop.work")
    before = shop.ledger("budget_refusals")
    with pytest.raises(BudgetExceeded):
        chain(*(work.si(number) for number in range(4))).apply_async(reserve="chain")
    assert shop.ledger("budget_refusals") == before


def test_a_chain_of_one_step_reserved_whole(shop: Shop) -> None:
    chain(shop.task("shop.work").s(1)).apply_async(reserve="chain")
    assert states(shop) == ["reserved"]


def test_step_by_step_is_what_a_chain_is_admitted_by(shop: Shop) -> None:
    work = shop.task("shop.work")
    chain(*(work.si(number) for number in range(4))).apply_async()
    assert shop.amounts("tenant:a") == (3, 0, 7)


def test_what_cannot_be_reserved_whole(shop: Shop) -> None:
    work, plain, grown = (shop.task(f"shop.{name}") for name in ("work", "plain", "grown"))
    before = shop.ledger()
    with pytest.raises(PolicyError, match=r"step 2 of the chain, shop\.plain, has no"):
        chain(work.s(1), plain.s(), work.s()).apply_async(reserve="chain")
    with pytest.raises(PolicyError, match="step 2 of the chain is a chord"):
        chain(work.s(1), group(work.s(), work.s()), work.s()).apply_async(reserve="chain")
    with pytest.raises(PolicyError, match="depends on 'size', which is <what the step before"):
        chain(work.s(1), grown.s()).apply_async(reserve="chain")
    with pytest.raises(PolicyError, match="reserve="):
        work.apply_async((1,), reserve="all")
    assert shop.ledger() == before


# The request id of a canvas.


def test_a_canvas_with_a_request_id_is_itself_again(shop: Shop) -> None:
    work = shop.task("shop.work")

    def nightly() -> Any:
        return group(work.s(number) for number in range(3)).apply_async(request_id="nightly")

    first = nightly()
    before = shop.ledger()
    again = nightly()
    assert again.id == first.id
    assert [one.id for one in again.results] == [one.id for one in first.results]
    assert shop.ledger() == before


def test_another_canvas_under_the_same_id_conflicts(shop: Shop) -> None:
    work = shop.task("shop.work")
    group(work.s(1), work.s(2)).apply_async(request_id="nightly")
    before = shop.ledger()
    for other in (
        group(work.s(1), work.s(2), work.s(3)),
        group(work.s(1), work.s(3)),
        group(work.s(1)),
    ):
        with pytest.raises(RequestConflict):
            other.apply_async(request_id="nightly")
    assert shop.ledger() == before


def test_request_ids_of_canvases_are_their_owners(shop: Shop) -> None:
    work = shop.task("shop.work")
    first = group(work.s(1), work.s(2)).apply_async(request_id="nightly")
    other = group(work.s(1, "b"), work.s(2, "b")).apply_async(request_id="nightly")
    assert not {one.id for one in first.results} & {one.id for one in other.results}


def test_a_chain_and_a_chord_with_a_request_id(shop: Shop) -> None:
    work, plain = shop.task("shop.work"), shop.task("shop.plain")

    def both() -> list[str]:
        one = chain(work.s(1), plain.s(), work.s()).apply_async(request_id="chain")
        two = chord([work.s(1), work.s(2)], plain.s()).apply_async(request_id="chord")
        return [one.id, one.parent.id, one.parent.parent.id, two.id, *map(str, two.parent.results)]

    first = both()
    before = shop.ledger()
    assert both() == first
    assert shop.ledger() == before
    assert len(set(first)) == len(first)


def test_a_canvas_keeps_the_signatures_it_was_made_of(shop: Shop) -> None:
    work = shop.task("shop.work")
    members = [work.s(1)]
    canvas = group(members)
    canvas.apply_async(request_id="one")
    assert all("task_id" not in member.options for member in members)
    canvas.apply_async(request_id="two")
    assert len(outbox(shop)) == 2


def test_a_request_id_needs_a_budget_to_begin_with(shop: Shop) -> None:
    work, plain = shop.task("shop.work"), shop.task("shop.plain")
    with pytest.raises(PolicyError, match="none of the tasks it starts with has a budget"):
        chain(plain.s(1), work.s()).apply_async(request_id="r")
    with pytest.raises(PolicyError, match="request_id"):
        group(work.s(1)).apply_async(request_id="a\nb")
    group(plain.s(1), plain.s(2)).apply_async(request_id="r")
    assert len(shop.received()) == 2


def test_the_envelopes_tell_nothing_of_our_options(shop: Shop) -> None:
    work = shop.task("shop.work")
    group(work.s(1), work.s(2)).apply_async(request_id="r", finishing=True, order_key="k")
    chain(work.s(1)).apply_async(reserve="chain")
    for row in shop.rows(schema.outbox):
        for ours in ("request_id", "finishing", "order_key", "reserve", "budget_canvas"):
            assert ours not in row.envelope
    keys = [row.order_key for row in shop.rows(schema.outbox)]
    assert keys.count("k") == 2


def test_nothing_stays_open_where_a_member_fails(shop: Shop) -> None:
    work = shop.task("shop.work")
    with pytest.raises(TypeError):
        group(work.s(1), work.s()).apply_async()
    work.delay(1)
    assert len(outbox(shop)) == 1
