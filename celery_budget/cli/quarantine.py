"""Commands for what could not be published, and what failed for good."""

from __future__ import annotations

import click
from celery.bin.base import CeleryOption

from celery_budget.cli.group import (
    BudgetCommand,
    BudgetGroup,
    ReadingCommand,
    budget,
    installed_of,
    json_option,
    show,
)
from celery_budget.cli.values import COUNT
from celery_budget.render.tables import quarantine_facts, quarantine_table
from celery_budget.render.text import literal

__all__ = ["quarantine"]


@budget.group(cls=BudgetGroup)
def quarantine() -> None:
    """See, publish again or discard what is in quarantine.

    That is what could not be published, or failed for good.

    A message that no queue takes, that is too large, that cannot be read, or that the broker
    refused each time, goes into quarantine. So does a request whose task declares how long it is
    tried, when it has failed. It holds no budget there.

    \b
    Examples:
      celery -A proj budget quarantine list
      celery -A proj budget quarantine requeue 6f0c7a0e-93a5-5d0b-9a26-4a1f6f2b8f11
    """


@quarantine.command("list", cls=ReadingCommand)
@click.option(
    "--limit",
    cls=CeleryOption,
    type=COUNT,
    default=100,
    show_default=True,
    help="How many, the last first.",
)
@json_option
@click.pass_context
def list_(ctx: click.Context, limit: int, as_json: bool) -> None:
    """List what is in quarantine, the last first.

    \b
    Examples:
      celery -A proj budget quarantine list
      celery -A proj budget quarantine list --limit 10 --json
    """
    isolated = installed_of(ctx).quarantine(limit)
    document = {"quarantine": [one.as_dict() for one in isolated]}
    show(ctx, document if as_json else quarantine_table(isolated))


@quarantine.command("show", cls=ReadingCommand)
@click.argument("some_id", metavar="ID|TASK_ID")
@json_option
@click.pass_context
def show_(ctx: click.Context, some_id: str, as_json: bool) -> None:
    """Show one: why it is there, its error, how often it ran, what it used.

    \b
    Examples:
      celery -A proj budget quarantine show 6f0c7a0e-93a5-5d0b-9a26-4a1f6f2b8f11
    """
    one = installed_of(ctx).quarantined(some_id)
    show(ctx, one.as_dict() if as_json else quarantine_facts(one))


@quarantine.command(cls=BudgetCommand)
@click.argument("some_id", metavar="ID|TASK_ID")
@json_option
@click.pass_context
def requeue(ctx: click.Context, some_id: str, as_json: bool) -> None:
    """Publish a message again, admitted anew. What failed begins anew, and is charged again.

    Exit status 1 where its budget refuses it, or where it is not there; it stays where it is.

    \b
    Examples:
      celery -A proj budget quarantine requeue 6f0c7a0e-93a5-5d0b-9a26-4a1f6f2b8f11
    """
    installed_of(ctx).requeue(some_id)
    show(ctx, {"requeued": some_id} if as_json else literal(f"{some_id} will be published again"))


@quarantine.command(cls=BudgetCommand)
@click.argument("some_id", metavar="ID|TASK_ID")
@json_option
@click.pass_context
def discard(ctx: click.Context, some_id: str, as_json: bool) -> None:
    """Delete a message for good.

    \b
    Examples:
      celery -A proj budget quarantine discard 6f0c7a0e-93a5-5d0b-9a26-4a1f6f2b8f11
    """
    installed_of(ctx).discard(some_id)
    show(ctx, {"discarded": some_id} if as_json else literal(f"{some_id} was discarded"))
