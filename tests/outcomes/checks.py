"""What is looked at once a request has come to its end, and what its row says of it."""

from __future__ import annotations

from typing import Any

from celery_budget.store import schema
from tests.cluster import WAIT, Cluster
from tests.outcomes.rows import THEN
from tests.outcomes.running import Asked, Pool

#: What the journal calls the ends of a reservation.
ENDS = {"settle": "settled", "release": "released", "lose": "lost"}


def seen(pool: Pool, one: Asked, seconds: float = WAIT) -> dict[str, Any]:
    """Return what a request has come to, in the ledger and for who waits for it."""
    cluster = pool.cluster
    story = pool.story(one, seconds)
    balance = cluster.budget.balance(one.budget)
    journal = cluster.budget.journal(one.budget)
    return {
        "state": story.reservation["state"],
        "reason": story.reservation["reason"],
        "outcomes": tuple(attempt["outcome"] for attempt in story.attempts),
        "balance": (balance.reserved, balance.spent, balance.available),
        "ends": [ENDS[entry.what] for entry in journal if entry.what in ENDS],
        "messages": story.messages,
        **results(cluster, one),
    }


def results(cluster: Cluster, one: Asked) -> dict[str, Any]:
    """Return what Celery's own user sees: results, and what followed."""
    result = cluster.app.AsyncResult(one.task_id)
    following = cluster.app.AsyncResult(one.next_id)
    lines = cluster.journal()
    return {
        "result": result.state,
        "error": type(result.result).__name__ if isinstance(result.result, Exception) else None,
        "following": following.state,
        "runs": lines.count(f"run {one.task_id}"),
        "followed": lines.count(f"after {one.task_id}"),
        "told": lines.count(f"told {one.task_id}"),
    }


def expected(one: Asked, limit: int) -> dict[str, Any]:
    """Return the same as its row promises."""
    end = one.row.end(one.ack)
    then = THEN[end.then]
    spent = end.charged if one.records else end.unrecorded
    following = then.step if one.records else then.chord
    return {
        "state": end.state,
        "reason": end.reason,
        "outcomes": end.outcomes,
        "balance": (0, spent, limit - spent),
        "ends": [end.state],
        "messages": (),
        "result": end.result,
        "error": end.error,
        "following": following,
        "runs": len(end.outcomes),
        "followed": int(following == "SUCCESS"),
        "told": int(then.errback and one.records),
    }


def check_nothing_is_left(cluster: Cluster) -> None:
    """Check that all has come to its end, is closed and told, and that ``reconcile`` agrees."""
    cluster.settle()
    with cluster.budget.store.snapshot() as connection:
        for table in (schema.outbox, schema.untold, schema.parked):
            assert connection.execute(table.select()).all() == []
        attempts = connection.execute(schema.attempts.select()).all()
    assert [row for row in attempts if row.lease_until_us is not None] == []
    assert [row for row in attempts if row.payload is not None] == []
    reconcile = cluster.start("reconcile", "budget", "reconcile")
    assert reconcile.popen.wait(WAIT) == 0, reconcile.text()
