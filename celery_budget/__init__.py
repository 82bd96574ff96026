"""Budgets for Celery, enforced before dispatch.

``CeleryBudget(app)`` ties an application to its ledger; ``@budgeted`` (or the base class
``BudgetedTask``) gives a task a budget and an estimate; ``usage.record`` tells what it used.
"""

from celery_budget.core.backpressure import Outlook
from celery_budget.core.budgets import Balance, Budget, Share
from celery_budget.core.estimators import Estimator, estimator
from celery_budget.core.losses import LostAttempt
from celery_budget.core.periods import Period
from celery_budget.core.policies import BudgetLine
from celery_budget.core.prices import cost
from celery_budget.errors import (
    AttemptLost,
    AttemptsSpent,
    BudgetError,
    BudgetExceeded,
    ClaimLost,
    ConfigurationError,
    EffectError,
    EnlistError,
    EstimateError,
    EstimateOutOfBounds,
    HoldsOpen,
    InvalidAmount,
    InvalidBudget,
    InvalidName,
    InvalidPeriod,
    InvalidReply,
    KeyConflict,
    MissingExtra,
    NotInstalled,
    NotQuarantined,
    NotRunning,
    OutboxFull,
    PolicyError,
    RequestConflict,
    RequestEnding,
    RequestNotRun,
    RequestRuns,
    ReservationExhausted,
    SchemaError,
    StoreError,
    UnknownBudget,
    UnknownPrice,
    UnknownRequest,
    UnsupportedPublication,
)
from celery_budget.integration import usage
from celery_budget.integration.effects import asettle, effect, settle
from celery_budget.integration.install import CeleryBudget
from celery_budget.integration.task import BudgetedTask, budgeted

__all__ = [
    "AttemptLost",
    "AttemptsSpent",
    "Balance",
    "Budget",
    "BudgetError",
    "BudgetExceeded",
    "BudgetLine",
    "BudgetedTask",
    "CeleryBudget",
    "ClaimLost",
    "ConfigurationError",
    "EffectError",
    "EnlistError",
    "EstimateError",
    "EstimateOutOfBounds",
    "Estimator",
    "HoldsOpen",
    "InvalidAmount",
    "InvalidBudget",
    "InvalidName",
    "InvalidPeriod",
    "InvalidReply",
    "KeyConflict",
    "LostAttempt",
    "MissingExtra",
    "NotInstalled",
    "NotQuarantined",
    "NotRunning",
    "OutboxFull",
    "Outlook",
    "Period",
    "PolicyError",
    "RequestConflict",
    "RequestEnding",
    "RequestNotRun",
    "RequestRuns",
    "ReservationExhausted",
    "SchemaError",
    "Share",
    "StoreError",
    "UnknownBudget",
    "UnknownPrice",
    "UnknownRequest",
    "UnsupportedPublication",
    "asettle",
    "budgeted",
    "cost",
    "effect",
    "estimator",
    "settle",
    "usage",
]
