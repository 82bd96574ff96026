"""The command that cancels a request."""

from __future__ import annotations

import click
from celery.bin.base import CeleryOption

from celery_budget.cli.group import BudgetCommand, budget, installed_of, json_option, show
from celery_budget.render.text import literal

__all__ = ["cancel"]

_TOLD = {
    "ended": "{} was cancelled",
    "requested": "{} runs; it was asked to stop",
    "terminated": "{} runs; its worker ends the process that runs it",
    "unanswered": "{} runs; it was asked to stop, and no worker says that it ends its process{}",
}

_DEAF = "; with worker_enable_remote_control off none can be asked"


@budget.command(cls=BudgetCommand)
@click.argument("task_id")
@click.option(
    "--terminate",
    cls=CeleryOption,
    is_flag=True,
    help="Where it runs, have its worker kill the process that runs it.",
)
@json_option
@click.pass_context
def cancel(ctx: click.Context, task_id: str, terminate: bool, as_json: bool) -> None:
    """Cancel the request of a task.

    What has not started gives its hold back and ends as REVOKED. A task that runs is asked to stop:
    it sees that where it looks, is not retried, and what it comes to is charged. Exit status 1
    where nothing is known of it, or where it has ended.

    \b
    Examples:
      celery -A proj budget cancel 6f0c7a0e-93a5-5d0b-9a26-4a1f6f2b8f11
      celery -A proj budget cancel 6f0c7a0e-93a5-5d0b-9a26-4a1f6f2b8f11 --terminate
    """
    installed = installed_of(ctx)
    outcome = installed.cancel(task_id, terminate)
    told = "unanswered" if terminate and outcome == "requested" else outcome
    document = {"cancelled": task_id, "outcome": outcome}
    deaf = "" if installed.app.conf.worker_enable_remote_control else _DEAF
    show(ctx, document if as_json else literal(_TOLD[told].format(task_id, deaf)))
