"""The ledger's server fails and its standby takes over, under load: nothing accepted is lost.

Two servers on loopback with synchronous replication. What a caller was told is in the ledger once,
is run and settled once, and nobody had to be restarted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery.result import AsyncResult
from psycopg import sql

from celery_budget.core.identity import task_id_of
from celery_budget.errors import StoreError
from celery_budget.store import Store, checkup, engine
from celery_budget.store.schema import attempts, reservations
from tests.cluster import WAIT, Cluster, eventually
from tests.services.base import LOOPBACK
from tests.services.postgres import PostgresReplica, PostgresServer
from tests.services.proxy import Proxy

pytestmark = [pytest.mark.fault, pytest.mark.postgres, pytest.mark.redis]

CALLERS = 3
#: How many each of them has had accepted before the server fails, and after that.
EACH = 5


def make_synchronous(replica: PostgresReplica) -> None:
    """Have the primary wait for the replica with each commit."""
    name = sql.Literal(replica.standby)
    replica.primary.execute(sql.SQL("ALTER SYSTEM SET synchronous_standby_names = {}").format(name))
    replica.primary.execute(sql.SQL("SELECT pg_reload_conf()"))
    replica.primary.until("SELECT bool_or(sync_state = 'sync') FROM pg_stat_replication")


@pytest.fixture
def pair(own_postgres: PostgresServer) -> Iterator[PostgresReplica]:
    """A primary and its synchronous standby, for a test that kills either."""
    with PostgresReplica(own_postgres) as replica:
        make_synchronous(replica)
        yield replica
        for server in (replica, own_postgres):
            # What it would write, and still send, nobody needs.
            server.kill()


def url_of_both(replica: PostgresReplica, url: str, **more: str) -> str:
    """A database's URL with both servers, by which the one is found that can be written."""
    primary = replica.primary.port
    query = {"target_session_attrs": "read-write", "connect_timeout": "2", **more}
    return (
        f"postgresql+psycopg://postgres@{LOOPBACK}:{primary},{LOOPBACK}:{replica.port}"
        f"{urlsplit(url).path}?{'&'.join(f'{name}={value}' for name, value in query.items())}"
    )


class Callers:
    """Threads that ask for work as users are told to: by a request id, again where it may help."""

    def __init__(self, cluster: Cluster) -> None:
        self.accepted: dict[str, AsyncResult[Any]] = {}
        self.stop = threading.Event()
        self._cluster = cluster
        self._threads = ThreadPoolExecutor(CALLERS)
        self._running = [self._threads.submit(self._call, number) for number in range(CALLERS)]

    def _call(self, number: int) -> None:
        count = 0
        while not self.stop.is_set():
            request_id = f"caller-{number}-{count}"
            try:
                result = self._cluster.task("draft").apply_async((1, "a"), request_id=request_id)
            except StoreError as error:
                if not error.retryable:
                    raise
                self.stop.wait(0.05)
            else:
                self.accepted[request_id] = result
                count += 1

    def have(self, number: int) -> None:
        """Wait until each has had so many accepted."""
        ids = [f"caller-{caller}-{number - 1}" for caller in range(CALLERS)]

        def look() -> bool:
            for one in self._running:
                if one.done():
                    one.result()
            return all(request_id in self.accepted for request_id in ids)

        eventually(look, what=f"{number} requests accepted of each caller")

    def end(self) -> None:
        """Have them stop; raises what any of them has failed with."""
        self.stop.set()
        for one in self._running:
            one.result(WAIT)
        self._threads.shutdown()


def leased_until(store: Store, task_id: str) -> int:
    with store.snapshot() as connection:
        row = connection.execute(
            attempts.select()
            .join(reservations, reservations.c.reservation_id == attempts.c.reservation_id)
            .where(reservations.c.task_id == task_id)
        ).one()
    return int(row.lease_until_us)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_nothing_accepted_is_lost(
    pair: PostgresReplica,
    redis_url: str,
    make_cluster: Callable[..., Cluster],
    how: str,
) -> None:
    primary = pair.primary
    url = primary.create_database()
    cluster = make_cluster(
        broker_url=redis_url,
        result_backend=redis_url,
        budget_database_url=url_of_both(pair, url),
        budget_answer_seconds=1,
        budget_lease_seconds=6,
        budget_republish_seconds=600,
    )
    cluster.budget.set("tenant:a", limit=1_000_000, unit="tokens")
    relay = cluster.relay()
    relay.says("the relay is woken by notifications")
    worker = cluster.worker(concurrency=3)
    through, late = (cluster.task("held").delay(name, "a") for name in ("through", "late"))
    eventually(cluster.journal, lambda lines: {"start through", "start late"} <= set(lines))
    callers = Callers(cluster)
    with ExitStack() as ends:
        ends.callback(callers.stop.set)
        callers.have(EACH)
        if how == "killed":
            primary.kill()
        else:
            ends.enter_context(primary.stopped())
        # It records and ends while there is no server, or finds one just now.
        cluster.release("late")
        pair.promote()
        callers.have(max(int(one.split("-")[2]) for one in callers.accepted) + 1 + EACH)
        callers.end()
        if how == "stopped":
            # As whoever promotes has to see to; until then nobody has waited for it.
            primary.kill()
        # By the promoted server, from the worker's main process.
        store = cluster.budget.store
        was = leased_until(store, through.id)
        eventually(lambda: leased_until(store, through.id), lambda until: until > was)
        cluster.release("through")
        results = [*callers.accepted.values(), through, late]
        assert [one.get(timeout=WAIT) for one in results[:-2]] == [1] * len(callers.accepted)
        assert [one.get(timeout=WAIT) for one in results[-2:]] == ["through", "late"]
        cluster.settle()
        counts = cluster.counts()
        assert (counts["admitted"], counts["settled"]) == (len(results), len(results))
        balance = cluster.budget.balance("tenant:a")
        assert (balance.reserved, balance.spent) == (0, len(callers.accepted) + 2 * 5)
        with store.snapshot() as connection:
            rows = connection.execute(reservations.select()).all()
            runs = connection.execute(attempts.select()).all()
        assert {row.task_id for row in rows} == {one.id for one in results}
        assert [run.outcome for run in runs] == ["returned"] * len(results)
        assert cluster.journal().count("draft 1") == len(callers.accepted)
        eventually(lambda: relay.text().count("the relay is woken by notifications") == 2)
        assert list(cluster.folder.glob("budget-spool/*/*")) == []
        if how == "killed":
            reconciled = cluster.start("reconcile", "budget", "reconcile")
            assert reconciled.popen.wait(WAIT) == 0
        assert worker.popen.poll() is None


def ask(cluster: Cluster, request_id: str) -> str:
    """Ask for work until it is accepted, as users are told to; its task's id."""

    def call() -> str | None:
        try:
            return str(cluster.task("draft").apply_async((1, "a"), request_id=request_id).id)
        except StoreError as error:
            if not error.retryable:
                raise
            return None

    return str(eventually(call, lambda task_id: task_id is not None))


def admitted(store: Store) -> list[str]:
    """The tasks that are in the ledger."""
    with store.snapshot() as connection:
        return sorted(row.task_id for row in connection.execute(reservations.select()).all())


def at_port(url: str, port: int, **query: str) -> str:
    """The same database at another port."""
    place = urlsplit(url)._replace(netloc=f"postgres@{LOOPBACK}:{port}")
    return place._replace(query="&".join(f"{name}={query[name]}" for name in query)).geturl()


@pytest.fixture
def shop_at(make_cluster: Callable[..., Cluster]) -> Callable[..., Cluster]:
    """Make an application whose callers are all that is looked at, by its ledger's URL."""

    def make(url: str, **more: Any) -> Cluster:
        cluster = make_cluster(
            broker_url="memory://",
            result_backend="cache+memory://",
            budget_database_url=url,
            **more,
        )
        cluster.budget.set("tenant:a", limit=100, unit="tokens")
        return cluster

    return make


def test_a_commit_under_way_is_made_once(
    pair: PostgresReplica, shop_at: Callable[..., Cluster]
) -> None:
    """One request is lost on its way, of another its answer: neither caller can tell which."""
    url = pair.primary.create_database()
    unsent, unheard = (task_id_of("tenant:a", name) for name in ("unsent", "unheard"))
    with Proxy(pair.primary.port) as proxy, ThreadPoolExecutor(2) as threads:
        cluster = shop_at(at_port(url, proxy.port))
        before = ask(cluster, "before")
        was_lost = proxy.lose("request", unsent.encode())
        first = threads.submit(ask, cluster, "unsent")
        assert was_lost.wait(WAIT)
        was_lost = proxy.lose("answer", b"reserved")
        second = threads.submit(ask, cluster, "unheard")
        assert was_lost.wait(WAIT)
        direct = Store(url)
        eventually(lambda: admitted(direct), lambda found: unheard in found)
        assert unsent not in admitted(direct)
        direct.dispose()
        pair.primary.shut_down_immediately()
        pair.promote()
        proxy.target = pair.port
        proxy.cut()
        assert [first.result(WAIT), second.result(WAIT)] == [unsent, unheard]
        assert admitted(cluster.budget.store) == sorted([before, unsent, unheard])
        assert cluster.budget.balance("tenant:a").reserved == 3


@pytest.mark.parametrize("used", ["never", "to read"])
def test_a_server_that_cannot_be_written_is_left(
    replicated: PostgresReplica, shop_at: Callable[..., Cluster], used: str
) -> None:
    """A proxy has led to the standby, and does not any more: connections are there still."""
    url = replicated.primary.create_database()
    with Proxy(replicated.primary.port) as proxy:
        cluster = shop_at(at_port(url, proxy.port))
        store = cluster.budget.store
        store.dispose()
        replicated.catch_up()
        proxy.target = replicated.port
        if used == "to read":
            assert cluster.budget.balance("tenant:a").reserved == 0
        with pytest.raises(StoreError, match=r"recovery|read-only") as caught:
            cluster.task("draft").apply_async((1, "a"), request_id="r")
        assert caught.value.retryable
        # As many as there may be, all of them there.
        with ExitStack() as opened:
            for _ in range(3):
                opened.enter_context(store.snapshot()).exec_driver_sql("SELECT 1")
            proxy.target = replicated.primary.port
        cluster.task("draft").apply_async((1, "a"), request_id="r")
        assert cluster.budget.reconcile().mismatches == ()


def test_nobody_waits_for_ever_for_a_standby(
    pair: PostgresReplica, shop_at: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "TRIES", 1)
    url = pair.primary.create_database()
    cluster = shop_at(url, budget_answer_seconds=0.5, budget_lock_seconds=1)
    work = cluster.task("draft")
    ask(cluster, "before")
    pair.kill()
    for why in ("synchronous standby", "lock timeout"):
        with pytest.raises(StoreError, match=why) as caught:
            work.apply_async((1, "a"), request_id="r")
        assert caught.value.retryable
    # Told to nobody, and seen by nobody: the commit still waits.
    assert cluster.budget.balance("tenant:a").reserved == 1
    pair.primary.kill()
    pair.primary.restart()
    cluster.budget.store.dispose()
    # It is there now, and on no standby: it is not accepted before it is.
    assert cluster.budget.balance("tenant:a").reserved == 2
    for together in (nullcontext, cluster.budget.batch):
        with pytest.raises(StoreError, match="synchronous standby") as caught, together():
            work.apply_async((1, "a"), request_id="r")
        assert caught.value.retryable
    pair.restart()
    ask(cluster, "r")
    assert cluster.budget.balance("tenant:a").reserved == 2


def test_check_sees_whether_commits_wait_for_a_standby(replicated: PostgresReplica) -> None:
    primary = replicated.primary
    primary.until("SELECT bool_or(state = 'streaming') FROM pg_stat_replication")
    url = primary.create_database()
    primary.execute(sql.SQL("CREATE ROLE nobody LOGIN"))

    def seen(user: str = "postgres") -> tuple[int, int] | None:
        store = Store(url.replace("postgres@", f"{user}@"))
        try:
            return store.read(checkup.read_server).standbys
        finally:
            store.dispose()

    assert seen() == (1, 0)
    assert seen("nobody") is None
    make_synchronous(replicated)
    try:
        assert seen() == (1, 1)
    finally:
        primary.execute(sql.SQL("ALTER SYSTEM RESET synchronous_standby_names"))
        primary.execute(sql.SQL("SELECT pg_reload_conf()"))
        primary.execute(sql.SQL("DROP ROLE nobody"))
