"""Whose share of a lane a task counts to, from its declaration to the worker that runs it."""

from __future__ import annotations

from typing import Any

import pytest
from celery.contrib.testing.worker import start_worker

from celery_budget import BudgetedTask, budgeted
from celery_budget.errors import PolicyError
from celery_budget.store import lanes, schema
from tests.cluster import eventually
from tests.integration.publication.conftest import logging_kept
from tests.integration.support import Shop, current


def tenants(shop: Shop) -> list[str]:
    return [row.tenant for row in shop.rows(schema.outbox)]


def draft(tenant: str, user: str) -> str:
    return user


def test_a_task_counts_to_its_owner_unless_it_says(shop: Shop) -> None:
    with current(shop.app):
        plain = budgeted(budget="tenant:{tenant}", estimate=1)(
            shop.app.task(name="fair.plain", shared=False)(draft)
        )
        template = budgeted(budget="tenant:{tenant}", estimate=1, fair_by="user:{user}")(
            shop.app.task(name="fair.template", shared=False)(draft)
        )

        class Called(BudgetedTask):
            budget = "tenant:{tenant}"
            estimate = 1

            def fair_by(user: str) -> str:  # type: ignore[misc]  # noqa: N805
                return user.upper()

        made = shop.app.task(name="fair.made", base=Called, shared=False)(draft)
        for task in (plain, template, made):
            task.delay("a", "ann")
        shop.app.send_task("fair.template", ("a", "bob"))
        assert sorted(tenants(shop)) == ["ANN", "tenant:a", "user:ann", "user:bob"]
        assert {row.owner for row in shop.rows(schema.reservations)} == {"tenant:a"}


def test_a_share_that_names_no_argument_is_refused(shop: Shop) -> None:
    task = budgeted(budget="tenant:{tenant}", estimate=1, fair_by="{team}")(
        shop.app.task(name="fair.wrong", shared=False)(draft)
    )
    with pytest.raises(PolicyError, match="names 'team'"):
        task.delay("a", "ann")
    assert tenants(shop) == []


def test_a_worker_gets_the_tasks_of_users_in_turn(shop: Shop) -> None:
    shop.app.conf.update(worker_hijack_root_logger=False)
    seen: list[str] = []
    with current(shop.app), logging_kept():

        @budgeted(budget="tenant:{tenant}", estimate=1, fair_by="user:{user}")
        @shop.app.task(name="fair.run", shared=False)
        def run(tenant: str, user: str) -> None:
            seen.append(user)

        queue = shop.app.conf.task_default_queue
        terms: dict[str, Any] = {"queues": (queue,), "preflight": False, "max_running_jobs": 1}
        shop.budget.store.run(lanes.declare, shop.budget.settings.root, "llm", terms)
        for user in ("ann", "ann", "ann", "ann", "bob", "bob"):
            run.delay("a", user)
        with start_worker(shop.app, perform_ping_check=False, shutdown_timeout=60):
            for ran in range(1, 7):
                assert shop.relay().published == 1
                eventually(lambda ran=ran: len(seen) == ran)  # type: ignore[misc]
                eventually(lambda ran=ran: _settled(shop) == ran)  # type: ignore[misc]
    assert seen == ["ann", "bob", "ann", "bob", "ann", "ann"]


def _settled(shop: Shop) -> int:
    return sum(row.state == "settled" for row in shop.rows(schema.reservations))
