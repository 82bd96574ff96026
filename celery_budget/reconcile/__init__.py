"""What is shown of a ledger: how budgets stand, reports, one request's life, and the proof.

Builds data and prints nothing; :mod:`celery_budget.render` turns it into text.
"""

from celery_budget.reconcile.brokers import QueueStanding
from celery_budget.reconcile.estimates import Drift, Suggestion, suggest
from celery_budget.reconcile.figures import Amounts, Day, Group, Refusals, Spread
from celery_budget.reconcile.following import Next
from celery_budget.reconcile.holdings import (
    Asking,
    BudgetStory,
    HeldWindow,
    Hold,
    RefusedFor,
    Waiting,
    explain_budget,
)
from celery_budget.reconcile.invoices import Compared, Comparison, Difference
from celery_budget.reconcile.invoices import compare as compare_invoice
from celery_budget.reconcile.isolation import Quarantined, find_quarantined, quarantined
from celery_budget.reconcile.isolation import is_full as quarantine_is_full
from celery_budget.reconcile.kinds import STEPS
from celery_budget.reconcile.lanes import LaneStanding, TenantShare, lane_standings
from celery_budget.reconcile.overview import BudgetSeen, Overview, overview
from celery_budget.reconcile.proof import Reconciliation, fold, reconcile
from celery_budget.reconcile.repairs import repair
from celery_budget.reconcile.reports import Asked, RelaySeen, Report, relays, report
from celery_budget.reconcile.standing import (
    Entry,
    Grant,
    Standing,
    Template,
    grants,
    journal,
    standing,
    templates,
)
from celery_budget.reconcile.steps import Pending, Step
from celery_budget.reconcile.stories import Story, explain
from celery_budget.reconcile.terms import (
    balance_as_dict,
    budget_as_dict,
    change_as_dict,
    lane_as_dict,
)
from celery_budget.reconcile.waiting import (
    ParkedRequest,
    Queued,
    find_parked,
    parked,
    queued,
)

__all__ = [
    "STEPS",
    "Amounts",
    "Asked",
    "Asking",
    "BudgetSeen",
    "BudgetStory",
    "Compared",
    "Comparison",
    "Day",
    "Difference",
    "Drift",
    "Entry",
    "Grant",
    "Group",
    "HeldWindow",
    "Hold",
    "LaneStanding",
    "Next",
    "Overview",
    "ParkedRequest",
    "Pending",
    "Quarantined",
    "QueueStanding",
    "Queued",
    "Reconciliation",
    "Refusals",
    "RefusedFor",
    "RelaySeen",
    "Report",
    "Spread",
    "Standing",
    "Step",
    "Story",
    "Suggestion",
    "Template",
    "TenantShare",
    "Waiting",
    "balance_as_dict",
    "budget_as_dict",
    "change_as_dict",
    "compare_invoice",
    "explain",
    "explain_budget",
    "find_parked",
    "find_quarantined",
    "fold",
    "grants",
    "journal",
    "lane_as_dict",
    "lane_standings",
    "overview",
    "parked",
    "quarantine_is_full",
    "quarantined",
    "queued",
    "reconcile",
    "relays",
    "repair",
    "report",
    "standing",
    "suggest",
    "templates",
]
