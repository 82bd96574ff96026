"""What commands say where: data, notes, progress and errors; colours, characters, exit statuses."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import click
import pytest
import sqlalchemy as sa

from celery_budget.cli import progress, streams
from celery_budget.cli.progress import Progress, Waiting
from celery_budget.events import Logger
from celery_budget.store.engine import _remedy
from tests import terminal
from tests.integration.commands import Run, runner
from tests.integration.support import Shop, make_app

CELERY = [sys.executable, "-m", "celery"]
COLOUR = "\x1b["
#: What a test's own surroundings say of colours.
SAID = ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "PYTHONIOENCODING", "CLICOLOR_FORCE")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def project(shop: Shop, tmp_path: Path) -> Path:
    """A folder with the module of an application, on the shop's ledger."""
    conf = {"broker_url": "memory://", "budget_database_url": shop.budget.settings.database_url}
    (tmp_path / "proj.py").write_text(
        "from celery import Celery\nfrom celery_budget import CeleryBudget\n"
        f"app = Celery('proj')\napp.conf.update({conf!r})\nbudget = CeleryBudget(app)\n"
    )
    return tmp_path


def surroundings(**variables: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in SAID} | variables


def piped(project: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*CELERY, "-A", "proj", "budget", *args],
        cwd=project,
        env=surroundings(**variables),
        capture_output=True,
        timeout=60,
    )


# Errors: one line on the standard error stream, a full stop, a status.


@pytest.mark.parametrize(
    ("conf", "args", "code", "said"),
    [
        ({}, ["show", "b"], 1, "no budget named 'b'; create it with"),
        ({}, ["report", "--since", "2030-02-31"], 2, "there is no day '2030-02-31'"),
        ({}, ["report", "--since", "soon"], 2, "'soon' is no time; give"),
        ({}, ["set", "tenant:a", "--limit", "many"], 2, "is not a limit; give"),
        ({}, ["set", "tenant:a", "--bogus"], 2, "No such option"),
        ({}, ["shwo"], 2, "No such command"),
        ({}, ["-q", "-v", "list"], 2, "give one of them"),
        ({}, ["apply", "/no/such/file"], 2, "No such file"),
        ({"budget_lease_seconds": "x"}, ["list"], 1, "budget_lease_seconds is 'x'; give"),
        ({"budget_database_url": "sqlite:////no/l.db"}, ["list"], 1, "see that the file's folder"),
        (
            {"budget_database_url": "postgresql+psycopg://u:hush@127.0.0.1:1/b"},
            ["list"],
            1,
            "see that its server runs",
        ),
        ({"imports": ["no_such_module"]}, ["list"], 1, "correct imports="),
        ({}, ["completion", "tcsh"], 2, "is not one of 'bash', 'zsh', 'fish' (see"),
    ],
)
def test_an_error_is_one_line(
    sqlite_url: str, run: Run, conf: dict[str, Any], args: list[str], code: int, said: str
) -> None:
    has_budget = "imports" not in conf
    app = make_app(budget=has_budget, **{"budget_database_url": sqlite_url, **conf})
    try:
        if not {"budget_database_url", "budget_lease_seconds", "imports"} & conf.keys():
            assert run(app, "init").code == 0
        done = run(app, *args)
        assert done.failed(code, said), done
        assert done.err.endswith((".\n", "?\n"))
        assert "hush" not in done.err
    finally:
        app.close()


def test_tables_of_a_later_release_stay_as_they_are(shop: Shop, run: Run) -> None:
    shop.sql(sa.text("update budget_alembic_version set version_num = '9999'"))
    assert run(shop.app, "init").failed(1, "install the release that made it.")


def test_an_application_that_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [*CELERY, "-A", "nope", "budget", "list"], cwd=tmp_path, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"The module nope was not found" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("permission denied for table budget_budgets", "rights"),
        ("attempt to write a readonly database", "rights"),
        ('password authentication failed for user "u"', "user or password"),
        ('database "shop" does not exist', "create it"),
        ("database or disk is full", "room"),
        ("database is locked", "in a moment"),
        ("what nobody has thought of", "see its log"),
    ],
)
def test_what_a_database_says_has_a_remedy(said: str, what: str) -> None:
    assert what in _remedy(said)


def test_ctrl_c_ends_a_command(project: Path) -> None:
    pipe = project / "budgets.toml"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [*CELERY, "-A", "proj", "budget", "apply", str(pipe)],
        cwd=project,
        env=surroundings(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    # Opened when the command reads it.
    with pipe.open("wb"):
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, b"", b"stopped")


def test_a_reader_that_leaves_is_no_error_to_tell(project: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [*CELERY, "-A", "proj", "budget", "list"],
        cwd=project,
        env=surroundings(),
        stdout=theirs,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (1, b"")


# Colours, widths and characters.


@pytest.mark.parametrize(
    ("variables", "no_color", "on_terminal", "in_pipe"),
    [
        ({}, False, True, False),
        ({}, True, False, False),
        ({"NO_COLOR": "1"}, False, False, False),
        ({"NO_COLOR": "0"}, False, False, False),
        ({"NO_COLOR": "never"}, False, False, False),
        ({"NO_COLOR": ""}, False, True, False),
        ({"TERM": "dumb"}, False, False, False),
        ({"FORCE_COLOR": "1"}, False, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False, False),
    ],
)
def test_where_colours_are(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    no_color: bool,
    on_terminal: bool,
    in_pipe: bool,
) -> None:
    for name in SAID:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with terminal.stream() as (_, stream):
        assert streams.coloured(stream, no_color) is on_terminal
    with (tmp_path / "out").open("w") as file:
        assert streams.coloured(file, no_color) is in_pipe


@pytest.mark.parametrize("said", ["always", "0", "1"])
def test_celery_takes_no_color_as_it_is_meant(said: str) -> None:
    environment = {"NO_COLOR": said}
    streams.normalize(environment)
    assert environment == {"NO_COLOR": "1"}


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": ""}])
def test_no_color_that_is_empty_says_nothing(environment: dict[str, str]) -> None:
    before = dict(environment)
    streams.normalize(environment)
    assert environment == before


def test_a_terminal_has_colours_and_its_width(project: Path) -> None:
    command = [*CELERY, "-A", "proj", "budget", "list"]
    status, seen = terminal.run(command, project, surroundings(TERM="xterm"), columns=60)
    assert (status, COLOUR in seen) == (0, True)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", seen).splitlines()
    assert any("tenant:a" in line for line in lines)
    assert max(map(len, lines)) <= 60
    # Any value but an empty one; Celery alone takes this one for wrong use.
    plain = surroundings(TERM="xterm", NO_COLOR="always")
    status, seen = terminal.run(command, project, plain)
    assert (status, COLOUR in seen, "tenant:a" in seen) == (0, False, True)


def test_a_pipe_has_neither_and_any_characters(shop: Shop, run: Run, project: Path) -> None:
    shop.budget.set("tenant:é", limit=1, unit="tokens")
    plain = piped(project, "list", COLUMNS="20", LANG="C", PYTHONIOENCODING="ascii")
    assert (plain.returncode, plain.stderr) == (0, b"")
    assert COLOUR.encode() not in plain.stdout
    assert "tenant:\\xe9" in plain.stdout.decode("ascii")
    # Whatever is said of columns: a line for each row.
    assert len(plain.stdout.splitlines()) == len(run(shop.app, "list").out.splitlines())


def test_colours_that_are_wanted_go_through_a_pipe(
    shop: Shop, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SAID:
        monkeypatch.delenv(name, raising=False)
    assert COLOUR not in run(shop.app, "list").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert COLOUR in run(shop.app, "list").out
    assert COLOUR not in run(shop.app, "list", "--json").out


# Progress, notes and logs.


@contextmanager
def screen_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A terminal that the standard error stream goes to; progress is shown at once.

    No fixture: pytest sets the stream anew between those and the test.
    """
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    with terminal.stream() as (ours, stream), redirect_stderr(stream):
        yield ours


def tell_progress() -> None:
    with Progress("proving", "parts") as told:
        for done in range(3):
            told.told(done, 2)


def test_long_work_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with screen_of(monkeypatch) as screen:
        tell_progress()
        assert "proving" in terminal.shown(screen, "proving")


def test_long_work_of_unknown_length_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with screen_of(monkeypatch) as screen, Waiting("comparing"):
        assert "comparing" in terminal.shown(screen, "comparing")


@pytest.mark.parametrize("why", ["quiet", "dumb"])
def test_it_is_not_where_nothing_may_move(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    context = click.Context(click.Command("x"))
    context.obj = type("Given", (), {"quiet": why == "quiet"})()
    with screen_of(monkeypatch) as screen, context:
        if why == "dumb":
            monkeypatch.setenv("TERM", "dumb")
        assert not streams.lively()
        tell_progress()
        sys.stderr.write("end\n")
        sys.stderr.flush()
        assert terminal.shown(screen, "end").strip() == "end"


def test_it_is_not_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    tell_progress()
    assert tuple(capsys.readouterr()) == ("", "")


@pytest.mark.parametrize(
    ("options", "shows"),
    [
        ([], ["warning"]),
        (["-v"], ["info", "warning"]),
        (["-vv"], ["debug", "info", "warning"]),
        (["-q"], []),
    ],
)
def test_how_much_is_logged(
    shop: Shop,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    shows: list[str],
) -> None:
    told = {"debug": "message.published", "info": "relay.woken", "warning": "message.event_lost"}
    own = logging.getLogger("celery_budget")
    monkeypatch.setattr(own, "propagate", not options[:1] or options == ["-q"])
    before = (own.level, list(own.handlers), logging.getLogger("alembic").level)
    seen: list[str] = []

    def balances() -> list[Any]:
        for level in told:
            number = getattr(logging, level.upper())
            if own.isEnabledFor(number):
                seen.append(level)
        Logger("celery_budget.x").event("message.event_lost", task="t", task_id="1")
        return []

    monkeypatch.setattr(shop.budget, "balances", balances)
    done = run(shop.app, *options, "list", "--json")
    assert done.code == 0
    expected = [level for level in told if level in shows]
    # Whatever the level of those above says; INFO is off unless asked for.
    assert [one for one in seen if one != "info" or "info" in shows] == expected
    if options in (["-v"], ["-vv"]):
        assert "WARNING celery_budget.x: the task-sent event of task t[1]" in done.err
    assert (own.level, list(own.handlers), logging.getLogger("alembic").level) == before


def test_a_replica_is_told_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    context = click.Context(click.Command("x"))
    context.obj = type("Given", (), {"quiet": False})()
    with context:
        streams.note("read from a replica")
        context.obj.quiet = True
        streams.note("read from a replica")
    assert tuple(capsys.readouterr()) == ("", "read from a replica\n")
