"""Completion: as bash does it, and the protocol by which shells ask."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from celery.bin.celery import celery
from click.shell_completion import get_completion_class

from celery_budget.cli import completion
from tests.integration.commands import Run, runner
from tests.integration.support import Shop

#: Completes each line of its input, and prints the line's answers on a line.
ASK = """
source "$2"
complete -p celery >/dev/null || exit 3
while IFS= read -r line; do
    COMP_LINE="$line" COMP_POINT=${#line}
    _celery_completion "$1"
    printf '%s\\n' "${COMPREPLY[*]}"
done
"""
Ask = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def write(folder: Path, name: str, url: str, more: str = "") -> None:
    conf = {"broker_url": "memory://", "budget_database_url": url}
    (folder / f"{name}.py").write_text(
        "from celery import Celery\nfrom celery_budget import CeleryBudget\n"
        f"app = Celery('proj', set_as_current=False)\napp.conf.update({conf!r})\n"
        f"budget = CeleryBudget(app)\n{more}"
    )


@pytest.fixture
def project(shop: Shop, tmp_path: Path) -> Path:
    """A folder with an application on the shop's ledger, which has three budgets and a lane."""
    for name in ("tenant:acme", "tenant:zeta"):
        shop.budget.set(name, limit=1, unit="tokens")
    shop.budget.lanes.set("llm", queues=["q"])
    write(tmp_path, "proj", shop.budget.settings.database_url)
    return tmp_path


@pytest.fixture
def ask(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Give what celery answers a shell about the last of some words, and nothing else."""
    monkeypatch.chdir(project)
    monkeypatch.delenv("CELERY_APP", raising=False)
    monkeypatch.delenv("PGCONNECT_TIMEOUT", raising=False)
    for name in ("proj", "absent", "noisy", "refused", "hangs"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def asked(*words: str, shell: str = "bash") -> str:
        monkeypatch.setenv("COMP_WORDS", " ".join(words))
        fish = shell == "fish"
        monkeypatch.setenv("COMP_CWORD", words[-1] if fish else str(len(words) - 1))
        kind = get_completion_class(shell)
        assert kind is not None
        answer = kind(
            celery, {"auto_envvar_prefix": "CELERY"}, "celery", "_CELERY_COMPLETE"
        ).complete()
        assert tuple(capsys.readouterr()) == ("", "")
        return answer

    return asked


def test_bash_completes_commands_options_and_names(shop: Shop, run: Run, project: Path) -> None:
    bash = shutil.which("bash")
    program = Path(sys.executable).with_name("celery")
    if bash is None or not program.exists():
        pytest.skip("bash, or celery beside this Python, is not installed")
    (project / "script").write_text(run(shop.app, "completion", "bash").out)
    lines = [
        "celery -A proj budget qu",
        "celery -A proj budget lane pause l",
        # Bash breaks words at a colon, and puts the answer behind it.
        "celery -A proj budget explain --budget tenant:",
    ]
    done = subprocess.run(
        [bash, "--norc", "-c", ASK, "bash", str(program), str(project / "script")],
        cwd=project,
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    commands, lanes, budgets = [set(line.split()) for line in done.stdout.splitlines()]
    assert commands == {"quarantine"}
    assert lanes == {"llm"}
    assert budgets == {"a", "acme", "zeta"}


def test_options_are_completed(ask: Ask) -> None:
    assert ask("celery", "budget", "set", "x", "--soft") == "plain,--soft-stop"
    assert ask("celery", "-A", "proj", "budget", "lane", "res") == "plain,resume"
    assert ask("celery", "budget", "report", "--by", "st") == "plain,stage"


@pytest.mark.parametrize(
    "before",
    [
        ("show",), ("set",), ("grant",), ("adjust",), ("close",), ("journal",),
        ("explain", "--budget"), ("report", "--budget"), ("set", "x", "--parent"),
        ("lane", "set", "x", "--budget"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_names_of_budgets_are_completed(ask: Ask, before: tuple[str, ...]) -> None:
    assert ask("celery", "-A", "proj", "budget", *before, "tenant:ac") == "plain,tenant:acme"


@pytest.mark.parametrize("before", ["set", "show", "pause", "resume", "delete"])
def test_names_of_lanes_are_completed(ask: Ask, before: str) -> None:
    assert ask("celery", "-A", "proj", "budget", "lane", before, "l") == "plain,llm"


def test_the_application_may_be_named_by_the_environment(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask("celery", "budget", "show", "tenant:z") == ""
    monkeypatch.setenv("CELERY_APP", "proj")
    assert ask("celery", "budget", "show", "tenant:z") == "plain,tenant:zeta"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_ask_click(shop: Shop, run: Run, ask: Ask, shell: str) -> None:
    assert f"_CELERY_COMPLETE={shell}_complete" in run(shop.app, "completion", shell).out
    said = ask("celery", "-A", "proj", "budget", "show", "tenant:ac", shell=shell)
    assert "acme" in said
    assert "zeta" not in said


def test_the_shell_is_known_by_its_name(
    shop: Shop, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", "/bin/bash")
    assert run(shop.app, "completion").out == run(shop.app, "completion", "bash").out
    monkeypatch.setenv("SHELL", "/bin/ash")
    assert run(shop.app, "completion").failed(2, "give one of bash, zsh, fish")


def test_it_is_quiet_and_empty_whatever_is_wrong(ask: Ask, project: Path) -> None:
    write(project, "absent", "sqlite:////no/such/ledger.db")
    write(project, "noisy", "sqlite:////no/l.db", "import sys\nprint('hello')\nsys.exit('no')\n")
    write(project, "refused", "postgresql+psycopg://u@127.0.0.1:1/b")
    for app in ("absent", "noisy", "refused", "nowhere"):
        assert ask("celery", "-A", app, "budget", "show", "t") == ""


def test_a_server_that_never_answers_is_not_waited_for(ask: Ask, project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"postgresql+psycopg://u@127.0.0.1:{server.getsockname()[1]}/b"
        write(project, "hangs", url)
        began = time.monotonic()
        assert ask("celery", "-A", "hangs", "budget", "show", "t") == ""
        # It would be for ever; what is over the two seconds is for a busy machine.
        assert time.monotonic() - began < completion.SECONDS + 20


def test_names_that_would_break_a_line_are_left_out(shop: Shop, ask: Ask) -> None:
    shop.budget.set("tenant:two words", limit=1, unit="tokens")
    assert ask("celery", "-A", "proj", "budget", "show", "tenant:t") == ""


def test_as_many_names_as_anybody_reads(
    shop: Shop, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "NAMES", 2)
    said = ask("celery", "-A", "proj", "budget", "show", "")
    assert said == "plain,tenant:a\nplain,tenant:acme"
