"""Tallies: whatever ends, whenever it is tallied, a report is what its rows add up to."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from celery_budget import reconcile, settlement, tallying
from celery_budget.core.reservations import Parked
from celery_budget.core.retries import Keep, Retries
from celery_budget.core.tallies import DAY_US
from celery_budget.errors import InvalidReport, UnknownBudget
from celery_budget.reconcile import Asked, reports
from celery_budget.store import inquiries, quarantine, refusals, schema, tallies
from tests.contract.racers import at_once
from tests.contract.support import RAISED, RETRIED, RETURNED, Ledger
from tests.contract.tallied import check, midnight

GROUPINGS = ("tenant", "stage", "task", "day", "estimator")


def tally(ledger: Ledger, limit: int = 500) -> int:
    """Tally all that has ended, so many at a time."""
    total = 0
    while done := ledger.store.run(tallies.roll, ledger.root, limit, 0):
        total += done
    return total


def untallied(ledger: Ledger) -> int:
    return sum(row.ended_us is not None and not row.tallied for row in ledger.rows("reservations"))


def mismatched(ledger: Ledger) -> list[Any]:
    return [
        one
        for day in ledger.store.read(tallies.days, ledger.root)
        for one in ledger.store.read(tallies.mismatched_tallies, ledger.root, day)
    ]


@pytest.fixture
def tree(ledger: Ledger) -> Ledger:
    """Two tenants below one budget, with all the budget they need."""
    ledger.set("all", None)
    ledger.set("b", None, parent="all")
    ledger.set("c", None, parent="all")
    ledger.set("small", 10)
    return ledger


class Life:
    """Requests that come to every kind of end, in an order drawn by lot."""

    def __init__(self, ledger: Ledger, seed: int) -> None:
        self.ledger, self.chosen = ledger, random.Random(seed)
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.ended: list[Any] = []
        self.steps: list[Callable[[], object]] = [
            self.reserve, self.reserve, self.reserve, self.start, self.start, self.finish,
            self.finish, self.retry, self.cancel, self.lose, self.late, self.park, self.refuse,
            self.tally, self.isolate,
        ]  # fmt: skip

    def step(self) -> None:
        self.chosen.choice(self.steps)()

    def take(self, some: list[Any]) -> Any:
        return some.pop(self.chosen.randrange(len(some))) if some else None

    def reserve(self) -> None:
        choice = self.chosen.choice
        budget = choice("bc")
        request = self.ledger.reserve(
            choice((3, 10)),
            budget=budget,
            stage=choice(("draft", "check")),
            task_name=choice(("shop.draft", "shop.check")),
            estimator_version=choice("12"),
            shadows=choice((None, '{"constant:9": 4}')),
        )
        # Admitted on one of some days.
        created = self.ledger.now() - self.chosen.randrange(4) * DAY_US
        self.ledger.put(
            "reservations", {"created_us": created}, reservation_id=request.reservation_id
        )
        self.waiting.append(request)

    def start(self) -> None:
        request = self.take(self.waiting)
        if request is not None:
            self.running.append((request, self.ledger.run(request)))

    def finish(self) -> None:
        found = self.take(self.running)
        if found is None:
            return
        _, attempt = found
        for amount in self.chosen.choice(((), (2,), (4, 30))):
            attempt.record(amount)
        assert attempt.end(self.chosen.choice((RETURNED, RETURNED, RAISED)))
        if self.chosen.random() < 0.7:
            attempt.close()
        self.ended.append(attempt)

    def retry(self) -> None:
        found = self.take(self.running)
        if found is None:
            return
        request, attempt = found
        attempt.record(1)
        following, _ = self.ledger.retry(request, attempt)
        assert attempt.end(RETRIED)
        self.waiting.append(following)

    def cancel(self) -> None:
        request = self.take(self.waiting)
        if request is not None:
            why = self.chosen.choice(("cancelled", "expired", "undelivered"))
            settlement.revoke(self.ledger.store, self.ledger.root, request.reservation_id, why)

    def lose(self) -> None:
        request = self.take(self.waiting)
        if request is not None:
            attempt = self.ledger.run(request, late_ack=False)
            self.ledger.lapse(request)
            assert self.ledger.recover().lost >= 1
            self.ended.append(attempt)

    def late(self) -> None:
        if self.ended:
            self.chosen.choice(self.ended).record(self.chosen.choice((1, 50)))

    def park(self) -> None:
        request = self.ledger.request(50, budget="small", stage="draft")
        assert isinstance(self.ledger.admit(request, continuation=True), Parked)
        end = self.chosen.choice(("given up", "cancelled", "neither"))
        if end == "given up":
            self.ledger.put("parked", {"deadline_us": 1})
            self.ledger.sweep()
        elif end == "cancelled":
            settlement.cancel(self.ledger.store, self.ledger.settings, request.task_id)

    def refuse(self) -> None:
        self.ledger.admit(self.ledger.request(50, budget="small", stage="check"))

    def isolate(self) -> None:
        found = self.take(self.running)
        if found is None:
            return
        _, attempt = found
        why = self.chosen.choice(("failed", "max_attempts"))
        outcome = settlement.Outcome("raised", payload=None, keep=Keep(why, "boom", 100))
        assert attempt.end(outcome)
        attempt.close()
        self.ended.append(attempt)
        if self.chosen.random() < 0.5:
            task_id = self.ledger.rows("quarantine")[-1].task_id
            assert self.ledger.store.run(quarantine.discard, self.ledger.root, task_id)

    def tally(self) -> None:
        for _ in range(self.chosen.randrange(1, 4)):
            self.ledger.store.run(tallies.roll, self.ledger.root, self.chosen.randrange(1, 9), 0)


@pytest.mark.parametrize("seed", range(3))
def test_a_report_is_what_its_rows_add_up_to_whenever_it_is_tallied(
    tree: Ledger, seed: int
) -> None:
    life = Life(tree, seed)
    for number in range(120):
        life.step()
        if number % 12 == 0:
            since = midnight(tree, number % 5) + number * 997
            asked = [Asked(), Asked(budget="all"), Asked(stage="draft", budget="b"), Asked(since)]
            check(tree, asked[number // 12 % 4], GROUPINGS[number // 12 % 5])
    tally(tree)
    for by in GROUPINGS:
        check(tree, by=by)
    check(tree, Asked(budget="c"), "day")
    assert untallied(tree) == 0
    assert mismatched(tree) == []


def settled(ledger: Ledger, used: int = 4, **terms: Any) -> Any:
    """A request that has ended; its attempt."""
    _, attempt = ledger.start(10, **terms)
    attempt.record(used)
    assert attempt.end(RETURNED)
    attempt.close()
    return attempt


def test_late_usage_takes_a_request_out_and_the_sweep_puts_it_in_again(funded: Ledger) -> None:
    attempt = settled(funded)
    assert tally(funded) == 1
    attempt.record(4, key="one")
    attempt.record(5, key="late")
    assert untallied(funded) == 1
    assert mismatched(funded) == []
    [amounts] = check(funded).amounts
    assert (amounts.charged, amounts.over, amounts.requests_over) == (13, 3, 1)
    assert tally(funded) == 1
    assert check(funded).amounts == (amounts,)
    # What was recorded before changes nothing.
    attempt.record(5, key="late")
    assert untallied(funded) == 0


def test_late_usage_does_not_write_tallies_that_somebody_has_deleted(racing: Ledger) -> None:
    many = [settled(racing, 1) for _ in range(4)]
    tally(racing)
    racing.store.run(delete_tallies, racing.root)
    at_once([partial(attempt.record, 2, key="late") for attempt in many])
    assert racing.rows("tallies") == []
    tally(racing)
    for day in racing.store.read(tallies.days, racing.root):
        racing.store.run(tallies.rebuild, racing.root, day)
    [amounts] = check(racing).amounts
    assert amounts.charged == 12


def delete_tallies(connection: sa.Connection, root: str) -> None:
    connection.execute(schema.tallies.delete().where(schema.tallies.c.root == root))


def test_two_rollers_at_once_count_each_request_once(racing: Ledger) -> None:
    for _ in range(12):
        settled(racing, 1)
    done = at_once([lambda: racing.store.run(tallies.roll, racing.root, 5, 0)] * 4)
    assert sum(done) >= 5
    check(racing)
    tally(racing)
    check(racing)
    assert mismatched(racing) == []


def test_late_usage_races_the_rollers(racing: Ledger) -> None:
    many = [settled(racing, 1) for _ in range(8)]
    tally(racing)

    def late(number: int) -> None:
        for attempt in many[number::2]:
            attempt.record(2, key="late")

    def roll() -> None:
        for _ in range(6):
            racing.store.run(tallies.roll, racing.root, 3, 0)

    at_once([lambda: late(0), lambda: late(1), roll, roll])
    [amounts] = check(racing).amounts
    assert amounts.charged == 24
    tally(racing)
    check(racing)
    assert mismatched(racing) == []


def test_several_units_of_late_usage_lock_the_tallies_last(racing: Ledger) -> None:
    racing.set("m", None, unit="usd")
    many = []
    for _ in range(6):
        request = racing.reserve(5, ("m", 5))
        attempt = racing.run(request)
        assert attempt.end(RETURNED)
        many.append((request, attempt))
    tally(racing)

    def tell(some: list[Any]) -> None:
        for request, attempt in some:
            racing.store.run(
                inquiries.record_total,
                racing.root,
                request.reservation_id,
                attempt.number,
                "asked",
                {"tokens": 30, "usd": 40},
            )

    at_once([lambda: tell(many[::2]), lambda: tell(many[1::2])])
    check(racing)
    tally(racing)
    assert mismatched(racing) == []


class Killed(Exception):
    """In place of a kill: nothing that its transaction did is kept."""


def test_a_roller_that_dies_leaves_it_as_it_was(funded: Ledger) -> None:
    settled(funded)
    settled(funded)
    tally(funded, 1)
    settled(funded)
    before = funded.dump()

    def die(connection: sa.Connection) -> None:
        assert tallies.roll(connection, funded.root, 5, 0) == 1
        raise Killed

    with pytest.raises(Killed):
        funded.store.run(die)
    assert funded.dump() == before
    check(funded)
    assert tally(funded) == 1
    check(funded)


def test_what_has_just_ended_is_left_for_a_while(funded: Ledger) -> None:
    settled(funded)
    assert tallying.run_once(funded.store, funded.settings).requests == 0
    funded.put("reservations", {"ended_us": funded.now() - tallying.AGE_US})
    assert tallying.run_once(funded.store, funded.settings) == tallying.Tallied(1, 0, False)
    check(funded)


def test_a_request_that_somebody_holds_is_passed_by(funded: Ledger) -> None:
    if funded.store.dialect == "sqlite":
        pytest.skip("there is one writer")
    attempt = settled(funded)
    with funded.store.transaction() as connection:
        connection.execute(sa.text("SELECT 1 FROM budget_reservations FOR NO KEY UPDATE"))
        assert funded.store.run(tallies.roll, funded.root, 5, 0) == 0
    assert funded.store.run(tallies.roll, funded.root, 5, 0) == 1
    assert attempt


@pytest.mark.parametrize("tallied", [False, True])
def test_the_ends_of_a_period_are_exact(tree: Ledger, tallied: bool) -> None:
    day = midnight(tree, 3)
    for at in (day - 1, day, day + 5, day + DAY_US - 1, day + DAY_US, day + 2 * DAY_US):
        request = tree.reserve(1, budget="b")
        tree.put("reservations", {"created_us": at}, reservation_id=request.reservation_id)
        attempt = tree.run(request)
        attempt.record(1)
        attempt.end(RETURNED)
    if tallied:
        tally(tree)
    ends = (None, day, day + 1, day + DAY_US, day + DAY_US + 1, day + 3 * DAY_US)
    for since in ends:
        for until in ends:
            if since is None or until is None or since < until:
                check(tree, Asked(since, until), "day")
    report = check(tree, Asked(day, day + DAY_US))
    assert (report.counts["admitted"], report.since_us, report.until_us) == (3, day, day + DAY_US)


def test_a_period_may_be_counted_back_from_now(funded: Ledger) -> None:
    old, new = funded.reserve(1), funded.reserve(1)
    hour = 3_600_000_000
    funded.put(
        "reservations",
        {"created_us": funded.now() - 2 * hour},
        reservation_id=old.reservation_id,
    )

    def admitted(*ago: int | None) -> int:
        return reports.report(funded.store, funded.settings, ago=(ago[0], ago[1])).counts[
            "admitted"
        ]

    assert (admitted(hour, None), admitted(None, hour), admitted(3 * hour, None)) == (1, 1, 2)
    assert new
    with pytest.raises(InvalidReport, match="begins before it ends"):
        admitted(hour, hour)


def test_a_period_without_time_and_an_unknown_budget_are_told(funded: Ledger) -> None:
    for asked in (Asked(5, 5), Asked(funded.now() + DAY_US)):
        with pytest.raises(InvalidReport):
            check(funded, asked)
    with pytest.raises(UnknownBudget):
        check(funded, Asked(budget="none"))


FOREVER = 10**20


def test_a_period_may_end_out_of_all_years(funded: Ledger) -> None:
    funded.reserve(1)

    def admitted(asked: Asked, *ago: int | None) -> int:
        told = reports.report(funded.store, funded.settings, asked, "day", (ago[0], ago[1]))
        return told.counts["admitted"]

    assert admitted(Asked(-FOREVER, FOREVER), None, None) == 1
    assert admitted(Asked(), FOREVER, -FOREVER) == 1
    assert admitted(Asked(), None, FOREVER) == 0
    for asked, ago in ((Asked(FOREVER), None), (Asked(), -FOREVER), (Asked(0, -FOREVER), None)):
        with pytest.raises(InvalidReport):
            admitted(asked, ago, None)


def test_refusals_are_told_by_day_stage_budget_and_reason(tree: Ledger) -> None:
    for stage, amount, count in (("draft", 50, 3), ("check", 50, 2), ("check", 11, 1)):
        for _ in range(count):
            tree.admit(tree.request(amount, budget="small", stage=stage))
    tree.set("none", 0)
    tree.admit(tree.request(1, budget="none"))

    def told(*asked: Any, **more: Any) -> dict[Any, int]:
        report = check(tree, Asked(*asked, **more))
        assert report.failures["refused"] == report.counts["refused"]
        assert sum(one.count for one in report.refusals) == report.counts["refused"]
        return {(one.budget, one.reason): one.count for one in report.refusals}

    small, none = ("small", "exhausted"), ("none", "blocked")
    assert told() == {small: 6, none: 1}
    assert told(stage="check") == {small: 3}
    assert told(budget="none") == {none: 1}
    today = midnight(tree)
    assert told(today) == {small: 6, none: 1}
    assert told(None, today) == {}
    groups = {one.key: one.counts["refused"] for one in check(tree, by="stage").groups}
    assert groups == {"draft": 4, "check": 3}
    groups = {one.key: one.counts["refused"] for one in check(tree, by="tenant").groups}
    assert groups == {"small": 6, "none": 1}
    [day] = check(tree, by="day").groups
    assert (day.counts["refused"], check(tree).days[-1].counts["refused"]) == (7, 7)


def test_refusals_of_days_that_are_over_are_folded_to_one_row_each(tree: Ledger) -> None:
    for stage in ("draft", "check"):
        for _ in range(40):
            tree.admit(tree.request(50, budget="small", stage=stage))
    [*slots] = tree.rows("refusals")
    assert len(slots) > 20
    assert tallying.run_once(tree.store, tree.settings).folded == 0
    past = slots[0].day - 2
    tree.put("refusals", {"day": past})
    last = {
        stage: max((row for row in slots if row.stage == stage), key=lambda row: row.refused_us)
        for stage in ("draft", "check")
    }
    while tree.store.run(refusals.fold, tree.root, 7):
        pass
    rows = {row.stage: row for row in tree.rows("refusals")}
    assert {stage: (row.day, row.slot, row.count) for stage, row in rows.items()} == {
        "draft": (past, 0, 40), "check": (past, 0, 40)
    }  # fmt: skip
    for stage, row in rows.items():
        assert row.refused_us == last[stage].refused_us
    assert check(tree, Asked(past * DAY_US, (past + 1) * DAY_US)).counts["refused"] == 80


def test_waits_and_runs_are_told_to_a_twentieth(funded: Ledger) -> None:
    request = funded.request(10)
    due = funded.now() + 60_000_000
    funded.admit(request, due_us=due)
    assert funded.row(request).due_us == due
    attempt = funded.run(request)
    attempt.record(1)
    attempt.end(RETURNED)
    funded.put("attempts", {"started_us": due + 2_000_000, "ended_us": due + 5_000_000})
    for _ in range(2):
        report = check(funded)
        assert report.waits.count == report.runs.count == 1
        for spread, seconds in ((report.waits, 2), (report.runs, 3)):
            for told in (spread.p50, spread.p95, spread.p99):
                assert told is not None
                assert seconds <= told <= seconds * 1.05
        tally(funded)


def test_a_request_that_may_run_no_more_is_exhausted(funded: Ledger) -> None:
    request, attempt = funded.start(5)
    following, _ = funded.retry(request, attempt, 5)
    assert attempt.end(RETRIED)
    assert funded.deliver(following, Retries(max_attempts=1))
    failures = check(funded).failures
    assert (failures["exhausted"], failures["transient"]) == (1, 0)
    _, attempt = funded.start(5)
    attempt.end(settlement.Outcome("raised", keep=Keep("max_attempts", "boom", 10)))
    assert check(funded).failures["exhausted"] == 2


def test_sums_beyond_64_bits_are_exact(ledger: Ledger) -> None:
    most = 2**63 - 1
    for budget in ("b", "c", "d"):
        ledger.set(budget, None)
        attempt = settled(ledger, 0, budget=budget)
        ledger.put("lines", {"estimate": most, "settled": most}, budget=budget)
        ledger.put("lines", {"budget": "b"}, budget=budget)
        assert attempt
    ledger.conserved = False
    for _ in range(2):
        [amounts] = check(ledger).amounts
        assert (amounts.estimated, amounts.charged) == (3 * most, 3 * most)
        [drift] = check(ledger).drift
        assert drift.actual == 3 * most
        tally(ledger)


def test_a_tally_that_was_changed_is_seen_and_rebuilt(tree: Ledger) -> None:
    life = Life(tree, 9)
    for _ in range(60):
        life.step()
    tally(tree)
    some = tree.rows("tallies")
    tree.put("tallies", {"figures": '{"settled":7}'}, tally_id=some[0].tally_id)
    tree.put("tallies", {"charged": 1, "requests": 3}, tally_id=some[1].tally_id)
    tree.put("tallies", {"stage": "other"}, tally_id=some[2].tally_id)

    def delete(connection: sa.Connection) -> None:
        table = sa.table("budget_tallies", sa.column("tally_id", sa.Uuid))
        connection.execute(sa.delete(table).where(table.c.tally_id == some[3].tally_id))

    tree.store.run(delete)
    # The changed stage is two: what should be there, and what should not.
    assert len(mismatched(tree)) == 5
    done = [
        tree.store.run(tallies.rebuild, tree.root, day)
        for day in tree.store.read(tallies.days, tree.root)
    ]
    assert sum(done) == 5
    assert mismatched(tree) == []
    assert tree.rows("tallies") == some
    check(tree)


def test_rebuilding_waits_for_nobody_and_nobody_is_lost(racing: Ledger) -> None:
    many = [settled(racing, 1) for _ in range(6)]
    tally(racing)
    [day] = racing.store.read(tallies.days, racing.root)

    def late() -> None:
        for attempt in many:
            attempt.record(2, key="late")

    def rebuild() -> None:
        for _ in range(4):
            racing.store.run(tallies.rebuild, racing.root, day)

    at_once([late, rebuild, lambda: tally(racing, 2)])
    check(racing)
    assert mismatched(racing) == []


def read_of(connection: sa.Connection, table: str) -> int:
    """How many rows of a table this session has read and not told yet."""
    found = connection.execute(
        sa.text(
            "SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)"
            " FROM pg_stat_xact_user_tables WHERE relname = :table"
        ),
        {"table": table},
    ).scalar_one()
    return int(found)


@pytest.mark.parametrize("asked", [Asked(), Asked(budget="b"), Asked(stage="draft")])
def test_a_report_reads_no_request_that_is_tallied(tree: Ledger, asked: Asked) -> None:
    if tree.store.dialect == "sqlite":
        pytest.skip("it does not say what it has read")
    for _ in range(30):
        settled(tree, 1)
    tree.reserve(1)
    tally(tree)
    tables = ("budget_reservations", "budget_lines", "budget_attempts")
    with tree.store.apart() as connection:
        connection.execute(sa.text(f"ANALYZE {', '.join(tables)}"))

    def read(connection: sa.Connection) -> list[int]:
        # As where there are many: a few rows are read faster without an index.
        connection.execute(sa.text("SET LOCAL enable_seqscan = off"))
        before = [read_of(connection, table) for table in tables]
        reports._report(connection, tree.settings, asked, "tenant", (None, None))
        after = [read_of(connection, table) for table in tables]
        return [one - other for one, other in zip(after, before, strict=True)]

    reservations, lines, attempts = tree.store.read(read)
    # The open one: by each statement that looks for open ones.
    assert reservations <= 3
    assert lines <= 2
    assert attempts == 0


def test_what_a_report_and_a_roll_cost(tree: Ledger) -> None:
    statements: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        statements.append(statement)

    costs = []
    event.listen(tree.store.engine, "before_cursor_execute", note)
    try:
        for count in (3, 12):
            for _ in range(count):
                settled(tree, 1)
            statements.clear()
            tree.store.run(tallies.roll, tree.root, 500, 0)
            rolled = len(statements)
            statements.clear()
            reconcile.report(tree.store, tree.settings)
            costs.append((rolled, len(statements)))
    finally:
        event.remove(tree.store.engine, "before_cursor_execute", note)
    (first, one), (second, other) = costs
    assert one == other
    # The first one inserts, the second one changes what is there.
    assert first == second <= 9
