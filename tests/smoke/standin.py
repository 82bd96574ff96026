"""A stand-in for a Docker engine's client, so that the way with containers runs without an engine.

As a plugin (``-p tests.smoke.standin``) it takes the place of ``docker.from_env``. A container is a
process behind it, or a server of ``tests.services``; what is asked for is checked by the Docker
client's own code, and names resolve in a network alone. Images are not built, but it is looked at
what they would be made of.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import docker
import pytest
from docker.models.containers import _create_container_args
from psycopg import sql
from pytest_docker_tools.wrappers import container

from tests.services.base import LOOPBACK, Service
from tests.services.postgres import PostgresServer
from tests.services.rabbitmq import RabbitServer
from tests.services.redis import RedisServer
from tests.smoke import engine
from tests.smoke.local import Engineless, Process, Server

#: By the beginning of an image's name: its server, and the port that it listens on in there.
IMAGES: dict[str, tuple[Callable[[], Service], int]] = {
    "rabbitmq": (RabbitServer, 5672),
    "redis": (lambda: RedisServer(appendonly=False), 6379),
    "postgres": (PostgresServer, 5432),
}
#: What the images' entry points say when they are through.
SAYS = b"Server startup complete\nReady to accept connections\nPostgreSQL init process complete\n"


class Contained(Server):
    """A server as in a container: known by its name inside, and by a published port outside."""

    def __init__(self, service: Service, inside: int, environment: Mapping[str, str]) -> None:
        super().__init__(service, f"//{LOOPBACK}:{service.port}")
        self.environment = dict(environment)
        self._inside = inside

    @property
    def attrs(self) -> dict[str, Any]:
        attrs = super().attrs
        [(_, published)] = attrs["NetworkSettings"]["Ports"].items()
        attrs["NetworkSettings"]["Ports"] = {f"{self._inside}/tcp": published}
        return attrs

    def exec_run(self, cmd: str | Sequence[str]) -> tuple[int, bytes]:
        if cmd == "cat /proc/net/tcp /proc/net/tcp6" and self.alive:
            return 0, f"0: 00000000:{self._inside:04X} 00000000:0000 0A".encode()
        return super().exec_run(cmd)

    def logs(self) -> bytes:
        return SAYS + super().logs()

    def remove(self, force: bool = False) -> None:
        self.service.stop()


class Removable(Process):
    """A program as in a container."""

    def remove(self, force: bool = False) -> None:
        self.end()
        shutil.rmtree(self.folder)


class Client:
    """As much of ``docker.DockerClient`` as the smoke tests use."""

    def __init__(self) -> None:
        self.images = SimpleNamespace(build=self._build)
        self.networks = SimpleNamespace(create=self._create_network)
        self.containers = SimpleNamespace(run=self._run)
        self._built: set[str] = set()
        self._networks: dict[str, dict[str, str]] = {}
        self._running: list[str] = []

    def ping(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is open."""

    def _build(self, *, path: str, tag: str, rm: bool, buildargs: dict[str, str]) -> Any:
        """Look that the Dockerfile, and all that it copies, is there."""
        folder = Path(path)
        for source in copied((folder / "Dockerfile").read_text()):
            assert (folder / source).exists(), f"COPY {source}: not in the context"
        image = SimpleNamespace(id=f"sha256:{uuid4().hex}", tags=[tag])
        self._built.add(image.id)
        return image, iter([])

    def _create_network(self, name: str) -> Any:
        self._networks[name] = {}

        def remove() -> None:
            assert not self._running, f"{name} is in use by {self._running}"
            del self._networks[name]

        return SimpleNamespace(name=name, remove=remove)

    def _run(self, image: str, command: list[str] | None, **options: Any) -> Engineless:
        assert options["detach"]
        names = self._networks[options["network"]]
        # What the engine would be told: raises where an option is unknown or makes no sense.
        terms = {"image": image, "command": command, "version": "1.50", **options}
        _create_container_args(terms)
        made: Contained | Removable
        if image in self._built:
            made = self._program(command or [], options["environment"], names)
        else:
            make, inside = IMAGES[image.partition(":")[0]]
            made = Contained(make().start(), inside, options["environment"])
            if "POSTGRES_DB" in made.environment:
                create = sql.SQL("CREATE DATABASE {}")
                name = sql.Identifier(made.environment["POSTGRES_DB"])
                made.service.execute(create.format(name))
            names[made.id[:12]] = f"{LOOPBACK}:{made.port}"
        self._running.append(made.id)
        remove = made.remove

        def removed(force: bool = False) -> None:
            assert force or not made.alive, "a running container can be removed by force alone"
            self._running.remove(made.id)
            remove()

        made.remove = removed  # type: ignore[method-assign]
        return made

    def _program(
        self, command: list[str], environment: dict[str, str], names: dict[str, str]
    ) -> Removable:
        """Start a program, to which the names of its network mean what they mean to the engine."""
        known = re.compile("|".join(names) or "$.")
        resolved = {
            key: known.sub(lambda found: names[found[0]], value)
            for key, value in environment.items()
        }
        folder = Path(tempfile.mkdtemp(prefix="celery-budget-smoke-"))
        program = Removable(f"program-{len(self._running)}", folder, command, resolved)
        program.start()
        return program


def copied(dockerfile: str) -> list[str]:
    """What a Dockerfile copies from its context."""
    lines = re.findall(r"^COPY (.+)$", dockerfile, re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


def pytest_configure(config: pytest.Config) -> None:
    """Take the client's place for the whole run."""
    client = Client()
    docker.from_env = lambda **_: client
    # Ours publish their ports wherever the tests run.
    engine.tests_inside_container = lambda: False
    container.tests_inside_container = lambda: False
