"""Budgets for Celery, enforced before dispatch.

``CeleryBudget(app)`` ties an application to its ledger; ``@budgeted`` (or the base class
``BudgetedTask``) gives a task a budget and an estimate; ``usage.record`` tells what it used.
"""

from celery_budget.core.budgets import Balance
from celery_budget.errors import (
    AttemptLost,
    BudgetError,
    BudgetExceeded,
    ConfigurationError,
    EstimateError,
    InvalidAmount,
    InvalidName,
    NotInstalled,
    PolicyError,
    RequestConflict,
    RequestNotRun,
    SchemaError,
    StoreError,
    UnknownBudget,
    UnsupportedPublication,
)
from celery_budget.integration import usage
from celery_budget.integration.install import CeleryBudget
from celery_budget.integration.task import BudgetedTask, budgeted

__all__ = [
    "AttemptLost",
    "Balance",
    "BudgetError",
    "BudgetExceeded",
    "BudgetedTask",
    "CeleryBudget",
    "ConfigurationError",
    "EstimateError",
    "InvalidAmount",
    "InvalidName",
    "NotInstalled",
    "PolicyError",
    "RequestConflict",
    "RequestNotRun",
    "SchemaError",
    "StoreError",
    "UnknownBudget",
    "UnsupportedPublication",
    "budgeted",
    "usage",
]
