"""``celery -A proj budget …``: parse, call, print.

Exit status: 0 where the command did what it says, 1 where it could not or where the ledger does
not add up, 2 where the command line is wrong. Errors go to the standard error stream, with
``--json`` too.
"""

from __future__ import annotations

import queue
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from celery import Celery
from celery.bin.base import LOG_LEVEL, CeleryCommand, CeleryOption, handle_preload_options
from click_didyoumean import DYMGroup
from rich.console import RenderableType

from celery_budget.core.amounts import check_amount
from celery_budget.errors import BudgetError, NotInstalled
from celery_budget.integration.context import find_installed
from celery_budget.integration.install import CeleryBudget
from celery_budget.integration.service import RelayService
from celery_budget.reconcile import balance_as_dict
from celery_budget.render.documents import json_document
from celery_budget.render.stories import stories_view
from celery_budget.render.tables import balances_table, report_view, verdict
from celery_budget.render.text import as_text, literal

__all__ = ["budget"]

#: How long a signal that another thread got may go unseen.
SIGNAL_SECONDS = 0.5


class BudgetGroup(DYMGroup):
    """The one place where this package's errors become a message and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except BudgetError as error:
            raise click.ClickException(str(error)) from error


def _parse_limit(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    """Return the limit that ``value`` writes; none for ``none``.

    Decimal digits only, in which ``_`` may group them: what int() takes beyond that (signs, blanks,
    the digits of other scripts) is more likely a slip than a limit.
    """
    if value.lower() == "none":
        return None
    try:
        if not re.fullmatch(r"[0-9]+(_[0-9]+)*", value):
            raise ValueError
        # int() refuses thousands of digits by a ValueError of its own.
        return check_amount(int(value), "the limit")
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not a limit; give an integer from 0 to 2^63-1 in the budget's unit, "
            "or 'none' for unlimited",
            ctx,
            param,
        ) from None


@click.group(cls=BudgetGroup)
@click.pass_context
@handle_preload_options
def budget(ctx: click.Context) -> None:
    """Budgets, enforced before dispatch.

    \b
    Examples:
      celery -A proj budget init
      celery -A proj budget set acme --limit 1_000_000 --unit tokens
      celery -A proj budget relay
      celery -A proj budget report --json
    """


json_option = click.option(
    "--json",
    "as_json",
    cls=CeleryOption,
    is_flag=True,
    help="Print one JSON document, with exact integers.",
)


@budget.command(cls=CeleryCommand)
@json_option
@click.pass_context
def init(ctx: click.Context, as_json: bool) -> None:
    """Create or upgrade the ledger's tables.

    Needed once, and after an upgrade. Running it again changes nothing.

    \b
    Example:
      celery -A proj budget init
    """
    installed = _installed(ctx)
    version = installed.init()
    url = installed.store.url
    view = literal(f"the ledger in {url} is at version {version}")
    _show(ctx, {"database": url, "version": version} if as_json else view)


@budget.command("set", cls=CeleryCommand)
@click.argument("name")
@click.option(
    "--limit",
    cls=CeleryOption,
    callback=_parse_limit,
    metavar="N|none",
    required=True,
    help="An integer from 0 (blocks everything) to 2^63-1, as 1000000 or 1_000_000; "
    "none is unlimited.",
)
@click.option(
    "--unit",
    cls=CeleryOption,
    help="What it counts, such as tokens or micro-usd; needed for a new budget.",
)
@json_option
@click.pass_context
def set_(ctx: click.Context, name: str, limit: int | None, unit: str | None, as_json: bool) -> None:
    """Create a budget or change its limit.

    Prints the balance it has then. What was reserved and spent stays; a limit below that leaves a
    negative balance, and nothing more is admitted.

    \b
    Examples:
      celery -A proj budget set acme --limit 1_000_000 --unit tokens
      celery -A proj budget set acme --limit 2_000_000
      celery -A proj budget set acme --limit none
    """
    installed = _installed(ctx)
    installed.set(name, limit=limit, unit=unit)
    _show_balance(ctx, installed, name, as_json)


@budget.command("list", cls=CeleryCommand)
@json_option
@click.pass_context
def list_(ctx: click.Context, as_json: bool) -> None:
    """List all budgets with their balances.

    \b
    Examples:
      celery -A proj budget list
      celery -A proj budget list --json
    """
    balances = _installed(ctx).balances()
    if as_json:
        _show(ctx, {"budgets": [balance_as_dict(balance) for balance in balances]})
    else:
        _show(ctx, balances_table(balances))


@budget.command(cls=CeleryCommand)
@click.argument("name")
@json_option
@click.pass_context
def show(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show the balance of one budget.

    \b
    Examples:
      celery -A proj budget show acme
      celery -A proj budget show acme --json
    """
    _show_balance(ctx, _installed(ctx), name, as_json)


@budget.command(cls=CeleryCommand)
@json_option
@click.pass_context
def report(ctx: click.Context, as_json: bool) -> None:
    """Show balances, counts, estimates and actuals.

    \b
    Examples:
      celery -A proj budget report
      celery -A proj budget report --json
    """
    found = _installed(ctx).report()
    _show(ctx, found.as_dict() if as_json else report_view(found))


@budget.command(cls=CeleryCommand)
@json_option
@click.pass_context
def reconcile(ctx: click.Context, as_json: bool) -> None:
    """Prove that the ledger adds up.

    Every balance is the sum of what its requests hold and were charged, every request the sum of
    its usage records, and every open request will end; what is not so is listed, and the exit
    status is 1. Work that is still open is no mismatch.

    \b
    Examples:
      celery -A proj budget reconcile
      celery -A proj budget reconcile --json
    """
    found = _installed(ctx).report()
    proved, requests = found.reconciliation, found.counts["admitted"]
    document = {**proved.as_dict(), "requests": requests}
    _show(ctx, document if as_json else verdict(proved, requests))
    if not proved.ok:
        ctx.exit(1)


@budget.command(cls=CeleryCommand)
@click.argument("some_id", metavar="TASK_ID|REQUEST_ID")
@json_option
@click.pass_context
def explain(ctx: click.Context, some_id: str, as_json: bool) -> None:
    """Tell the life of one request.

    What it reserved and used, and what happened when. A reservation id will do as well. Exit
    status 1 where nothing is known of it.

    \b
    Examples:
      celery -A proj budget explain 6f0c7a0e-93a5-5d0b-9a26-4a1f6f2b8f11
      celery -A proj budget explain order-4711 --json
    """
    stories = _installed(ctx).explain(some_id)
    if not stories:
        raise click.ClickException(
            f"nothing is known of {some_id!r}: no request with this task id, request id or "
            "reservation id was admitted or parked (one that is refused leaves only a count)"
        )
    if as_json:
        _show(ctx, {"requests": [story.as_dict() for story in stories]})
    else:
        _show(ctx, stories_view(stories))


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
    installed = _installed(ctx)
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


def _installed(ctx: click.Context) -> CeleryBudget:
    """Return the application's CeleryBudget, also where a module with its tasks makes it.

    :raises NotInstalled: where there is none.
    """
    app: Celery = ctx.obj.app
    found = find_installed(app)
    if found is None:
        app.loader.import_default_modules()
        found = find_installed(app)
    if found is None:
        raise NotInstalled(
            f"the application {app.main or 'default'!r} has no CeleryBudget; add "
            "'budget = CeleryBudget(app)' where it is made, and name it by 'celery -A PROJ budget'"
        )
    return found


def _show_balance(ctx: click.Context, installed: CeleryBudget, name: str, as_json: bool) -> None:
    balance = installed.balance(name)
    _show(ctx, balance_as_dict(balance) if as_json else balances_table([balance]))


def _show(ctx: click.Context, what: dict[str, Any] | RenderableType) -> None:
    """Print a JSON document or, to the terminal's width where there is one, a view."""
    if isinstance(what, dict):
        text = json_document(what)
    else:
        terminal = sys.stdout.isatty()
        text = as_text(
            what,
            width=shutil.get_terminal_size().columns if terminal else None,
            colour=terminal and not ctx.obj.no_color,
            encoding=sys.stdout.encoding or "utf-8",
        )
    click.echo(text, nl=False)
