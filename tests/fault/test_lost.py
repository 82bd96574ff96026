"""Lost attempts of real workers: asked about, undone, charged, or run again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery.exceptions import TaskRevokedError

from celery_budget import AttemptLost
from celery_budget.store import schema
from tests.apps import losing
from tests.cluster import WAIT, Cluster, eventually

pytestmark = pytest.mark.fault

#: Longer than the main process may take to find that a child has died: five seconds.
LONG = {"budget_lease_seconds": 20}
REPLIES = Path(__file__).parent.parent / "replies"


@dataclass
class Losing:
    """A cluster with one worker whose children may be killed."""

    cluster: Cluster

    def __post_init__(self) -> None:
        self.cluster.budget.set("tenant:a", limit=1000, unit="tokens")
        self.cluster.beat()
        self.worker = self.cluster.worker()

    def send(self, task: str, name: str, **options: Any) -> Any:
        result = self.cluster.app.tasks[f"losing.{task}"].apply_async((name, "a"), **options)
        eventually(self.cluster.journal, lambda said: any(f"start {name}" in one for one in said))
        return result

    def kill_child(self) -> None:
        """Kill the child that runs the one attempt there is."""
        [pid] = [row.pid for row in self.rows("attempts") if row.ended_us is None]
        [child] = [one for one in self.worker.children() if one.pid == pid]
        child.kill()

    def rows(self, table: str) -> list[Any]:
        with self.cluster.budget.store.snapshot() as connection:
            return list(connection.execute(getattr(schema, table).select()))

    def answer(self, name: str, answer: Any) -> None:
        written = self.cluster.folder / f"written-{name}"
        written.write_text(json.dumps(answer))
        written.rename(self.cluster.folder / f"answer-{name}")

    def says(self, text: str) -> None:
        eventually(self.cluster.journal, lambda said: any(text in one for one in said))

    def keys(self, name: str) -> set[str]:
        """The idempotency keys that attempts and lookups of a request have had."""
        said = [one.split() for one in self.cluster.journal()]
        return {one[-1] for one in said if one[0] in ("start", "lookup") and one[1] == name}

    def ended(self) -> tuple[str, str | None, bool]:
        self.cluster.settle()
        [row] = self.rows("reservations")
        return row.state, row.reason, row.unmetered

    def spent(self) -> int:
        balance = self.cluster.budget.balance("tenant:a")
        assert balance.reserved == 0
        return balance.spent


@pytest.fixture
def losing_cluster(
    redis_url: str, postgres_url: str, make_cluster: Callable[..., Cluster]
) -> Callable[..., Losing]:
    def make(**conf: Any) -> Losing:
        cluster = make_cluster(
            broker_url=redis_url,
            result_backend=redis_url,
            budget_database_url=postgres_url,
            imports=[losing.__name__],
            **conf,
        )
        cluster.app.loader.import_default_modules()
        return Losing(cluster)

    return make


def test_a_killed_child_is_charged_what_the_provider_tells(
    losing_cluster: Callable[..., Losing],
) -> None:
    one = losing_cluster(**LONG)
    result = one.send("asked_early", "x")
    one.kill_child()
    with pytest.raises(WorkerLostError):
        result.get(timeout=WAIT)
    one.says("lookup x 1")
    assert [row.state for row in one.rows("reservations")] == ["running"], "it waits to be told"
    one.answer("x", 4)
    assert one.ended() == ("settled", "looked up", False)
    assert one.spent() == 4
    assert len(one.keys("x")) == 1
    assert "undo" not in " ".join(one.cluster.journal())


def test_a_hard_time_limit_is_charged_a_providers_reply(
    losing_cluster: Callable[..., Losing],
) -> None:
    reply = json.loads((REPLIES / "openai_chat.json").read_text())
    one = losing_cluster()
    one.answer("x", reply)
    result = one.send("asked", "x", time_limit=2)
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=WAIT)
    assert one.ended() == ("settled", "looked up", False)
    # What it had recorded by itself was another call.
    assert one.spent() == 2 + reply["usage"]["total_tokens"]
    assert len(one.rows("attempts")) == 1


def test_a_terminated_one_is_undone_where_nobody_can_tell(
    losing_cluster: Callable[..., Losing],
) -> None:
    one = losing_cluster(worker_enable_remote_control=True, budget_lookup_seconds=0.5)
    result = one.send("asked_early", "x")
    result.revoke(terminate=True, signal="SIGKILL")
    with pytest.raises(TaskRevokedError):
        result.get(timeout=WAIT)
    assert one.ended() == ("lost", "compensated", False)
    assert one.spent() == 6
    one.says("undo x {'tokens': 2}")


def test_one_whose_machine_is_gone_is_asked_about_before_it_runs_again(
    losing_cluster: Callable[..., Losing],
) -> None:
    one = losing_cluster()
    result = one.send("asked", "x")
    one.worker.kill()
    one.says("lookup x 1")
    one.cluster.worker()
    one.cluster.release("x")
    one.answer("x", 5)
    assert result.get(timeout=WAIT) == "x"
    assert one.ended() == ("settled", None, False)
    assert one.spent() == 5 + 5
    assert [row.outcome for row in one.rows("attempts")] == ["uncertain", "returned"]
    said = [line.split()[0] for line in one.cluster.journal()]
    assert said[0] == "start"
    assert said[-2:] == ["start", "end"]
    assert set(said[1:-2]) == {"lookup"}
    assert len(one.keys("x")) == 1


def test_what_it_has_done_is_undone_before_it_runs_again(
    losing_cluster: Callable[..., Losing],
) -> None:
    one = losing_cluster()
    result = one.send("undone", "x")
    one.kill_child()
    one.says("undo x {'tokens': 2}")
    one.cluster.release("x")
    assert result.get(timeout=WAIT) == "x"
    assert one.ended() == ("settled", None, False)
    assert [line.split()[0] for line in one.cluster.journal()] == ["start", "undo", "start", "end"]
    assert one.spent() == 2 + 5


@pytest.mark.parametrize("victim", ["child", "worker"])
def test_one_that_is_to_be_charged_does_not_run_again(
    losing_cluster: Callable[..., Losing], victim: str
) -> None:
    one = losing_cluster(**(LONG if victim == "child" else {}))
    result = one.send("charged", "x")
    if victim == "child":
        one.kill_child()
    else:
        one.worker.kill()
        one.cluster.worker()
    with pytest.raises(WorkerLostError if victim == "child" else AttemptLost):
        result.get(timeout=WAIT)
    assert one.ended() == ("lost", None, False)
    assert one.spent() == 6
    assert len(one.cluster.journal()) == 1


def test_what_is_terminated_has_ended_before_celery_stores_that(
    losing_cluster: Callable[..., Losing],
) -> None:
    """Its message is acknowledged late, and would run again by the ledger."""
    one = losing_cluster(worker_enable_remote_control=True, shop_break="mark_as_revoked")
    result = one.send("undone", "x")
    result.revoke(terminate=True, signal="SIGKILL")
    assert one.ended()[0] == "lost"
    assert len(one.rows("attempts")) == 1
    assert "the backend is away" in one.worker.text()
