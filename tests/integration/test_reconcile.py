"""Reconciliation of a ledger that real workers and a real relay are at."""

from __future__ import annotations

from tests.integration.tenant import Tenant


def test_what_has_ended_has_its_results_and_what_is_to_come_is_named(tenant: Tenant) -> None:
    work, budget = tenant.task("work"), tenant.cluster.budget
    later = work.apply_async((0, tenant.name), countdown=3600)
    done = [work.delay(number, tenant.name) for number in range(3)]
    assert [result.get(timeout=30) for result in done] == [0, 1, 2]
    for result in done:
        tenant.story(result.id)
    found = budget.reconcile(limit=1000, broker=True, results=3)
    assert found.ok
    assert (found.results, found.unstored) == (3, ())
    assert found.relays >= 1
    assert all(queue.messages is not None for queue in found.queues), "the broker has answered"
    [step] = [one for kind in found.pending for one in kind.steps if one.task_id == later.id]
    assert (step.kind, step.overdue_seconds) == ("later", 0)
    assert "none is seen" not in step.told
    done[2].forget()
    [missing] = budget.reconcile(results=3).unstored
    assert missing.startswith(f"task {done[2].id} (steps.work) has returned")
    budget.cancel(later.id)
