"""Commands for what waits for budget."""

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
from celery_budget.render.tables import parked_table
from celery_budget.render.text import literal

__all__ = ["parked"]


@budget.group(cls=BudgetGroup)
def parked() -> None:
    """See or discard what waits for budget.

    A request of a task with on_refused="park" that does not fit waits for its budget, as does
    what continues running work. It holds nothing meanwhile.

    \b
    Examples:
      celery -A proj budget parked list
      celery -A proj budget parked discard 6f0c7a0e-93a5-5d0b-9a26-4a1f6f2b8f11
    """


@parked.command("list", cls=ReadingCommand)
@click.option(
    "--limit",
    cls=CeleryOption,
    type=COUNT,
    default=100,
    show_default=True,
    help="How many, budget by budget, what is served first first.",
)
@json_option
@click.pass_context
def list_(ctx: click.Context, limit: int, as_json: bool) -> None:
    """List what is parked, budget by budget, what is served first first.

    \b
    Examples:
      celery -A proj budget parked list
      celery -A proj budget parked list --limit 10 --json
    """
    waiting = installed_of(ctx).parked(limit)
    document = {"parked": [one.as_dict() for one in waiting]}
    show(ctx, document if as_json else parked_table(waiting))


@parked.command(cls=BudgetCommand)
@click.argument("some_id", metavar="ID|TASK_ID")
@json_option
@click.pass_context
def discard(ctx: click.Context, some_id: str, as_json: bool) -> None:
    """Cancel what is parked: it will not run, and its result says so.

    Exit status 1 where nothing with this id is parked.

    \b
    Examples:
      celery -A proj budget parked discard 6f0c7a0e-93a5-5d0b-9a26-4a1f6f2b8f11
    """
    installed_of(ctx).discard_parked(some_id)
    show(ctx, {"discarded": some_id} if as_json else literal(f"{some_id} was discarded"))
