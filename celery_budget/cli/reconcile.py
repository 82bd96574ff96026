"""The command that proves the ledger, says what is open, repairs, and compares invoices."""

from __future__ import annotations

from datetime import timedelta

import click
from celery.bin.base import CeleryCommand, CeleryOption

from celery_budget.cli.group import budget, installed_of, json_option, show
from celery_budget.cli.values import DURATION
from celery_budget.render.reconcile import reconciliation_view

__all__ = ["reconcile"]


@budget.command(cls=CeleryCommand)
@click.option(
    "--repair",
    cls=CeleryOption,
    is_flag=True,
    help="First put right what can be worked out anew: balances, journals, counts.",
)
@click.option(
    "--limit",
    cls=CeleryOption,
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="How much that is open is told one by one, of each kind.",
)
@click.option("--no-broker", cls=CeleryOption, is_flag=True, help="Do not ask the brokers.")
@click.option(
    "--results",
    cls=CeleryOption,
    type=click.IntRange(1),
    metavar="N",
    help="Look up the results of the last N requests that have ended.",
)
@click.option(
    "--stuck",
    cls=CeleryOption,
    type=DURATION,
    help="Exit with 1 as well where anything is overdue for longer: 60s, 10m.",
)
@json_option
@click.pass_context
def reconcile(
    ctx: click.Context,
    repair: bool,
    limit: int,
    no_broker: bool,
    results: int | None,
    stuck: timedelta | None,
    as_json: bool,
) -> None:
    """Prove that the ledger adds up, and say what becomes of all that is open.

    Every balance is the sum of what its requests hold and were charged, and what its journal leads
    to; every request is the sum of its usage records, and every open request will end. What is not
    so is listed, and the exit status is 1. Work that is still open is no mismatch.

    \b
    Examples:
      celery -A proj budget reconcile
      celery -A proj budget reconcile --json --limit 0
      celery -A proj budget reconcile --repair
      celery -A proj budget reconcile --stuck 10m --results 1000
    """
    installed = installed_of(ctx)
    repaired = installed.repair() if repair else ()
    found = installed.reconcile(limit=limit, broker=not no_broker, results=results or 0)
    late = () if stuck is None else found.stuck(stuck.total_seconds())
    if as_json:
        show(
            ctx,
            {
                **found.as_dict(),
                "repaired": list(repaired),
                "stuck": {one.kind: one.overdue_seconds for one in late},
            },
        )
    else:
        show(ctx, reconciliation_view(found, repaired))
    if late or not found.ok:
        ctx.exit(1)
