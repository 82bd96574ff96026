"""Completion by a shell: the command that prints its script, and names that are read in the ledger.

A shell asks by running ``celery`` once more, with what is on the line in its environment; click
answers with commands and options, and asks here for names. Whatever fails, there is none.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import PurePath

import click
from celery.app.utils import find_app
from click.shell_completion import CompletionItem, get_completion_class

from celery_budget.cli.group import BudgetCommand, budget
from celery_budget.integration.context import find_installed
from celery_budget.integration.install import CeleryBudget
from celery_budget.store import budgets, lanes

__all__ = ["budget_names", "completion", "lane_names"]

#: How long a shell waits for names, the import of the application included.
SECONDS = 2.0
#: How many names a shell is given; nobody reads more.
NAMES = 100
SHELLS = ("bash", "zsh", "fish")
#: By which a shell asks.
_VARIABLE = "_CELERY_COMPLETE"

#: Bash breaks words at ':' as well, and budgets are called tenant:acme: by click's own script those
#: are completed no further than to their first colon. So the line is taken as a whole, and what is
#: in front of the last break is taken away from each answer.
_BASH = r"""_celery_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" response type value current="" IFS=$' \t\n'
    local -a words
    read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    (( ${#words[@]} )) && current="${words[${#words[@]}-1]}"
    response=$(COMP_WORDS="$line" COMP_CWORD=$(( ${#words[@]} - 1 )) \
        _CELERY_COMPLETE=bash_complete "$1" 2>/dev/null)
    local broken=""
    if [[ "$current" == *:* && "$COMP_WORDBREAKS" == *:* ]]; then
        broken="${current%"${current##*:}"}"
    fi
    COMPREPLY=()
    while IFS=, read -r type value; do
        case "$type" in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("${value#"$broken"}") ;;
        esac
    done <<< "$response"
}
complete -o nosort -F _celery_completion celery
"""


@budget.command(cls=BudgetCommand)
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@click.pass_context
def completion(ctx: click.Context, shell: str | None) -> None:
    """Print what makes a shell complete 'celery' and its commands.

    Names of budgets and lanes are read in the ledger, where -A or CELERY_APP is given. SHELL is
    bash, zsh or fish; by default the one in $SHELL.

    \b
    Examples:
      celery -A proj budget completion bash
      eval "$(celery budget completion bash)"   in ~/.bashrc
      eval "$(celery budget completion zsh)"    in ~/.zshrc
    """
    chosen = shell or PurePath(os.environ.get("SHELL", "")).name
    if chosen not in SHELLS:
        raise click.UsageError(f"which shell is not known; give one of {', '.join(SHELLS)}")
    if chosen == "bash":
        click.echo(_BASH, nl=False)
        return
    made = get_completion_class(chosen)
    if made is None:
        raise click.ClickException(f"click knows no {chosen} here; upgrade click")
    click.echo(made(ctx.find_root().command, {}, "celery", _VARIABLE).source(), nl=False)


def budget_names(ctx: click.Context, param: click.Parameter, start: str) -> list[CompletionItem]:
    """Return the budgets whose names begin so, for click."""
    return _found(
        ctx,
        start,
        lambda found: found.store.read(budgets.beginning, found.settings.root, start, NAMES),
    )


def lane_names(ctx: click.Context, param: click.Parameter, start: str) -> list[CompletionItem]:
    """Return the lanes whose names begin so, for click."""
    return _found(ctx, start, lambda found: found.store.read(lanes.find, found.settings.root))


def _found(
    ctx: click.Context, start: str, look: Callable[[CeleryBudget], Iterable[str]]
) -> list[CompletionItem]:
    """Return the names that an application's ledger has; none where it cannot tell in time."""
    app = ctx.find_root().params.get("app")
    if not isinstance(app, str):
        return []
    names: list[str] = []

    def read() -> None:
        # Whatever an application's module does, a shell's line stays as it is.
        with contextlib.suppress(BaseException):
            celery = find_app(app)
            if find_installed(celery) is None:
                celery.loader.import_default_modules()
            found = find_installed(celery)
            if found is not None:
                names.extend(look(found))

    # A server that does not answer must not keep the thread for longer than it is waited for.
    os.environ.setdefault("PGCONNECT_TIMEOUT", "2")
    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(SECONDS)
    told = sorted(one for one in [*names] if one.startswith(start) and _writable(one))
    return [CompletionItem(one) for one in told[:NAMES]]


def _writable(name: str) -> bool:
    """Return whether a name is one word, in the output's characters."""
    try:
        name.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return not any(one.isspace() for one in name)
