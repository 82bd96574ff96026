"""The whole path over pytest-celery's components, on RabbitMQ and on Redis.

Every test ends with the proof: nothing is open, and ``budget reconcile`` finds nothing wrong. So
does each broker's round, beside its relay.
"""

from __future__ import annotations

from typing import Any

import pytest
from celery import chain, chord, group
from celery.result import AsyncResult
from redis import Redis

from celery_budget import BudgetExceeded
from celery_budget.core.identity import new_id
from celery_budget.errors import AttemptLost
from tests.cluster import eventually
from tests.integration.support import received
from tests.smoke.app import ESTIMATE, IDLE, PATIENCE, TENANT, USED, gates, let_go, started
from tests.smoke.components import BudgetTestSetup

pytestmark = pytest.mark.fault


class Tenant:
    """A tenant of a test's own: its budget, its tasks, and what they have done.

    :param limit: of its budget.
    """

    def __init__(self, setup: BudgetTestSetup, name: str, limit: int = 1000) -> None:
        self.setup = setup
        self.name = name
        self.budget = TENANT.format(tenant=name)
        self.limit(limit)

    def limit(self, amount: int) -> None:
        self.setup.budget.set(self.budget, limit=amount, unit="tokens")

    def call(self, task: str, *args: Any, **options: Any) -> AsyncResult[Any]:
        """Publish a task of this tenant's."""
        found = self.setup.app.tasks[f"smoke.{task}"]
        return found.apply_async((*args, self.name), **options)

    def s(self, task: str, *args: Any) -> Any:
        """A signature of a task of this tenant's."""
        return self.setup.app.tasks[f"smoke.{task}"].s(*args, tenant=self.name)

    @property
    def amounts(self) -> tuple[int, int]:
        """What is reserved, and what is spent."""
        balance = self.setup.budget.balance(self.budget)
        return balance.reserved, balance.spent

    def done(self) -> list[str]:
        """The effects that its tasks have had, sorted."""
        found = self.setup.ledger.rows(
            "SELECT word FROM smoke_done WHERE tenant = %s ORDER BY word", self.name
        )
        return [word for (word,) in found]

    def attempts(self, result: AsyncResult[Any]) -> list[str]:
        """The outcomes of a task's attempts."""
        found = self.setup.ledger.rows(
            "SELECT a.outcome FROM budget_attempts a JOIN budget_reservations r"
            " ON r.root = a.root AND r.reservation_id = a.reservation_id"
            " WHERE r.task_id = %s ORDER BY a.attempt",
            result.id,
        )
        return [outcome for (outcome,) in found]

    def wait_started(self, word: str) -> None:
        """Wait until a task that waits has begun."""
        with self._backend() as backend:
            assert backend.blpop([started(self.name, word)], timeout=PATIENCE), f"{word} is idle"

    def let_go(self, word: str) -> None:
        """Let it, or the next that waits, go on."""
        with self._backend() as backend:
            backend.rpush(let_go(self.name, word), 1)

    def prove(self, spent: int) -> None:
        """Wait until all has ended, see what it cost, and have the ledger checked."""
        open_work = eventually(
            lambda: self.setup.budget.reconcile().open_work,
            lambda found: not any(found.values()),
            what="a ledger with nothing open",
        )
        assert not any(open_work.values())
        assert self.amounts == (0, spent)
        code, said = self.setup.command("reconcile")
        assert code == 0, said

    def _backend(self) -> Redis:
        return gates(self.setup.app.conf.result_backend)


def get(result: Any) -> Any:
    """Return what a task came to."""
    return result.get(timeout=PATIENCE)


def test_refusal_before_dispatch(celery_setup: BudgetTestSetup) -> None:
    tenant = Tenant(celery_setup, "refused", limit=ESTIMATE)
    first = tenant.call("work", "first", queue=IDLE)
    refused = str(new_id())
    with pytest.raises(BudgetExceeded) as error:
        tenant.call("work", "second", queue=IDLE, task_id=refused)
    assert (error.value.budget, error.value.available) == (tenant.budget, 0)
    with pytest.raises(BudgetExceeded):
        tenant.call("work", "third", task_id=refused)
    with pytest.raises(BudgetExceeded):
        group(tenant.s("work", word).set(task_id=refused) for word in ("x", "y")).apply_async()
    # What is admitted later takes the same way, through the relay, and comes after what came first.
    tenant.limit(10 * ESTIMATE)
    last = tenant.call("work", "last", queue=IDLE)
    seen: list[str] = []

    def look() -> list[str]:
        seen.extend(message.headers["id"] for message in received(celery_setup.app, IDLE))
        return seen

    assert eventually(look, lambda ids: last.id in ids) == [first.id, last.id]
    for result in (first, last):
        assert celery_setup.budget.cancel(result.id) == "ended"
    # So it is in the queue that the worker consumes.
    ran = tenant.call("work", "ran")
    assert get(ran) == "ran"
    assert celery_setup.worker is not None
    celery_setup.worker.assert_log_exists(ran.id)
    assert refused not in celery_setup.worker.logs()
    assert tenant.done() == ["ran"]
    tenant.prove(spent=USED)


def test_redelivery(celery_setup: BudgetTestSetup) -> None:
    """A worker dies after a task's effect and before its acknowledgement."""
    tenant = Tenant(celery_setup, "redelivered")
    worker = celery_setup.worker
    assert worker is not None
    late = tenant.call("late", "once")
    tenant.wait_started("once")
    assert tenant.amounts == (ESTIMATE, 0)
    worker.kill("SIGKILL")
    assert worker.container.status == "exited"
    # Nobody knows what it has done: what it holds stays held.
    assert tenant.amounts == (ESTIMATE, 0)
    worker.restart()
    tenant.wait_started("once")
    tenant.let_go("once")
    assert get(late) == "once"
    # On a machine that stands still a lease may lapse once more.
    first, *_, last = tenant.attempts(late)
    assert (first, last) == ("uncertain", "returned")
    assert worker.logs().count(f"smoke.late[{late.id}] received") >= 2
    assert tenant.done() == ["once"]
    tenant.prove(spent=USED)


def test_worker_kill_and_restart(celery_setup: BudgetTestSetup) -> None:
    """One task of each kind runs, others wait behind them, when the worker dies."""
    tenant = Tenant(celery_setup, "killed")
    worker = celery_setup.worker
    assert worker is not None
    late, early = tenant.call("late", "late"), tenant.call("early", "early")
    tenant.wait_started("late")
    tenant.wait_started("early")
    waiting = [tenant.call("work", word) for word in ("a", "b", "c")]
    worker.kill("SIGKILL")
    assert tenant.amounts == (5 * ESTIMATE, 0)
    worker.restart()
    # With late acknowledgement it runs again, and is charged what it used, which is the same.
    tenant.wait_started("late")
    tenant.let_go("late")
    assert get(late) == "late"
    assert [get(result) for result in waiting] == ["a", "b", "c"]
    # With early acknowledgement it is lost, and charged the greater of used and estimated.
    with pytest.raises(AttemptLost):
        get(early)
    assert tenant.done() == ["a", "b", "c", "early", "late"]
    tenant.prove(spent=4 * USED + max(USED, ESTIMATE))


def test_relay_restart(celery_setup: BudgetTestSetup) -> None:
    """The relay dies amid publishing, and is away while more is committed."""
    tenant = Tenant(celery_setup, "relayed")
    relay = celery_setup.relay
    amid = [tenant.call("work", f"amid {number:02}") for number in range(20)]
    get(amid[0])
    relay.kill("SIGKILL")
    assert relay.container.status == "exited"
    after = [tenant.call("work", f"then {number}") for number in range(5)]
    assert after_the_kill(tenant, after) == {"reserved"}
    relay.restart()
    words = [get(result) for result in (*amid, *after)]
    assert tenant.done() == sorted(words)
    assert {tenant.attempts(result)[-1] for result in (*amid, *after)} == {"returned"}
    tenant.prove(spent=25 * USED)


def after_the_kill(tenant: Tenant, results: list[AsyncResult[Any]]) -> set[str]:
    """The states of requests that nobody can have published."""
    ids = [result.id for result in results]
    found = tenant.setup.ledger.rows(
        "SELECT r.state, o.state FROM budget_reservations r JOIN budget_outbox o"
        " ON o.root = r.root AND o.reservation_id = r.reservation_id WHERE r.task_id = ANY(%s)",
        ids,
    )
    assert [outbox for _, outbox in found] == ["due"] * len(results)
    return {state for state, _ in found}


def test_chain(celery_setup: BudgetTestSetup) -> None:
    """Admitted step by step, and as a whole."""
    tenant = Tenant(celery_setup, "chained", limit=5 * ESTIMATE)

    def steps(name: str) -> Any:
        more = (tenant.s("more", f"{name} {number}") for number in (2, 3))
        return chain(tenant.s("work", f"{name} 1"), *more)

    assert get(steps("a").apply_async()) == "a 1 a 2 a 3"
    assert get(steps("b").apply_async(reserve="chain")) == "b 1 b 2 b 3"
    # Of 25 there are 7 left: one step would fit.
    with pytest.raises(BudgetExceeded):
        steps("c").apply_async(reserve="chain")
    assert tenant.done() == ["a 1", "a 2", "a 3", "b 1", "b 2", "b 3"]
    tenant.prove(spent=6 * USED)


def test_chord(celery_setup: BudgetTestSetup) -> None:
    tenant = Tenant(celery_setup, "joined", limit=3 * ESTIMATE)
    with pytest.raises(BudgetExceeded):
        chord((tenant.s("work", word) for word in "abcd"), tenant.s("join")).apply_async()
    assert tenant.amounts == (0, 0)
    whole = chord((tenant.s("work", word) for word in "abc"), tenant.s("join"))
    assert get(whole.apply_async()) == "a b c"
    assert tenant.done() == ["a", "b", "c", "join"]
    tenant.prove(spent=4 * USED)


def test_group(celery_setup: BudgetTestSetup) -> None:
    tenant = Tenant(celery_setup, "grouped", limit=3 * ESTIMATE)
    members = group(tenant.s("work", word) for word in "abcd").apply_async(partial=True)
    assert get(members) == ["a", "b", "c"]
    [refused] = members.refused
    assert isinstance(refused.error, BudgetExceeded)
    assert tenant.done() == ["a", "b", "c"]
    tenant.prove(spent=3 * USED)
