"""Commands that show what is in the ledger: how it stands, what was used, one request's life."""

from __future__ import annotations

from datetime import timedelta

import click
from celery.bin.base import CeleryOption
from rich.console import Group
from rich.text import Text

from celery_budget.cli.completion import budget_names
from celery_budget.cli.declare import show_standing
from celery_budget.cli.group import ReadingCommand, budget, installed_of, json_option
from celery_budget.cli.group import show as print_out
from celery_budget.cli.progress import Progress
from celery_budget.cli.values import COUNT, DURATION
from celery_budget.errors import InvalidAmount
from celery_budget.reconcile import balance_as_dict
from celery_budget.render.budgets import budgets_view, journal_table
from celery_budget.render.tables import queued_table, suggestions_table
from celery_budget.render.text import number

__all__ = ["journal", "list_", "show", "suggest"]


@budget.command("list", cls=ReadingCommand)
@json_option
@click.pass_context
def list_(ctx: click.Context, as_json: bool) -> None:
    """List all budgets with their balances, and what waits.

    Each is beneath its parent; templates come after them.

    \b
    Examples:
      celery -A proj budget list
      celery -A proj budget list --json
    """
    installed = installed_of(ctx)
    balances, templates = installed.balances(), installed.templates()
    queued = installed.queued()
    if as_json:
        document = {
            "budgets": [balance_as_dict(balance) for balance in balances],
            "templates": [template.as_dict() for template in templates],
            "parked": [one.as_dict() for one in queued],
        }
        print_out(ctx, document)
    else:
        view = budgets_view(balances, templates)
        print_out(ctx, Group(view, Text(), queued_table(queued)) if queued else view)


@budget.command(cls=ReadingCommand)
@click.argument("name", shell_complete=budget_names)
@json_option
@click.pass_context
def show(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show one budget or template in full.

    Its terms, balance, all above it, and grants.

    \b
    Examples:
      celery -A proj budget show acme
      celery -A proj budget show acme --json
    """
    show_standing(ctx, installed_of(ctx), name, as_json)


@budget.command(cls=ReadingCommand)
@click.argument("name", required=False, shell_complete=budget_names)
@click.option(
    "--limit",
    cls=CeleryOption,
    type=COUNT,
    help="How many entries, the newest first; by default 100.",
)
@click.option(
    "--fold-before",
    cls=CeleryOption,
    type=DURATION,
    help="Fold what is older into a checkpoint for each balance, of all budgets: 90d, 12h.",
)
@json_option
@click.pass_context
def journal(
    ctx: click.Context,
    name: str | None,
    limit: int | None,
    fold_before: timedelta | None,
    as_json: bool,
) -> None:
    """Show every change of a budget's balances, or fold old changes.

    Balances stay as they are and provable where entries are folded; the entries are gone.

    \b
    Examples:
      celery -A proj budget journal acme --limit 20
      celery -A proj budget journal acme --json
      celery -A proj budget journal --fold-before 90d
    """
    if fold_before is not None:
        if name is not None or limit is not None:
            raise click.UsageError(
                "--fold-before is for the journals of all budgets; leave NAME and --limit out"
            )
        _fold(ctx, fold_before, as_json)
        return
    if name is None:
        raise click.UsageError("give the NAME of a budget, or --fold-before")
    entries = installed_of(ctx).journal(name, limit or 100)
    document = {"budget": name, "entries": [entry.as_dict() for entry in entries]}
    print_out(ctx, document if as_json else journal_table(entries))


def _fold(ctx: click.Context, older_than: timedelta, as_json: bool) -> None:
    with Progress("folding journals", "balances") as progress:
        folded = installed_of(ctx).fold_journal(older_than, progress.told)
    entries = "entry" if folded == 1 else "entries"
    print_out(
        ctx,
        {"folded": folded}
        if as_json
        else Text(f"{number(folded)} {entries} of the journals folded into checkpoints"),
    )


@budget.command(cls=ReadingCommand)
@click.option("--stage", cls=CeleryOption, help="Of one stage only.")
@click.option(
    "--quantile",
    cls=CeleryOption,
    default="0.95",
    show_default=True,
    help="For which share of the requests it is to be enough.",
)
@click.option(
    "--since",
    cls=CeleryOption,
    type=DURATION,
    help="Only by requests that ended since then: 7d, 12h.",
)
@json_option
@click.pass_context
def suggest(
    ctx: click.Context, stage: str | None, quantile: str, since: timedelta | None, as_json: bool
) -> None:
    """Suggest estimates by what was used.

    Of each stage's last thousand measured requests those that succeeded at their first attempt. By
    nearest rank: it is what one of them used.

    \b
    Examples:
      celery -A proj budget suggest
      celery -A proj budget suggest --stage draft --quantile 0.99 --since 7d
    """
    try:
        found = installed_of(ctx).suggest(stage, quantile, since)
    except InvalidAmount as exc:
        raise click.BadParameter(str(exc), param_hint="'--quantile'") from exc
    document = {"suggestions": [one.as_dict() for one in found]}
    print_out(ctx, document if as_json else suggestions_table(found, stage))
