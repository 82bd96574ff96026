"""Commands that change what a budget has: grant, adjust."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import click
from celery.bin.base import CeleryOption

from celery_budget.cli.completion import budget_names
from celery_budget.cli.group import BudgetCommand, budget, installed_of, json_option, show
from celery_budget.cli.values import AMOUNT, DURATION, INSTANT
from celery_budget.integration.install import CeleryBudget
from celery_budget.integration.ledger import Receipt
from celery_budget.reconcile import balance_as_dict
from celery_budget.render.text import literal, moment, number

__all__ = ["adjust", "grant"]

key_option = click.option(
    "--key",
    cls=CeleryOption,
    help="The same key again changes nothing; without one every call counts.",
)


@budget.command(cls=BudgetCommand)
@click.argument("name", shell_complete=budget_names)
@click.argument("amount", type=AMOUNT)
@click.option(
    "--until",
    cls=CeleryOption,
    type=INSTANT,
    metavar="ISO",
    help="When it ends, with a time zone: 2030-01-31T12:00:00Z. By default never.",
)
@click.option(
    "--for", "lasts", cls=CeleryOption, type=DURATION, help="How long from now: 45s, 30m, 12h, 7d."
)
@key_option
@click.option("--reason", cls=CeleryOption, help="For those who look at it later.")
@json_option
@click.pass_context
def grant(
    ctx: click.Context,
    name: str,
    amount: int,
    until: datetime | None,
    lasts: timedelta | None,
    key: str | None,
    reason: str | None,
    as_json: bool,
) -> None:
    """Raise a budget's limit by AMOUNT, for a time or for good.

    It counts in every window until it ends.

    \b
    Examples:
      celery -A proj budget grant acme 500_000 --for 7d --key launch
      celery -A proj budget grant acme 500_000 --until 2030-01-31T12:00:00Z
    """
    if until is not None and lasts is not None:
        raise click.UsageError("--until and --for both say when it ends; give one of them")
    installed = installed_of(ctx)
    receipt = installed.grant(
        name, amount, key=key, until=lasts if until is None else until, reason=reason
    )
    [mine] = [one for one in installed.grants(name, ended=True) if one.key == receipt.key]
    ends = "for good" if mine.until_us is None else f"until {moment(mine.until_us)}"
    unit = installed.balance(name).unit
    said = f"granted {number(amount)} {unit} to {name!r} {ends}"
    _show_receipt(ctx, installed, receipt, mine.as_dict(), said, as_json)


@budget.command(cls=BudgetCommand)
@click.argument("name", shell_complete=budget_names)
@click.option("--charge", cls=CeleryOption, type=AMOUNT, help="Add this to what is spent.")
@click.option("--refund", cls=CeleryOption, type=AMOUNT, help="Take this from what is spent.")
@click.option("--reason", cls=CeleryOption, required=True, help="Why; kept in the journal.")
@key_option
@json_option
@click.pass_context
def adjust(
    ctx: click.Context,
    name: str,
    charge: int | None,
    refund: int | None,
    reason: str,
    key: str | None,
    as_json: bool,
) -> None:
    """Correct what a budget has spent in its present window.

    \b
    Examples:
      celery -A proj budget adjust acme --refund 1200 --reason 'a failed batch'
      celery -A proj budget adjust acme --charge 300 --reason 'by hand' --key h-31
    """
    if charge is not None and refund is None:
        amount, did = charge, "charged to"
    elif refund is not None and charge is None:
        amount, did = -refund, "refunded to"
    else:
        raise click.UsageError("give --charge N or --refund N, one of the two")
    installed = installed_of(ctx)
    receipt = installed.adjust(name, amount, reason=reason, key=key)
    unit = installed.balance(name).unit
    told = {"budget": name, "amount": amount, "key": receipt.key, "reason": reason}
    said = f"{number(abs(amount))} {unit} {did} {name!r}"
    _show_receipt(ctx, installed, receipt, told, said, as_json)


def _show_receipt(
    ctx: click.Context,
    installed: CeleryBudget,
    receipt: Receipt,
    told: dict[str, Any],
    said: str,
    as_json: bool,
) -> None:
    """Print what was done under a key, or that it had been, and what the balance is."""
    balance = installed.balance(told["budget"])
    if as_json:
        show(ctx, {**told, "repeated": receipt.repeated, "balance": balance_as_dict(balance)})
        return
    if receipt.repeated:
        said = f"nothing was changed, key {receipt.key!r} was used for this before: {said}"
    else:
        said = f"{said} (key {receipt.key})"
    show(ctx, literal(f"{said}; available: {number(balance.available)}"))
