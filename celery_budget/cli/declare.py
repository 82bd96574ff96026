"""Commands that say which budgets there are: init, set, apply, export, close."""

from __future__ import annotations

import sys
from decimal import Decimal
from typing import IO, Any

import click
from celery.bin.base import CeleryOption
from rich.console import Group
from rich.text import Text

from celery_budget.cli.completion import budget_names
from celery_budget.cli.group import BudgetCommand, budget, called, installed_of, json_option, show
from celery_budget.cli.progress import Waiting
from celery_budget.cli.values import RATIO, limit_of, parent_of, stripes_of, thresholds_of
from celery_budget.core.budgets import MOST_STRIPES, MOST_WEIGHT
from celery_budget.core.declarations import Change
from celery_budget.core.lane_files import LaneChange
from celery_budget.core.periods import PERIODS
from celery_budget.integration.install import CeleryBudget
from celery_budget.reconcile import budget_as_dict, change_as_dict, lane_as_dict
from celery_budget.render.budgets import changes_table, standing_view
from celery_budget.render.documents import json_document
from celery_budget.render.text import literal, printable

__all__ = ["apply", "close", "export", "init", "set_", "show_standing"]


def show_standing(ctx: click.Context, installed: CeleryBudget, name: str, as_json: bool) -> None:
    """Print how a budget or a template stands."""
    standing = installed.standing(name)
    show(ctx, standing.as_dict() if as_json else standing_view(standing))


@budget.command(cls=BudgetCommand)
@click.option(
    "--distributed",
    cls=CeleryOption,
    is_flag=True,
    help="Distribute them by root over a Citus cluster, whose coordinator the database is.",
)
@json_option
@click.pass_context
def init(ctx: click.Context, distributed: bool, as_json: bool) -> None:
    """Create or upgrade the ledger's tables.

    Needed once, and after an upgrade. Running it again changes nothing.

    \b
    Example:
      celery -A proj budget init
      celery -A proj budget init --distributed
    """
    installed = installed_of(ctx)
    with Waiting("bringing the tables up to date"):
        version = installed.init(distributed=distributed)
    url = installed.store.url
    view = literal(f"the ledger in {url} is at version {version}")
    show(ctx, {"database": url, "version": version} if as_json else view)


@budget.command("set", cls=BudgetCommand)
@click.argument("name", shell_complete=budget_names)
@click.option(
    "--limit",
    cls=CeleryOption,
    metavar="N|N%|none",
    help="An integer from 0 (blocks everything) to 2^63-1, as 1000000 or 1_000_000; a share of "
    "the parent's limit, as 10%; none is unlimited. Needed for a new budget.",
)
@click.option(
    "--unit",
    cls=CeleryOption,
    help="What it counts, such as tokens or micro-usd; needed for a new budget without parent.",
)
@click.option(
    "--parent",
    cls=CeleryOption,
    shell_complete=budget_names,
    metavar="NAME|none",
    help="The budget that every request on this one draws on as well; none for no parent.",
)
@click.option(
    "--period",
    cls=CeleryOption,
    type=click.Choice(PERIODS),
    help="When it begins anew; another period begins a new window now.",
)
@click.option(
    "--timezone",
    cls=CeleryOption,
    metavar="ZONE",
    help="Whose clock cuts the windows: an IANA name, such as Europe/Berlin.",
)
@click.option(
    "--anchor-day",
    cls=CeleryOption,
    type=click.IntRange(1, 31),
    help="Where a week (1 is Monday) or a month begins; 31 is the last day of each month.",
)
@click.option(
    "--soft-stop",
    cls=CeleryOption,
    type=RATIO,
    help="Up to which part of the limit new work is admitted, such as 0.8.",
)
@click.option(
    "--hard-stop",
    cls=CeleryOption,
    type=RATIO,
    help="Up to which part work is admitted that continues what was started.",
)
@click.option(
    "--weight",
    cls=CeleryOption,
    type=click.IntRange(0, MOST_WEIGHT),
    help="Its share of a lane beside that of others, 1 unless given; with 0 its work goes last.",
)
@click.option(
    "--stripes",
    cls=CeleryOption,
    metavar=f"1-{MOST_STRIPES}|auto",
    help="Over how many rows its counters are spread, so that many may draw on it at once; auto "
    "for as many as turn out to be of use.",
)
@click.option(
    "--alert-at",
    cls=CeleryOption,
    metavar="SHARES|none|default",
    help="At which parts of its limit it gives an alert, such as 80%,95%; none for no alert, "
    "default for those of budget_alert_at.",
)
@click.option(
    "--reopen", cls=CeleryOption, is_flag=True, help="Let a closed budget take requests again."
)
@json_option
@click.pass_context
def set_(
    ctx: click.Context,
    name: str,
    limit: str | None,
    unit: str | None,
    parent: str | None,
    period: str | None,
    timezone: str | None,
    anchor_day: int | None,
    soft_stop: Decimal | None,
    hard_stop: Decimal | None,
    weight: int | None,
    stripes: str | None,
    alert_at: str | None,
    reopen: bool,
    as_json: bool,
) -> None:
    """Create a budget or change it.

    Only what is given changes; prints what it is then. What was reserved and spent stays: a limit
    below that leaves a negative balance, and nothing more is admitted. A name with a * is that of
    a template, from which budgets yet unseen are made when they are first drawn on.

    \b
    Examples:
      celery -A proj budget set acme --limit 1_000_000 --unit tokens
      celery -A proj budget set acme --period month --timezone Europe/Berlin
      celery -A proj budget set acme/drafts --parent acme --limit 10%
      celery -A proj budget set acme --soft-stop 0.8
      celery -A proj budget set acme --alert-at 50%,90%
      celery -A proj budget set 'tenant:*' --parent acme --limit 50_000
    """
    given: dict[str, Any] = {
        "unit": unit,
        "period": period,
        "timezone": timezone,
        "anchor_day": anchor_day,
        "soft_stop": soft_stop,
        "hard_stop": hard_stop,
        "weight": weight,
        "alert_at": alert_at,
    }
    terms = {term: value for term, value in given.items() if value is not None}
    if limit is not None:
        terms["limit"] = limit_of(limit)
    if parent is not None:
        terms["parent"] = parent_of(parent)
    if stripes is not None:
        terms["stripes"] = stripes_of(stripes)
    if alert_at is not None:
        terms["alert_at"] = thresholds_of(alert_at)
    if not terms and not reopen:
        raise click.UsageError(
            "nothing is to be changed; give --limit or another term ('budget show NAME' shows them)"
        )
    installed = installed_of(ctx)
    installed.set(name, **terms, reopen=reopen)
    show_standing(ctx, installed, name, as_json)


@budget.command(cls=BudgetCommand)
@click.argument("file", type=click.File("rb"))
@click.option(
    "--dry-run", cls=CeleryOption, is_flag=True, help="Show what would change; change nothing."
)
@click.option(
    "--prune",
    cls=CeleryOption,
    is_flag=True,
    help="Close what the file does not name, except for what templates made; delete its lanes.",
)
@json_option
@click.pass_context
def apply(ctx: click.Context, file: IO[bytes], dry_run: bool, prune: bool, as_json: bool) -> None:
    """Make the budgets and lanes what a file says.

    Shows the difference, then makes all of it in one transaction, or nothing (exit status 1).
    The same file again changes nothing. - reads the standard input.

    \b
    Examples:
      celery -A proj budget apply budgets.toml --dry-run
      celery -A proj budget apply budgets.toml
      celery -A proj budget export | celery -A other budget apply -
    """
    name = getattr(file, "name", "<stdin>")
    source = "the standard input" if name == "<stdin>" else click.format_filename(name)
    try:
        text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{source} is not in UTF-8, save it so: {error}") from None
    except OSError as error:
        raise click.ClickException(
            f"{source} cannot be read: {error.strerror}; see that it is there and may be read"
        ) from None
    installed = installed_of(ctx)
    if as_json:
        changes = installed.apply(text, source=source, prune=prune, dry_run=dry_run)
        applied = not dry_run
        show(ctx, {"applied": applied, "changes": [change_as_dict(change) for change in changes]})
        return
    root = installed.settings.root
    found = installed.difference(text, source=source, prune=prune)
    nothing = literal(f"nothing to change: the budgets are as {source} says")
    show(ctx, changes_table(found, root) if found else nothing)
    done = installed.apply(text, source=source, prune=prune, dry_run=dry_run)
    if done != found:
        again = Text("the budgets were changed meanwhile; what is changed is:")
        show(ctx, Group(Text(), again, changes_table(done, root)))
    if done:
        show(ctx, Group(Text(), Text(_summary(done, dry_run))))


_DONE = {"add": "added", "change": "changed", "reopen": "reopened", "close": "closed"}


def _summary(changes: tuple[Change | LaneChange, ...], dry_run: bool) -> str:
    kinds = [change.kind for change in changes]
    counts = ", ".join(f"{kinds.count(kind)} {did}" for kind, did in _DONE.items() if kind in kinds)
    return f"would be {counts}; nothing was changed (--dry-run)" if dry_run else counts


@budget.command(cls=BudgetCommand)
@click.option(
    "-o",
    "--output",
    cls=CeleryOption,
    type=click.File("w", encoding="utf-8", lazy=True, atomic=True),
    metavar="FILE",
    help="Where to; the standard output if none.",
)
@click.option("--everything", cls=CeleryOption, is_flag=True, help="Also what templates made.")
@json_option
@click.pass_context
def export(ctx: click.Context, output: Any, everything: bool, as_json: bool) -> None:
    """Write the budgets and lanes as a file for apply.

    Closed budgets are left out, and so is what templates made.

    \b
    Examples:
      celery -A proj budget export > budgets.toml
      celery -A proj budget export -o budgets.toml
      celery -A proj budget export --everything --json
    """
    installed = installed_of(ctx)
    if as_json:
        declared = installed.declared(everything=everything)
        text = json_document(
            {
                "budgets": [
                    {"root": root, **budget_as_dict(one)}
                    for root, budgets in declared.items()
                    for one in budgets
                ],
                "lanes": [
                    {"root": root, **lane_as_dict(one)}
                    for root, lanes in installed.declared_lanes().items()
                    for one in lanes
                ],
            }
        )
    else:
        text = installed.export(everything=everything)
        if not text:
            told = (
                "there is no budget to export; create one with "
                "'celery -A PROJ budget set NAME --limit N --unit UNIT'"
            )
            raise click.ClickException(called(ctx, told))
    if output is None:
        click.echo(_encodable(text, sys.stdout.encoding or "utf-8"), nl=False)
    else:
        output.write(text)


def _encodable(text: str, encoding: str) -> str:
    """Return a TOML or JSON document in characters of ``encoding``; all others are in strings."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return "".join(
            one
            if one.isascii()
            else f"\\u{ord(one):04x}"
            if ord(one) < 0x10000
            else f"\\U{ord(one):08x}"
            for one in text
        )
    return text


@budget.command(cls=BudgetCommand)
@click.argument("name", shell_complete=budget_names)
@click.option(
    "--drain",
    cls=CeleryOption,
    is_flag=True,
    help="Take nothing new, let open requests end, and close it then.",
)
@json_option
@click.pass_context
def close(ctx: click.Context, name: str, drain: bool, as_json: bool) -> None:
    """Close a budget and all that is below it to new work.

    Refused while requests that draw on it have not ended, unless it is to be drained. Closing it
    again changes nothing; 'budget set NAME --reopen' opens it.

    \b
    Examples:
      celery -A proj budget close acme
      celery -A proj budget close acme --drain
    """
    with Waiting(f"closing {printable(name)}"):
        state = installed_of(ctx).close(name, drain)
    then = "" if state == "closed" else ": it takes nothing new and is closed when all has ended"
    view = literal(f"budget {name!r} is {state}{then}")
    show(ctx, {"budget": name, "state": state} if as_json else view)
