"""The command that publishes what was admitted."""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import click
from celery import Celery
from celery.bin.base import LOG_LEVEL, CeleryCommand, CeleryOption

from celery_budget.cli.group import budget, installed_of
from celery_budget.integration.service import RelayService

__all__ = ["relay"]

#: How long a signal that another thread got may go unseen.
SIGNAL_SECONDS = 0.5


@budget.command(cls=CeleryCommand)
@click.option(
    "-l",
    "--loglevel",
    cls=CeleryOption,
    type=LOG_LEVEL,
    default="INFO",
    show_default=True,
    help="Logging level.",
)
@click.option(
    "-f", "--logfile", cls=CeleryOption, help="Log destination; the standard error stream if none."
)
@click.pass_context
def relay(ctx: click.Context, loglevel: int, logfile: str | None) -> None:
    """Publish what was admitted, until stopped.

    Runs every periodic step as well: parked work, recovery. One has to run somewhere, here or
    beside beat ('celery -A proj beat -S budget'); several share the work. SIGTERM and SIGINT
    (Ctrl-C) stop it after the batch in hand; killing it loses nothing.

    \b
    Examples:
      celery -A proj budget relay
      celery -A proj budget relay --loglevel WARNING --logfile /var/log/budget.log
    """
    installed = installed_of(ctx)
    app: Celery = installed.app
    app.loader.import_default_modules()
    app.log.setup(loglevel, logfile, colorize=False if ctx.obj.no_color else None)
    service = RelayService(installed)
    with _stop_signals() as stopped:
        service.start()
        name = _wait(stopped)
    click.echo(f"{name}: stopping the relay", err=True)
    service.stop()


@contextmanager
def _stop_signals() -> Iterator[queue.SimpleQueue[int]]:
    """Collect SIGTERM and SIGINT; afterwards they do what they did before.

    A SimpleQueue, since its put() may run inside a signal handler that interrupts its get().
    """
    stopped: queue.SimpleQueue[int] = queue.SimpleQueue()
    before = {
        number: signal.signal(number, lambda number, frame: stopped.put(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(stopped: queue.SimpleQueue[int]) -> str:
    """Return the name of the first signal.

    In short steps: a signal that the system hands to another thread does not end the wait, and
    its handler runs only when this one wakes.
    """
    while True:
        try:
            return signal.Signals(stopped.get(timeout=SIGNAL_SECONDS)).name
        except queue.Empty:
            continue
