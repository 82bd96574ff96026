"""The matrix finds what is here, counts what was run, and fails where it has to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import cli, pythons, servers
from tests.matrix.cells import ESSENTIALS, ROOT, STORE, OnPostgres, OnPython, Result
from tests.services import postgres

HERE = sys.version_info[:2]


def a_program(path: Path, says: str, status: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with one folder, which is empty but for what sh needs."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("PYTHONS", raising=False)
    return folder


def test_what_is_supported_is_what_the_classifiers_say() -> None:
    found = pythons.supported(ROOT)
    assert found[0] == (3, 10)
    assert HERE in found


def test_what_is_selected_is_there() -> None:
    assert [name for name in (*ESSENTIALS, *STORE) if not (ROOT / name).exists()] == []


def test_this_interpreter_is_here_and_others_are_told(nothing_else: Path) -> None:
    assert list(pythons.present([HERE, (3, 99)])) == [HERE]


def test_a_shim_that_does_not_run_is_no_interpreter(nothing_else: Path) -> None:
    a_program(nothing_else / "python3.98", "no such version", 127)
    assert pythons.present([(3, 98)]) == {}


def test_of_several_of_a_release_the_newest_is_taken(nothing_else: Path, tmp_path: Path) -> None:
    a_program(nothing_else / "python3.98", "3 98 1 /one")
    a_program(nothing_else / "pyenv", str(tmp_path / "root"))
    a_program(tmp_path / "root" / "versions" / "3.98.10" / "bin" / "python3", "3 98 10 /ten")
    assert pythons.present([(3, 98)]) == {(3, 98): Path("/ten")}


def test_what_pythons_names_is_all_that_is_looked_at(
    nothing_else: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = a_program(tmp_path / "mine", "3 98 1 /mine")
    monkeypatch.setenv("PYTHONS", str(given))
    assert pythons.present([HERE, (3, 98)]) == {(3, 98): Path("/mine")}
    monkeypatch.setenv("PYTHONS", str(tmp_path / "none"))
    with pytest.raises(SystemExit, match="none is no interpreter"):
        pythons.present([HERE])


def test_servers_are_told_by_what_they_say(
    nothing_else: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = a_program(tmp_path / "bin" / "postgres", "postgres (PostgreSQL) 16.4").parent
    a_program(programs / "initdb", "")
    monkeypatch.setenv(postgres.PROGRAMS, str(programs))
    assert servers.present([14, 16], tmp_path / "npm") == {16: programs}


def test_the_ends_are_the_oldest_with_the_oldest_and_the_newest_with_the_newest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = {(3, 11): Path("/a"), (3, 12): Path("/b"), (3, 13): Path("/c")}
    monkeypatch.setattr(pythons, "present", lambda wanted: here)
    assert cli.main(["--ends", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "left out: Python 3.10, which is not here",
        "python3.11-oldest",
        "python3.13-newest",
    ]


def a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> OnPostgres:
    """A cell that runs one file of tests, marked as those on PostgreSQL are."""
    file = tmp_path / "test_it.py"
    file.write_text(f"import pytest\npytestmark = pytest.mark.postgres\n{source}")
    monkeypatch.setattr("tests.matrix.cells.STORE", (str(file),))
    return OnPostgres("it", tmp_path / "it", a_program(tmp_path / "bin/postgres", "x) 1").parent)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def test_a(): pass\n", (1, 0, False)),
        ("def test_a(): pass\ndef test_b(): assert 0\ndef test_c(missing): pass\n", (1, 2, True)),
        ("def test_a(): pytest.skip('it')\n", (0, 0, True)),
    ],
    ids=["well", "a failure and an error", "none run"],
)
def test_a_cell_is_well_where_tests_were_run_and_none_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: tuple[Any, ...]
) -> None:
    result = a_cell(tmp_path, monkeypatch, source).run("0")
    assert (result.passed, len(result.failed), bool(result.problem)) == expected


def test_what_passes_alone_is_named_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = tmp_path / "once"
    source = f"""
from pathlib import Path
def test_a(): pass
def test_b():
    again = Path({str(once)!r}).exists()
    Path({str(once)!r}).touch()
    assert again
"""
    result = a_cell(tmp_path, monkeypatch, source).run("0")
    assert (result.passed, result.failed, result.problem) == (2, (), "")
    assert "passed alone: " in result.what
    assert "test_b" in result.what


def test_what_cannot_be_installed_is_a_failure(tmp_path: Path) -> None:
    cell = OnPython("it", tmp_path / "it", (3, 98), tmp_path / "none", "oldest")
    assert cell.run("0").problem.startswith("not installed: ")


@pytest.mark.parametrize(
    ("results", "status"),
    [([Result(passed=1)], 0), ([Result(passed=1), Result(problem="it")], 1), ([], 3)],
)
def test_the_status_tells_whether_all_was_well(
    results: list[Result], status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cells = [OnPostgres(str(at), tmp_path, tmp_path) for at, _ in enumerate(results)]
    monkeypatch.setattr(cli, "_cells", lambda given: (cells, []))
    monkeypatch.setattr(OnPostgres, "run", lambda cell, n: results[int(cell.name)])
    assert cli.main([]) == status


def test_without_an_index_no_python_is_run_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    assert cli.main(["--ends"]) == cli.NOTHING_TO_RUN
    assert "left out: each Python, as there is no index to install from (" in (
        capsys.readouterr().out
    )


def test_the_table_names_what_failed() -> None:
    told = cli.table([("a", Result(2, ("t::one",), problem="see it")), ("b", Result(3))])
    assert "FAILED" in told
    assert told.endswith("a: see it\n  t::one")
