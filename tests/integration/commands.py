"""Running ``budget …`` on an application in this process."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext

from celery_budget.cli import budget

Run = Callable[..., "Done"]


@dataclass(frozen=True)
class Done:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, which is one JSON document."""
        return json.loads(self.out)

    @property
    def rows(self) -> list[list[str]]:
        """The words of each line it printed."""
        return [line.split() for line in self.out.splitlines()]

    @property
    def facts(self) -> dict[str, str]:
        """What it printed above the first empty line: what is first on each line, and the rest."""
        lines = self.out.split("\n\n")[0].splitlines()
        return dict(line.split("  ", 1) for line in lines)

    def failed(self, code: int, said: str) -> bool:
        """Whether it ended so, with nothing but one line of error that says so."""
        [line, *more] = self.err.splitlines() or [""]
        return (
            (self.code, self.out, more) == (code, "", [])
            and line.startswith("Error: ")
            and said in line
        )


def runner(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what runs a command; ``stdin`` is what it can read."""

    def run(app: Celery, *args: str, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        with pytest.raises(SystemExit) as ended:
            budget.main(
                list(args), prog_name="budget", obj=CLIContext(app, no_color=False, workdir=None)
            )
        code = ended.value.code
        assert isinstance(code, int)
        return Done(code, *capsys.readouterr())

    return run
