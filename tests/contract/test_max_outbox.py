"""The bound of the outbox: beyond it nothing new is admitted; looking at it makes nobody wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_budget.core.reservations import Reserved
from celery_budget.errors import OutboxFull
from celery_budget.store import backlog
from tests.contract.support import Ledger


@pytest.fixture
def bounded(funded: Ledger) -> Ledger:
    """A ledger in which three messages may wait."""
    funded.settings = replace(funded.settings, max_outbox=3)
    return funded


def recount(ledger: Ledger) -> None:
    """Let the time come to count anew."""
    ledger.put("backlog", {"counted_us": 1})


def test_beyond_the_bound_nothing_new_is_admitted(bounded: Ledger) -> None:
    for _ in range(3):
        bounded.reserve(1)
    recount(bounded)
    before = bounded.dump()
    with pytest.raises(OutboxFull) as full:
        bounded.admit(bounded.request(1))
    assert full.value.args[:2] == (3, 3)
    assert full.value.retry_after is not None
    assert bounded.dump() == before
    assert isinstance(bounded.admit(bounded.request(1), continuation=True), Reserved)
    bounded.relay()
    with pytest.raises(OutboxFull):
        # Nobody has counted since.
        bounded.admit(bounded.request(1))
    recount(bounded)
    bounded.reserve(1)


def test_a_count_is_good_for_a_while(bounded: Ledger) -> None:
    for _ in range(6):
        bounded.reserve(1)
    recount(bounded)
    with pytest.raises(OutboxFull) as full:
        bounded.admit(bounded.request(1))
    # No more is counted than what decides.
    assert full.value.messages == 4


def test_messages_that_wait_for_their_time_count(bounded: Ledger) -> None:
    for _ in range(3):
        bounded.reserve(1, due_us=2**62)
    recount(bounded)
    with pytest.raises(OutboxFull):
        bounded.admit(bounded.request(1))


def test_nobody_waits_for_the_count(racing: Ledger) -> None:
    """Another transaction counts and stays open: the last count is good meanwhile."""
    racing.settings = replace(racing.settings, max_outbox=3)
    racing.reserve(1)
    if racing.store.dialect == "sqlite":
        pytest.skip("SQLite has one writer")
    recount(racing)
    with racing.store.transaction() as connection:
        assert backlog.waiting(connection, racing.root, 3) == 1
        racing.reserve(1)
