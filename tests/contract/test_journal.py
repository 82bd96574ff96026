"""The journal: what it tells of each change, what is read from it, found by it and put right."""

from __future__ import annotations

import getpass
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget import reconcile, settlement
from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.reservations import START, Extended, Line, Outcome, Parked, Reserved
from celery_budget.store import journal, repairs, schema
from celery_budget.store.balances import Key
from tests.contract.racers import at_once
from tests.contract.support import RAISED, RETRIED, RETURNED, Ledger, admit_many, message_of

#: After which any entry is old.
ANY_AGE = -1_000_000

Told = tuple[str, int, int, int, int]


def told(ledger: Ledger, budget: str = "b") -> list[Told]:
    """What was done, by how much reserved and spent changed, and what they were then."""
    return [
        (row.what, row.reserved, row.spent, row.reserved_after, row.spent_after)
        for row in ledger.rows("journal", budget=budget)
    ]


def replay(ledger: Ledger) -> dict[tuple[str, int, int], tuple[int, int, int]]:
    """Rebuild all balances from the journal alone: reserved, spent, and the number of entries."""
    found: dict[tuple[str, int, int], tuple[int, int, int]] = {}
    for row in ledger.rows("journal"):
        key = row.budget, row.window_us, row.stripe
        reserved, spent, entries = found.get(key, (0, 0, 0))
        if row.what in journal.ABSOLUTE:
            reserved, spent = row.reserved_after, row.spent_after
        else:
            reserved, spent = reserved + row.reserved, spent + row.spent
            # Without a gap, and telling what there was then.
            assert row.entry == entries + 1
        assert (row.reserved_after, row.spent_after) == (reserved, spent)
        found[key] = reserved, spent, row.entry
    return found


def stand(ledger: Ledger) -> dict[tuple[str, int, int], tuple[int, int, int]]:
    """The balances that anything has changed, as :func:`replay` rebuilds them."""
    return {
        (row.budget, row.window_us, row.stripe): (row.reserved, row.spent, row.entries)
        for row in ledger.rows("balances")
        if row.entries
    }


def fold(ledger: Ledger, budget: str = "b", age_us: int = ANY_AGE) -> int:
    return sum(
        ledger.store.run(journal.fold, ledger.root, budget, window_us, 0, age_us)
        for window_us, _ in ledger.windows(budget)
    )


def foldable(ledger: Ledger, age_us: int = ANY_AGE) -> list[str]:
    return [row.budget for row in ledger.store.read(journal.foldable, ledger.root, age_us, 100)]


def mismatches(ledger: Ledger) -> tuple[str, ...]:
    return reconcile.reconcile(ledger.store, ledger.settings).mismatches


def repair(ledger: Ledger) -> tuple[str, ...]:
    return reconcile.repair(ledger.store, ledger.settings)


# Each leaves one entry of the kind it is named for, last; returns whose.


def _reserve(ledger: Ledger) -> Any:
    return ledger.reserve(10)


def _raise(ledger: Ledger) -> Any:
    request, attempt = ledger.start(10)
    attempt.record(4)
    assert ledger.retry(request, attempt)[1] == Reserved(request.reservation_id)
    return request


def _park(ledger: Ledger) -> Any:
    request, attempt = ledger.start(60)
    attempt.record(41)
    assert isinstance(ledger.retry(request, attempt)[1], Parked)
    return request


def _start(ledger: Ledger) -> Any:
    request = ledger.reserve(10, lines=(Line("b", 10, START),))
    ledger.run(request)
    return request


def _settle(ledger: Ledger) -> Any:
    request, attempt = ledger.start(10)
    attempt.record(4)
    assert attempt.end(RETURNED)
    return request


def _release(ledger: Ledger) -> Any:
    request = ledger.reserve(10)
    assert settlement.revoke(ledger.store, ledger.root, request.reservation_id, "cancelled")
    return request


def _lose(ledger: Ledger) -> Any:
    request, _ = ledger.start(10, late_ack=False)
    ledger.lapse(request)
    assert ledger.recover().lost == 1
    return request


def _exceed(ledger: Ledger) -> Any:
    request, attempt = ledger.start(10)
    attempt.record(13)
    return request


def _late(ledger: Ledger) -> Any:
    request, attempt = ledger.start(10)
    attempt.record(4)
    attempt.end(RAISED)
    attempt.record(3)
    return request


def _extend(ledger: Ledger) -> Any:
    request, attempt = ledger.start(10)
    assert attempt.extend(5, key="more") == Extended(5)
    return request


def _adjust(ledger: Ledger) -> Any:
    assert ledger.adjust("invoice-7", 12)
    return None


def _repair(ledger: Ledger) -> Any:
    ledger.reserve(10)
    ledger.put("balances", {"reserved": 9, "spent": 1}, budget="b")
    assert len(repair(ledger)) == 1
    return None


@pytest.mark.parametrize(
    ("do", "what", "entry", "reason"),
    [
        (_reserve, "reserve", (10, 0, 10, 0), None),
        (_raise, "raise", (4, 0, 14, 0), None),
        (_park, "park", (-19, 0, 41, 0), None),
        (_start, "start", (-10, 10, 0, 10), None),
        (_settle, "settle", (-10, 4, 0, 4), None),
        (_release, "release", (-10, 0, 0, 0), "cancelled"),
        (_lose, "lose", (-10, 10, 0, 10), None),
        (_exceed, "exceed", (3, 0, 13, 0), None),
        (_late, "late", (0, 3, 0, 7), None),
        (_extend, "extend", (5, 0, 15, 0), None),
        (_adjust, "adjust", (0, 12, 0, 12), "invoice"),
        (_repair, "repair", (1, -1, 10, 0), "budget reconcile --repair"),
    ],
)
def test_each_verb_leaves_an_entry(
    funded: Ledger,
    do: Callable[[Ledger], Any],
    what: str,
    entry: tuple[int, int, int, int],
    reason: str | None,
) -> None:
    began = funded.now()
    request = do(funded)
    row = funded.rows("journal")[-1]
    assert row.what == what
    assert (row.reserved, row.spent, row.reserved_after, row.spent_after) == entry
    assert row.reason == reason
    assert row.who.startswith(f"{getpass.getuser()}@")
    assert row.reservation_id == (request and request.reservation_id)
    assert began <= row.at_us <= funded.now()
    assert replay(funded) == stand(funded)


def test_a_change_of_nothing_leaves_none(funded: Ledger) -> None:
    request, attempt = funded.start(0)
    attempt.record(0)
    attempt.end(RETURNED)
    assert funded.state(request) == "settled"
    assert told(funded) == []


def test_every_budget_on_the_way_up_has_its_own(ledger: Ledger) -> None:
    ledger.set("org", 100)
    ledger.set("b", 50, parent="org")
    ledger.set("c", 50, parent="org")
    _, attempt = ledger.start(10)
    ledger.reserve(20, budget="c")
    attempt.record(4)
    attempt.end(RETURNED)
    assert told(ledger, "b") == [("reserve", 10, 0, 10, 0), ("settle", -10, 4, 0, 4)]
    assert told(ledger, "c") == [("reserve", 20, 0, 20, 0)]
    assert told(ledger, "org") == [
        ("reserve", 10, 0, 10, 0),
        ("reserve", 20, 0, 30, 0),
        ("settle", -10, 4, 20, 4),
    ]
    assert replay(ledger) == stand(ledger)


def test_a_long_life_is_rebuilt_from_it(funded: Ledger) -> None:
    funded.set("b", 1000)
    funded.set("c", None, unit="usd")
    _, running = funded.start(10)
    for do in (_raise, _settle, _release, _lose, _exceed, _late, _extend, _adjust):
        do(funded)
    request = funded.reserve(7, ("c", MAX_AMOUNT))
    attempt = funded.run(request)
    attempt.record(2)
    following, _ = funded.retry(request, attempt)
    attempt.end(RETRIED)
    funded.run(following).end(Outcome("raised"))
    running.end(RETURNED)
    assert replay(funded) == stand(funded)
    assert mismatches(funded) == ()


def test_each_window_has_a_journal_of_its_own(funded: Ledger) -> None:
    funded.set("b", 100, period="day")
    _, attempt = funded.start(10)
    funded.age("b", 2 * 86_400_000_000)
    funded.reserve(3)
    attempt.end(RETURNED)
    first, second = funded.windows()
    rows = funded.rows("journal")
    assert [(row.window_us, row.entry, row.what) for row in rows] == [
        (first[0], 1, "reserve"),
        (first[0], 2, "settle"),
        (second[0], 1, "reserve"),
    ]
    assert replay(funded) == stand(funded)


def test_the_last_entries_are_read_newest_first(funded: Ledger) -> None:
    for amount in range(1, 6):
        funded.reserve(amount)
    rows = funded.store.read(journal.entries, funded.root, "b", 3)
    assert [row.reserved for row in rows] == [5, 4, 3]


# Folding


def test_old_entries_become_one_that_stands_for_them(funded: Ledger) -> None:
    request = _settle(funded)
    funded.reserve(20)
    before = stand(funded)
    assert foldable(funded) == ["b"]
    assert fold(funded) == 2
    [row] = funded.rows("journal")
    assert (row.what, row.entry, row.reason) == ("checkpoint", 3, "3 entries")
    assert (row.reserved_after, row.spent_after) == (20, 4)
    assert replay(funded) == stand(funded) == before
    # Once more there is nothing to fold.
    assert foldable(funded) == []
    assert fold(funded) == 0
    assert request is not None


def test_a_folded_journal_goes_on_and_is_folded_again(funded: Ledger) -> None:
    for _ in range(3):
        _settle(funded)
        fold(funded)
        _settle(funded)
        assert replay(funded) == stand(funded)
        assert mismatches(funded) == ()
    assert fold(funded) == 2
    assert told(funded) == [("checkpoint", 0, 24, 0, 24)]


def test_what_is_young_stays_and_all_behind_it(funded: Ledger) -> None:
    _settle(funded)
    _settle(funded)
    old = funded.now() - 10**9
    for entry in (1, 2, 4):
        funded.put("journal", {"at_us": old}, entry=entry)
    assert fold(funded, age_us=10**8) == 1
    assert [row.entry for row in funded.rows("journal")] == [2, 3, 4]
    assert replay(funded) == stand(funded)


def test_what_does_not_add_up_is_not_folded(funded: Ledger) -> None:
    funded.conserved = False
    _settle(funded)
    _settle(funded)
    whole = funded.rows("journal")
    for change in (
        lambda: funded.put("journal", {"reserved": 11}, entry=3),
        lambda: funded.put("journal", {"spent_after": 5}, entry=2),
        lambda: _delete(funded, "journal", entry=2),
        lambda: _delete(funded, "journal", entry=1),
    ):
        change()
        broken = funded.rows("journal")
        found = mismatches(funded)
        assert len(found) == 1
        assert fold(funded) == 0
        assert funded.rows("journal") == broken
        assert mismatches(funded) == found
        funded.store.run(_restore, funded.root, whole)
    assert fold(funded) == 3


def test_folding_twice_at_once_beside_settlements(funded: Ledger) -> None:
    funded.set("b", None)
    for _ in range(5):
        _settle(funded)
    attempts = [funded.start(10)[1] for _ in range(6)]
    ended = [lambda attempt=attempt: attempt.end(RETURNED) for attempt in attempts]
    at_once([*[lambda: fold(funded)] * 3, *ended])
    assert replay(funded) == stand(funded)
    fold(funded)
    assert len(funded.rows("journal")) == 1
    assert funded.balance() == (0, 80)


# What reconciliation finds, and what is put right


def _delete(ledger: Ledger, table: str, **where: Any) -> None:
    of = getattr(schema, table)
    conditions = [of.c[name] == value for name, value in {"root": ledger.root, **where}.items()]
    with ledger.store.transaction() as connection:
        connection.execute(of.delete().where(*conditions))


def _restore(connection: sa.Connection, root: str, rows: list[Any]) -> None:
    connection.execute(schema.journal.delete().where(schema.journal.c.root == root))
    connection.execute(schema.journal.insert(), [dict(row._mapping) for row in rows])


SAYS = "budget 'b' says 10 reserved and 4 spent"


@pytest.mark.parametrize(
    ("table", "values", "where", "said"),
    [
        ("balances", {"reserved": 9}, {}, ["says 9 reserved", "add up to 10 and 4", "to 10 and 4"]),
        ("balances", {"spent": 5}, {}, ["says 10 reserved and 5 spent", "add up to 10 and 4"]),
        ("balances", {"entries": 2}, {}, [SAYS, "lines agree", "entry of its journal is missing"]),
        ("journal", {"reserved": 11}, {"entry": 1}, [SAYS, "entry of its journal does not follow"]),
        (
            "journal",
            {"spent_after": 5},
            {"entry": 2},
            [SAYS, "entry of its journal does not follow"],
        ),
        (
            "journal",
            {"reserved_after": 0},
            {"entry": 3},
            [SAYS, "does not follow from the one before it"],
        ),
        (
            "journal",
            {"spent": MAX_AMOUNT},
            {"entry": 2},
            [SAYS, "does not follow from the one before it"],
        ),
        ("journal", {"entry": 7}, {"entry": 3}, [SAYS, "entry of its journal is missing"]),
        ("journal", None, {"entry": 1}, [SAYS, "entry of its journal is missing"]),
        ("journal", None, {"entry": 2}, [SAYS, "entry of its journal is missing"]),
        ("journal", None, {"entry": 3}, [SAYS, "entry of its journal is missing"]),
        ("journal", None, {}, [SAYS, "entry of its journal is missing"]),
        ("balances", None, {}, ["budget 'b' has no balance", "10 and 4", "leads to 10 and 4"]),
    ],
)
def test_each_corruption_is_named_and_put_right(
    funded: Ledger,
    table: str,
    values: dict[str, Any] | None,
    where: dict[str, Any],
    said: list[str],
) -> None:
    _settle(funded)
    held, running = funded.start(10)
    if values is None:
        _delete(funded, table, **where)
    else:
        funded.put(table, values, **where)
    found = mismatches(funded)
    assert found
    for words in said:
        assert words in found[0]
    assert len(found) == 1

    assert repair(funded) == ("budget 'b' was rebuilt from its lines",)
    assert mismatches(funded) == ()
    last = funded.rows("journal")[-1]
    assert (last.what, last.reason) == ("repair", "budget reconcile --repair")
    assert last.reservation_id is None
    by_lines = [(row.reserved, row.settled) for row in funded.rows("lines")]
    sums = tuple(map(sum, zip(*by_lines, strict=True)))
    assert funded.balance() == (last.reserved_after, last.spent_after) == sums
    # A second time nothing is wrong.
    before = funded.dump()
    assert repair(funded) == ()
    assert funded.dump() == before
    # And everything goes on, also after folding.
    assert funded.reserve(1)
    assert running.end(RETURNED)
    assert mismatches(funded) == ()
    assert fold(funded) > 0
    assert mismatches(funded) == ()
    assert held is not None


@pytest.mark.parametrize(
    ("values", "where", "said"),
    [
        ({"reserved": 11}, {"reserved": 10}, "add up to 11 and 4, its journal agrees"),
        ({"settled": 5}, {"settled": 4}, "add up to 10 and 5, its journal agrees"),
    ],
)
def test_a_wrong_line_is_named_and_the_balance_does_not_follow_it(
    funded: Ledger, values: dict[str, Any], where: dict[str, Any], said: str
) -> None:
    _settle(funded)
    funded.reserve(10)
    funded.put("lines", values, **where)
    [found] = mismatches(funded)
    assert SAYS in found
    assert said in found
    assert repair(funded) == ()
    assert mismatches(funded) == (found,)
    funded.put("lines", where, **values)


def test_a_lost_window_ends_when_it_did(ledger: Ledger) -> None:
    ledger.set("b", 100, period="day")
    ledger.reserve(10)
    before = ledger.windows()
    _delete(ledger, "balances")
    assert len(repair(ledger)) == 1
    assert ledger.windows() == before
    assert ledger.balance() == (10, 0)
    ledger.reserve(90)
    # One of a period that is not known any more ends no later than the next begins.
    ledger.age("b", 86_400_000_000)
    ledger.reserve(5)
    ledger.set("b", 100, period="month")
    first, second = ledger.windows()
    _delete(ledger, "balances", window_us=first[0])
    assert len(repair(ledger)) == 1
    assert ledger.windows() == [first, second]


def test_several_are_told_and_put_right_in_order(ledger: Ledger) -> None:
    for name in ("c", "b", "a"):
        ledger.set(name, 100)
        ledger.reserve(10, budget=name)
    ledger.adjust("k", 5, "a")
    for name in ("a", "c"):
        ledger.put("balances", {"reserved": 0, "spent": 99}, budget=name)
    assert [one.split("'")[1] for one in mismatches(ledger)] == ["a", "c"]
    assert [one.split("'")[1] for one in repair(ledger)] == ["a", "c"]
    assert ledger.balances("a", "b", "c") == [(10, 5), (10, 0), (10, 0)]


def test_a_balance_that_cannot_be_is_left_and_the_others_are_put_right(ledger: Ledger) -> None:
    for name in ("a", "b"):
        ledger.set(name, None)
        request = ledger.reserve(10, budget=name)
        ledger.reserve(1, budget=name)
        ledger.put("balances", {"reserved": 0}, budget=name)
        if name == "a":
            wrong = request
            ledger.put("lines", {"reserved": MAX_AMOUNT}, reservation_id=request.reservation_id)
    assert len(mismatches(ledger)) == 2
    assert repair(ledger) == ("budget 'b' was rebuilt from its lines",)
    [said] = mismatches(ledger)
    assert f"budget 'a' says 0 reserved and 0 spent, its lines add up to {MAX_AMOUNT + 1}" in said
    ledger.put("lines", {"reserved": 10}, reservation_id=wrong.reservation_id)
    assert repair(ledger) == ("budget 'a' was rebuilt from its lines",)


def test_what_is_wrong_with_a_request_is_told_and_left(funded: Ledger) -> None:
    request, attempt = funded.start(10)
    attempt.record(4)
    funded.put("lines", {"used": 3}, reservation_id=request.reservation_id)
    [said] = mismatches(funded)
    assert said == f"task {request.task_id} used 3 of 'b' by its line and 4 by its usage records"
    assert repair(funded) == ()
    assert mismatches(funded) == (said,)
    funded.put("lines", {"used": 4}, reservation_id=request.reservation_id)


def test_a_line_whose_request_is_gone_is_told(funded: Ledger) -> None:
    funded.conserved = False
    request = funded.reserve(10)
    funded.store.run(
        lambda connection: connection.execute(
            schema.reservations.delete().where(schema.reservations.c.root == funded.root)
        )
    )
    [told] = reconcile.reconcile(funded.store, funded.settings).mismatches
    assert "'b' holds 10 and charged 0" in told
    assert str(request.reservation_id) in told


def test_a_repair_is_right_beside_what_goes_on(funded: Ledger) -> None:
    funded.set("b", None)
    key = Key("b", 0)
    for _ in range(5):
        attempts = [funded.start(10)[1] for _ in range(3)]
        reserved = funded.balance()[0]
        funded.put("balances", {"reserved": reserved + 1000, "spent": 77_777}, budget="b")
        rebuilt = at_once(
            [
                *[lambda: funded.store.run(repairs.rebuild, funded.root, key, "test")] * 2,
                *[lambda: funded.reserve(5)] * 3,
                *[lambda attempt=attempt: attempt.end(RETURNED) for attempt in attempts],
                lambda: funded.start(3)[1].end(RETURNED),
            ]
        )[:2]
        assert sorted(rebuilt) == [False, True]
        assert mismatches(funded) == ()
    assert funded.balance() == (5 * 3 * 5, 5 * (3 * 10 + 3))
    assert [row.what for row in funded.rows("journal")].count("repair") == 5


def test_a_journal_as_large_as_may_be(ledger: Ledger) -> None:
    ledger.set("b", None)
    _, first = ledger.start(MAX_AMOUNT)
    first.end(RAISED)
    _, second = ledger.start(MAX_AMOUNT)
    second.record(MAX_AMOUNT)
    second.end(RETURNED)
    ledger.adjust("back", -MAX_AMOUNT)
    ledger.reserve(MAX_AMOUNT)
    assert replay(ledger) == stand(ledger)
    assert mismatches(ledger) == ()
    assert fold(ledger) == 5
    assert told(ledger) == [("checkpoint", MAX_AMOUNT, 0, MAX_AMOUNT, 0)]
    assert mismatches(ledger) == ()


def test_entries_of_one_batch_are_numbered_in_its_order(funded: Ledger) -> None:
    requests = [funded.request(amount) for amount in (3, 1, 2)]
    asked = [(request, message_of(request)) for request in requests]
    admit_many(funded.store, funded.settings, asked)
    rows = funded.rows("journal")
    assert [row.reservation_id for row in rows] == [one.reservation_id for one in requests]
    assert [row.reserved_after for row in rows] == [3, 4, 6]
    assert replay(funded) == stand(funded)
