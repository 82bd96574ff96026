"""Who goes next through a lane, by the ledger: shares, and that large work has its turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget import reconcile
from celery_budget.core.shares import LANE, Account, Key
from celery_budget.settings import Settings
from celery_budget.store import (
    Store,
    continuations,
    dispatching,
    lanes,
    migrate,
    schema,
    shares,
)
from tests.contract.support import RETRIED, RETURNED, Ledger, admit_many, message_of

SECOND = 1_000_000


def lane(ledger: Ledger, **terms: Any) -> None:
    given = {"queues": ("celery",), "preflight": False, **terms}
    ledger.store.run(lanes.declare, ledger.root, "llm", given)


def dispatch(ledger: Ledger) -> int:
    return ledger.store.run(dispatching.dispatch, ledger.root, "llm")


def reserve(ledger: Ledger, count: int, amount: int = 10, budget: str = "b", **changes: Any) -> Any:
    """Admit so many requests together; their ids, in order."""
    requests = [ledger.request(amount, budget=budget, **changes) for _ in range(count)]
    admit_many(ledger.store, ledger.settings, [(one, message_of(one)) for one in requests])
    return requests


def served(ledger: Ledger) -> dict[str, int]:
    """How many units of each tenant were released and are not done with."""
    found: dict[str, int] = {}
    for row in ledger.rows("outbox"):
        if row.state in ("due", "published"):
            found[row.tenant] = found.get(row.tenant, 0) + row.weight
    return found


def finish_all(ledger: Ledger, *requests: Any) -> None:
    """Run and end what was released."""
    for one in requests:
        if (message := ledger.message(one)) is not None and message.state in ("due", "published"):
            attempt = ledger.run(one)
            assert attempt.end(RETURNED)
            assert attempt.close()


@pytest.fixture
def shared(ledger: Ledger) -> Ledger:
    """Three tenants, of which one weighs twice as much as each of the others."""
    for name, weight in (("a", 2), ("b", 1), ("c", 1)):
        ledger.set(name, None, weight=weight)
    return ledger


def test_tenants_share_a_lane_by_weight(shared: Ledger) -> None:
    lane(shared, max_running_units=400)
    for name in ("a", "b", "c"):
        reserve(shared, 30, budget=name)
    assert dispatch(shared) == 40
    assert served(shared) == {"a": 200, "b": 100, "c": 100}
    accounts = shared.store.read(shares.read, shared.root, "llm", ["a", "b", "c"]).accounts
    assert accounts == {
        LANE: Account(0, 0, 100),
        **{Key(name): Account(100) for name in ("a", "b", "c")},
    }


def test_shares_last_from_one_dispatch_to_the_next(shared: Ledger) -> None:
    lane(shared, max_running_jobs=1)
    requests = [*reserve(shared, 30, 10, "b"), *reserve(shared, 3, 100, "c")]
    turns = []
    for _ in range(22):
        assert dispatch(shared) == 1
        turns += list(served(shared))
        finish_all(shared, *requests)
    # Ten of b's for one of c's.
    assert turns.count("b") == 20
    assert turns.count("c") == 2


def test_who_comes_back_has_no_credit(shared: Ledger) -> None:
    lane(shared, max_running_units=100)
    requests = reserve(shared, 50, 10, "b")
    for _ in range(3):
        dispatch(shared)
        finish_all(shared, *requests)
    reserve(shared, 50, 10, "c")
    dispatch(shared)
    assert served(shared) == {"b": 50, "c": 50}


def test_siblings_share_what_is_their_parents(ledger: Ledger) -> None:
    ledger.set("org", None)
    ledger.set("other", None)
    for name in ("org/1", "org/2"):
        ledger.set(name, None, parent="org")
    lane(ledger, max_running_units=80)
    for name in ("org", "org/1", "org/2", "other"):
        reserve(ledger, 20, 10, name)
    dispatch(ledger)
    found = served(ledger)
    assert found["other"] == 40
    assert sorted(found.values()) == [10, 10, 20, 40]
    assert {row.name for row in ledger.rows("shares")} == {"", *found}
    assert [row.name for row in ledger.rows("shares") if row.own] == ["org"]


def test_weight_nothing_goes_last(shared: Ledger) -> None:
    shared.set("b", None, weight=0)
    lane(shared, max_running_units=100)
    reserve(shared, 5, 10, "b")
    requests = reserve(shared, 15, 10, "c")
    assert dispatch(shared) == 10
    assert served(shared) == {"c": 100}
    finish_all(shared, *requests)
    dispatch(shared)
    assert served(shared) == {"c": 50}
    # It is its turn once nobody else has work.
    dispatch(shared)
    assert served(shared) == {"c": 50, "b": 50}


def test_the_tenant_of_a_request_is_whose_share_it_counts_to(shared: Ledger) -> None:
    lane(shared, max_running_units=100)
    for tenant in ("x", "y"):
        reserve(shared, 10, 10, "b", tenant=tenant)
    dispatch(shared)
    assert served(shared) == {"x": 50, "y": 50}


def test_the_lightest_goes_first_and_what_has_waited_long_before_it(shared: Ledger) -> None:
    lane(shared, max_running_jobs=1, ageing=10)
    [heavy, light, light_too] = [shared.reserve(n, budget="b") for n in (50, 10, 10)]
    assert dispatch(shared) == 1
    assert shared.message(light).state == "due"
    finish_all(shared, light)
    # By now it counts ten units less than what came after it.
    shared.put("outbox", {"due_us": shared.now() - 5 * SECOND}, reservation_id=heavy.reservation_id)
    assert dispatch(shared) == 1
    assert shared.message(heavy).state == "due"
    assert shared.message(light_too).state == "held"


def test_what_becomes_free_is_kept_for_what_has_aged(shared: Ledger) -> None:
    lane(shared, max_running_units=100, ageing=10)
    first, second = reserve(shared, 2, 45, "b")
    assert dispatch(shared) == 2
    heavy = shared.reserve(90, budget="b")
    shared.put("outbox", {"due_us": shared.now() - 9 * SECOND}, reservation_id=heavy.reservation_id)
    light = shared.reserve(1, budget="b")
    assert dispatch(shared) == 0
    finish_all(shared, first)
    assert dispatch(shared) == 0
    finish_all(shared, second)
    assert dispatch(shared) == 2
    assert [shared.message(one).state for one in (heavy, light)] == ["due", "due"]


def test_among_many_tenants_each_has_its_turn(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatching, "MOST_TENANTS", 3)
    ledger.set("b", None)
    lane(ledger, max_running_jobs=1)
    requests = [one for n in range(8) for one in reserve(ledger, 3, 10, tenant=f"t{n}")]
    seen = []
    for _ in range(24):
        assert dispatch(ledger) == 1
        seen += list(served(ledger))
        finish_all(ledger, *requests)
    assert sorted(seen) == sorted(f"t{n}" for n in range(8) for _ in range(3))
    # Nobody is passed by twice before all have had their turn once.
    assert set(seen[:13]) == {f"t{n}" for n in range(8)}


def test_what_was_not_served_for_long_is_forgotten(shared: Ledger) -> None:
    lane(shared)
    reserve(shared, 1, 10, "a")
    dispatch(shared)
    shared.put("shares", {"served_us": 1}, name="a")
    reserve(shared, 1, 10, "b")
    dispatch(shared)
    assert {row.name for row in shared.rows("shares")} == {"", "b"}


ENDS: list[tuple[str, int]] = [
    ("used", 4), ("more", 25), ("unmetered", 10), ("cancelled", 0), ("expired", 0), ("retried", 4),
]  # fmt: skip


@pytest.mark.parametrize(("how", "counts"), ENDS)
def test_what_was_really_used_counts_in_the_end(shared: Ledger, how: str, counts: int) -> None:
    lane(shared)
    request = shared.reserve(10, budget="b", expires_us=shared.now() + 3_600 * SECOND)
    assert dispatch(shared) == 1
    assert account(shared, "b") == Account(10)
    if how == "cancelled":
        shared.store.run(continuations.cancel, shared.root, request.task_id)
    elif how == "expired":
        shared.put("outbox", {"expires_us": 1}, reservation_id=request.reservation_id)
        assert shared.relay().released == 1
    else:
        attempt = shared.run(request)
        if how == "retried":
            # The run before the last one counts by its estimate, whatever it used.
            attempt.record(7)
            following, _ = shared.retry(request, attempt)
            assert attempt.end(RETRIED)
            assert dispatch(shared) == 1
            assert account(shared, "b") == Account(20)
            attempt = shared.run(following)
            counts += 10
        if how != "unmetered":
            attempt.record({"used": 4, "more": 25, "retried": 4}[how], key="last")
        assert attempt.end(RETURNED)
        assert attempt.close()
    before = shared.rows("share_returns")
    assert [row.units for row in before] == (
        [20 - counts] if how == "retried" else ([10 - counts] if counts != 10 else [])
    )
    dispatch(shared)
    assert account(shared, "b") == Account(counts)
    assert shared.rows("share_returns") == []


def account(ledger: Ledger, name: str) -> Account:
    return ledger.store.read(shares.read, ledger.root, "llm", [name]).accounts[Key(name)]


def test_what_its_lane_never_let_go_is_not_given_back(shared: Ledger) -> None:
    lane(shared, paused=True)
    request = shared.reserve(10, budget="b")
    shared.store.run(continuations.cancel, shared.root, request.task_id)
    assert shared.rows("share_returns") == []
    shared.reserve(10, budget="b", queue="elsewhere")
    shared.relay()
    assert shared.rows("share_returns") == []


def test_what_its_worker_had_before_counts_by_what_it_used(shared: Ledger) -> None:
    lane(shared)
    request = shared.request(10, budget="b", unreserved=True)
    shared.admit(request, delivered=True)
    attempt = shared.run(request)
    attempt.record(4)
    assert attempt.end(RETURNED)
    assert attempt.close()
    assert [row.units for row in shared.rows("share_returns")] == [-4]


def test_what_another_ends_meanwhile_is_not_counted(shared: Ledger) -> None:
    if shared.store.dialect != "postgresql":
        pytest.skip("one writer at a time")
    lane(shared)
    first, second = reserve(shared, 2, 10, "b")
    with shared.store.transaction() as connection:
        connection.execute(
            sa.select(schema.outbox.c.outbox_id)
            .where(schema.outbox.c.reservation_id == first.reservation_id)
            .with_for_update()
        ).all()
        assert dispatch(shared) == 1
    assert [shared.message(one).state for one in (first, second)] == ["held", "due"]
    assert account(shared, "b") == Account(10)


def test_who_estimates_too_little_gains_nothing(shared: Ledger) -> None:
    lane(shared, max_running_jobs=1)
    requests = [*reserve(shared, 40, 1, "b"), *reserve(shared, 20, 10, "c")]
    had = {"b": 0, "c": 0}
    for _ in range(40):
        assert dispatch(shared) == 1
        [one] = [r for r in requests if (m := shared.message(r)) and m.state == "due"]
        attempt = shared.run(one)
        attempt.record(10)
        assert attempt.end(RETURNED)
        assert attempt.close()
        had[one.owner] += 10
    assert abs(had["b"] - had["c"]) <= 20


@pytest.fixture
def apart(postgres_url: str) -> Iterator[Ledger]:
    """A ledger in a database of its own, whose statistics are of nothing else."""
    store = Store(postgres_url)
    store.run(migrate.upgrade)
    yield Ledger(store, Settings(postgres_url, root="root"))
    store.dispose()


@pytest.mark.postgres
def test_a_dispatch_reads_no_more_of_a_large_backlog(apart: Ledger) -> None:
    """By index: the rows that it reads do not grow with what waits."""
    ledger = apart
    ledger.set("b", None)
    lane(ledger, max_running_units=100)
    [request] = reserve(ledger, 1, 10)
    reserve(ledger, 30, 10, tenant="other")
    message = ledger.message(request)
    columns = [column.name for column in schema.outbox.columns]
    read = []
    for total in (20_000, 40_000):
        ledger.store.run(_multiply, message, columns, total)
        with ledger.store.statement() as connection:
            connection.exec_driver_sql("VACUUM (ANALYZE) budget_outbox")
        plans = ledger.store.run(_explained, ledger.root)
        nodes = [node for plan in plans for node in _nodes(plan)]
        used = {node.get("Index Name") for node in nodes}
        assert {"ix_budget_outbox_held", "ix_budget_outbox_light"} <= used
        scanned = {node.get("Relation Name") for node in nodes if node["Node Type"] == "Seq Scan"}
        assert "budget_outbox" not in scanned
        read.append(sum(_rows_of(node) for node in nodes))
    assert read[0] > 0
    assert read[1] <= read[0] * 1.1


def _multiply(connection: sa.Connection, message: Any, columns: list[str], total: int) -> None:
    """Have as many messages like this one wait."""
    new = {"outbox_id": "gen_random_uuid()", "reservation_id": "gen_random_uuid()"}
    new |= {"weight": "10 + n % 90", "due_us": "one.due_us - n", "task_id": "CAST(n AS text)"}
    one, table = schema.outbox.alias("one"), schema.outbox
    number = sa.func.generate_series(1, total).table_valued("n").render_derived("numbers")
    made = [sa.literal_column(new[name]) if name in new else one.c[name] for name in columns]
    connection.execute(
        table.insert().from_select(
            columns,
            sa.select(*made).select_from(one.join(number, one.c.outbox_id == message.outbox_id)),
        )
    )


def _explained(connection: sa.Connection, root: str) -> list[Any]:
    """Return how the looks at what waits are planned, and what they read."""
    plans: list[Any] = []
    busy = False

    def explain(
        conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: Any
    ) -> None:
        nonlocal busy
        if busy or "budget_outbox" not in statement or not statement.startswith(("SELECT", "WITH")):
            return
        if "FOR UPDATE" in statement:
            return
        busy = True
        found = connection.exec_driver_sql(
            f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters
        )
        plans.append(found.scalar_one()[0]["Plan"])
        busy = False

    sa.event.listen(connection, "before_cursor_execute", explain)
    try:
        row = connection.execute(sa.select(schema.lanes).where(schema.lanes.c.root == root)).one()
        dispatching._heads(connection, root, row)
    finally:
        sa.event.remove(connection, "before_cursor_execute", explain)
    return plans


def _nodes(plan: Any) -> list[Any]:
    return [plan, *(node for below in plan.get("Plans", ()) for node in _nodes(below))]


def _rows_of(node: Any) -> int:
    """How many rows of the outbox a node has read, those that it left out included."""
    if node.get("Relation Name") != "budget_outbox":
        return 0
    dropped = ("Rows Removed by Filter", "Rows Removed by Index Recheck")
    return round(
        (node["Actual Rows"] + sum(node.get(name, 0) for name in dropped)) * node["Actual Loops"]
    )


def test_how_tenants_stand_in_a_lane_is_shown(ledger: Ledger) -> None:
    ledger.set("acme", 10_000)
    ledger.set("acme/ann", 10_000, parent="acme")
    ledger.set("initech", 10_000, weight=3)
    lane(ledger, max_queued_jobs=4)
    reserve(ledger, 4, budget="acme/ann")
    reserve(ledger, 4, budget="initech")
    last = reserve(ledger, 1, 30, budget="acme")
    assert dispatch(ledger) == 4
    [standing] = reconcile.lane_standings(ledger.store, ledger.settings, "llm")
    told = {one.tenant: one for one in standing.shares}
    assert {name: (one.above, one.weight) for name, one in told.items()} == {
        "acme": ("acme", 1),
        "acme/ann": ("acme", 1),
        "initech": (None, 3),
    }
    held = {row.tenant: 0 for row in ledger.rows("outbox")}
    for row in ledger.rows("outbox"):
        held[row.tenant] += row.weight if row.state == "held" else 0
    assert {name: one.waiting.units for name, one in told.items()} == held
    assert sorted(one.turn for one in told.values() if one.turn) == [1, 2, 3]
    # Who is furthest behind is first: what is let go next is of the first by turn.
    first = min((one for one in told.values() if one.turn), key=lambda one: one.turn or 0)
    before = served(ledger)
    lane(ledger, max_queued_jobs=5)
    assert dispatch(ledger) == 1
    after = served(ledger)
    assert [name for name in after if after[name] > before.get(name, 0)] == [first.tenant]
    assert len(last) == 1
    # Of all lanes at once only the totals are looked at.
    [plain] = reconcile.lane_standings(ledger.store, ledger.settings)
    assert plain.shares == ()
    assert "shares" not in plain.as_dict()
    assert [one["tenant"] for one in standing.as_dict()["shares"]] == [
        one.tenant for one in standing.shares
    ]
