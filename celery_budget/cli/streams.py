"""What the standard streams take: colours, a bar that moves, notes beside what was asked for."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from typing import TextIO

import click

from celery_budget.render.text import printable

__all__ = ["coloured", "is_quiet", "lively", "normalize", "note", "set_up_logging"]

#: Terminals that know neither colours nor how to go back on a line.
_DUMB = ("dumb", "unknown")
#: What others log, and only those who look for it want to read.
_OTHERS = ("alembic", "amqp", "kombu", "sqlalchemy")


def normalize(environment: MutableMapping[str, str]) -> None:
    """Have ``NO_COLOR`` read as no-color.org has it: set to anything, ``0`` included.

    Celery takes it for a switch, and calls ``NO_COLOR=always`` wrong use.
    """
    if environment.get("NO_COLOR"):
        environment["NO_COLOR"] = "1"


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "").lower() not in _DUMB


def coloured(stream: TextIO, no_color: bool) -> bool:
    """Return whether colours are for a stream.

    ``--no-color`` and ``NO_COLOR`` say no; ``FORCE_COLOR`` says yes; else a terminal does.
    """
    if no_color or os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or _is_terminal(stream)


def is_quiet() -> bool:
    """Return whether the command that runs was asked to be quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(getattr(context.obj, "quiet", False))


def lively() -> bool:
    """Return whether the standard error stream is one for what moves, and somebody wants to see."""
    return _is_terminal(sys.stderr) and not is_quiet()


def note(text: str) -> None:
    """Say something beside what was asked for, on the standard error stream; not where quiet."""
    if not is_quiet():
        click.echo(printable(text), err=True)


def set_up_logging(context: click.Context, verbose: int) -> None:
    """Log to the standard error stream while a command runs, as much as was asked for.

    By default what somebody should look at: warnings, and those of other libraries as errors.

    :param verbose: 1 for what happens (INFO), 2 for all of it (DEBUG).
    """
    levels = dict.fromkeys(_OTHERS, logging.ERROR)
    own = logging.getLogger("celery_budget")
    if verbose:
        levels = {own.name: logging.INFO if verbose == 1 else logging.DEBUG}
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        own.addHandler(handler)
        context.call_on_close(lambda: own.removeHandler(handler))
    elif is_quiet():
        levels[own.name] = logging.ERROR
    for name, level in levels.items():
        logger = logging.getLogger(name)
        context.call_on_close(lambda logger=logger, before=logger.level: logger.setLevel(before))
        logger.setLevel(level)
