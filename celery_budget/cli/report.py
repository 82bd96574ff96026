"""``budget report``: what became of requests, for people, programs, spreadsheets and browsers."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta
from pathlib import PurePath

import click
from celery.bin.base import CeleryOption

from celery_budget.cli.completion import budget_names
from celery_budget.cli.files import write_file
from celery_budget.cli.group import ReadingCommand, budget, called, installed_of, json_option
from celery_budget.cli.group import show as print_out
from celery_budget.cli.progress import Waiting
from celery_budget.cli.values import WHEN
from celery_budget.reconcile import Report
from celery_budget.reconcile.figures import GROUPINGS
from celery_budget.render.csv_reports import report_csv
from celery_budget.render.documents import json_document
from celery_budget.render.reports import report_view
from celery_budget.render.text import as_text

__all__ = ["report"]

_FORMATS = ("table", "json", "csv", "html")
#: What a file's name says of its format.
_ENDINGS = {".json": "json", ".csv": "csv", ".html": "html", ".htm": "html"}
#: Stands for the standard output in the place of a file.
_STDOUT = "-"


@budget.command(cls=ReadingCommand)
@click.option(
    "--since",
    cls=CeleryOption,
    type=WHEN,
    help="Only requests admitted from then on: 7d, 12h, 2030-01-31 or 2030-01-31T12:00:00Z.",
)
@click.option("--until", cls=CeleryOption, type=WHEN, help="Only requests admitted before then.")
@click.option(
    "--budget",
    "name",
    cls=CeleryOption,
    shell_complete=budget_names,
    help="Only requests that draw on this budget.",
)
@click.option("--stage", cls=CeleryOption, help="Only requests of this stage.")
@click.option(
    "--by",
    cls=CeleryOption,
    type=click.Choice(GROUPINGS),
    help="Group the figures by this as well.",
)
@click.option(
    "--format",
    "form",
    cls=CeleryOption,
    type=click.Choice(_FORMATS),
    help="What to write; by default what the ending of FILE says, else a table.",
)
@click.option(
    "--output",
    cls=CeleryOption,
    metavar="FILE",
    help="Write it to this file, whole or not at all; '-' is the standard output.",
)
@json_option
@click.pass_context
def report(
    ctx: click.Context,
    since: datetime | timedelta | None,
    until: datetime | timedelta | None,
    name: str | None,
    stage: str | None,
    by: str | None,
    form: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Show balances, and what became of requests.

    How many there were, what they were estimated at and used, how they failed, how long they
    waited and ran.

    \b
    Examples:
      celery -A proj budget report
      celery -A proj budget report --since 7d --by stage
      celery -A proj budget report --since 2030-01-01 --by day --output days.csv
      celery -A proj budget report --since 30d --output /var/www/budget.html
      celery -A proj budget report --json
    """
    target = None if output == _STDOUT else output
    chosen = _format(form, target, as_json)
    if chosen == "html" and output is None and sys.stdout.isatty():
        raise click.UsageError(
            "a page of HTML is for a browser; add '--output report.html', or pipe it on"
        )
    installed = installed_of(ctx)
    plain = chosen == "table" and target is None
    with Waiting("gathering the report"):
        found = installed.report(since, until, name, stage, by)
        written = b"" if plain else _written(ctx, found, chosen)
    if plain:
        print_out(ctx, report_view(found))
    elif target is None:
        click.echo(written, nl=False)
    else:
        write_file(target, written)


def _format(form: str | None, target: str | None, as_json: bool) -> str:
    """Return which format is meant.

    :raises click.UsageError: where ``--json`` is given beside another one.
    """
    if as_json and form not in (None, "json"):
        raise click.UsageError(f"give --json or --format {form}, not both")
    if as_json:
        return "json"
    ending = PurePath(target).suffix.lower() if target is not None else ""
    return form or _ENDINGS.get(ending, "table")


def _written(ctx: click.Context, found: Report, form: str) -> bytes:
    """Return a report in a format, as the bytes of its file."""
    if form == "json":
        return json_document(found.as_dict()).encode()
    if form == "csv":
        return report_csv(found).encode()
    if form == "html":
        # Imported here: no other command, and no worker, needs a template engine.
        from celery_budget.render.html import report_html

        return report_html(found).encode()
    return called(ctx, as_text(report_view(found))).encode()
