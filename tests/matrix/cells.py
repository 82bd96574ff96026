"""What is run: a Python with the oldest or the newest dependencies, or a PostgreSQL server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.matrix.pythons import Version, told
from tests.services.postgres import PROGRAMS

__all__ = [
    "DEPENDENCIES",
    "ESSENTIALS",
    "STORE",
    "Cell",
    "OnPostgres",
    "OnPython",
    "Result",
    "unreachable",
]

ROOT = Path(__file__).parents[2]

#: How uv chooses what pyproject.toml leaves open, the lower bounds there being what is oldest.
DEPENDENCIES = {"oldest": "lowest-direct", "newest": "highest"}

#: The store's contract: what depends most on the database.
STORE = (
    "tests/migration",
    "tests/contract/test_reserve.py",
    "tests/contract/test_attempts.py",
    "tests/contract/test_store.py",
    "tests/contract/test_prepared.py",
    "tests/contract/test_notifications.py",
)

#: The contract on both stores, Celery's own with each broker, types.
ESSENTIALS = (
    "tests/unit",
    "tests/typing",
    *STORE,
    "tests/acceptance/test_embedded.py",
    "tests/integration/test_capture.py",
    "tests/integration/test_brokers.py",
    "tests/integration/test_workers.py",
    "tests/integration/test_releases.py",
)

#: How many tests that failed are run again, alone: with real servers one may by its timing.
MOST_AGAIN = 3

#: What the table says of an environment.
_SHOWN = ("celery", "kombu", "SQLAlchemy")


@dataclass(frozen=True)
class Result:
    """What became of a cell. `problem` is empty where all was well."""

    passed: int = 0
    failed: tuple[str, ...] = ()
    skipped: int = 0
    seconds: float = 0.0
    what: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Cell:
    """One run of the tests; its logs are in a folder of its name."""

    name: str
    folder: Path

    def run(self, processes: str) -> Result:
        """Run it. Whatever fails, installing as well, is in the result."""
        began = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            python = self._prepare()
            result = self._test(python, processes)
        except subprocess.CalledProcessError as exc:
            result = Result(problem=f"not installed: {_last_line(exc)}")
        return Result(**{**vars(result), "seconds": time.monotonic() - began})

    def _prepare(self) -> Path:
        """Return the interpreter to test with."""
        raise NotImplementedError

    def _selection(self) -> Sequence[str]:
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        return {}

    def _what(self, python: Path) -> str:
        raise NotImplementedError

    def _test(self, python: Path, processes: str) -> Result:
        """Run the tests; what failed once more, alone, as ``make retest`` does: three at most."""
        result = self._run(python, processes, "junit.xml")
        if not 0 < len(result.failed) <= MOST_AGAIN:
            return result
        again = self._run(
            python, "0", "again.xml", "--last-failed", "--last-failed-no-failures", "none"
        )
        if again.problem or again.passed < len(result.failed):
            return result
        named = ", ".join(result.failed)
        return replace(
            result,
            passed=result.passed + len(result.failed),
            failed=(),
            problem="",
            what=f"{result.what}; passed alone: {named}",
        )

    def _run(self, python: Path, processes: str, report: str, *how: str) -> Result:
        junit, log = self.folder / report, self.folder / f"{report}.log"
        junit.unlink(missing_ok=True)
        with log.open("wb") as out:
            done = subprocess.run(
                [
                    *(str(python), "-m", "pytest", "-n", processes, "--dist", "loadfile", *how),
                    *("-q", "--junitxml", str(junit), "-o", f"cache_dir={self.folder / 'cache'}"),
                    *self._selection(),
                ],
                cwd=ROOT,
                env={**os.environ, **self._environment()},
                stdout=out,
                stderr=subprocess.STDOUT,
                check=False,
            )
        what = self._what(python)
        if not junit.exists():
            return Result(what=what, problem=f"pytest exited with {done.returncode}; see {log}")
        passed, failed, skipped = _counted(junit)
        problem = ""
        if done.returncode or failed or not passed:
            problem = f"pytest exited with {done.returncode}; see {log}"
        return Result(passed, failed, skipped, what=what, problem=problem)


@dataclass(frozen=True)
class OnPython(Cell):
    """An interpreter with one end of the dependencies, in an environment of their own."""

    version: Version
    interpreter: Path
    dependencies: str

    def _prepare(self) -> Path:
        locked, environment = self.folder / "requirements.txt", self.folder / "environment"
        # Where it is there, uv would keep what it says.
        locked.unlink(missing_ok=True)
        _uv(
            *("pip", "compile", "--python", str(self.interpreter)),
            *("--resolution", DEPENDENCIES[self.dependencies], "--extra", "test"),
            *("pyproject.toml", "--output-file", str(locked)),
        )
        python = environment / "bin" / "python"
        if not python.exists():
            _uv("venv", "--python", str(self.interpreter), str(environment))
        _uv("pip", "sync", "--python", str(python), str(locked))
        _uv("pip", "install", "--python", str(python), "--no-deps", "--editable", ".")
        return python

    def _selection(self) -> Sequence[str]:
        # Of the one environment that has all there is, linters too.
        return (*ESSENTIALS, "--ignore=tests/unit/test_dependencies.py")

    def _what(self, python: Path) -> str:
        asked = (
            "from importlib.metadata import version; import sys; print(*map(version, sys.argv[1:]))"
        )
        found = subprocess.run(
            [str(python), "-c", asked, *_SHOWN], capture_output=True, text=True, check=True
        )
        pairs = zip(_SHOWN, found.stdout.split(), strict=True)
        return ", ".join(f"{name} {version}" for name, version in pairs)


@dataclass(frozen=True)
class OnPostgres(Cell):
    """A PostgreSQL server, with the environment that this process has."""

    programs: Path

    def _prepare(self) -> Path:
        return Path(sys.executable)

    def _selection(self) -> Sequence[str]:
        return ("-m", "postgres", *STORE)

    def _environment(self) -> dict[str, str]:
        return {PROGRAMS: str(self.programs)}

    def _what(self, python: Path) -> str:
        asked = subprocess.run([self.programs / "postgres", "-V"], capture_output=True, text=True)
        return asked.stdout.split(") ")[-1].strip()


def python_cells(
    pythons: dict[Version, Path], dependencies: Sequence[str], folder: Path
) -> list[OnPython]:
    """Return a cell for each of these interpreters and ends of the dependencies."""
    return [
        OnPython(name, folder / name, version, interpreter, end)
        for version, interpreter in pythons.items()
        for end in dependencies
        for name in (f"python{told(version)}-{end}",)
    ]


def unreachable() -> str:
    """Return why uv cannot ask its package index; empty where it can."""
    try:
        _uv("pip", "compile", "--refresh-package", "celery", "-", asked="celery")
    except subprocess.CalledProcessError as exc:
        return _last_line(exc)
    return ""


def _last_line(exc: subprocess.CalledProcessError) -> str:
    return next(iter((exc.stderr or "").strip().splitlines()[-1:]), str(exc))


def _uv(*arguments: str, asked: str | None = None) -> None:
    """Run uv in the project's folder. Raises CalledProcessError, with what it said."""
    subprocess.run(
        [sys.executable, "-m", "uv", "--quiet", *arguments],
        input=asked,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )


def _counted(junit: Path) -> tuple[int, tuple[str, ...], int]:
    """Return how many passed, which failed, and how many were skipped."""
    passed, skipped, failed = 0, 0, []
    for case in ET.parse(junit).iter("testcase"):  # noqa: S314 - pytest wrote it
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, tuple(failed), skipped
