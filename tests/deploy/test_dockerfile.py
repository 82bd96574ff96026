"""The Dockerfile: its stages, what it copies, and who runs what in the end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from celery_budget.core.declarations import tomllib
from tests.deploy.compose import OURS, ROOT, copied, copy_to, services, stages, tracked

IGNORED = [
    line
    for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    if line and not line.startswith("#")
]


def ignored(path: str) -> bool:
    """Tell whether .dockerignore leaves something out; the last line that fits decides."""
    out = False
    for line in IGNORED:
        pattern, back = line.removeprefix("!"), line.startswith("!")
        names = [path, *map(str, Path(path).parents)]
        anywhere = pattern.removeprefix("**/")
        if any(fnmatch(one, pattern) for one in names) or (
            anywhere != pattern and any(fnmatch(Path(one).name, anywhere) for one in names)
        ):
            out = not back
    return out


def test_stages_that_are_named_are_there() -> None:
    names = list(stages())
    for number, name in enumerate(names):
        for instruction, text in stages()[name]:
            if instruction == "FROM":
                assert re.fullmatch(r"python:\d+\.\d+-slim", text)
            for other in re.findall(r"^--from=(\S+)", text):
                assert other in names[:number]
    assert {services[name]["build"]["target"] for name in OURS} == {"runtime"}
    assert names[-1] == "runtime"


@pytest.mark.parametrize("stage", stages())
def test_what_is_copied_is_in_git_and_not_ignored(stage: str) -> None:
    for sources, _ in copied(stage):
        for source in sources:
            assert source in tracked()
            assert not ignored(source), source


def test_what_is_not_copied_is_ignored() -> None:
    wanted = {source for stage in stages() for sources, _ in copied(stage) for source in sources}
    for name in tracked() - {"."}:
        assert ignored(name) is (Path(name).parts[0] not in wanted), name
    for name in (".git", ".env", ".venv", "examples/.env", "celery_budget/x/__pycache__/y.pyc"):
        assert ignored(name)


def test_it_ends_as_nobody_in_particular_without_tools() -> None:
    last = stages()["runtime"]
    users = [text for name, text in last if name == "USER"]
    assert users[-1:] == ["10001:10001"]
    assert [name for name, _ in last].index("USER") > max(
        number for number, (name, _) in enumerate(last) if name in ("RUN", "COPY")
    )
    assert {services[name]["user"] for name in OURS} == {users[-1]}
    for name, text in last:
        assert not (name == "RUN" and re.search(r"\b(pip|apt-get|gcc)\b", text))
        assert name != "ADD"
    # What signals are sent to is the program itself.
    [command] = [json.loads(text) for name, text in last if name == "CMD"]
    assert command == services["api"]["command"]
    [health] = [text for name, text in last if name == "HEALTHCHECK"]
    assert json.loads(health.partition("CMD ")[2]) == services["api"]["healthcheck"]["test"][1:]


def test_folders_of_volumes_are_the_users() -> None:
    made = " ".join(text for name, text in stages()["runtime"] if name == "RUN")
    for name in OURS:
        for volume in services[name].get("volumes", []):
            assert re.search(rf"install --directory .*{volume.split(':')[1]}\b", made)


def test_the_extras_are_ones_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    [named] = re.findall(r"celery-budget\[([\w,]+)\]", str(stages()["packages"]))
    assert set(named.split(",")) <= set(extras["optional-dependencies"])


def test_what_is_copied_makes_the_wheel(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    copy_to("wheel", source)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, source],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("celery_budget-*.whl"))) == 1
