"""Both ways of the smoke tests: which is taken, and that a test cannot tell them apart."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from docker.models.containers import Container
from pytest_celery import CeleryTestNode, RabbitMQContainer, RedisContainer
from pytest_docker_tools.wrappers import container as wrappers

from celery_budget.core.declarations import tomllib
from tests.cluster import ROOT
from tests.services.redis import RedisServer
from tests.smoke import engine
from tests.smoke.components import BudgetWorkerContainer, LedgerContainer, RelayContainer
from tests.smoke.local import (
    LocalLedgerContainer,
    LocalRabbitMQContainer,
    LocalRedisContainer,
    Process,
    Server,
)
from tests.smoke.places import Containers, Processes, make_context
from tests.smoke.standin import copied

VERSION = b'{"ApiVersion": "1.50"}'
OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
BROKEN = b"HTTP/1.1 500 Broken\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@contextmanager
def listening(ping: bytes | None) -> Iterator[list[str]]:
    """An engine's socket, named by ``DOCKER_HOST``; what it was asked for.

    :param ping: what it answers to a ping; it says nothing to anything where that is none.
    """
    # The names of sockets are short; a test's own folder may be deep.
    folder = tempfile.mkdtemp(prefix="smoke-")
    path = f"{folder}/docker.sock"
    asked: list[str] = []
    held: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            if ping is None:
                held.append(connection)
                continue
            with connection:
                asked.append(connection.recv(65536).decode().split()[1])
                answer = ping if asked[-1].endswith("/_ping") else OK % (len(VERSION), VERSION)
                connection.sendall(answer)

    with socket.socket(socket.AF_UNIX) as server, pytest.MonkeyPatch.context() as patched:
        server.bind(path)
        server.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        patched.setenv("DOCKER_HOST", f"unix://{path}")
        patched.setattr(engine, "tests_inside_container", lambda: False)
        yield asked
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in held:
        connection.close()
    shutil.rmtree(folder)


def test_an_engine_that_answers_is_taken() -> None:
    with listening(OK % (2, b"OK")) as asked:
        assert engine.chosen({}) == "containers"
    assert asked == ["/version", "/v1.50/_ping"]


def test_an_engine_whose_ping_fails_is_not() -> None:
    with listening(BROKEN) as asked:
        assert engine.chosen({}) == "processes"
    assert "/v1.50/_ping" in asked


def test_an_engine_that_says_nothing_is_not() -> None:
    with listening(None):
        assert not engine.answers(patience=0.2)


def test_where_nobody_listens_there_is_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    monkeypatch.setattr(engine, "tests_inside_container", lambda: False)
    assert engine.chosen({}) == "processes"


def test_within_a_container_no_engine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(OK % (2, b"OK")) as asked:
        monkeypatch.setattr(engine, "tests_inside_container", lambda: True)
        assert engine.chosen({}) == "processes"
    assert asked == []


def test_the_variable_decides() -> None:
    with listening(OK % (2, b"OK")) as asked:
        assert engine.chosen({engine.VARIABLE: "processes"}) == "processes"
        assert engine.chosen({engine.VARIABLE: "containers"}) == "containers"
        assert engine.chosen({engine.VARIABLE: ""}) == "containers"
    assert len(asked) == 2
    with pytest.raises(ValueError, match="BUDGET_SMOKE is 'docker': it may be 'containers' or"):
        engine.chosen({engine.VARIABLE: "docker"})


def test_ours_have_all_that_is_asked_of_a_container() -> None:
    tree = ast.parse(inspect.getsource(wrappers.Container))
    asked = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self._container"
    }
    assert {"attrs", "exec_run", "kill", "logs", "restart", "status"} <= asked
    for ours in (Process, Server):
        for name in asked:
            real = getattr(Container, name, None)
            found = getattr(ours, name, None)
            if not callable(real):
                # An attribute of the instance, or a property.
                assert not callable(found), name
                continue
            assert callable(found), f"{ours.__name__}.{name}"
            taken = set(inspect.signature(found).parameters)
            known = inspect.signature(real).parameters
            free = any(one.kind is one.VAR_KEYWORD for one in known.values())
            assert free or taken <= set(known), f"{ours.__name__}.{name}{taken}"


@pytest.mark.parametrize(
    ("local", "contained"),
    [
        (LocalRabbitMQContainer, RabbitMQContainer),
        (LocalRedisContainer, RedisContainer),
        (LocalLedgerContainer, LedgerContainer),
        (Processes, Containers),
    ],
)
def test_a_test_finds_the_same_names_on_both_ways(local: type, contained: type) -> None:
    def names(cls: type) -> dict[str, Any]:
        known = {name: getattr(cls, name) for name in dir(cls) if not name.startswith("_")}
        return {
            name: str(inspect.signature(one)) if callable(one) else ""
            for name, one in known.items()
        }

    # Where a server without a container says where it is, the other may have it of its container.
    more = {"hostname", "port", "vhost"} if contained is LedgerContainer else set()
    assert {key: one for key, one in names(local).items() if key not in more} == names(contained)


def test_a_node_kills_a_server_and_brings_it_back(own_redis: RedisServer) -> None:
    node = CeleryTestNode(LocalRedisContainer(Server(own_redis, own_redis.database_url(3))))
    assert node.ready()
    assert node.config() == {
        "url": own_redis.database_url(3),
        "host_url": own_redis.database_url(3),
        "hostname": "127.0.0.1",
        "port": own_redis.port,
        "vhost": "3",
    }
    with node.container.client as client:
        client.set("kept", "yes")
    node.kill()
    assert (node.container.status, own_redis.alive) == ("exited", False)
    node.restart()
    assert node.container.status == "running"
    with node.container.client as client:
        assert client.get("kept") == "yes"
    assert node.logs().count("Ready to accept connections") == 2
    with pytest.raises(ValueError, match="SIGKILL alone"):
        node.kill("SIGTERM")
    assert node.container.get_text("server.log")["server.log"] == node.logs()


INSTRUCTION = re.compile(r"^(FROM|ARG|ENV|RUN|WORKDIR|COPY|USER|CMD) \S")


def test_the_image_can_be_made_of_what_is_sent(tmp_path: Path) -> None:
    context = make_context(tmp_path / "context")
    text = (context / "Dockerfile").read_text()
    lines = [
        line
        for line in text.replace("\\\n", "").splitlines()
        if line.strip() and not line.startswith("#")
    ]
    assert all(INSTRUCTION.match(line) for line in lines)
    kinds = [line.split()[0] for line in lines]
    assert (kinds[0], kinds[-1], kinds.count("CMD")) == ("FROM", "CMD", 1)
    assert "USER root" not in text
    assert kinds.index("USER") > max(place for place, kind in enumerate(kinds) if kind == "RUN")
    assert copied(text)
    for source in copied(text):
        assert (context / source).exists(), source
    project = tomllib.loads((context / "pyproject.toml").read_text())["project"]
    [extras] = re.findall(r'"\.\[(.+?)\]"', text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    # The package is built of it, and the programs find their application in it, and nothing else.
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"],
        cwd=context,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    found = subprocess.run(
        [sys.executable, "-c", "import tests.smoke.app as app; print(app.__file__)"],
        cwd=context,
        env={**os.environ, "PYTHONPATH": str(context)},
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == str(context / "tests" / "smoke" / "app.py"), found.stderr


@pytest.mark.parametrize("cls", [BudgetWorkerContainer, RelayContainer])
def test_what_the_programs_are_given_has_no_address_of_the_tests_own(cls: Any) -> None:
    config = {
        f"{name}_cluster_config": {"urls": [f"{name}://inside"], "host_urls": ["outside"]}
        for name in ("celery_broker", "celery_backend", "budget_ledger")
    }
    environment = cls.initial_env(config)
    assert "outside" not in str(environment)
    assert environment["SMOKE_CONF"].count("://inside") == 3


@pytest.mark.fault
def test_the_way_with_containers(tmp_path: Path) -> None:
    """One of the tests by a client that is not the engine's, but asks for the same."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-n", "0", "-p", "tests.smoke.standin"),
            *("-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}"),
            "tests/smoke/test_smoke.py::test_redelivery[redis]",
        ],
        cwd=ROOT,
        env={key: one for key, one in os.environ.items() if not key.startswith("BUDGET_")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "smoke tests: containers (BUDGET_SMOKE)" in done.stdout
    assert "1 passed" in done.stdout


def test_other_tests_do_not_load_it() -> None:
    code = (
        "import pytest, sys\n"
        "pytest.main(['-q', '-n', '0', '-p', 'no:cacheprovider', '--collect-only',"
        " 'tests/unit/test_amounts.py'])\n"
        "print('loaded:', sorted({'docker', 'pytest_celery', 'debugpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded: []"
