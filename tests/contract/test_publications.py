"""Several publications in one transaction: units, messages without a budget, what is parked."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from celery_budget import admission, settlement
from celery_budget.admission import Publication
from celery_budget.core.messages import WireMessage
from celery_budget.core.reservations import (
    AlreadyReserved,
    Backlogged,
    Conflict,
    Parked,
    Refused,
    Reserved,
    ReserveRequest,
    Skipped,
)
from celery_budget.store import declaring, schema
from tests.contract.support import Ledger, message_of


def of(request: ReserveRequest, unit: int = 0, *, continuation: bool = False) -> Publication:
    return Publication(request, message_of(request), unit, continuation)


def plain(name: str, unit: int = 0, needs: uuid.UUID | None = None) -> Publication:
    return Publication(
        None, WireMessage(name, "shop.plain", b"body", "{}", "celery"), unit, needs=needs
    )


def admit(ledger: Ledger, publications: Sequence[Publication], **flags: bool) -> list[object]:
    return list(admission.admit_many(ledger.store, ledger.settings, publications, **flags))


def written(ledger: Ledger) -> set[str]:
    """The ids of the tasks in the outbox."""
    return {row.task_id for row in ledger.rows("outbox")}


def test_all_of_a_unit_or_none_of_it(funded: Ledger) -> None:
    first = [funded.request(30), funded.request(80)]
    second = [funded.request(40), funded.request(50)]
    third = [funded.request(20)]
    publications = [
        of(first[0], 1),
        of(second[0], 2),
        of(first[1], 1),
        plain("with the first", 1),
        of(second[1], 2),
        plain("with the second", 2),
        of(third[0], 3),
    ]
    outcomes = admit(funded, publications, partial=True)
    # The first unit takes nothing, whatever of it would have fitted.
    assert [type(outcome).__name__ for outcome in outcomes] == [
        "Skipped",
        "Reserved",
        "Refused",
        "NoneType",
        "Reserved",
        "NoneType",
        "Refused",
    ]
    assert written(funded) == {*(one.task_id for one in second), "with the second"}
    assert funded.balance() == (90, 0)


def test_one_request_in_two_units(funded: Ledger) -> None:
    shared, much, little = funded.request(10), funded.request(95), funded.request(1)
    publications = [of(shared, 1), of(much, 1), of(shared, 2), of(little, 2)]
    outcomes = admit(funded, publications, partial=True)
    assert isinstance(outcomes[1], Refused)
    assert isinstance(outcomes[3], Skipped)
    assert outcomes[3].because == outcomes[1]
    assert [outcomes[0], outcomes[2], outcomes[3]] == [Skipped(), Skipped(), Skipped()]
    assert written(funded) == set()
    assert admit(funded, [of(shared, 1), of(shared, 2), of(little, 2)]) == [
        Reserved(shared.reservation_id),
        Reserved(shared.reservation_id),
        Reserved(little.reservation_id),
    ]


def test_what_tells_of_a_request_goes_out_with_it_only(funded: Ledger) -> None:
    known, new = funded.reserve(5), funded.request(5)
    again = ReserveRequest(**{**vars(known), "reservation_id": uuid.uuid4()})
    outcomes = admit(
        funded,
        [
            of(again),
            plain("of the known", needs=again.reservation_id),
            of(new),
            plain("of the new", needs=new.reservation_id),
        ],
    )
    assert outcomes[0] == AlreadyReserved(known.reservation_id, known.task_id)
    assert written(funded) == {known.task_id, new.task_id, "of the new"}


def test_what_of_a_canvas_has_no_budget_goes_out_with_what_has(funded: Ledger) -> None:
    request = funded.request(5)

    def publish(one: ReserveRequest, name: str) -> None:
        admit(
            funded,
            [
                replace(of(one, 1), canvas="nightly"),
                replace(plain(f"{name} member", 2), canvas="nightly"),
                plain(f"{name} added by Celery", 1),
                plain(f"{name} of its own", 3),
            ],
        )

    publish(request, "first")
    publish(replace(request, reservation_id=uuid.uuid4()), "second")
    assert written(funded) == {
        request.task_id,
        "first member",
        "first added by Celery",
        "first of its own",
        "second of its own",
    }


def nightly(request: ReserveRequest, name: str, unit: int = 1) -> list[Publication]:
    """A budgeted member of a canvas, in a call of its own, and one without a budget."""
    anew = replace(request, reservation_id=uuid.uuid4())
    return [replace(one, canvas="nightly") for one in (of(anew, unit), plain(name, unit))]


def test_what_has_no_budget_is_not_written_anew_with_what_was_released(funded: Ledger) -> None:
    request = funded.request(5)
    [first, _] = admit(funded, nightly(request, "first"))
    assert isinstance(first, Reserved)
    settlement.revoke(funded.store, funded.root, first.reservation_id, "cancelled")
    [second, _] = admit(funded, nightly(request, "second"))
    assert isinstance(second, Reserved)
    assert written(funded) == {request.task_id, "first"}


def test_nor_with_what_was_parked(funded: Ledger) -> None:
    request = funded.request(500)
    for name in ("first", "second"):
        one, other = nightly(request, name)
        outcome, _ = admit(funded, [replace(one, continuation=True), other])
        assert isinstance(outcome, Parked)
    assert written(funded) == {"first"}


def test_nor_by_the_same_call_after_it_was_published(funded: Ledger) -> None:
    """As after a commit whose answer was lost, and a relay that was faster than the next try."""
    publications = nightly(funded.request(5), "member")
    outcomes = admit(funded, publications)
    funded.relay()
    assert admit(funded, publications) == outcomes
    funded.relay()
    assert funded.broker.published.count("member") == 1


def test_a_unit_that_did_not_fit_is_whole_when_it_does(funded: Ledger) -> None:
    little, much = funded.request(5), funded.request(500)

    def publish(call: int) -> None:
        publications = [
            *nightly(little, f"{call} with little"),
            *nightly(much, f"{call} with much", 2),
            replace(plain(f"{call} by itself", 3), canvas="nightly"),
        ]
        admit(funded, publications, partial=True)

    publish(1)
    funded.set("b", 1000)
    publish(2)
    publish(3)
    assert written(funded) == {
        little.task_id,
        much.task_id,
        "1 with little",
        "1 by itself",
        "2 with much",
    }


def test_what_is_to_be_prepared_goes_with_what_has_no_budget(funded: Ledger) -> None:
    little, much = funded.request(5), funded.request(500)
    prepared: list[str] = []

    def publish() -> None:
        publications = [*nightly(little, "little"), *nightly(much, "much", 2)]
        publications += [
            Publication(None, None, unit, prepare=partial(prepared.append, name))
            for unit, name in ((1, "little"), (2, "much"), (3, "by itself"))
        ]
        admit(funded, publications, partial=True)

    publish()
    assert prepared == ["little", "by itself"]
    funded.set("b", 1000)
    publish()
    assert prepared == ["little", "by itself", "much", "by itself"]


def test_what_fits_only_after_the_look_is_prepared_as_well(funded: Ledger) -> None:
    """Or a chord would go out of which its result backend knows nothing."""
    little, much = funded.request(5), funded.request(500)
    prepared: list[str] = []

    def tell_of_little() -> None:
        prepared.append("little")
        declaring.set_budget(running[0], funded.root, "b", {"limit": 1000})

    publications = [of(little), of(much, 2)]
    publications += [
        Publication(None, None, 1, prepare=tell_of_little),
        Publication(None, None, 2, prepare=partial(prepared.append, "much")),
    ]
    running: list[Any] = []

    class Seen:
        """Lends its connection to what is prepared: on SQLite no other could write meanwhile."""

        def run(self, function: Any, *args: Any) -> Any:
            def call(connection: Any) -> Any:
                running[:] = [connection]
                return function(connection, *args)

            return funded.store.run(call)

    outcomes = admission.admit_many(Seen(), funded.settings, publications, partial=True)
    assert outcomes[:2] == [Reserved(little.reservation_id), Reserved(much.reservation_id)]
    assert prepared == ["little", "much"]


def test_the_same_call_again_writes_nothing_twice(funded: Ledger) -> None:
    """As after a commit whose answer was lost."""
    publications = [of(funded.request(5)), plain("one"), plain("two")]
    first = admit(funded, publications)
    before = funded.dump()
    assert admit(funded, publications) == first
    assert funded.dump() == before


def test_messages_without_a_budget_only(funded: Ledger) -> None:
    assert admit(funded, [plain("one"), plain("two")]) == [None, None]
    assert written(funded) == {"one", "two"}
    assert admit(funded, []) == []


def test_what_continues_is_parked_by_itself(funded: Ledger) -> None:
    requests = [funded.request(amount) for amount in (60, 50, 40)]
    outcomes = admit(funded, [of(one, continuation=True) for one in requests])
    assert [type(outcome) for outcome in outcomes] == [Reserved, Parked, Reserved]
    assert funded.balance() == (100, 0)
    assert funded.refused() == 0
    again = admit(funded, [of(one, continuation=True) for one in requests])
    assert again == outcomes
    funded.set("b", 150)
    assert funded.sweep().admitted == 1


def test_what_continues_and_is_in_use_for_something_else(funded: Ledger) -> None:
    known = funded.reserve(5)
    other = ReserveRequest(
        **{**vars(known), "reservation_id": uuid.uuid4(), "fingerprint": "1:other"}
    )
    fits = funded.request(5)
    outcomes = admit(funded, [of(other, continuation=True), of(fits, continuation=True)])
    assert isinstance(outcomes[0], Conflict)
    assert outcomes[1] == Reserved(fits.reservation_id)


def test_a_parents_message_is_written_once(funded: Ledger) -> None:
    parent = funded.reserve(5)
    child = WireMessage("child", "shop.plain", b"body", "{}", "celery")
    for _ in range(2):
        admit(funded, [Publication(None, child, parent=parent.reservation_id)])
    assert [row.task_id for row in funded.rows("outbox", parent_id=parent.reservation_id)] == [
        "child"
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_a_full_outbox_takes_nothing_new(funded: Ledger, count: int) -> None:
    known = funded.reserve(5)
    funded.store.run(
        lambda connection: connection.execute(
            schema.backlog.update()
            .where(schema.backlog.c.root == funded.root)
            .values(messages=10**6, counted_us=2**62)
        )
    )
    new = [funded.request(5) for _ in range(count)]
    outcomes = admit(funded, [of(one) for one in new])
    assert outcomes == [Backlogged(10**6, 10**6)] * count
    assert written(funded) == {known.task_id}
    # What continues work goes on, and what is known is found.
    assert isinstance(admit(funded, [of(new[0], continuation=True)])[0], Reserved)
    again = ReserveRequest(**{**vars(known), "reservation_id": uuid.uuid4()})
    assert isinstance(admit(funded, [of(again)])[0], AlreadyReserved)
