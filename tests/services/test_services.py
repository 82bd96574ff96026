"""The servers of the tests do what the fault tests rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import psycopg
import pytest
from amqp import Message
from amqp.exceptions import ConnectionForced
from redis import Redis

from tests.conftest import LONGEST
from tests.services.base import NotOwned, Service, free_port
from tests.services.pgbouncer import PgBouncer
from tests.services.postgres import PostgresReplica, PostgresServer, plain_url
from tests.services.rabbitmq import RabbitServer, connect
from tests.services.redis import ExternalRedis, RedisServer

ROOT = Path(__file__).parents[2]


def running(pids: list[int]) -> list[int]:
    """Which of these processes still run; a zombie does not."""
    left = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                left.append(pid)
        except psutil.NoSuchProcess:
            pass
    return left


def family(server: Service) -> list[int]:
    """A server's processes."""
    root = psutil.Process(server.pid)
    return [root.pid, *(child.pid for child in root.children(recursive=True))]


def crash_and_return(server: Service) -> None:
    """Kill a server and bring it back, checking port and processes."""
    port, before = server.port, family(server)
    server.kill()
    assert running(before) == []
    with pytest.raises(RuntimeError):
        _ = server.pid
    server.restart()
    assert server.alive
    assert server.port == port
    assert server.pid not in before


def stop_leaves_nothing(server: Service) -> None:
    """Stop a server and check that processes and folder are gone."""
    folder, pids = server.folder, family(server)
    server.stop()
    assert running(pids) == []
    assert not folder.exists()
    assert not server.alive


@pytest.mark.redis
@pytest.mark.fault
def test_redis_keeps_its_data_through_a_crash(own_redis: RedisServer) -> None:
    with Redis.from_url(own_redis.url) as client:
        client.set("kept", "yes")
    crash_and_return(own_redis)
    with Redis.from_url(own_redis.url) as client:
        assert client.get("kept") == b"yes"
        own_redis.flush()
        assert client.get("kept") is None
    stop_leaves_nothing(own_redis)


@pytest.mark.postgres
@pytest.mark.fault
def test_postgres_keeps_committed_data_through_a_crash(own_postgres: PostgresServer) -> None:
    url = own_postgres.create_database()
    with psycopg.connect(plain_url(url)) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    with closing(psycopg.connect(plain_url(url))) as open_session:
        open_session.execute("INSERT INTO kept VALUES (43)")
        crash_and_return(own_postgres)
    with psycopg.connect(plain_url(url)) as connection:
        assert connection.execute("SELECT answer FROM kept").fetchall() == [(42,)]
    stop_leaves_nothing(own_postgres)


@pytest.mark.postgres
def test_postgres_copies_a_template_and_drops_under_a_session(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    with psycopg.connect(plain_url(postgres_url)) as connection:
        connection.execute("CREATE TABLE mould ()")
    copy = postgres_server.create_database(template=postgres_url.rpartition("/")[2])
    with closing(psycopg.connect(plain_url(copy))) as session:
        session.execute("SELECT * FROM mould")
        postgres_server.drop_database(copy)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(plain_url(copy))


@pytest.mark.postgres
@pytest.mark.fault
def test_a_replica_follows_returns_and_is_promoted(own_postgres: PostgresServer) -> None:
    url = own_postgres.create_database()
    with PostgresReplica(own_postgres) as replica, psycopg.connect(plain_url(url)) as primary:
        copy = plain_url(replica.url_of(url))
        primary.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        primary.commit()
        replica.catch_up()
        replica.pause()
        primary.execute("INSERT INTO kept VALUES (43)")
        primary.commit()
        with psycopg.connect(copy) as session:
            assert session.execute("SELECT answer FROM kept").fetchall() == [(42,)]
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                session.execute("INSERT INTO kept VALUES (44)")
        replica.resume()
        crash_and_return(replica)
        replica.catch_up()
        own_postgres.kill()
        replica.promote()
        with psycopg.connect(copy) as session:
            session.execute("INSERT INTO kept VALUES (45)")
            rows = session.execute("SELECT answer FROM kept ORDER BY 1").fetchall()
        assert rows == [(42,), (43,), (45,)]
        stop_leaves_nothing(replica)


@pytest.mark.rabbitmq
@pytest.mark.fault
def test_rabbitmq_keeps_confirmed_messages_through_a_crash(own_rabbitmq: RabbitServer) -> None:
    url = own_rabbitmq.create_vhost()
    with connect(url) as connection:
        channel = connection.channel()
        channel.queue_declare("kept", durable=True, auto_delete=False)
        channel.confirm_select()
        channel.basic_publish_confirm(Message("x", delivery_mode=2), routing_key="kept")
    # A confirmed message is on disk; the queue's own record may still be on its way there.
    own_rabbitmq.evaluate("mnesia:sync_log().")
    crash_and_return(own_rabbitmq)
    assert own_rabbitmq.queue_depth("kept", url=url) == 1
    assert own_rabbitmq.queue_depth("kept") is None
    assert own_rabbitmq.purge("kept", url=url) == 1


@pytest.mark.rabbitmq
@pytest.mark.fault
def test_rabbitmq_cuts_its_clients(own_rabbitmq: RabbitServer) -> None:
    connection = connect(own_rabbitmq.url)
    connection.connect()
    own_rabbitmq.close_connections()
    with pytest.raises(ConnectionForced):
        connection.drain_events(timeout=10)


@pytest.mark.rabbitmq
@pytest.mark.fault
def test_rabbitmq_leaves_nothing(own_rabbitmq: RabbitServer) -> None:
    stop_leaves_nothing(own_rabbitmq)
    mapper = [p for p in psutil.process_iter(["cmdline"]) if own_rabbitmq_mapper(p, own_rabbitmq)]
    assert mapper == []
    own_rabbitmq.start()


def own_rabbitmq_mapper(process: psutil.Process, server: RabbitServer) -> bool:
    """Whether a process is this node's epmd."""
    words = process.info["cmdline"] or []
    return "epmd" in " ".join(words[:1]) and str(server.epmd_port) in words


@pytest.mark.fault
@pytest.mark.parametrize(
    "make",
    [
        pytest.param("redis:RedisServer", marks=pytest.mark.redis),
        pytest.param("postgres:PostgresServer", marks=pytest.mark.postgres),
    ],
)
def test_a_killed_test_run_leaves_no_server(make: str) -> None:
    module, name = make.split(":")
    script = (
        f"from tests.services.{module} import {name}; server = {name}().start(); "
        "print(server.pid, server.folder, flush=True); input()"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with run:
        assert run.stdout is not None
        line = run.stdout.readline().split()
        assert line, "the server did not start"
        pid, folder = int(line[0]), Path(line[1])
        assert running([pid]) == [pid]
        run.send_signal(signal.SIGKILL)
        run.wait()
    wait_until(lambda: running([pid]) == [] and not folder.exists())


def wait_until(condition: Callable[[], bool], timeout_seconds: float = 20.0) -> None:
    """Wait for a state; fails where it is not reached."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "the state was not reached in time"
        time.sleep(0.02)


@pytest.mark.postgres
def test_pgbouncer_gives_each_transaction_a_session_and_ends_with_its_test(
    postgres_server: PostgresServer,
) -> None:
    server = PgBouncer(postgres_server, pool=1)
    with server:
        url = plain_url(server.url).partition("?")[0]
        with (
            closing(psycopg.connect(url, autocommit=True, prepare_threshold=None)) as one,
            closing(psycopg.connect(url, autocommit=True, prepare_threshold=None)) as other,
        ):
            backends = [each.execute("SELECT pg_backend_pid()").fetchone() for each in (one, other)]
        assert backends[0] == backends[1]
        crash_and_return(server)
        stop_leaves_nothing(server)


@pytest.mark.redis
def test_a_server_given_by_url_is_not_killed(redis_url: str) -> None:
    external = ExternalRedis(redis_url)
    with pytest.raises(NotOwned):
        external.kill()
    with pytest.raises(NotOwned):
        external.restart()
    external.stop()
    with Redis.from_url(redis_url) as client:
        assert client.ping()


@pytest.mark.redis
def test_a_foreign_server_on_the_port_is_not_taken_for_ours(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter([redis_server.port, free_port()])
    monkeypatch.setattr("tests.services.base.free_port", lambda: next(ports))
    with RedisServer() as server:
        assert server.port != redis_server.port


def test_ports_lie_below_the_range_of_outgoing_connections() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert free_port() < max(low, 32768)


def test_the_longest_files_are_there_under_their_names() -> None:
    tests = Path(__file__).parents[1]
    found = {"/".join(path.parts[-2:]) for path in tests.rglob("test_*.py")}
    assert set(LONGEST) <= found


@pytest.mark.postgres
def test_a_kill_loses_nothing_that_was_committed_unflushed(own_postgres: PostgresServer) -> None:
    url = own_postgres.create_database()
    with psycopg.connect(plain_url(url)) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
    own_postgres.kill()
    own_postgres.restart()
    with psycopg.connect(plain_url(url)) as connection:
        assert connection.execute("SELECT number FROM kept").fetchone() == (7,)
