"""Where a module's components run. Both places have one interface: tests cannot tell them apart."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import celery
import docker
import pytest
from pytest_celery import CeleryTestContainer, RabbitMQContainer, RedisContainer
from pytest_docker_tools.exceptions import ContainerError, TimeoutError  # noqa: A004
from pytest_docker_tools.utils import wait_for_callable

from tests.smoke.components import LedgerContainer
from tests.smoke.local import (
    ROOT,
    LocalLedgerContainer,
    LocalRabbitMQContainer,
    LocalRedisContainer,
    Process,
    Server,
)

SERVERS = ("rabbitmq", "redis-broker", "redis-backend", "ledger")
#: Seconds within which a component has to be ready: an image may be slow to begin.
READY_SECONDS = 120
#: What the image of the application's programs is made of, in the repository.
CONTEXT = (
    *("pyproject.toml", "README.md", "LICENSE", "celery_budget"),
    *("tests/__init__.py", "tests/smoke/__init__.py", "tests/smoke/app.py"),
)
DOCKERFILE = Path(__file__).with_name("Dockerfile")


class Place(Protocol):
    """What both of them are."""

    def server(self, kind: str) -> CeleryTestContainer:
        """Return one of ``SERVERS``, ready."""

    def program(
        self, cls: type[CeleryTestContainer], environment: Mapping[str, str]
    ) -> AbstractContextManager[CeleryTestContainer]:
        """Start what the class' ``command`` says, without waiting for it; end it with the block."""

    def close(self) -> None:
        """End the servers, where they are the place's own."""


class Processes:
    """Processes of this machine; the servers are those of the test session.

    :param fixture: what returns a fixture of the session by its name.
    """

    def __init__(self, fixture: Callable[[str], Any], folder: Path) -> None:
        self._fixture = fixture
        self._folder = folder
        self._numbers = count()
        self._ends = ExitStack()

    def server(self, kind: str) -> CeleryTestContainer:
        if kind == "rabbitmq":
            node = self._fixture("rabbitmq_server")
            return LocalRabbitMQContainer(Server(node, node.create_vhost()))
        if kind == "ledger":
            postgres = self._fixture("postgres_server")
            url = postgres.create_database()
            self._ends.callback(postgres.drop_database, url)
            return LocalLedgerContainer(Server(postgres, url))
        redis = self._fixture("redis_server")
        number = {"redis-broker": 1, "redis-backend": 2}[kind]
        container = LocalRedisContainer(Server(redis, redis.database_url(number)))
        with container.client as client:
            client.flushdb()
        return container

    @contextmanager
    def program(
        self, cls: type[CeleryTestContainer], environment: Mapping[str, str]
    ) -> Iterator[CeleryTestContainer]:
        name = f"{cls.__name__.lower()}-{next(self._numbers)}"
        process = Process(name, self._folder, cls.command(), environment)
        process.start()
        try:
            yield cls(process)
        finally:
            process.end()

    def close(self) -> None:
        self._ends.close()


class Containers:
    """Containers of an engine, in a network of their own.

    :param folder: where what the image is made of is put together.
    """

    def __init__(self, client: docker.DockerClient, folder: Path) -> None:
        self._client = client
        self._folder = folder
        self._ends = ExitStack()
        self._network = client.networks.create(f"celery-budget-smoke-{uuid4().hex[:12]}")
        self._ends.callback(self._network.remove)
        self._image = ""

    def server(self, kind: str) -> CeleryTestContainer:
        cls = {"rabbitmq": RabbitMQContainer, "ledger": LedgerContainer}.get(kind, RedisContainer)
        command = cls.command() if cls is RedisContainer else None
        container = self._ends.enter_context(
            self._run(cls, cls.image(), cls.initial_env(), command, cls.ports())
        )
        ready(container)
        return container

    @contextmanager
    def program(
        self, cls: type[CeleryTestContainer], environment: Mapping[str, str]
    ) -> Iterator[CeleryTestContainer]:
        self._image = self._image or self._build()
        with self._run(cls, self._image, environment, cls.command(), None) as container:
            yield container

    def close(self) -> None:
        self._ends.close()

    @contextmanager
    def _run(
        self,
        cls: type[CeleryTestContainer],
        image: str,
        environment: Mapping[str, str],
        command: list[str] | None,
        ports: Mapping[str, None] | None,
    ) -> Iterator[CeleryTestContainer]:
        raw = self._client.containers.run(
            image,
            command,
            detach=True,
            environment=dict(environment),
            labels={"creator": "celery-budget-smoke"},
            network=self._network.name,
            ports=ports,
        )
        try:
            yield cls(raw)
        finally:
            raw.remove(force=True)

    def _build(self) -> str:
        """Build the image of the application's programs; its id."""
        context = make_context(self._folder / "context")
        image, _ = self._client.images.build(
            path=str(context),
            tag="celery-budget/smoke",
            rm=True,
            buildargs={"CELERY_VERSION": str(celery.__version__)},
        )
        return str(image.id)


def make_context(folder: Path) -> Path:
    """Copy what the image is made of into a new folder; the folder."""
    folder.mkdir()
    for name in CONTEXT:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    shutil.copy2(DOCKERFILE, folder / DOCKERFILE.name)
    return folder


def ready(container: CeleryTestContainer) -> None:
    """Wait until a component is ready; fail with what it said if it never is."""
    try:
        wait_for_callable(f"Waiting for {container.name}", container.ready, READY_SECONDS)
    except (ContainerError, TimeoutError) as error:
        pytest.fail(f"{container.name} is not ready: {error}\n{container.logs()[-4000:]}")
