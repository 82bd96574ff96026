"""The command that lists alerts."""

from __future__ import annotations

import click

from celery_budget.cli.group import ReadingCommand, budget, installed_of, json_option, show
from celery_budget.render.alerts import alerts_view

__all__ = ["alerts"]


@budget.command(cls=ReadingCommand)
@json_option
@click.pass_context
def alerts(ctx: click.Context, as_json: bool) -> None:
    """List the alerts that stand, the newest first.

    A budget's stands until its window ends, or what is used of it falls well below the threshold;
    the others until what they are about is over. They are given by the relay.

    \b
    Examples:
      celery -A proj budget alerts
      celery -A proj budget alerts --json
    """
    found = installed_of(ctx).alerts()
    show(ctx, {"alerts": [one.as_dict() for one in found]} if as_json else alerts_view(found))
