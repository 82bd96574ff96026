"""The command that publishes what was admitted."""

from __future__ import annotations

import queue
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click
from celery import Celery
from celery.bin.base import LOG_LEVEL, CeleryOption

from celery_budget.cli.group import BudgetCommand, budget, called, installed_of, json_option, show
from celery_budget.cli.streams import note
from celery_budget.cli.values import SECONDS
from celery_budget.integration.service import RelayService
from celery_budget.reconcile import RelaySeen
from celery_budget.render.tables import FULL, relays_table
from celery_budget.render.text import printable

__all__ = ["relay"]

#: How long a signal that another thread got may go unseen.
SIGNAL_SECONDS = 0.1
#: A relay is seen every few seconds, unless its broker has stalled or its ledger is down.
HEALTHY_SECONDS = 15.0


class RelayCommand(BudgetCommand):
    """A relay serves metrics as other processes do; whether one runs is not asked of a replica."""

    from_replica = True


@budget.command(cls=RelayCommand)
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
@click.option(
    "--health",
    cls=CeleryOption,
    is_flag=True,
    help="Start nothing; exit with 0 if a relay was seen on this host, else with 1.",
)
@click.option(
    "--max-age",
    cls=CeleryOption,
    type=SECONDS,
    help="With --health: seen how many seconds ago at most; by default 15.",
)
@click.option("--any-host", cls=CeleryOption, is_flag=True, help="With --health: on any host.")
@click.option(
    "--metrics-port",
    cls=CeleryOption,
    type=click.IntRange(0, 65_535),
    help="Serve /metrics for Prometheus on this port, and not on budget_metrics_port; 0: do not.",
)
@click.option(
    "--metrics-host",
    cls=CeleryOption,
    help="On this address, and not on budget_metrics_host.",
)
@json_option
@click.pass_context
def relay(
    ctx: click.Context,
    loglevel: int,
    logfile: str | None,
    health: bool,
    max_age: float | None,
    any_host: bool,
    metrics_port: int | None,
    metrics_host: str | None,
    as_json: bool,
) -> None:
    """Publish what was admitted, until stopped.

    Runs every periodic step as well: parked work, recovery. One has to run somewhere: here, beside
    beat ('celery -A proj beat -S budget') or in a worker ('--budget-relay'); several share the
    work. SIGTERM and SIGINT (Ctrl-C) stop it within two seconds: the batch in hand is finished or
    given back. Killing it loses nothing.

    \b
    Examples:
      celery -A proj budget relay
      celery -A proj budget relay --loglevel WARNING --logfile /var/log/budget.log
      celery -A proj budget relay --metrics-port 9464
      celery -A proj budget relay --health --max-age 30
    """
    if health:
        if metrics_port is not None or metrics_host is not None:
            raise click.UsageError(
                "--metrics-port and --metrics-host are not for --health; leave them out"
            )
        _health(ctx, HEALTHY_SECONDS if max_age is None else max_age, any_host, as_json)
        return
    if max_age is not None or any_host or as_json:
        raise click.UsageError("--max-age, --any-host and --json are for --health; give that too")
    installed = installed_of(ctx)
    app: Celery = installed.app
    app.loader.import_default_modules()
    app.log.setup(loglevel, logfile, colorize=False if ctx.obj.no_color else None)
    service = RelayService(installed, metrics_port, metrics_host)
    with _stop_signals() as stopped:
        service.start()
        name = _wait(stopped)
    note(f"{name}: stopping the relay")
    service.stop()


def _health(ctx: click.Context, max_age: float, any_host: bool, as_json: bool) -> None:
    """Tell whether a relay was seen not long ago; the exit status is for probes."""
    host = None if any_host else socket.gethostname()
    installed = installed_of(ctx)
    with installed.primary():
        relays = [one for one in installed.relays() if host in (None, one.host)]
        full = installed.quarantine_is_full()
    found = [one for one in relays if one.seconds <= max_age]
    if as_json:
        rows = [one.as_dict() for one in relays]
        show(ctx, {"ok": bool(found), "relays": rows, "quarantine_full": full})
    elif found:
        show(ctx, relays_table(found))
        if full:
            told = f"{FULL}; see 'celery -A PROJ budget quarantine list'"
            note(called(ctx, told))
    else:
        raise click.ClickException(called(ctx, _unseen(host, max_age, relays)))
    if not found:
        ctx.exit(1)


def _unseen(host: str | None, max_age: float, relays: Sequence[RelaySeen]) -> str:
    where = "on any host" if host is None else f"on {printable(host)}"
    last = f"; the last one {relays[0].seconds:,.1f} s ago" if relays else ""
    return (
        f"no relay was seen {where} in the last {max_age:g} s{last}. Start one: "
        "'celery -A PROJ budget relay', 'celery -A PROJ beat -S budget' or "
        "'celery -A PROJ worker --budget-relay'"
    )


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
