"""The command that proves the ledger, says what is open, repairs, and compares invoices."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import click
from celery.bin.base import CeleryOption

from celery_budget.cli.group import ReadingCommand, budget, installed_of, json_option, show
from celery_budget.cli.progress import Progress, Waiting
from celery_budget.cli.values import COUNT, COUNT_OR_NONE, DURATION
from celery_budget.render.invoices import comparison_view
from celery_budget.render.reconcile import reconciliation_view

__all__ = ["reconcile"]


@budget.command(cls=ReadingCommand)
@click.option(
    "--repair",
    cls=CeleryOption,
    is_flag=True,
    help="First put right what can be worked out anew: balances, journals, counts.",
)
@click.option(
    "--limit",
    cls=CeleryOption,
    type=COUNT_OR_NONE,
    default=20,
    show_default=True,
    help="How much that is open is told one by one, of each kind.",
)
@click.option("--no-broker", cls=CeleryOption, is_flag=True, help="Do not ask the brokers.")
@click.option(
    "--results",
    cls=CeleryOption,
    type=COUNT,
    metavar="N",
    help="Look up the results of the last N requests that have ended.",
)
@click.option(
    "--stuck",
    cls=CeleryOption,
    type=DURATION,
    help="Exit with 1 as well where anything is overdue for longer: 60s, 10m.",
)
@click.option(
    "--invoice",
    cls=CeleryOption,
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Compare a provider's own export (CSV) with the ledger instead, by day and model.",
)
@click.option(
    "--columns",
    cls=CeleryOption,
    metavar="day=HEADER,...",
    help="The export's headers of day, model, input, cached, output, cost, currency; + adds up.",
)
@click.option(
    "--model",
    "models",
    cls=CeleryOption,
    multiple=True,
    metavar="EXPORT=LEDGER",
    help="A model that the export names otherwise than the ledger.",
)
@click.option(
    "--provider",
    cls=CeleryOption,
    help="Compare with the records of this provider, or 'any'; by default whose export it is.",
)
@click.option(
    "--tolerance",
    cls=CeleryOption,
    metavar="PERCENT",
    help="Up to how much of the export a difference counts as none: 0.5.",
)
@click.option(
    "--timezone", cls=CeleryOption, metavar="ZONE", help="Whose days count; by default UTC."
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
    invoice: str | None,
    columns: str | None,
    models: tuple[str, ...],
    provider: str | None,
    tolerance: str | None,
    timezone: str | None,
    as_json: bool,
) -> None:
    """Prove that the ledger adds up; tell what is open.

    Every balance is the sum of what its requests hold and were charged, and what its journal leads
    to; every request is the sum of its usage records, and every open request will end. What is not
    so is listed, and the exit status is 1. Work that is still open is no mismatch: it is told what
    becomes of it, and when.

    With --invoice a provider's export is compared with the ledger; 1 where they differ.

    \b
    Examples:
      celery -A proj budget reconcile
      celery -A proj budget reconcile --json --limit 0
      celery -A proj budget reconcile --repair
      celery -A proj budget reconcile --stuck 10m --results 1000
      celery -A proj budget reconcile --invoice usage.csv --tolerance 0.5
      celery -A proj budget reconcile --invoice b.csv --columns day=Day,cost=USD
    """
    installed = installed_of(ctx)
    of_invoices: dict[str, Any] = {
        "columns": None if columns is None else _pairs("--columns", columns.split(",")),
        "models": _pairs("--model", models) or None,
        "provider": provider,
        "tolerance": tolerance,
        "timezone": timezone,
    }
    given = {name: value for name, value in of_invoices.items() if value is not None}
    if invoice is not None:
        if repair or no_broker or results or stuck:
            raise click.UsageError(
                "--invoice compares an export, and proves nothing else"
                "; call reconcile once more for that"
            )
        with Waiting("comparing the invoice"):
            compared = installed.compare_invoice(invoice, **given)
        show(ctx, compared.as_dict() if as_json else comparison_view(compared))
        ctx.exit(0 if compared.ok else 1)
    if given:
        names = ", ".join("--model" if name == "models" else f"--{name}" for name in given)
        raise click.UsageError(f"{names} is for --invoice; give that too")
    with Waiting("repairing balances"):
        repaired = installed.repair() if repair else ()
    with Progress("proving", "parts") as progress:
        found = installed.reconcile(
            limit=limit, broker=not no_broker, results=results or 0, told=progress.told
        )
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


def _pairs(option: str, given: Iterable[str]) -> dict[str, str]:
    """Return what is written as NAME=VALUE.

    :raises click.BadParameter: for anything else.
    """
    pairs = {}
    for one in given:
        name, equals, value = (part.strip() for part in one.partition("="))
        if not (name and equals and value) or name in pairs:
            raise click.BadParameter(
                f"{one!r} is no NAME=VALUE, or its name is there twice"
                "; give each name once, such as day=HEADER",
                param_hint=f"'{option}'",
            )
        pairs[name] = value
    return pairs
