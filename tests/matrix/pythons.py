"""The interpreters that are here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Version", "present", "supported", "told"]

Version = tuple[int, int]

#: What each candidate is asked. A shim of pyenv's for a release that is not chosen fails here.
_ASKED = "import sys; print(*sys.version_info[:3], sys.executable)"


def supported(project: Path) -> list[Version]:
    """Return the releases of Python that the project's classifiers name, oldest first."""
    metadata = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [re.fullmatch(r".* :: (3)\.(\d+)", line) for line in metadata["classifiers"]]
    return sorted((int(one[1]), int(one[2])) for one in found if one)


def told(version: Version) -> str:
    """Return a release in words."""
    return ".".join(map(str, version))


def present(wanted: Iterable[Version]) -> dict[Version, Path]:
    """Return an interpreter of each of these releases that is here, the newest where several are.

    ``PYTHONS``, with paths and names between blanks, says where to look; else this interpreter,
    ``python3.X`` on PATH, and what pyenv has installed.
    """
    releases, best = set(wanted), dict[Version, tuple[int, Path]]()
    given = os.environ.get("PYTHONS", "").split()
    for candidate in given or _candidates(releases):
        answer = _ask(candidate)
        if answer is None:
            if given:
                raise SystemExit(f"PYTHONS: {candidate} is no interpreter")
            continue
        version, patch, path = answer
        if version in releases and (version not in best or best[version][0] < patch):
            best[version] = (patch, path)
    return {version: best[version][1] for version in sorted(best)}


def _candidates(releases: Iterable[Version]) -> Iterator[str]:
    yield sys.executable
    for version in releases:
        found = shutil.which(f"python{told(version)}")
        if found:
            yield found
    if shutil.which("pyenv"):
        asked = subprocess.run(["pyenv", "root"], capture_output=True, text=True)
        for place in Path(asked.stdout.strip() or os.devnull).glob("versions/*/bin/python3"):
            yield str(place)


def _ask(candidate: str) -> tuple[Version, int, Path] | None:
    """Return release, patch and place of an interpreter; none where it does not run."""
    try:
        asked = subprocess.run(
            [candidate, "-c", _ASKED], capture_output=True, text=True, timeout=60
        )
    except OSError:
        return None
    if asked.returncode:
        return None
    major, minor, patch, path = asked.stdout.strip().split(" ", 3)
    return (int(major), int(minor)), int(patch), Path(path)
