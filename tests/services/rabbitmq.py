"""A RabbitMQ node with a port mapper (epmd) of its own.

RabbitMQ comes from the system; where it is missing and we are root on Debian it is installed,
without its own service. The node is started by RabbitMQ's script itself, not by Debian's wrapper,
which would switch the user on its own and write its log outside our folder. Cookie, data, logs and
port mapper all belong to this node alone, so that it shares nothing with another one.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from uuid import uuid4

from amqp import Connection
from amqp.exceptions import NotFound

from tests.services.base import (
    LOOPBACK,
    NotOwned,
    Service,
    ServiceUnavailable,
    StartFailed,
    end_hard,
    free_port,
    give_to,
    unprivileged,
)
from tests.services.debian import find_or_install

HOW_TO_GET = "install the system package rabbitmq-server, or set BUDGET_TEST_RABBITMQ_URL"
PROGRAMS = Path("/usr/lib/rabbitmq/bin")
CONFIGURATION = """\
listeners.tcp.1 = {host}:{port}
disk_free_limit.absolute = 50MB
vm_memory_high_watermark.relative = 0.8
log.file = false
log.console = true
log.console.level = info
"""


def find_program(name: str) -> Path | None:
    """RabbitMQ's own script of this name, rather than a distribution's wrapper around it."""
    direct = PROGRAMS / name
    if direct.exists():
        return direct
    on_path = shutil.which(name)
    return Path(on_path) if on_path else None


def find_in_erlang(name: str) -> Path | None:
    """A program that comes with Erlang."""
    on_path = shutil.which(name)
    if on_path:
        return Path(on_path)
    found = sorted(Path("/usr/lib/erlang").glob(f"erts-*/bin/{name}"))
    return found[-1] if found else None


class _Broker:
    """What an AMQP client can ask of a broker."""

    url: str

    def queue_depth(self, queue: str, *, url: str | None = None) -> int | None:
        """How many messages are ready in a queue; None where there is no such queue."""
        with connect(url or self.url) as connection:
            try:
                return int(connection.channel().queue_declare(queue, passive=True).message_count)
            except NotFound:
                return None

    def purge(self, queue: str, *, url: str | None = None) -> int:
        """Drop the ready messages of a queue and say how many; NotFound where there is none."""
        with connect(url or self.url) as connection:
            return int(connection.channel().queue_purge(queue))


def connect(url: str, *, timeout_seconds: float = 5.0) -> Any:
    """An open AMQP connection to a broker's URL, to be used as a context manager."""
    parts = urlsplit(url)
    return Connection(
        f"{parts.hostname}:{parts.port or 5672}",
        userid=unquote(parts.username or "guest"),
        password=unquote(parts.password or "guest"),
        virtual_host=unquote(parts.path[1:]) or "/",
        login_method="PLAIN",
        connect_timeout=timeout_seconds,
        read_timeout=timeout_seconds,
        write_timeout=timeout_seconds,
    )


class RabbitServer(_Broker, Service):
    """An own RabbitMQ node; four to five seconds to start."""

    name = "RabbitMQ"
    shutdown_signal = signal.SIGTERM
    start_seconds = 90.0

    def __init__(self) -> None:
        super().__init__()
        self.node = f"budget-{uuid4().hex[:12]}@localhost"
        self._epmd: subprocess.Popen[bytes] | None = None
        self.epmd_port = 0
        self._dist_port = 0
        self._programs: dict[str, Path] = {}
        self._user: pwd.struct_passwd | None = None

    @property
    def url(self) -> str:  # type: ignore[override]  # read-only here
        """The default virtual host."""
        return f"amqp://guest:guest@{LOOPBACK}:{self.port}//"

    def vhost_url(self, vhost: str) -> str:
        """A virtual host of this name."""
        return f"amqp://guest:guest@{LOOPBACK}:{self.port}/{quote(vhost, safe='')}"

    def create_vhost(self) -> str:
        """An empty virtual host of its own; its URL."""
        name = f"budget-{uuid4().hex[:12]}"
        self.evaluate(f'ok = rabbit_vhost:add(<<"{name}">>, <<"tests">>).')
        self.permit(name)
        return self.vhost_url(name)

    def permit(
        self, vhost: str, configure: str = ".*", write: str = ".*", read: str = ".*"
    ) -> None:
        """Let the user have what is named so in a virtual host, and nothing else."""
        named = ", ".join(f'<<"{pattern}">>' for pattern in (configure, write, read))
        self.evaluate(
            "ok = rabbit_auth_backend_internal:set_permissions("
            f'<<"guest">>, <<"{vhost}">>, {named}, <<"tests">>).'
        )

    def limit_memory(self, limit: str) -> None:
        """Say how much memory the node may have: `0.8` of it all, or `{absolute, 1}` byte."""
        self.evaluate(f"ok = vm_memory_monitor:set_vm_memory_high_watermark({limit}).")

    def close_connections(self, reason: str = "closed by the tests") -> None:
        """Cut every client's connection from the server's side."""
        # What handles a connection may be gone before it has answered.
        self.evaluate(
            f'[catch rabbit_networking:close_connection(Pid, <<"{reason}">>) '
            "|| Pid <- rabbit_networking:connections()]."
        )

    def evaluate(self, expression: str) -> None:
        """Evaluate an Erlang expression in the node; StartFailed where that fails.

        By a small program of Erlang's where it has it: RabbitMQ's command line starts a node of its
        own, which takes a second, and half a minute on a machine that is busy.
        """
        erl_call = find_in_erlang("erl_call")
        if erl_call is None:
            self._run("", self._programs["rabbitmqctl"], "--quiet", "eval", expression)
            return
        said = self._run(expression + "\n", erl_call, "-n", self.node, "-e")
        if not said.startswith("{ok, "):
            raise StartFailed(f"{expression}\n{said}")

    def _run(self, told: str, *command: str | Path) -> str:
        return self._run_to_end(command, user=self._user, env=self._environment(), told=told)

    def _prepare(self) -> None:
        self._find_programs()
        self._user = unprivileged("rabbitmq")
        for name in ("data", "log"):
            (self.folder / name).mkdir()
        plugins = self.folder / "enabled_plugins"
        plugins.write_text("[].\n")
        give_to(self._user, self.folder, plugins, self.folder / "data", self.folder / "log")

    def _find_programs(self) -> None:
        names = ("rabbitmq-server", "rabbitmqctl")
        try:
            found = find_or_install(
                "rabbitmq-server", *(partial(find_program, name) for name in names)
            )
        except ServiceUnavailable as error:
            raise ServiceUnavailable(f"{error}; {HOW_TO_GET}") from error
        self._programs = dict(zip(names, found, strict=True))

    def _environment(self) -> dict[str, str]:
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("RABBITMQ_", "ERL_", "NOTIFY_SOCKET"))
        }
        return {
            **kept,
            "HOME": os.fspath(self.folder),
            "LC_ALL": "C.UTF-8",
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_CRASH_DUMP_BYTES": "0",
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_CONFIG_FILE": os.fspath(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": os.fspath(self.folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": os.fspath(self.folder / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": os.fspath(self.folder / "data"),
            "RABBITMQ_LOG_BASE": os.fspath(self.folder / "log"),
            "RABBITMQ_PID_FILE": os.fspath(self.folder / "data" / "pid"),
            # Idle schedulers do not spin, and other nodes reach this one from the machine only.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none "
            "-kernel inet_dist_use_interface {127,0,0,1}",
        }

    def _launch(self) -> None:
        configuration = self.folder / "rabbitmq.conf"
        configuration.write_text(CONFIGURATION.format(host=LOOPBACK, port=self.port))
        configuration.chmod(0o644)
        if self._epmd is None or self._epmd.poll() is not None:
            self._start_epmd()
        self._dist_port = self._dist_port or free_port()
        self._process = self._spawn(
            [self._programs["rabbitmq-server"]], user=self._user, env=self._environment()
        )

    def _start_epmd(self) -> None:
        """Start our own port mapper, so that Erlang leaves no shared one behind."""
        self.epmd_port = self.epmd_port or free_port()
        epmd = find_in_erlang("epmd")
        if epmd is None:
            raise ServiceUnavailable(
                f"Erlang's epmd is neither on PATH nor in /usr/lib/erlang; {HOW_TO_GET}"
            )
        command: list[str | Path] = [
            epmd,
            "-port",
            str(self.epmd_port),
            "-address",
            LOOPBACK,
        ]
        self._epmd = self._spawn(command, log="epmd.log", user=self._user)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and self._epmd.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex((LOOPBACK, self.epmd_port)) == 0:
                    return
            time.sleep(0.02)
        raise ServiceUnavailable("epmd did not start: " + (self.folder / "epmd.log").read_text())

    def _answers(self) -> bool:
        # Where the port was taken, somebody else's node answers.
        with connect(self.url) as connection:
            name = str(connection.server_properties["cluster_name"])
        # The host's part of a cluster name is the machine's own, not the node's.
        return name.partition("@")[0] == self.node.partition("@")[0]

    def _end_for_good(self) -> None:
        self._end_hard()
        end_hard(self._epmd)
        self._epmd = None


class ExternalRabbit(_Broker):
    """The broker named by BUDGET_TEST_RABBITMQ_URL; its one virtual host serves all tests."""

    alive = True

    def __init__(self, url: str) -> None:
        self.url = url

    def create_vhost(self) -> str:
        """The URL as given: tests have to use queue names of their own."""
        return self.url

    def close_connections(self, reason: str = "") -> None:
        """Refuse: raises NotOwned."""
        raise NotOwned("the connections of BUDGET_TEST_RABBITMQ_URL are not ours to cut")

    def stop(self) -> None:
        """Leave the broker alone."""

    def kill(self) -> None:
        """Refuse: raises NotOwned."""
        raise NotOwned("the broker of BUDGET_TEST_RABBITMQ_URL is not ours to kill")

    def restart(self) -> None:
        """Refuse: raises NotOwned."""
        raise NotOwned("the broker of BUDGET_TEST_RABBITMQ_URL is not ours to restart")
