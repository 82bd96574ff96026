"""The command that looks whether the running configuration keeps the guarantees."""

from __future__ import annotations

import click
from celery.bin.base import CeleryOption

from celery_budget.cli.group import BudgetCommand, budget, installed_of, json_option, show
from celery_budget.cli.values import SECONDS
from celery_budget.integration.checkup import ASK_SECONDS
from celery_budget.render.check import check_view

__all__ = ["check"]


@budget.command(cls=BudgetCommand)
@click.option(
    "--strict", cls=CeleryOption, is_flag=True, help="Exit with 1 where there is a warning, too."
)
@click.option(
    "--timeout",
    cls=CeleryOption,
    type=SECONDS,
    default=ASK_SECONDS,
    show_default=True,
    help="How many seconds workers are given to answer.",
)
@click.option(
    "--all", "everything", cls=CeleryOption, is_flag=True, help="Show also what is right."
)
@json_option
@click.pass_context
def check(
    ctx: click.Context, strict: bool, timeout: float, everything: bool, as_json: bool
) -> None:
    """Look for what would break the guarantees, with the remedy.

    Looks at the configuration, the tasks, the brokers, the ledger, the relays and the workers as
    they are now; what cannot be asked is named. Changes nothing. The exit status is 1 where
    there is an error.

    \b
    Examples:
      celery -A proj budget check
      celery -A proj budget check --strict --json
    """
    found = installed_of(ctx).checkup(timeout)
    show(ctx, found.as_dict() if as_json else check_view(found, everything))
    if not found.ok or (strict and found.of("warning")):
        ctx.exit(1)
