"""docker-compose.yml as Compose would read it, and the files that an image would have."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.yml"
VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+):-([^}]*)\})")
DOCKERFILE = ROOT / "Dockerfile"


def resolved(value: Any, given: Mapping[str, str]) -> Any:
    """Put in variables as Compose does: ``${NAME:-default}``, and ``$$`` for a dollar sign."""
    if isinstance(value, dict):
        return {key: resolved(one, given) for key, one in value.items()}
    if isinstance(value, list):
        return [resolved(one, given) for one in value]
    if not isinstance(value, str):
        return value
    assert "$" not in VARIABLE.sub("", value), f"without a default: {value}"
    return VARIABLE.sub(lambda found: "$" if found[1] else given.get(found[2]) or found[3], value)


raw = yaml.safe_load(FILE.read_text("utf-8"))
project = resolved(raw, {})
services: dict[str, dict[str, Any]] = project["services"]
#: Those that run commands of ours.
OURS = [name for name, one in services.items() if "build" in one]


def tracked() -> set[str]:
    """Return what is in git, with the folders."""
    said = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    files = {name for name in said if name}
    return files | {str(parent) for name in files for parent in Path(name).parents}


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, by name and text, in order."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text("utf-8"), flags=re.MULTILINE)
    joined = re.sub(r"\\\n\s*", " ", text)
    return [
        (line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line
    ]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the stages with their instructions."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, text in instructions():
        if name == "FROM":
            image, as_, stage = text.split()
            assert as_ == "AS"
            found[stage] = [("FROM", image)]
        else:
            list(found.values())[-1].append((name, text))
    return found


def copied(stage: str) -> list[tuple[list[str], str]]:
    """Return what a stage copies of the repository, with its place."""
    found = []
    for name, text in stages()[stage]:
        if name == "COPY" and not text.startswith("--from="):
            *sources, place = text.split()
            found.append((sources, place))
    return found


def copy_to(stage: str, folder: Path) -> None:
    """Copy what a stage does, of what is in git and not ignored."""
    for sources, place in copied(stage):
        for source in sources:
            target = folder / place / (source if place == "./" else "")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, target)
