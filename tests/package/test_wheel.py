"""The built wheel: what is in it, and that it works where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "celery_budget"
ENTRY_POINTS = {
    "celery.commands": "celery_budget.cli:budget",
    "celery.beat_schedulers": "celery_budget.integration.beat:BudgetScheduler",
    "pytest11": "celery_budget.testing.plugin",
}
PROBE = """
import json, sys
from importlib.metadata import entry_points, version
import celery_budget
from celery_budget.reconcile import Report
from celery_budget.render.html import report_html
assert report_html(Report((), {"admitted": 0})).endswith("</html>\\n"), "no page"
found = {
    group: [(point.value, point.load() is not None) for point in entry_points(group=group)
            if point.name in ("budget", "celery_budget")]
    for group in ("celery.commands", "celery.beat_schedulers", "pytest11")
}
print(json.dumps([celery_budget.__file__, version("celery-budget"), found]))
"""


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command; fails the test with its output where it fails."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[:4]} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without the network by the build backend of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    command = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    run(sys.executable, *command, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_content(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packaged = {name for name in names if name.startswith("celery_budget/")}
    source = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packaged == source
    assert "celery_budget/py.typed" in packaged
    # No build step makes them: what the dashboard sends to browsers is in the package.
    for name in ("static/dashboard.css", "static/dashboard.js", "templates/overview.html"):
        assert f"celery_budget/dashboard/{name}" in packaged
    migrations = {name for name in packaged if name.startswith("celery_budget/store/migrations/")}
    assert "celery_budget/store/migrations/env.py" in migrations
    assert any("/versions/" in name and name.endswith(".py") for name in migrations)


def test_nothing_else_is_shipped(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"celery_budget", next(top for top in tops if top.endswith(".dist-info"))}


def test_the_source_has_what_metrics_are_watched_by(tmp_path: Path) -> None:
    command = ["-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    run(sys.executable, *command, cwd=tmp_path)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("grafana/celery_budget.json", "prometheus/rules.yml"):
        assert f"docs/monitoring/{name}" in names


def test_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    text = archive.read(metadata).decode()
    assert "Name: celery-budget\n" in text
    assert "License-Expression: BSD-3-Clause\n" in text
    assert "Requires-Python: >=3.10\n" in text
    assert metadata.replace("METADATA", "licenses/LICENSE") in archive.namelist()


def test_installed_package_works(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", str(environment), cwd=tmp_path)
    python = str(environment / "bin" / "python")
    isolated = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    arguments = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    run(python, *arguments, cwd=tmp_path, env=isolated)
    # The dependencies of this environment, behind the new one's own packages. A plain path in a
    # .pth file does not read the .pth files over there, so the editable install stays out of it.
    purelib = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
    )
    (Path(purelib.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    file, version, found = json.loads(run(python, "-c", PROBE, cwd=tmp_path, env=isolated))
    assert Path(file).is_relative_to(environment)
    assert version in wheel.name
    # The editable install's metadata may be listed a second time; each has to load.
    for group, value in ENTRY_POINTS.items():
        assert found[group], f"no entry point in {group}"
        assert all(point == [value, True] for point in found[group])
