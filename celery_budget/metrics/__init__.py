"""Metrics for Prometheus, read from the ledger at each scrape.

``registry.register(BudgetCollector(budget))`` for a registry of one's own; :func:`exposition` for
whoever answers scrapes. What is exposed is what :data:`CATALOGUE` lists. The only package that
knows prometheus-client, imported when it is first needed.
"""

from celery_budget.metrics.catalogue import CATALOGUE, OTHER, Metric
from celery_budget.metrics.collector import BudgetCollector, exposition
from celery_budget.metrics.passes import Passes
from celery_budget.metrics.server import serve

__all__ = ["CATALOGUE", "OTHER", "BudgetCollector", "Metric", "Passes", "exposition", "serve"]
