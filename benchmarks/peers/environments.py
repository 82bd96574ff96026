"""The environments and processes of peers, and how a block is asked of one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.services.base import ServiceUnavailable, end_hard

__all__ = ["OUTBOX", "PROCRASTINATE", "SNIPZ", "Peer", "running"]

ROOT = Path(__file__).resolve().parents[2]
#: Kept for the next run; ``make clean`` removes them.
ENVIRONMENTS = ROOT / ".venv-peers"


@dataclass(frozen=True)
class Peer:
    """A package, the releases that were read for this, and the program that drives it.

    :ivar python: the oldest Python that it runs on.
    """

    name: str
    program: str
    requirements: tuple[str, ...]
    python: tuple[int, int] = (3, 10)


OUTBOX = Peer(
    "django-celery-outbox",
    "outbox.py",
    ("django-celery-outbox==0.4.*", "celery[redis]", "psycopg[binary]"),
)
PROCRASTINATE = Peer("procrastinate", "deferring.py", ("procrastinate==3.*", "psycopg[binary]"))
SNIPZ = Peer("Snipz", "holding.py", ("snipz[postgres]==0.2.*",), (3, 13))


@contextmanager
def running(peer: Peer, conf: dict[str, Any]) -> Iterator[Callable[[], Sequence[float]]]:
    """Have a peer's process; what it yields asks for a block and returns what was measured.

    :raises ServiceUnavailable: where its environment cannot be made.
    """
    process = subprocess.Popen(
        [_environment(peer), Path(__file__).with_name(peer.program), json.dumps(conf)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    requests, answers = process.stdin, process.stdout

    def block() -> list[float]:
        requests.write("block\n")
        requests.flush()
        answer = answers.readline()
        if not answer:
            raise RuntimeError(f"the process of {peer.name} ended; what it said is above")
        return [float(one) for one in json.loads(answer)]

    try:
        yield block
    finally:
        end_hard(process)
        requests.close()
        answers.close()


def _environment(peer: Peer) -> Path:
    """Return the interpreter of a peer's environment, made anew where what it needs has changed."""
    folder = ENVIRONMENTS / peer.name.lower()
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join(peer.requirements) + "\n"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    try:
        subprocess.run([_interpreter(peer), "-m", "venv", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *peer.requirements], check=True)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ServiceUnavailable(f"{peer.name} could not be installed: {error}") from error
    stamp.write_text(wanted)
    return python


def _interpreter(peer: Peer) -> Path:
    """Return a Python that is new enough: this one, one on the path, or one of pyenv's."""
    if sys.version_info >= peer.python:
        return Path(sys.executable)
    named = [shutil.which(f"python3.{minor}") for minor in range(peer.python[1], 20)]
    pyenvs = Path.home() / ".pyenv" / "versions"
    candidates = [Path(found) for found in named if found] + sorted(pyenvs.glob("3.*/bin/python"))
    for candidate in candidates:
        asked = subprocess.run(
            [candidate, "-c", f"import sys; sys.exit(sys.version_info < {peer.python})"],
            capture_output=True,
            check=False,
        )
        if asked.returncode == 0:
            return candidate
    needed = ".".join(map(str, peer.python))
    raise ServiceUnavailable(f"{peer.name} needs Python {needed}; put one on the PATH")
