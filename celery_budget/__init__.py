"""Budgets for Celery, enforced before dispatch.

``CeleryBudget(app)`` ties an application to its ledger; ``@budgeted`` (or the base class
``BudgetedTask``) gives a task a budget and an estimate; ``usage.record`` tells what it used.
"""

from celery_budget.core.alerts import Alert
from celery_budget.core.backpressure import Outlook
from celery_budget.core.budgets import Balance, Budget, Share
from celery_budget.core.estimators import Estimator, estimator
from celery_budget.core.jobs import Job
from celery_budget.core.lanes import Lane, LaneBudget
from celery_budget.core.losses import LostAttempt
from celery_budget.core.periods import Period
from celery_budget.core.policies import BudgetLine
from celery_budget.core.prices import cost
from celery_budget.core.reservations import GivenUp
from celery_budget.errors import (
    AttemptLost,
    AttemptsSpent,
    BudgetError,
    BudgetExceeded,
    ClaimLost,
    ConfigurationError,
    DeadlinePassed,
    EffectError,
    EnlistError,
    EstimateError,
    EstimateOutOfBounds,
    HoldsOpen,
    InvalidAmount,
    InvalidBudget,
    InvalidLane,
    InvalidName,
    InvalidPeriod,
    InvalidReply,
    InvalidReport,
    InvoiceError,
    KeyConflict,
    MissingExtra,
    NotInstalled,
    NotParked,
    NotQuarantined,
    NotRunning,
    OutboxFull,
    ParkingFull,
    PolicyError,
    QueueFull,
    RequestConflict,
    RequestEnding,
    RequestNotRun,
    RequestRuns,
    ReservationExhausted,
    ResultGone,
    ResultNotReady,
    SchemaError,
    StoreError,
    UnknownBudget,
    UnknownLane,
    UnknownPrice,
    UnknownRequest,
    UnsupportedPublication,
)
from celery_budget.integration import usage
from celery_budget.integration.effects import asettle, effect, settle
from celery_budget.integration.install import CeleryBudget
from celery_budget.integration.signals import alert, park_expired
from celery_budget.integration.task import BudgetedTask, budgeted

__all__ = [
    "Alert",
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
    "DeadlinePassed",
    "EffectError",
    "EnlistError",
    "EstimateError",
    "EstimateOutOfBounds",
    "Estimator",
    "GivenUp",
    "HoldsOpen",
    "InvalidAmount",
    "InvalidBudget",
    "InvalidLane",
    "InvalidName",
    "InvalidPeriod",
    "InvalidReply",
    "InvalidReport",
    "InvoiceError",
    "Job",
    "KeyConflict",
    "Lane",
    "LaneBudget",
    "LostAttempt",
    "MissingExtra",
    "NotInstalled",
    "NotParked",
    "NotQuarantined",
    "NotRunning",
    "OutboxFull",
    "Outlook",
    "ParkingFull",
    "Period",
    "PolicyError",
    "QueueFull",
    "RequestConflict",
    "RequestEnding",
    "RequestNotRun",
    "RequestRuns",
    "ReservationExhausted",
    "ResultGone",
    "ResultNotReady",
    "SchemaError",
    "Share",
    "StoreError",
    "UnknownBudget",
    "UnknownLane",
    "UnknownPrice",
    "UnknownRequest",
    "UnsupportedPublication",
    "alert",
    "asettle",
    "budgeted",
    "cost",
    "effect",
    "estimator",
    "park_expired",
    "settle",
    "usage",
]
