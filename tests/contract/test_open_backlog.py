"""What the sweep's looks cost does not depend on how much is open: kept, running, or let go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Engine

from celery_budget import recovery
from celery_budget.store import lanes, outbox, silent
from tests.contract.support import RETURNED, Ledger
from tests.contract.test_backlog import _nodes, ledger

__all__ = ["ledger"]

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

MANY = 20_000

_RESERVATIONS = sa.text(
    "INSERT INTO budget_reservations SELECT (jsonb_populate_record(r, jsonb_build_object("
    " 'reservation_id', md5(:name || n)::uuid, 'request_id', :name || n, 'task_id', :name || n))).*"
    " FROM budget_reservations r, generate_series(1, :many) AS n"
    " WHERE r.root = :root AND r.task_id = :name"
)
_OF_REQUESTS = (
    "INSERT INTO budget_{0} SELECT (jsonb_populate_record(o, jsonb_build_object("
    " 'reservation_id', md5(:name || n)::uuid{1}))).*"
    " FROM budget_{0} o, budget_reservations r, generate_series(1, :many) AS n"
    " WHERE r.root = :root AND r.task_id = :name"
    " AND o.root = :root AND o.reservation_id = r.reservation_id"
)
_ATTEMPTS = sa.text(_OF_REQUESTS.format("attempts", ""))
_MESSAGES = sa.text(
    _OF_REQUESTS.format("outbox", ", 'outbox_id', gen_random_uuid(), 'task_id', :name || n")
)
_KEPT = sa.text(
    "INSERT INTO budget_outbox SELECT (jsonb_populate_record(o, jsonb_build_object("
    " 'outbox_id', md5('kept' || n)::uuid, 'reservation_id', NULL,"
    " 'parent_id', md5(:name || n)::uuid, 'task_id', 'kept' || n))).*"
    " FROM budget_outbox o, generate_series(1, :many) AS n"
    " WHERE o.root = :root AND o.task_id = :name"
)


def fill(ledger: Ledger, *, kept: bool) -> None:
    """Many that run, whose messages were published long ago; with ``kept`` one's child of each."""
    ledger.conserved = False
    ledger.start(1, task_id="runs")
    assert ledger.relay().published == 1
    given = {"root": ledger.root, "name": "runs", "many": MANY}
    with ledger.store.transaction() as connection:
        for statement in (_RESERVATIONS, _ATTEMPTS, *([_KEPT] if kept else []), _MESSAGES):
            connection.execute(statement, given)
    with ledger.store.statement() as connection:
        for table in ("reservations", "attempts", "outbox"):
            connection.exec_driver_sql(f"VACUUM (ANALYZE) budget_{table}")


@contextmanager
def executed() -> Iterator[list[tuple[str, Any]]]:
    """What is executed meanwhile, with its parameters."""
    said: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        said.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield said
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def read_by(ledger: Ledger, look: Callable[..., Any], *args: Any) -> int:
    """How many rows the first SELECT of a look reads, of all tables."""
    with executed() as said:
        ledger.store.run(look, ledger.root, *args)
    statement, parameters = next(one for one in said if "budget_outbox" in one[0])
    with ledger.store.engine.connect() as connection:
        [found] = connection.exec_driver_sql(
            f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters
        ).scalar_one()
    scans = [node for node in _nodes(found["Plan"]) if "Scan" in node["Node Type"]]
    return round(
        sum(
            (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
            for node in scans
        )
    )


def test_a_look_for_silent_messages_reads_what_it_looks_at(ledger: Ledger) -> None:
    fill(ledger, kept=False)
    ledger.put("outbox", {"due_us": 1, "published_us": 1}, state="published")
    # Each with the state of its request.
    assert read_by(ledger, silent.look, 100) <= 2 * 100


def test_a_look_at_what_runs_reads_a_part(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(ledger, kept=False)
    monkeypatch.setattr(silent, "IN_HAND", 100)
    # Each with its message, and whether it came by its reservation.
    assert read_by(ledger, silent.started) <= 4 * 100


def test_one_behind_many_that_run_is_found_by_the_next_passes(ledger: Ledger) -> None:
    fill(ledger, kept=False)
    lost = ledger.reserve(1, task_id="lost")
    assert ledger.relay().published == 1
    ledger.put("outbox", {"due_us": 1, "published_us": 1}, state="published")
    ledger.put("outbox", {"due_us": 2, "published_us": 2}, task_id="lost")
    suspicion = ledger.suspicion()
    passes = 0
    while not suspicion.look():
        passes += 1
        assert passes <= MANY // 10_000 + 1
    assert passes >= 1
    # Those that run are not looked at again for a while.
    looked = ledger.store.read(silent.look, ledger.root, 10)
    assert [one.reservation_id for one in looked.unstarted] == [lost.reservation_id]
    assert looked.others == []


def test_a_look_at_what_is_kept_reads_a_part_and_goes_on_there(ledger: Ledger) -> None:
    fill(ledger, kept=True)
    # Its parent, an open attempt of it, and itself.
    assert read_by(ledger, outbox.prune, 100) <= 3 * outbox.KEPT_AT_ONCE
    kept = recovery.Kept()
    seen = []
    while not seen or kept.after is not None:
        assert ledger.store.run(outbox.prune, ledger.root, 100, kept.after).count == 0
        recovery.run_once(ledger.store, ledger.settings, ledger.results, ledger.suspicion(), kept)
        seen.append(kept.after)
    assert len(seen) == MANY // outbox.KEPT_AT_ONCE + 1
    assert len(set(seen)) == len(seen)


def test_what_a_lane_without_limits_has_let_go_is_not_counted(ledger: Ledger) -> None:
    terms = {"queues": ("celery",), "preflight": False}
    ledger.store.run(lanes.declare, ledger.root, "llm", terms)
    for limit, counts in ((None, 0), (5, 1)):
        ledger.store.run(lanes.declare, ledger.root, "llm", {"max_running_jobs": limit})
        request = ledger.reserve(1)
        with executed() as said:
            assert ledger.relay().published == 1
        counting = [one for one, _ in said if "count(*)" in one and "GROUP BY" in one]
        assert len(counting) == counts
        assert ledger.run(request).end(RETURNED)
