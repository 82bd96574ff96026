"""PgBouncer before a PostgreSQL of the tests: a proxy that pools transactions.

It comes from the system; where it is missing and we are root on Debian it is installed, without its
own service.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from tests.services.base import LOOPBACK, Service, ServiceUnavailable, give_to, unprivileged
from tests.services.debian import find_or_install
from tests.services.postgres import SUPERUSER, PostgresServer, plain_url

HOW_TO_GET = "install the system package pgbouncer"
PROGRAM = Path("/usr/sbin/pgbouncer")
CONFIGURATION = """\
[databases]
* = host={host} port={server} user={user}
[pgbouncer]
listen_addr = {host}
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {pool}
max_client_conn = 200
"""


def find_program() -> Path | None:
    """The program, which is not on everybody's PATH."""
    on_path = shutil.which("pgbouncer")
    if on_path:
        return Path(on_path)
    return PROGRAM if PROGRAM.exists() else None


class PgBouncer(Service):
    """A proxy before ``server``, with few connections to it: two clients share each."""

    name = "PgBouncer"

    def __init__(self, server: PostgresServer, *, pool: int = 3) -> None:
        super().__init__()
        self._server = server
        self._pool = pool
        self._program = Path()

    @property
    def url(self) -> str:
        """The maintenance database, through the proxy."""
        return self.through(self._server.url)

    def through(self, url: str) -> str:
        """The same database of the server, through the proxy."""
        parts = urlsplit(url)._replace(
            netloc=f"{SUPERUSER}@{LOOPBACK}:{self.port}", query="prepare_threshold=none"
        )
        return parts.geturl()

    def _prepare(self) -> None:
        try:
            [self._program] = find_or_install("pgbouncer", find_program)
        except ServiceUnavailable as error:
            raise ServiceUnavailable(f"{error}; {HOW_TO_GET}") from error

    def _launch(self) -> None:
        configuration = self.folder / "pgbouncer.ini"
        configuration.write_text(
            CONFIGURATION.format(
                host=LOOPBACK,
                port=self.port,
                server=self._server.port,
                user=SUPERUSER,
                pool=self._pool,
            )
        )
        # It refuses to run as root.
        user = unprivileged("postgres")
        give_to(user, self.folder, configuration)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        self._process = self._spawn([self._program, configuration], user=user, env=kept)

    def _answers(self) -> bool:
        plain = plain_url(self.url).partition("?")[0]
        with psycopg.connect(plain, connect_timeout=2, prepare_threshold=None) as connection:
            row = connection.execute("SHOW data_directory").fetchone()
        # Where the port was taken, somebody else's proxy answers.
        return row is not None and Path(row[0]) == self._server.data
