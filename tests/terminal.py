"""A terminal without anybody before it, and a program that is started in one."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

SECONDS = 30.0


@contextmanager
def terminal(columns: int = 80) -> Iterator[tuple[int, int]]:
    """Open one; give the file descriptors of its keyboard and screen, and of its program's side."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    try:
        yield ours, theirs
    finally:
        for one in (ours, theirs):
            try:
                os.close(one)
            except OSError:
                continue


@contextmanager
def stream(columns: int = 80) -> Iterator[tuple[int, TextIO]]:
    """Give a terminal's screen and a stream that is written to it."""
    with terminal(columns) as (ours, theirs), os.fdopen(os.dup(theirs), "w") as file:
        yield ours, file


def shown(ours: int, until: str) -> str:
    """Return what is on the screen, once that has ``until`` in it."""
    seen = b""
    end = time.monotonic() + SECONDS
    while until.encode() not in seen and time.monotonic() < end:
        if select.select([ours], [], [], 0.2)[0]:
            seen += os.read(ours, 65536)
    return seen.decode()


def run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], columns: int = 80
) -> tuple[int, str]:
    """Run a program in a terminal; return its exit status and what was on the screen."""
    with terminal(columns) as (ours, theirs):
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        seen = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:  # nobody writes to it any more
                break
            if not more:
                break
            seen += more
        return process.wait(SECONDS), seen.decode()
