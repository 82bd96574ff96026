"""Install a Debian package for the tests without letting it start its own service."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.services.base import ServiceUnavailable

POLICY = Path("/usr/sbin/policy-rc.d")
REFUSE = "#!/bin/sh\nexit 101\n"


def find_or_install(package: str, *programs: Callable[[], Path | None]) -> list[Path]:
    """Return where a package's programs are; where one is missing, install it with apt-get as root.

    Several test processes at once look one after the other, so that none sees half a package.
    Raises ServiceUnavailable with what is missing, or what apt said.
    """
    with _one_at_a_time():
        found = [find() for find in programs]
        if not all(found):
            _install(package)
            found = [find() for find in programs]
    there = [path for path in found if path is not None]
    if len(there) < len(programs):
        raise ServiceUnavailable(f"{package} was installed but its programs were not found")
    return there


def _install(package: str) -> None:
    if os.geteuid() != 0:
        raise ServiceUnavailable(f"{package} is not installed and only root may install it")
    if shutil.which("apt-get") is None:
        raise ServiceUnavailable(f"{package} is not installed and there is no apt-get")
    with _no_services():
        _apt_get("update")
        _apt_get("install", "--yes", "--no-install-recommends", package)


def _apt_get(*arguments: str) -> None:
    command = ["apt-get", "--quiet", "--option", "DPkg::Lock::Timeout=300", *arguments]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        raise ServiceUnavailable(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    lock = Path(tempfile.gettempdir()) / "celery-budget-install.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _no_services() -> Iterator[None]:
    """Have every package's start of its service refused; a policy that stood here comes back."""
    saved = POLICY.with_name("policy-rc.d.celery-budget-saved")
    if POLICY.exists():
        POLICY.replace(saved)
    POLICY.write_text(REFUSE)
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)
        if saved.exists():
            saved.replace(POLICY)
