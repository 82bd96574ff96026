"""Processes in the place of containers, for machines without a Docker engine.

pytest-celery's nodes work on its container classes, and those on an object of the Docker client's:
:class:`Process` and :class:`Server` are such objects, as far as any of these classes asks. So one
and the same class is worker, relay, broker, backend or ledger on either way; the ``Local`` ones
below only say where a server is that has no network and no ports of its own.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from pytest_celery import CeleryTestContainer, RabbitMQContainer, RedisContainer

from tests.services.base import LOOPBACK, end_hard
from tests.services.guardian import guardian
from tests.smoke.components import LedgerContainer

ROOT = Path(__file__).resolve().parents[2]


class Engineless:
    """What a container of the Docker client's and one of ours have in common."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.id = uuid4().hex * 2
        self.folder = folder
        self.environment = dict(environment)

    @property
    def alive(self) -> bool:
        raise NotImplementedError

    @property
    def status(self) -> str:
        return "running" if self.alive else "exited"

    @property
    def attrs(self) -> dict[str, Any]:
        return {
            "Config": {
                "Hostname": self.id[:12],
                "Env": [f"{key}={value}" for key, value in self.environment.items()],
                "Labels": {},
            },
            "HostConfig": {"PortBindings": {}},
            "NetworkSettings": {"Networks": {"host": {"IPAddress": LOOPBACK}}, "Ports": {}},
        }

    def reload(self) -> None:
        """Nothing is remembered that could be old."""

    def exec_run(self, cmd: str | Sequence[str]) -> tuple[int, bytes]:
        """Run a command beside it, in its folder and environment."""
        done = subprocess.run(
            self.spelled(shlex.split(cmd) if isinstance(cmd, str) else cmd),
            cwd=self.folder,
            env=self.surroundings(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return done.returncode, done.stdout

    def get_archive(self, path: str) -> tuple[Iterator[bytes], dict[str, Any]]:
        """A file or folder of its, as a tar file in pieces."""
        found = self.folder / path
        archive = io.BytesIO()
        with tarfile.open(mode="w", fileobj=archive) as tar:
            tar.add(found, arcname=found.name)
        return iter([archive.getvalue()]), {"name": found.name, "size": found.stat().st_size}

    def surroundings(self) -> dict[str, str]:
        """The environment of what runs here."""
        return {**os.environ, "PYTHONPATH": str(ROOT), **self.environment}

    def spelled(self, command: Sequence[str]) -> list[str]:
        """A command of a container's image, by this interpreter, with the host's name filled in."""
        program, *arguments = command
        named = [one.replace("%h", self.id[:12]) for one in arguments]
        if program == "celery":
            return [sys.executable, "-m", "celery", *named]
        return [sys.executable if program == "python" else program, *named]


class Process(Engineless):
    """A program that runs as a process, in a session of its own."""

    def __init__(
        self, name: str, folder: Path, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        super().__init__(name, folder, environment)
        self.command = list(command)
        self._log = folder / f"{name}.log"
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def start(self) -> None:
        """Start it; what it says goes on in the same log."""
        with self._log.open("ab") as output:
            self._popen = subprocess.Popen(
                self.spelled(self.command),
                cwd=self.folder,
                env=self.surroundings(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        guardian.watch_process(self._popen.pid, signal.SIGTERM)

    def kill(self, signal: str | int | None = None) -> None:
        """Send it a signal; with SIGKILL, the default, its children end as well."""
        number = _number(signal)
        if not self.alive:
            raise ProcessLookupError(f"{self.name} does not run")
        assert self._popen is not None
        if number == _number("SIGKILL"):
            end_hard(self._popen)
        else:
            self._popen.send_signal(number)

    def restart(self, timeout: float = 10) -> None:
        """End it in good order, or by force after ``timeout`` seconds; then start it again."""
        if self.alive:
            assert self._popen is not None
            self._popen.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(timeout)
        self.end()
        self.start()

    def logs(self) -> bytes:
        """What it has said since it was first started."""
        return self._log.read_bytes()

    def end(self) -> None:
        """Leave nothing of it running."""
        end_hard(self._popen)


class Server(Engineless):
    """A server of ``tests.services``, which others may have as well.

    :param url: the part of it (database, virtual host) that is meant.
    """

    def __init__(self, service: Any, url: str) -> None:
        folder = getattr(service, "folder", Path.cwd())
        super().__init__(type(service).__name__.lower(), folder, {})
        self.service = service
        self.url = url

    @property
    def alive(self) -> bool:
        return bool(self.service.alive)

    @property
    def port(self) -> int:
        found = urlsplit(self.url).port
        assert found is not None, self.url
        return found

    @property
    def attrs(self) -> dict[str, Any]:
        attrs = super().attrs
        attrs["NetworkSettings"]["Ports"] = {
            f"{self.port}/tcp": [{"HostIp": LOOPBACK, "HostPort": str(self.port)}]
        }
        return attrs

    def kill(self, signal: str | int | None = None) -> None:
        """Crash it; servers know no other signal here."""
        if _number(signal) != _number("SIGKILL"):
            raise ValueError(f"{self.name} can be killed by SIGKILL alone, not by {signal}")
        self.service.kill()

    def restart(self, timeout: float = 10) -> None:
        """Bring it back on its port and data, within its own time."""
        self.service.restart()

    def logs(self) -> bytes:
        """What it has said; nothing where it was given by its URL."""
        log = self.folder / "server.log"
        return log.read_bytes() if hasattr(self.service, "folder") and log.exists() else b""


class Local(CeleryTestContainer):
    """A container class whose server is where its URL says, seen from anywhere."""

    _container: Server

    @property
    def url(self) -> str:
        return self._container.url

    @property
    def host_url(self) -> str:
        return self._container.url

    @property
    def hostname(self) -> str:
        return urlsplit(self._container.url).hostname or ""

    @property
    def port(self) -> int:
        return self._container.port

    @property
    def vhost(self) -> str:
        return unquote(urlsplit(self._container.url).path[1:])

    @property
    def ready_prompt(self) -> str | None:
        # It answered before it was given to us.
        return None


class LocalRabbitMQContainer(Local, RabbitMQContainer):
    """A virtual host of a RabbitMQ node."""


class LocalRedisContainer(Local, RedisContainer):
    """A database of a Redis server."""


class LocalLedgerContainer(Local, LedgerContainer):
    """A database of a PostgreSQL server."""


def _number(named: str | int | None) -> int:
    """A signal's number."""
    if named is None:
        return signal.SIGKILL
    return named if isinstance(named, int) else int(signal.Signals[named])
