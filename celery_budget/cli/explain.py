"""The command that explains: one request's life, or what holds a budget."""

from __future__ import annotations

import click
from celery.bin.base import CeleryOption

from celery_budget.cli.completion import budget_names
from celery_budget.cli.group import ReadingCommand, budget, installed_of, json_option, show
from celery_budget.cli.values import AMOUNT, COUNT
from celery_budget.render.holdings import budget_view
from celery_budget.render.stories import stories_view

__all__ = ["explain"]

#: How many holds are listed where nobody says.
_LIMIT = 20


@budget.command(cls=ReadingCommand)
@click.argument("some_id", metavar="[ID]", required=False)
@click.option(
    "--budget",
    "name",
    cls=CeleryOption,
    shell_complete=budget_names,
    help="Instead of a request: what holds this budget, what will free it, what waits for it.",
)
@click.option(
    "--limit",
    cls=CeleryOption,
    type=COUNT,
    help=f"Of a budget: how many holds, the largest, and how much of what waits; {_LIMIT}.",
)
@click.option(
    "--amount",
    cls=CeleryOption,
    type=AMOUNT,
    help="Of a budget: tell what a new request of so much would meet.",
)
@json_option
@click.pass_context
def explain(
    ctx: click.Context,
    some_id: str | None,
    name: str | None,
    limit: int | None,
    amount: int | None,
    as_json: bool,
) -> None:
    """Tell the life of one request, or what holds a budget.

    ID is that of a task, a request or a reservation, of a message of the outbox, or of what is
    parked or in quarantine. What it reserved and used, what happened when, and what comes next.
    Exit status 1 where nothing is known of it.

    \b
    Examples:
      celery -A proj budget explain 6f0c7a0e-93a5-5d0b-9a26-4a1f6f2b8f11
      celery -A proj budget explain order-4711 --json
      celery -A proj budget explain --budget acme
      celery -A proj budget explain --budget acme --amount 2_000 --limit 5
    """
    if name is not None and some_id is None:
        told = installed_of(ctx).explain_budget(name, limit or _LIMIT, amount)
        show(ctx, told.as_dict() if as_json else budget_view(told))
        return
    if name is not None or some_id is None:
        raise click.UsageError("give the ID of a request, or --budget NAME")
    if limit is not None or amount is not None:
        raise click.UsageError("--limit and --amount are for --budget NAME; leave them out")
    stories = installed_of(ctx).explain(some_id)
    if not stories:
        raise click.ClickException(
            f"nothing is known of {some_id!r}: it is the id of no task, request, reservation, "
            "message, nor of anything that was parked or is in quarantine (one that is refused "
            "leaves only a count)"
            "; give another id, or see 'celery -A PROJ budget report'"
        )
    if as_json:
        show(ctx, {"requests": [story.as_dict() for story in stories]})
    else:
        show(ctx, stories_view(stories))
