"""Whether a command line of a page is one that there is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
from celery.bin.celery import celery

from celery_budget.cli import budget
from celery_budget.core.declarations import tomllib
from tests.docs.pages import ROOT

#: Commands of others, which are only taken apart.
FOREIGN = {
    "createdb", "curl", "docker", "uvicorn", "kubectl", "pg_dump", "pg_restore", "psql",
}  # fmt: skip
#: Words that stand for a value.
STANDS_FOR = re.compile(r"^[A-Z_]+$|^…$|^\.\.\.$|^\[|^[A-Z]+=|^\$")


def lines_of(text: str) -> Iterator[str]:
    """Yield the commands of a block: all lines, or those after a prompt where there are any."""
    joined = re.sub(r"\\\n\s*", "", text)
    lines = [line for line in joined.splitlines() if line.strip()]
    prompted = any(line.startswith("$ ") for line in lines)
    for line in lines:
        if not prompted or line.startswith("$ "):
            command = line.removeprefix("$ ")
            if not command.startswith("#"):
                yield command


def shown(text: str, command: str) -> str:
    """Return what a block shows below a command that stands after a prompt."""
    if not text.startswith("$ "):
        return ""
    joined = re.sub(r"\\\n\s*", "", text)
    for part in joined.split("$ ")[1:]:
        typed, _, said = part.partition("\n")
        if typed == command:
            return said
    return ""


def check(command: str) -> None:
    """Check that a command of Celery's, make or pip is there with its options.

    :raises ValueError: naming what is not.
    """
    words = shlex.split(command, comments=True)
    while words and re.match(r"^[A-Z_]+=", words[0]):
        words.pop(0)
    if not words:
        return
    program, *rest = words
    if program == "eval" or words[:2] == ["sh", "-c"]:
        # What is in it, or what it gets from.
        check(rest[-1].removeprefix("$(").removesuffix(")"))
    elif program == "celery":
        _celery(rest)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        for word in rest:
            if "=" not in word and word not in targets:
                raise ValueError(f"no target {word!r}")
    elif program == "pip":
        _pip(rest)
    elif program == "python":
        if rest and rest[0].endswith(".py") and "/" in rest[0] and not (ROOT / rest[0]).exists():
            raise ValueError(f"no file {rest[0]!r}")
    elif program not in FOREIGN | {".", "cd", "export", "mkdir", "rm"}:
        raise ValueError(f"{program!r} is no command that this test knows")


def _pip(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for word in words[1:]:
        ours = re.match(r"^(?:celery-budget|\.)\[([\w,-]+)\]", word)
        for extra in ours[1].split(",") if ours else ():
            if extra not in project["optional-dependencies"]:
                raise ValueError(f"no extra {extra!r}")


def _celery(words: list[str]) -> None:
    if words[:1] == ["-A"]:
        words = words[2:]
    if words[:1] == ["budget"]:
        _parse(budget, words[1:])
    elif words and words[0] in celery.commands:
        # The application adds these two.
        _parse(celery.commands[words[0]], [word for word in words[1:] if word != "--budget-relay"])
    else:
        raise ValueError(f"celery has no command {words[:1]}")


def _parse(command: click.Command, words: list[str]) -> None:
    context = click.Context(command)
    try:
        options, rest, _ = command.make_parser(context).parse_args(list(words))
    except click.UsageError as error:
        raise ValueError(error.format_message()) from error
    for param in command.params:
        value = options.get(str(param.name))
        values = value if isinstance(value, (list, tuple)) else [value]
        if isinstance(param.type, click.Choice):
            for one in values:
                if isinstance(one, str) and not STANDS_FOR.match(one):
                    param.type.convert(one, param, context)
    if isinstance(command, click.Group):
        if not rest or STANDS_FOR.match(rest[0]):
            return
        if rest[0] not in command.commands:
            raise ValueError(f"{command.name} has no command {rest[0]!r}")
        _parse(command.commands[rest[0]], rest[1:])
