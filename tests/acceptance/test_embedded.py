"""The whole path on the embedded default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_budget import BudgetExceeded
from tests.cluster import WAIT, Cluster


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_request_is_reserved_published_run_and_settled(
    make_cluster: Callable[..., Cluster], embedded: dict[str, Any], pool: str
) -> None:
    cluster = make_cluster(**embedded)
    cluster.budget.set("tenant:a", limit=10, unit="tokens")
    result = cluster.task("draft").delay(6, "a", used=5)
    with pytest.raises(BudgetExceeded) as refusal:
        cluster.task("draft").delay(6, "a")
    assert refusal.value.args[:9] == ("tenant:a", "tokens", 6, 4, 10, 6, 0, "held", 10)
    cluster.worker(pool=pool)
    cluster.beat()
    assert result.get(timeout=WAIT) == 5
    cluster.settle()
    balance = cluster.budget.balance("tenant:a")
    assert (balance.reserved, balance.spent, balance.available) == (0, 5, 5)
    assert cluster.journal() == ["draft 6"]
