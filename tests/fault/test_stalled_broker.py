"""A broker that accepts connections and never answers: nobody waits for it but its messages."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from celery_budget.core.identity import new_id
from celery_budget.integration.service import RelayService
from celery_budget.store import claims
from celery_budget.store.schema import outbox as table
from tests.cluster import WAIT, Cluster, Process, eventually
from tests.messages import Told
from tests.services.base import LOOPBACK

pytestmark = pytest.mark.fault

#: Within which a relay has to be gone, whatever holds it up: less than the ten seconds which the
#: broker has for an answer, and more than the two that it takes where nothing else runs.
SECONDS = 8.0
JOBS = 3


@pytest.fixture(params=["amqp", "redis"])
def stalled_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A broker whose machine answers, and whose server does not."""
    with socket.create_server((LOOPBACK, 0), backlog=64) as server:
        yield f"{request.param}://{LOOPBACK}:{server.getsockname()[1]}//"


@pytest.fixture
def stuck(stalled_url: str, postgres_url: str, make_cluster: Callable[..., Cluster]) -> Cluster:
    cluster = make_cluster(
        broker_url=stalled_url,
        result_backend="cache+memory://",
        budget_database_url=postgres_url,
        budget_publish_seconds=600,
        budget_lease_seconds=600,
        broker_connection_timeout=60,
    )
    cluster.budget.set("tenant:a", limit=1000, unit="tokens")
    return cluster


def taken(cluster: Cluster) -> int:
    """How many messages relays have in hand."""
    with cluster.budget.store.snapshot() as connection:
        rows = connection.execute(table.select()).all()
    return sum(row.taken_by is not None for row in rows)


def free(cluster: Cluster) -> int:
    """How many messages another relay gets now."""
    store, settings = cluster.budget.store, cluster.budget.settings
    batch = store.run(claims.claim_due, settings.root, "", 100, 1, new_id())
    return len(batch.messages)


def ends(process: Process) -> float:
    """Ask a process to end; how long it took."""
    begin = time.monotonic()
    process.ask_to_end()
    process.popen.wait(WAIT)
    return time.monotonic() - begin


def admitted(cluster: Cluster) -> int:
    return cluster.counts()["admitted"]


def handed_back(cluster: Cluster, stops: int = 1) -> None:
    """Check that the batch is free again, but for one that each stop may have left on its way."""
    # What hangs goes on beside, and so does who signs off in its place.
    eventually(lambda: cluster.budget.relays() == ())
    assert free(cluster) >= JOBS - stops


def test_the_relay_hands_its_batch_back_and_is_gone_in_time(stuck: Cluster) -> None:
    for number in range(JOBS):
        stuck.task("draft").delay(number, "a")
    relay = stuck.relay()
    eventually(lambda: taken(stuck), lambda count: count == JOBS)
    eventually(stuck.budget.relays)
    assert ends(relay) < SECONDS, relay.text()
    assert relay.popen.returncode == 0
    handed_back(stuck)


def test_a_service_is_stopped_in_time_and_can_be_started_again(stuck: Cluster, told: Told) -> None:
    """As beat and workers stop it."""
    for number in range(JOBS):
        stuck.task("draft").delay(number, "a")
    service = RelayService(stuck.budget)
    for stops in (1, 2):
        service.start()
        assert service.alive
        eventually(lambda: taken(stuck), lambda count: count >= JOBS - 1)
        begin = time.monotonic()
        service.stop()
        assert time.monotonic() - begin < SECONDS
        assert not service.alive
        handed_back(stuck, stops)
    assert {one["store"] for one in told("relay.handed_back")} == {stuck.budget.store.url}


def test_beat_goes_on_admitting_its_entries(stuck: Cluster) -> None:
    stuck.conf["beat_schedule"] = {
        "often": {"task": "shop.draft", "schedule": 0.2, "args": [1, "a"]},
        "seldom": {"task": "shop.quiet", "schedule": 0.5, "args": ["a"]},
    }
    beat = stuck.beat()
    eventually(lambda: taken(stuck))
    before = admitted(stuck)
    begin = time.monotonic()
    eventually(lambda: admitted(stuck), lambda count: count >= before + 20)
    # Seven a second; a broker that is waited for but once takes longer.
    assert time.monotonic() - begin < 50
    assert "Traceback" not in beat.text()
    assert ends(beat) < SECONDS, beat.text()
    assert beat.popen.returncode == 0
    assert free(stuck) >= admitted(stuck) - 1
    assert stuck.budget.relays() == ()
