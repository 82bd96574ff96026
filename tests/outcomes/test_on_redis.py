"""Every outcome has one right end in the ledger, with Redis."""

from __future__ import annotations

import pytest

from tests.cluster import Cluster
from tests.outcomes.checks import check_nothing_is_left, expected, seen
from tests.outcomes.rows import Row
from tests.outcomes.running import LIMIT, Pool

BROKER = "redis"

pytestmark = [
    pytest.mark.redis,
    pytest.mark.postgres,
    pytest.mark.slow,
    # The first test of a pool runs all that belongs to it.
    pytest.mark.timeout(900),
]


@pytest.mark.fault
def test_outcome(ran: Pool, row: Row, ack: str) -> None:
    for one in ran.asked[row.name, ack]:
        assert seen(ran, one) == expected(one, LIMIT)


def test_nothing_is_left(cluster: Cluster) -> None:
    check_nothing_is_left(cluster)
