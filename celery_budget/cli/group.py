"""The command ``budget`` itself, and what every subcommand needs: the ledger, a way to print."""

from __future__ import annotations

import errno
import shlex
import shutil
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import click
from celery import Celery
from celery.bin.base import CeleryCommand, CeleryOption, handle_preload_options
from click_didyoumean import DYMGroup
from rich.console import RenderableType

from celery_budget.cli.streams import coloured, note, set_up_logging
from celery_budget.errors import (
    BudgetError,
    InvalidName,
    InvalidPeriod,
    InvalidReport,
    NotInstalled,
)
from celery_budget.integration.context import find_installed
from celery_budget.integration.install import CeleryBudget
from celery_budget.render.documents import json_document
from celery_budget.render.sources import replica_told
from celery_budget.render.text import as_text, printable

__all__ = [
    "BudgetCommand",
    "ReadingCommand",
    "budget",
    "called",
    "installed_of",
    "json_option",
    "show",
]


#: Where a disk takes no more, as that of a file that the output goes to.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


#: Commands that run until they are stopped.
_LOGGING = ("relay", "dashboard")

#: Options by which a command reads the ledger's own database: asked for, or since it changes that.
_NEED_PRIMARY = ("primary", "repair", "fold_before")


#: The exit status after Ctrl-C, as shells have it.
INTERRUPTED = 130


class WrongUse(click.ClickException):
    """The command line is wrong, whatever the ledger has in it."""

    exit_code = 2


class BudgetCommand(CeleryCommand):
    """A command of ``budget``.

    :cvar from_replica: whether it shows what a replica says where there is one. What it changes,
        and looks at before or afterwards, is in the ledger's own database.
    """

    from_replica: ClassVar[bool] = False

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, and no arguments: the text above them says what those are."""
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        with formatter.section("Options"):
            formatter.write_dl([told for one in options if (told := one.get_help_record(ctx))])


class ReadingCommand(BudgetCommand):
    """A command that only shows something: from a replica, where there is one, which it says."""

    from_replica = True

    def invoke(self, ctx: click.Context) -> Any:
        """Say where it reads, beside what it prints, and run it."""
        source = installed_of(ctx).read_from()
        if source.replica:
            note(replica_told(source))
        return super().invoke(ctx)


class BudgetGroup(DYMGroup):
    """The one place where errors become a line and an exit status: 2 for wrong use, else 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except (InvalidName, InvalidPeriod, InvalidReport) as error:
            raise WrongUse(sentence(called(ctx, str(error)))) from error
        except BudgetError as error:
            raise click.ClickException(sentence(called(ctx, str(error)))) from error
        except click.UsageError as error:
            told = " ".join(error.format_message().split()).removesuffix(".")
            command = (error.ctx or ctx).command_path
            raise WrongUse(sentence(f"{told} (see '{command} --help')")) from error
        except click.ClickException as error:
            kind = WrongUse if error.exit_code == WrongUse.exit_code else click.ClickException
            raise kind(sentence(error.format_message())) from error
        except KeyboardInterrupt:
            # What ^C has left on the line.
            click.echo(err=True)
            note("stopped")
            ctx.exit(INTERRUPTED)
        except OSError as error:
            # Who reads a pipe no more has what he wanted; click ends quietly.
            if error.errno == errno.EPIPE:
                raise
            raise click.ClickException(sentence(_told(error))) from error


def _told(error: OSError) -> str:
    said = error.strerror or str(error)
    if error.errno in _FULL:
        return (
            f"what was to be printed is not, or not whole: {said}; make room, and run it once more"
        )
    where = repr(error.filename) if error.filename else "what it was to read or write"
    return f"{said}; see that {where} is there and may be used"


def sentence(text: str) -> str:
    """Return what an error says on one line, with a full stop."""
    told = printable(text)
    return told if told.endswith((".", "!", "?")) else f"{told}."


def called(ctx: click.Context, told: str) -> str:
    """Return what is said, with the commands it names as they are called here."""
    app = ctx.find_root().params.get("app")
    return told.replace("-A PROJ ", f"-A {shlex.quote(app)} ") if isinstance(app, str) else told


@click.group(cls=BudgetGroup)
@click.option(
    "--primary",
    cls=CeleryOption,
    is_flag=True,
    help="Show what the ledger's own database says, not the replica of budget_report_url.",
)
@click.option(
    "-q",
    "--quiet",
    cls=CeleryOption,
    is_flag=True,
    help="Say nothing but what is asked for, and errors.",
)
@click.option(
    "-v",
    "--verbose",
    cls=CeleryOption,
    count=True,
    help="Log what happens to the standard error stream; -vv: in every detail.",
)
@click.pass_context
@handle_preload_options
def budget(ctx: click.Context, primary: bool, quiet: bool, verbose: int) -> None:
    """Budgets, enforced before dispatch.

    \b
    Examples:
      celery -A proj budget init
      celery -A proj budget set acme --limit 1_000_000 --unit tokens
      celery -A proj budget relay
      celery -A proj budget report --json
    """
    if quiet and verbose:
        raise click.UsageError("-q and -v say the contrary; give one of them")
    ctx.obj.quiet = quiet or getattr(ctx.obj, "quiet", False)
    # What runs for long logs as its own options say.
    if verbose or ctx.invoked_subcommand not in _LOGGING:
        set_up_logging(ctx, verbose)


json_option = click.option(
    "--json",
    "as_json",
    cls=CeleryOption,
    is_flag=True,
    help="Print one JSON document, with exact integers.",
)


def installed_of(ctx: click.Context) -> CeleryBudget:
    """Return the application's CeleryBudget, also where a module with its tasks makes it.

    :raises NotInstalled: where there is none.
    """
    app: Celery = ctx.obj.app
    found = find_installed(app)
    if found is None:
        try:
            app.loader.import_default_modules()
        except ImportError as error:
            raise click.ClickException(
                f"a module of the application cannot be imported: {error}; correct imports= or "
                "include= of its configuration"
            ) from error
        found = find_installed(app)
    if found is None:
        raise NotInstalled(
            f"the application {app.main or 'default'!r} has no CeleryBudget; add "
            "'budget = CeleryBudget(app)' where it is made, and name it by 'celery -A PROJ budget'"
        )
    found.reads_primary = not getattr(ctx.command, "from_replica", False) or any(
        inside.params.get(option) for inside in _upwards(ctx) for option in _NEED_PRIMARY
    )
    ctx.call_on_close(lambda: setattr(found, "reads_primary", False))
    return found


def _upwards(ctx: click.Context | None) -> Iterator[click.Context]:
    while ctx is not None:
        yield ctx
        ctx = ctx.parent


def show(ctx: click.Context, what: dict[str, Any] | RenderableType) -> None:
    """Print a JSON document or, to the terminal's width where there is one, a view."""
    if isinstance(what, dict):
        text = json_document(what)
    else:
        text = as_text(
            what,
            width=shutil.get_terminal_size().columns if sys.stdout.isatty() else None,
            colour=coloured(sys.stdout, ctx.obj.no_color),
            encoding=sys.stdout.encoding or "utf-8",
        )
        text = called(ctx, text)
    # By itself click drops colours where there is no terminal, FORCE_COLOR or not.
    click.echo(text, nl=False, color=True)
