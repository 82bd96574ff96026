"""Commands for lanes: set, list, show, pause, resume, delete."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import click
from celery.bin.base import CeleryOption

from celery_budget.cli.completion import budget_names, lane_names
from celery_budget.cli.group import (
    BudgetCommand,
    BudgetGroup,
    ReadingCommand,
    budget,
    installed_of,
    json_option,
    show,
)
from celery_budget.cli.values import DURATION, MAYBE_AMOUNT, NO_LIMIT
from celery_budget.core.lanes import LIMITS
from celery_budget.integration.install import CeleryBudget
from celery_budget.render.lanes import lane_view, lanes_table
from celery_budget.render.text import literal

__all__ = ["lane"]

#: What each limit is for.
_HELP = {
    "max_queued_jobs": "How many jobs may be published and not started.",
    "max_queued_units": "How many units may be published and not started.",
    "max_running_jobs": "How many jobs may run; queued and running together keep to it.",
    "max_running_units": "How many units may run; queued and running together keep to it.",
    "burst_units": "How many units are released in one second.",
    "max_waiting_jobs": "How many jobs may be held back; then new ones are refused.",
    "max_waiting_units": "How many units may be held back; then new ones are refused.",
}
_MICROSECOND = timedelta(microseconds=1)


@budget.group(cls=BudgetGroup)
def lane() -> None:
    """See, set, pause and resume lanes.

    A lane says what is let go to workers, and how much at a time.

    What is admitted to a queue that a lane feeds is held in the ledger until the lane lets it go.
    Without lanes everything is published at once.

    \b
    Examples:
      celery -A proj budget lane set llm --queue llm --max-running-units 200_000
      celery -A proj budget lane list
    """


def _limits(command: Any) -> Any:
    for key in reversed(LIMITS):
        option = click.option(
            f"--{key.replace('_', '-')}",
            cls=CeleryOption,
            type=MAYBE_AMOUNT,
            metavar="N|none",
            help=_HELP[key],
        )
        command = option(command)
    return command


@lane.command("set", cls=BudgetCommand)
@click.argument("name", shell_complete=lane_names)
@click.option(
    "--queue",
    "queues",
    cls=CeleryOption,
    multiple=True,
    help="A queue that it feeds; several times for several. All of them, where any is given.",
)
@click.option(
    "--budget",
    "budgets",
    cls=CeleryOption,
    shell_complete=budget_names,
    multiple=True,
    metavar="NAME[=AMOUNT]|none",
    help="A budget that what comes through it by a fallback draws on: the estimate, or AMOUNT at "
    "each start. Several times for several; 'none' for none.",
)
@_limits
@click.option(
    "--max-wait",
    cls=CeleryOption,
    metavar="DURATION|none",
    help="How long work may be held back: 45s, 30m, 12h, 7d, none for ever. By default a day.",
)
@click.option(
    "--preflight/--no-preflight",
    cls=CeleryOption,
    default=None,
    help="Release nothing while no worker consumes its queues. On by default.",
)
@click.option(
    "--ageing",
    cls=CeleryOption,
    type=click.IntRange(0),
    help="By how many units what waits counts lighter for each second. By default 100.",
)
@json_option
@click.pass_context
def set_lane(
    ctx: click.Context,
    /,
    name: str,
    queues: tuple[str, ...],
    budgets: tuple[str, ...],
    max_wait: str | None,
    preflight: bool | None,
    ageing: int | None,
    as_json: bool,
    **limits: Any,
) -> None:
    """Create a lane or change it.

    Only what is given changes; prints how it stands then. What waits in it goes by its new terms.

    \b
    Examples:
      celery -A proj budget lane set llm --queue llm --max-running-jobs 8
      celery -A proj budget lane set llm --max-queued-units 50_000 --max-wait 2h
      celery -A proj budget lane set llm --max-running-jobs none
      celery -A proj budget lane set paid --queue llm-paid --budget paid-usd
    """
    terms: dict[str, Any] = {
        key: None if value is NO_LIMIT else value
        for key, value in limits.items()
        if value is not None
    }
    if queues:
        terms["queues"] = queues
    if budgets:
        terms["budgets"] = () if budgets == ("none",) else budgets
    if max_wait is not None:
        terms["max_wait_us"] = _wait(ctx, max_wait)
    if preflight is not None:
        terms["preflight"] = preflight
    if ageing is not None:
        terms["ageing"] = ageing
    if not terms:
        raise click.UsageError(
            "nothing is to be changed; give --queue or another term ('budget lane show NAME' shows "
            "them)"
        )
    installed = installed_of(ctx)
    installed.lanes.set(name, **terms)
    _show(ctx, installed, name, as_json)


def _wait(ctx: click.Context, text: str) -> int | None:
    if text.lower() == "none":
        return None
    try:
        lasts: timedelta = DURATION.convert(text, None, ctx)
    except click.BadParameter as exc:
        said = f"{exc.message}; or 'none' for ever"
        raise click.BadParameter(said, ctx, param_hint="'--max-wait'") from None
    return lasts // _MICROSECOND


def _show(ctx: click.Context, installed: CeleryBudget, name: str, as_json: bool) -> None:
    standing = installed.lanes.show(name)
    show(ctx, standing.as_dict() if as_json else lane_view(standing))


@lane.command("list", cls=ReadingCommand)
@json_option
@click.pass_context
def list_lanes(ctx: click.Context, as_json: bool) -> None:
    """Show all lanes: what waits, is queued and runs, as jobs (units), and why work is held back.

    \b
    Examples:
      celery -A proj budget lane list
      celery -A proj budget lane list --json
    """
    found = installed_of(ctx).lanes.list()
    show(ctx, {"lanes": [one.as_dict() for one in found]} if as_json else lanes_table(found))


@lane.command("show", cls=ReadingCommand)
@click.argument("name", shell_complete=lane_names)
@json_option
@click.pass_context
def show_lane(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show one lane with its limits.

    \b
    Example:
      celery -A proj budget lane show llm
    """
    _show(ctx, installed_of(ctx), name, as_json)


@lane.command(cls=BudgetCommand)
@click.argument("name", shell_complete=lane_names)
@json_option
@click.pass_context
def pause(ctx: click.Context, name: str, as_json: bool) -> None:
    """Let go nothing until the lane is resumed; what it has let go goes on.

    \b
    Example:
      celery -A proj budget lane pause llm
    """
    installed = installed_of(ctx)
    installed.lanes.pause(name)
    _show(ctx, installed, name, as_json)


@lane.command(cls=BudgetCommand)
@click.argument("name", shell_complete=lane_names)
@json_option
@click.pass_context
def resume(ctx: click.Context, name: str, as_json: bool) -> None:
    """Let go work again.

    \b
    Example:
      celery -A proj budget lane resume llm
    """
    installed = installed_of(ctx)
    installed.lanes.resume(name)
    _show(ctx, installed, name, as_json)


@lane.command(cls=BudgetCommand)
@click.argument("name", shell_complete=lane_names)
@json_option
@click.pass_context
def delete(ctx: click.Context, name: str, as_json: bool) -> None:
    """Delete a lane: what it holds is let go, and its queues are fed directly.

    \b
    Example:
      celery -A proj budget lane delete llm
    """
    installed_of(ctx).lanes.delete(name)
    view = literal(f"lane {name!r} is deleted; what it held is published")
    show(ctx, {"lane": name, "deleted": True} if as_json else view)
