"""What all servers of the tests share: life cycle, ports, folders and users."""

from __future__ import annotations

import atexit
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import psutil
from typing_extensions import Self

from tests.services.guardian import guardian, kill_tree

LOOPBACK = "127.0.0.1"


class ServiceUnavailable(Exception):
    """The server's program cannot be had here; the message says what was tried."""


class NotOwned(Exception):
    """The server was given by its URL: the tests may use it but not stop, kill or restart it."""


class StartFailed(Exception):
    """The program is there but the server did not come up; the message ends with its log."""


class EndedEarly(StartFailed):
    """The server ended while it was awaited, as one does whose port is taken."""


class Service(ABC):
    """One server, from its own folder and on its own port.

    `start` picks folder and port; `kill` crashes it; `restart` brings it back on the same port with
    the same data; `stop` ends it and removes the folder. All may be called in any thread.
    """

    name: ClassVar[str]
    shutdown_signal: ClassVar[signal.Signals] = signal.SIGTERM
    start_seconds: ClassVar[float] = 30.0

    def __init__(self) -> None:
        self.port = 0
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    # What a server has to say for itself.

    @property
    @abstractmethod
    def url(self) -> str:
        """Where clients find the server."""

    @abstractmethod
    def _prepare(self) -> None:
        """Find the program, fill the fresh folder. Raises ServiceUnavailable."""

    @abstractmethod
    def _launch(self) -> None:
        """Start the program through `_spawn` on `self.port` over the data in the folder."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether the server answers, and is this one. Any exception counts as not yet."""

    def _crashed(self) -> None:  # noqa: B027 - most servers have nothing to do
        """Called after a kill, with all processes gone."""

    # The life cycle.

    @property
    def folder(self) -> Path:
        """The server's own folder; there is none before `start` and after `stop`."""
        if self._folder is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._folder

    @property
    def pid(self) -> int:
        """The server's main process; raises RuntimeError where it does not run."""
        if self._process is None:
            raise RuntimeError(f"{self.name} does not run")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Make folder and port and start the server; returns when it answers.

        Raises ServiceUnavailable where its program is missing, StartFailed where it does not come
        up. A port that was taken in the meantime is tried again with another one.
        """
        if self._folder is not None:
            raise RuntimeError(f"{self.name} has been started already")
        self._folder = Path(tempfile.mkdtemp(prefix=f"celery-budget-{self.name.lower()}-"))
        guardian.watch_folder(self._folder)
        atexit.register(self._stop_at_exit)
        try:
            self._prepare()
            for attempt in range(3):
                self.port = free_port()
                try:
                    self._bring_up()
                    break
                except EndedEarly:
                    if attempt == 2:
                        raise
        except BaseException:
            self.stop()
            raise
        return self

    def restart(self) -> None:
        """Start again on the same port and data, after an orderly end if the server still runs."""
        if self.alive:
            self._end_orderly()
        self._bring_up()

    def kill(self) -> None:
        """SIGKILL the server with all its processes, as a crash of its machine would."""
        self._end_hard()
        self._crashed()

    def stop(self) -> None:
        """End the server and remove its folder; does nothing where there is none."""
        atexit.unregister(self._stop_at_exit)
        if self._folder is None:
            return
        self._end_for_good()
        shutil.rmtree(self._folder, ignore_errors=True)
        guardian.forget_folder(self._folder)
        self._folder = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # For the servers themselves.

    def _spawn(
        self,
        command: Sequence[str | Path],
        *,
        log: str = "server.log",
        user: pwd.struct_passwd | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a watched process in the folder, its output appended to a log there."""
        with (self.folder / log).open("ab") as output:
            process = subprocess.Popen(
                [os.fspath(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=env,
                start_new_session=True,
                **as_user(user),
            )
        guardian.watch_process(process.pid, self.shutdown_signal)
        return process

    def _run_to_end(
        self,
        command: Sequence[str | Path],
        *,
        user: pwd.struct_passwd | None = None,
        env: dict[str, str] | None = None,
        told: str = "",
        timeout_seconds: float = 120.0,
    ) -> str:
        """Run a command in the folder and return its output; StartFailed where it fails.

        It is given `told` to read.
        """
        done: subprocess.CompletedProcess[str] = subprocess.run(
            [os.fspath(part) for part in command],
            input=told,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
            env=env,
            text=True,
            timeout=timeout_seconds,
            check=False,
            **as_user(user),
        )
        if done.returncode:
            raise StartFailed(f"{command[0]} exited with {done.returncode}:\n{done.stdout[-3000:]}")
        return done.stdout

    def _bring_up(self) -> None:
        """Launch and wait until the server answers; leaves nothing running where it does not."""
        self._launch()
        deadline = time.monotonic() + self.start_seconds
        while not self._ready():
            ended = not self.alive
            if ended or time.monotonic() > deadline:
                self._end_hard()
                state = "ended" if ended else f"did not answer in {self.start_seconds:g} s"
                error = EndedEarly if ended else StartFailed
                raise error(f"{self.name} {state}; its log ends with:\n{self._log_tail()}")
            time.sleep(0.02)

    def _ready(self) -> bool:
        try:
            return self._answers()
        except Exception:  # noqa: BLE001 - each client library has its own errors for "not yet"
            return False

    def _log_tail(self) -> str:
        log = self.folder / "server.log"
        return log.read_text(errors="replace")[-3000:] if log.exists() else "(no log)"

    def _end_orderly(self) -> None:
        """Ask the server to end, and insist where it does not."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.send_signal(self.shutdown_signal)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=20)
        self._end_hard()

    def _end_hard(self) -> None:
        end_hard(self._process)
        self._process = None

    def _end_for_good(self) -> None:
        """End the server when its data is no longer wanted."""
        self._end_orderly()

    def _stop_at_exit(self) -> None:
        # A child forked from the test run inherits the handler, but not the server.
        if self._owner == os.getpid():
            self.stop()


def end_hard(process: subprocess.Popen[bytes] | None) -> None:
    """SIGKILL a watched process with its descendants and reap it; None is accepted."""
    if process is None:
        return
    if process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            kill_tree(psutil.Process(process.pid))
        process.wait()
    guardian.forget_process(process.pid)


def free_port() -> int:
    """A loopback port nobody listens on, from below the range of outgoing connections.

    A client that keeps connecting to a dead server's port inside that range can be given that very
    port for its own end and then talks to itself, and the server cannot come back.
    """
    try:
        limits = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        low = int(limits[0])
    except (OSError, ValueError, IndexError):
        low = 32768
    candidates = range(12000, low) if low > 13000 else range(12000, 32768)
    for _ in range(200):
        port = random.choice(candidates)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise StartFailed("no free loopback port was found in 200 tries")


def unprivileged(*names: str) -> pwd.struct_passwd | None:
    """The first of these users that exists, else nobody; None where we are not root anyway."""
    if os.geteuid() != 0:
        return None
    for name in (*names, "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise ServiceUnavailable(f"running as root and none of the users {names}, nobody exists")


def as_user(user: pwd.struct_passwd | None) -> dict[str, Any]:
    """Arguments for subprocess that run a command as this user."""
    if user is None:
        return {}
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def give_to(user: pwd.struct_passwd | None, *paths: Path) -> None:
    """Hand files and folders to this user."""
    if user is not None:
        for path in paths:
            os.chown(path, user.pw_uid, user.pw_gid)
