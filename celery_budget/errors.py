"""Every error celery_budget raises, as one tree under :class:`BudgetError`.

An error says what happened, to what, and what to do. Each of them survives pickling and Celery's
result backends: the constructor takes exactly the values that end up in ``args``.
"""

from __future__ import annotations

import shlex

__all__ = [
    "AttemptLost",
    "BudgetError",
    "BudgetExceeded",
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
]


class BudgetError(Exception):
    """Base of all errors of this package."""


class ConfigurationError(BudgetError):
    """A ``budget_*`` setting is missing or has a value that cannot work."""


class NotInstalled(BudgetError):
    """A budgeted task is used on a Celery app that has no :class:`~celery_budget.CeleryBudget`."""


class SchemaError(BudgetError):
    """The ledger's tables are missing or are of another version; ``budget init`` brings them up."""


class PolicyError(BudgetError):
    """A budget cannot be worked out: a wrong declaration, or arguments that do not fit it."""


class EstimateError(PolicyError):
    """The task's estimator raised instead of returning an amount."""


class InvalidAmount(BudgetError, ValueError):
    """An amount is not an integer from 0 to 2^63-1. Nothing was changed."""


class InvalidName(BudgetError, ValueError):
    """A budget's name is not text of 1 to 255 characters in NFC without control characters."""


class UnsupportedPublication(BudgetError):
    """A budgeted task is published in a way that cannot be budgeted (yet)."""


class UnknownBudget(BudgetError, LookupError):
    """A request names a budget that does not exist. Nothing was reserved and nothing published.

    :param budget: the name that was looked for.
    """

    def __init__(self, budget: str) -> None:
        super().__init__(budget)
        self.budget = budget

    def __str__(self) -> str:
        return (
            f"there is no budget named {self.budget!r}; create it with "
            f"'celery -A PROJ budget set {shlex.quote(self.budget)} --limit N --unit UNIT'"
        )


class RequestConflict(BudgetError):
    """A request id is in use for another request (another task or other arguments).

    :param request_id: the id that was given.
    :param owner: the budget in whose name it was given.
    :param task_id: the task the id belongs to.
    """

    def __init__(self, request_id: str, owner: str, task_id: str) -> None:
        super().__init__(request_id, owner, task_id)
        self.request_id = request_id
        self.owner = owner
        self.task_id = task_id

    def __str__(self) -> str:
        return (
            f"request id {self.request_id!r} of {self.owner!r} is taken by another request "
            f"(task {self.task_id}): repeat that request with the same task and arguments, "
            "or use a new request id"
        )


class BudgetExceeded(BudgetError):
    """A request does not fit its budget. It reserved nothing and was not published.

    All amounts are integers in the budget's unit, as they were when the request was refused.

    :param budget: the budget that was short.
    :param unit: what it counts.
    :param requested: the amount the request asked for.
    :param available: ``limit - reserved - spent``; negative where more was used than allowed.
    :param limit: the budget's limit.
    :param reserved: held by requests that have not ended yet.
    :param spent: used for good.
    """

    def __init__(
        self,
        budget: str,
        unit: str,
        requested: int,
        available: int,
        limit: int,
        reserved: int,
        spent: int,
    ) -> None:
        super().__init__(budget, unit, requested, available, limit, reserved, spent)
        self.budget = budget
        self.unit = unit
        self.requested = requested
        self.available = available
        self.limit = limit
        self.reserved = reserved
        self.spent = spent

    def __str__(self) -> str:
        return (
            f"budget {self.budget!r} has {self.available} of {self.limit} {self.unit} available "
            f"({self.reserved} reserved, {self.spent} spent) and {self.requested} were requested; "
            f"see 'celery -A PROJ budget show {shlex.quote(self.budget)}'"
        )


class RequestNotRun(BudgetError):
    """An accepted request ended before it ran; stored as the result of its task.

    :param task_id: the task that did not run.
    :param reason: why: ``undelivered``, ``unpublishable``, ``park_expired`` and the like.
    """

    def __init__(self, task_id: str, reason: str) -> None:
        super().__init__(task_id, reason)
        self.task_id = task_id
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"task {self.task_id} was not run: {self.reason}; nothing is held for it "
            f"(see 'celery -A PROJ budget explain {shlex.quote(self.task_id)}')"
        )


class AttemptLost(BudgetError):
    """A task was started and its outcome is not known; charged and flagged in the ledger.

    :param task_id: the task whose worker went away.
    """

    def __init__(self, task_id: str) -> None:
        super().__init__(task_id)
        self.task_id = task_id

    def __str__(self) -> str:
        return (
            f"task {self.task_id} was started, its worker went away, and it may not be run again; "
            f"see 'celery -A PROJ budget explain {shlex.quote(self.task_id)}'"
        )


class StoreError(BudgetError):
    """The ledger's database failed. While admitting: nothing was published.

    :param message: what was attempted and what the database said.
    :param retryable: whether the same call may succeed later without any change.
    """

    def __init__(self, message: str, retryable: bool = False) -> None:
        super().__init__(message, retryable)
        self.message = message
        self.retryable = retryable

    def __str__(self) -> str:
        return self.message
