"""Plots of a report as markup: inline SVG that needs no script, each with its figures as a table.

Pure functions from figures to a ``<figure>``, with all text escaped. A page that shows them has
:data:`PLOT_CSS` once, and may set its variables (``--cb-…``) anew. What is drawn at a mark is exact
in the mark's ``<title>``, which a browser shows beside the pointer; a screen reader gets a title, a
description, and the table.

Ids on the page start with ``cb-``: the same figure twice on one page would have the same id.
"""

from importlib.resources import files

from markupsafe import Markup

from celery_budget.render.plots.bars import balance_bar
from celery_budget.render.plots.ratios import drift_plot
from celery_budget.render.plots.spend import spend_plot, top_budgets
from celery_budget.render.plots.spreads import runs_plot, waits_plot

__all__ = [
    "PLOT_CSS",
    "balance_bar",
    "drift_plot",
    "runs_plot",
    "spend_plot",
    "top_budgets",
    "waits_plot",
]

#: The style sheet of all plots, with its colours as variables, for light, dark and print.
PLOT_CSS = Markup(  # noqa: S704 (a file of this package)
    files(__package__).joinpath("plots.css").read_text("utf-8")
)
