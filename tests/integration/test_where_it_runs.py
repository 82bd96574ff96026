"""Where the relay runs: beside beat under any scheduler, by itself, inside a worker, several."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redbeat import RedBeatSchedulerEntry

from tests.cluster import ROOT, WAIT, Cluster, Process, eventually
from tests.services.redis import RedisServer

MakeCluster = Callable[..., Cluster]
pytestmark = [pytest.mark.postgres, pytest.mark.redis]

#: Entries of budgeted tasks.
SCHEDULE = {
    "often": {"task": "shop.draft", "schedule": 0.3, "args": [2, "a"]},
    "seldom": {"task": "shop.quiet", "schedule": 0.7, "args": ["a"]},
}


@pytest.fixture
def make(redis_url: str, postgres_url: str, make_cluster: MakeCluster) -> MakeCluster:
    """Make a cluster on Redis and PostgreSQL, with a budget of many tokens."""

    def make(**conf: Any) -> Cluster:
        cluster = make_cluster(
            broker_url=redis_url, result_backend=redis_url, budget_database_url=postgres_url, **conf
        )
        cluster.budget.set("tenant:a", limit=1_000_000, unit="tokens")
        return cluster

    return make


def ran(cluster: Cluster) -> Counter[str]:
    """How often each task ran."""
    return Counter(line.split()[0] for line in cluster.journal())


def goes_on(cluster: Cluster, *tasks: str) -> None:
    """Wait until each has run three times more."""
    before = ran(cluster)
    eventually(lambda: ran(cluster), lambda now: all(now[one] >= before[one] + 3 for one in tasks))


def ends_well(cluster: Cluster, *processes: Process) -> None:
    """End these processes, then have another relay bring all that was admitted to its end."""
    for process in processes:
        assert process.terminate() == 0, process.text()
        assert "Traceback" not in process.text()
    assert cluster.budget.relays() == ()
    cluster.relay()
    cluster.settle()
    counts = cluster.counts()
    assert counts["settled"] == counts["admitted"] == ran(cluster).total()


def test_beat_with_its_own_scheduler(make: MakeCluster) -> None:
    cluster = make(beat_schedule=SCHEDULE)
    cluster.worker()
    beat = cluster.beat()
    goes_on(cluster, "draft", "quiet")
    [relay] = cluster.budget.relays()
    assert relay.pid == beat.pid
    ends_well(cluster, beat)


def test_beat_with_redbeat(make: MakeCluster, own_redis: RedisServer) -> None:
    cluster = make(
        beat_schedule=SCHEDULE,
        budget_beat_scheduler="redbeat.RedBeatScheduler",
        redbeat_redis_url=own_redis.url,
        beat_max_loop_interval=0.2,
    )
    cluster.worker()
    beat = cluster.beat()
    goes_on(cluster, "draft", "quiet")
    # An entry that is made while beat runs.
    RedBeatSchedulerEntry("late", "shop.fail", 0.5, ["late", "a"], app=cluster.app).save()
    goes_on(cluster, "fail")
    assert beat.terminate() == 0
    # Its lock is free: another beat goes on at once.
    again = cluster.beat()
    goes_on(cluster, "draft")
    ends_well(cluster, again)


ENTRIES = """
import django
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from django_celery_beat.models import IntervalSchedule, PeriodicTask
every = IntervalSchedule.objects.create(every=300, period="microseconds")
every.every = 300_000
every.save()
for name, args in ("draft", '[2, "a"]'), ("quiet", '["a"]'):
    PeriodicTask.objects.create(name=name, task="shop." + name, args=args, interval=every)
"""


@pytest.mark.parametrize("named", ["django", "django_celery_beat.schedulers:DatabaseScheduler"])
def test_beat_with_djangos_scheduler(
    make: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    cluster = make(budget_beat_scheduler=named, beat_max_loop_interval=0.2)
    cluster.worker()
    django = {
        "DJANGO_SETTINGS_MODULE": "tests.apps.django_settings",
        "DJANGO_DATABASE": str(tmp_path / "django.db"),
    }
    subprocess.run(
        [sys.executable, "-c", ENTRIES], cwd=ROOT, env={**os.environ, **django}, check=True
    )
    for name, value in django.items():
        monkeypatch.setenv(name, value)
    beat = cluster.beat()
    for name in django:
        monkeypatch.delenv(name)
    goes_on(cluster, "draft", "quiet")
    ends_well(cluster, beat)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_worker_with_a_relay_needs_nothing_beside_it(make: MakeCluster, pool: str) -> None:
    cluster = make(worker_max_tasks_per_child=2)
    worker = cluster.worker("--budget-relay", pool=pool)
    worker.says("budget relay started")
    results = [cluster.task("draft").delay(number, "a") for number in range(6)]
    results.append(cluster.task("flaky").delay(2, "a"))
    assert [result.get(timeout=WAIT) for result in results] == [0, 1, 2, 3, 4, 5, 2]
    [relay] = cluster.budget.relays()
    assert relay.pid == worker.pid
    assert worker.terminate() == 0
    assert cluster.budget.relays() == ()
    cluster.settle()


def test_a_worker_relays_only_where_it_is_asked_to(make: MakeCluster) -> None:
    cluster = make()
    cluster.worker()
    assert "--budget-relay" in helped(cluster)
    cluster.task("draft").delay(1, "a")
    assert cluster.budget.relays() == ()
    assert cluster.counts()["reserved"] == 1
    relay = cluster.relay()
    cluster.settle()
    ends_well(cluster, relay)


def helped(cluster: Cluster) -> str:
    process = cluster.start("help", "worker", "--help")
    assert process.popen.wait(WAIT) == 0
    return process.text()


def test_two_relays_and_two_beats_at_once(make: MakeCluster) -> None:
    """Each message is published once, each entry is sent by each beat, nothing is lost."""
    # What no worker takes is not published again meanwhile.
    cluster = make(
        beat_schedule=SCHEDULE, task_default_queue="shared", budget_republish_seconds=600
    )
    beats = [
        cluster.start(
            *("beat", "beat", "-S", "budget", "-l", "INFO"),
            *("-s", str(cluster.folder / f"schedule-{number}")),
        )
        for number in range(2)
    ]
    relays = [cluster.relay() for _ in range(2)]
    for beat in beats:
        beat.says("budget relay started")
    assert len(eventually(cluster.budget.relays, lambda found: len(found) == 4)) == 4
    calls = 100
    for number in range(calls):
        cluster.task("draft").delay(number % 3, "a")
    counts = eventually(cluster.counts, lambda now: now["admitted"] >= calls + 20)
    for process in (*beats, *relays):
        process.ask_to_end()
    for process in (*beats, *relays):
        assert process.terminate() == 0, process.text()
    sent = sum(beat.text().count("Sending due task") for beat in beats)
    counts = cluster.counts()
    assert counts["admitted"] == calls + sent
    assert min(beat.text().count("Sending due task") for beat in beats) > 0
    last = cluster.relay()
    eventually(cluster.counts, lambda now: now["published"] == now["admitted"])
    assert last.terminate() == 0
    # Before any worker takes them: what is in the queue is what was published.
    with cluster.app.connection_for_read() as connection:
        queued = connection.default_channel.client.llen("shared")
    assert queued == counts["admitted"]
    cluster.worker()
    cluster.relay()
    cluster.settle()
    assert ran(cluster).total() == cluster.counts()["settled"] == calls + sent
