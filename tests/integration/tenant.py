"""A budget of its own for each test on one shared cluster, and waiting for what becomes of it."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from tests.cluster import WAIT, Cluster, eventually


class Tenant:
    """One test's budget on the shared cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.name = uuid4().hex[:8]
        self.set(100)

    @property
    def budget(self) -> str:
        return f"tenant:{self.name}"

    def set(self, limit: int) -> None:
        self.cluster.budget.set(self.budget, limit=limit, unit="tokens")

    def task(self, name: str) -> Any:
        return self.cluster.app.tasks[f"steps.{name}"]

    def spent(self, amount: int) -> None:
        """Wait until nothing is held any more and ``amount`` was charged; it adds up."""

        def look() -> tuple[int, int]:
            balance = self.cluster.budget.balance(self.budget)
            return balance.reserved, balance.spent

        eventually(look, lambda seen: seen == (0, amount), WAIT, f"(0, {amount})")
        assert self.cluster.budget.reconcile().mismatches == ()

    def story(self, task_id: str) -> Any:
        """Wait until the request has ended and is closed, and return its last story."""

        def look() -> Any:
            return self.cluster.budget.explain(task_id)

        def ended(stories: Any) -> bool:
            return bool(stories) and all(
                story.reservation.get("ended_us")
                and all(attempt["lease_until_us"] is None for attempt in story.attempts)
                for story in stories
            )

        return eventually(look, ended, WAIT, f"the end of {task_id}")[-1]

    def outcomes(self, task_id: str) -> list[str]:
        return [attempt["outcome"] for attempt in self.story(task_id).attempts]

    def parked(self, task_id: str) -> None:
        """Wait until the task waits for budget."""
        eventually(
            lambda: self.cluster.budget.explain(task_id),
            lambda stories: any(
                story.reservation["state"] == "parked" or story.reservation.get("parked")
                for story in stories
            ),
            WAIT,
            f"{task_id} parked",
        )
