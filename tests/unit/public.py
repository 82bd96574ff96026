"""All that is public and has a name, by line: ``python -m tests.unit.public`` writes the list."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from logging import getLevelName
from pathlib import Path
from typing import Any

import click

from celery_budget import CeleryBudget, usage
from celery_budget.cli import budget
from celery_budget.events import EVENTS
from celery_budget.integration.lanes import Lanes
from celery_budget.metrics.catalogue import CATALOGUE
from celery_budget.settings import PREFIX, Settings

LIST = Path(__file__).with_name("public_api.txt")
MODULES = ("", ".http", ".estimators", ".metrics", ".dashboard", ".testing")


def arguments(called: Any) -> str:
    """Return the arguments of something, without types and values: ``(a, *, b=)``."""
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return ""
    bare = [
        one.replace(
            annotation=one.empty, default=one.default if one.default is one.empty else _Given()
        )
        for one in signature.parameters.values()
        if one.name not in ("self", "cls")
    ]
    return str(inspect.Signature(bare)).replace("=<given>", "=")


class _Given:
    def __repr__(self) -> str:
        return "<given>"


def members(owner: Any, name: str) -> Iterator[str]:
    """Yield the methods and properties of a class that are its own or of a base of ours."""
    for member in sorted(dir(owner)):
        value = inspect.getattr_static(owner, member)
        home = next((one for one in owner.__mro__ if member in vars(one)), owner)
        if member.startswith("_") or not home.__module__.startswith("celery_budget"):
            continue
        if isinstance(value, (staticmethod, classmethod)):
            yield f"{name}.{member}{arguments(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"{name}.{member}{arguments(value)}"
        elif isinstance(value, property):
            yield f"{name}.{member}"
    if dataclasses.is_dataclass(owner):
        yield from (f"{name}.{field.name}" for field in dataclasses.fields(owner))


def python() -> Iterator[str]:
    """Yield what can be imported."""
    for suffix in MODULES:
        module = importlib.import_module(f"celery_budget{suffix}")
        for exported in sorted(module.__all__):
            name, found = f"celery_budget{suffix}.{exported}", getattr(module, exported)
            if inspect.isclass(found) and issubclass(found, Exception):
                [base] = found.__bases__[:1]
                yield f"{name}: {base.__name__}"
            elif inspect.isclass(found):
                shown = "" if found is CeleryBudget else arguments(found)
                yield f"{name}{shown}"
                yield from members(found, name)
            else:
                yield f"{name}{arguments(found) if callable(found) else ''}"
    yield from members(Lanes, "CeleryBudget.lanes")
    for name in sorted(usage.__all__):
        yield f"celery_budget.usage.{name}{arguments(getattr(usage, name))}"


def commands(command: click.Command, path: str) -> Iterator[str]:
    """Yield commands with their options."""
    for one in command.params:
        yield f"{path} {'/'.join([*one.opts, *one.secondary_opts])}"
    if isinstance(command, click.Group):
        for name, below in sorted(command.commands.items()):
            yield f"{path} {name}"
            yield from commands(below, f"{path} {name}")


def everything() -> list[str]:
    """Return all lines, each once."""
    lines = [
        *(f"python {line}" for line in python()),
        *(f"setting {PREFIX}{field.name}" for field in dataclasses.fields(Settings)),
        *(f"command {line}" for line in commands(budget, "budget")),
        *(
            f"event {name} {getLevelName(event.level)} {' '.join(event.fields)}".rstrip()
            for name, event in sorted(EVENTS.items())
        ),
        *(f"metric {one.name} {one.kind} {' '.join(one.labels)}".rstrip() for one in CATALOGUE),
    ]
    return list(dict.fromkeys(lines))


if __name__ == "__main__":
    LIST.write_text("".join(f"{line}\n" for line in everything()), encoding="utf-8")
