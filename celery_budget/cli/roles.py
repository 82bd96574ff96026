"""The command that prints the statements of least-privilege roles."""

from __future__ import annotations

import click
from celery.bin.base import CeleryOption

from celery_budget.cli.group import BudgetCommand, budget, installed_of
from celery_budget.store.roles import PREFIX

__all__ = ["roles"]


@budget.command(cls=BudgetCommand)
@click.option(
    "--prefix",
    cls=CeleryOption,
    default=PREFIX,
    show_default=True,
    help="What the names of the roles begin with.",
)
@click.option(
    "--templates",
    cls=CeleryOption,
    is_flag=True,
    help="Let callers and workers make the budgets that templates stand for.",
)
@click.pass_context
def roles(ctx: click.Context, prefix: str, templates: bool) -> None:
    """Print SQL of least-privilege roles for the ledger.

    They give each kind of process what it needs, and nothing else: roles without a login, for
    callers, workers, relays, reporters and admins, on PostgreSQL. Run it as who owns the tables,
    after 'budget init' and again after each upgrade, and make the users of your processes members
    of them. Changes nothing itself.

    \b
    Examples:
      celery -A proj budget roles | psql DATABASE
      celery -A proj budget roles --prefix shop_ --templates
    """
    for statement in installed_of(ctx).role_statements(prefix, templates=templates):
        click.echo(f"{statement};")
