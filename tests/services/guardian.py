"""A process that outlives the test run by a moment and ends what the run could not.

It reads what to watch from its standard input: `process PID SIGNAL`, `forget PID`, `folder PATH`,
`forget-folder PATH`. The end of that stream means that the test run is gone, however it went; then
every process still watched is asked to end by its signal and, where it lingers, killed with its
descendants, and every folder is removed. After an orderly run nothing is left to do. A parent-death
signal would not serve here: it fires when the *thread* that started the server ends, and a change
of user clears it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

GRACE_SECONDS = 3.0


def kill_tree(root: psutil.Process, timeout_seconds: float = 15.0) -> None:
    """SIGKILL a process and all its descendants and wait until they are gone.

    The root is stopped first, so that it cannot fork while its descendants are listed. Raises
    TimeoutError where one of them outlives the signal.
    """
    with suppress(psutil.NoSuchProcess):
        root.suspend()
    family = [root]
    with suppress(psutil.NoSuchProcess):
        family += root.children(recursive=True)
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    deadline = time.monotonic() + timeout_seconds
    while left := [member.pid for member in family if _runs(member)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {left} outlived SIGKILL")
        time.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    """Whether a process still holds resources; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Guardian:
    """The test run's end of the pipe; the process is started with the first thing to watch."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def watch_process(self, pid: int, shutdown_signal: int) -> None:
        """End this process and its descendants should the test run die."""
        self._tell(f"process {pid} {int(shutdown_signal)}")

    def forget_process(self, pid: int) -> None:
        """The process has ended; its number may be used again."""
        self._tell(f"forget {pid}")

    def watch_folder(self, folder: Path) -> None:
        """Remove this folder should the test run die."""
        self._tell(f"folder {folder}")

    def forget_folder(self, folder: Path) -> None:
        """The folder has been removed."""
        self._tell(f"forget-folder {folder}")

    def _tell(self, line: str) -> None:
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _start(self) -> None:
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
            text=True,
        )
        atexit.register(self._close, self._process, self._owner)

    @staticmethod
    def _close(process: subprocess.Popen[str], owner: int) -> None:
        if owner == os.getpid() and process.stdin is not None:
            process.stdin.close()
            process.wait()


guardian = Guardian()


def main() -> None:
    """Follow the test run to its end, then clear up."""
    processes: dict[int, tuple[psutil.Process, int]] = {}
    folders: set[str] = set()
    for line in sys.stdin:
        verb, _, value = line.rstrip("\n").partition(" ")
        if verb == "process":
            pid, shutdown_signal = map(int, value.split())
            with suppress(psutil.NoSuchProcess):
                processes[pid] = (psutil.Process(pid), shutdown_signal)
        elif verb == "forget":
            processes.pop(int(value), None)
        elif verb == "folder":
            folders.add(value)
        elif verb == "forget-folder":
            folders.discard(value)
    for process, shutdown_signal in processes.values():
        # psutil compares the start time: a reused number is left alone.
        with suppress(psutil.NoSuchProcess):
            process.send_signal(shutdown_signal)
        with suppress(psutil.TimeoutExpired):
            process.wait(timeout=GRACE_SECONDS)
        with suppress(TimeoutError):
            kill_tree(process)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
