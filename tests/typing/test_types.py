"""The public API as type checkers see it: lines of ``checked`` say what is revealed, and what is
an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKED, STUBS = HERE / "checked", HERE / "stubs"
ROOT = HERE.parents[1]
MARK = re.compile(r"  # (is: (?P<type>.+)|error)$")
MYPY = re.compile(r"^[^:]+\.py:(?P<line>\d+): (?P<kind>error|note): (?P<text>.*)$", re.MULTILINE)

#: By line: the type that is revealed there, or that there is an error.
Told = dict[int, str]


def expected(name: str) -> Told:
    lines = (CHECKED / name).read_text(encoding="utf-8").splitlines()
    marks = {number: MARK.search(line) for number, line in enumerate(lines, start=1)}
    return {number: mark["type"] or "error" for number, mark in marks.items() if mark}


def plain(revealed: str) -> str:
    """Return a type in the words that both checkers have."""
    revealed = re.sub(r"\b(?:\w+\.)+(?=\w)", "", revealed)
    revealed = revealed.removeprefix("def ").replace("def (", "(")
    return re.sub(r"\[\[([^\[\]]*)\], ", r"[(\1), ", revealed)


def run(command: list[str], folder: Path = CHECKED, **env: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def by_mypy(name: str, cache: Path, *options: str, **env: str) -> Told:
    base = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--config-file="]
    out = run([*base, "--cache-dir", str(cache), *options, name], **env)
    told: Told = {}
    for found in MYPY.finditer(out):
        line = int(found["line"])
        revealed = re.fullmatch(r'Revealed type is "(.*)"', found["text"])
        if revealed:
            told[line] = plain(revealed[1])
        elif found["kind"] == "error":
            told[line] = "error"
    return told


def by_pyright(name: str, folder: Path, stubs: Path | None) -> Told:
    pyright = pytest.importorskip("pyright", reason="pyright is not installed")
    script = Path(pyright.__file__).parent / "dist" / "index.js"
    # What drives browsers brings a node of its own.
    playwright = pytest.importorskip("playwright")
    own = Path(playwright.__file__).parent / "driver" / "node"
    node = shutil.which("node") or (str(own) if own.exists() else None)
    if node is None or not script.exists():
        pytest.skip("pyright needs node, and the release that brings its script")
    configuration = {
        "include": [name],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "standard",
        **({} if stubs is None else {"stubPath": str(stubs)}),
    }
    shutil.copy(CHECKED / name, folder)
    (folder / "pyrightconfig.json").write_text(json.dumps(configuration))
    out = json.loads(
        run([node, str(script), "--outputjson", "--pythonpath", sys.executable], folder)
    )
    assert out["summary"]["filesAnalyzed"] == 1, out
    told: Told = {}
    for one in out["generalDiagnostics"]:
        revealed = re.fullmatch(r'Type of "(?:.*)" is "(.*)"', one["message"], re.DOTALL)
        line = one["range"]["start"]["line"] + 1
        if revealed:
            told[line] = plain(revealed[1])
        elif one["severity"] == "error":
            told[line] = "error"
    return told


@pytest.mark.slow
def test_mypy_with_types_for_celery(tmp_path: Path) -> None:
    for name in ("public.py", "tasks.py"):
        assert by_mypy(name, tmp_path, MYPYPATH=str(STUBS)) == expected(name)


@pytest.mark.slow
def test_mypy_without(tmp_path: Path) -> None:
    """A task decorator of Celery's own is of any type there, and so is what it makes."""
    told = by_mypy("public.py", tmp_path, "--ignore-missing-imports")
    assert told == expected("public.py")


@pytest.mark.parametrize("name", ["public.py", "tasks.py"])
def test_pyright_with_types_for_celery(name: str, tmp_path: Path) -> None:
    assert by_pyright(name, tmp_path, STUBS) == expected(name)


def test_pyright_without(tmp_path: Path) -> None:
    told = by_pyright("public.py", tmp_path, None)
    # Of what has no annotations it finds some types by itself.
    wanted = {line: kind for line, kind in expected("public.py").items() if kind != "Any"}
    assert {line: kind for line, kind in told.items() if line in wanted} == wanted
    assert "error" not in {kind for line, kind in told.items() if line not in wanted}


def test_the_package_says_that_it_has_types() -> None:
    assert (ROOT / "celery_budget" / "py.typed").is_file()
