"""Every error celery_budget raises, as one tree under :class:`BudgetError`.

An error says what happened, to what, and what to do. Each of them survives pickling and Celery's
result backends: the constructor takes exactly the values that end up in ``args``.
"""

from __future__ import annotations

import shlex
from typing import Any

__all__ = [
    "AttemptLost",
    "AttemptsSpent",
    "BudgetError",
    "BudgetExceeded",
    "ClaimLost",
    "ConfigurationError",
    "DeadlinePassed",
    "DistributionError",
    "EffectError",
    "EnlistError",
    "EstimateError",
    "EstimateOutOfBounds",
    "HoldsOpen",
    "InvalidAmount",
    "InvalidBudget",
    "InvalidKey",
    "InvalidLane",
    "InvalidName",
    "InvalidPeriod",
    "InvalidReply",
    "InvalidReport",
    "InvoiceError",
    "KeyConflict",
    "MissingExtra",
    "NotAuthorized",
    "NotInstalled",
    "NotParked",
    "NotQuarantined",
    "NotRunning",
    "OutboxFull",
    "ParkingFull",
    "PolicyError",
    "QueueFull",
    "ReplicaError",
    "RequestConflict",
    "RequestEnding",
    "RequestNotRun",
    "RequestRuns",
    "ReservationExhausted",
    "ResultGone",
    "ResultNotReady",
    "SchemaError",
    "StoreError",
    "UnknownBudget",
    "UnknownLane",
    "UnknownPrice",
    "UnknownRequest",
    "UnsupportedPublication",
]


class BudgetError(Exception):
    """Base of all errors of this package."""

    #: Of a refusal: in how many seconds it makes sense to try again, at the earliest; none where it
    #: makes none without a change, or nobody can tell.
    retry_after: float | None = None


class ConfigurationError(BudgetError):
    """A ``budget_*`` setting is missing or has a value that cannot work."""


class NotInstalled(BudgetError):
    """A budgeted task is used on a Celery app that has no :class:`~celery_budget.CeleryBudget`."""


class SchemaError(BudgetError):
    """The ledger's tables are missing or are of another version; ``budget init`` brings them up."""


class PolicyError(BudgetError):
    """A budget cannot be worked out: a wrong declaration, or arguments that do not fit it."""


class NotAuthorized(BudgetError):
    """Whoever asks may not draw on a budget, by ``authorize=``. Nothing was changed.

    :param task_name: the task that was to be run.
    :param budgets: the names of those that it would have drawn on.
    :param reason: ``refused``, or which error the hook has raised; that is chained, and its text is
        not part of this one.
    """

    def __init__(self, task_name: str, budgets: list[str], reason: str = "refused") -> None:
        super().__init__(task_name, budgets, reason)
        self.task_name = task_name
        self.budgets = budgets
        self.reason = reason

    def __str__(self) -> str:
        named = ", ".join(repr(name) for name in self.budgets)
        why = "" if self.reason == "refused" else f" ({self.reason})"
        return (
            f"task {self.task_name} may not draw on {named} for this caller{why}: authorize= of "
            "the task, or budget_authorize, did not allow it; name a budget that the caller may "
            "use, or see that the caller is set where it is published: with calling(...)"
        )


class EstimateError(PolicyError):
    """The task's estimator raised instead of returning an amount. Nothing was changed."""


class EstimateOutOfBounds(EstimateError):
    """An estimate is outside of its estimator's bounds. Nothing was changed.

    :param task_name: whose estimate it is.
    :param estimator: the estimator's name and version.
    :param estimate: what it gave.
    :param at_least: the lower bound; none without one.
    :param at_most: the upper bound; none without one.
    """

    def __init__(
        self,
        task_name: str,
        estimator: str,
        estimate: int,
        at_least: int | None,
        at_most: int | None,
    ) -> None:
        super().__init__(task_name, estimator, estimate, at_least, at_most)
        self.task_name = task_name
        self.estimator = estimator
        self.estimate = estimate
        self.at_least = at_least
        self.at_most = at_most

    def __str__(self) -> str:
        low = self.at_least is not None and self.estimate < self.at_least
        bound = f"at_least={self.at_least}" if low else f"at_most={self.at_most}"
        return (
            f"the estimate for {self.task_name} is {self.estimate}, and estimator {self.estimator} "
            f"has {bound}; correct the estimator, or its bound where such work is meant to be"
        )


class EnlistError(BudgetError):
    """A connection cannot be enlisted, or not used as it is while one is. Nothing was changed."""


class EffectError(BudgetError, ValueError):
    """An effect, a step or a settlement cannot be as it was asked for. Nothing was changed."""


class NotRunning(BudgetError):
    """What is for a running task with a budget was asked for where none runs.

    :param what: what was asked for.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return (
            f"{self.what} is for a task with a budget while it runs, and none runs in this thread; "
            "call it in the body of one that a worker, or apply(), runs"
        )


class InvalidAmount(BudgetError, ValueError):
    """An amount is not an integer from 0 to 2^63-1. Nothing was changed."""


class InvalidName(BudgetError, ValueError):
    """A budget's name is not text of 1 to 255 characters in NFC without control characters."""


class InvalidKey(BudgetError, ValueError):
    """A usage record's key is not text of 1 to 255 characters that a database can hold.

    Nothing was recorded.

    :param key: what was given, as Python writes it.
    :param most: how many characters a key may have.
    """

    def __init__(self, key: str, most: int) -> None:
        super().__init__(key, most)
        self.key = key
        self.most = most

    def __str__(self) -> str:
        return (
            f"usage key {self.key} cannot be one; give text of 1 to {self.most} characters without "
            "null characters, such as the reply's id"
        )


class InvalidReply(BudgetError, ValueError):
    """A provider's reply does not tell what it used, or not in a way that can be read.

    Nothing was recorded. Of a stream, which is over when this is found out, the estimate was.
    """


class InvoiceError(BudgetError, ValueError):
    """A provider's export cannot be read. Nothing was compared.

    :param name: of the file.
    :param line: its number, from 1 on; 0 where it is the file itself.
    :param problem: what is wrong with it.
    """

    def __init__(self, name: str, line: int, problem: str) -> None:
        super().__init__(name, line, problem)
        self.name = name
        self.line = line
        self.problem = problem

    def __str__(self) -> str:
        where = f"{self.name}, line {self.line}" if self.line else self.name
        return f"{where}: {self.problem}"


class InvalidPeriod(BudgetError, ValueError):
    """A period, its time zone or its anchor day is none that there is."""


class InvalidBudget(BudgetError, ValueError):
    """A budget's terms cannot be met, by themselves or beside those of other budgets.

    Nothing was changed.
    """


class InvalidReport(BudgetError, ValueError):
    """What is asked of a report cannot be: a period without time, an unknown grouping."""


class InvalidLane(BudgetError, ValueError):
    """A lane's terms cannot be met, by themselves or beside another lane's. Nothing was changed."""


class UnknownLane(BudgetError):
    """No lane has this name. Nothing was changed.

    :param lane: the name.
    """

    def __init__(self, lane: str) -> None:
        super().__init__(lane)
        self.lane = lane

    def __str__(self) -> str:
        named = shlex.quote(self.lane)
        return (
            f"no lane is called {self.lane!r}; see 'celery -A PROJ budget lane list', or make it: "
            f"'celery -A PROJ budget lane set {named} --queue QUEUE'"
        )


class HoldsOpen(BudgetError):
    """A change would leave holds behind that are still open. Nothing was changed.

    :param budget: the budget that was to be changed.
    :param change: what was to be done with it.
    :param holds: how many requests that have not ended draw on it.
    """

    def __init__(self, budget: str, change: str, holds: int) -> None:
        super().__init__(budget, change, holds)
        self.budget = budget
        self.change = change
        self.holds = holds

    def __str__(self) -> str:
        return (
            f"{self.change} of budget {self.budget!r} has to wait: {self.holds} of its requests "
            f"have not ended; let them end first with 'celery -A PROJ budget close "
            f"{shlex.quote(self.budget)} --drain'"
        )


class KeyConflict(BudgetError):
    """The key of a grant or an adjustment is in use for another one. Nothing was changed.

    :param key: the key that was given.
    :param what: what it is the key of.
    """

    def __init__(self, key: str, what: str) -> None:
        super().__init__(key, what)
        self.key = key
        self.what = what

    def __str__(self) -> str:
        return f"key {self.key!r} is that of another {self.what}; repeat that one, or use a new key"


class UnknownRequest(BudgetError, LookupError):
    """No request with this id was admitted or parked.

    :param some_id: the id that was looked for.
    """

    def __init__(self, some_id: str) -> None:
        super().__init__(some_id)
        self.some_id = some_id

    def __str__(self) -> str:
        return (
            f"no request {self.some_id!r} was admitted or parked; give the id of a task that was "
            "published to this ledger"
        )


class ResultNotReady(BudgetError):
    """A job has not ended, or what it came to is still being stored.

    :param task_id: its task.
    :param state: how it stands; see ``docs/jobs.md``.
    """

    def __init__(self, task_id: str, state: str) -> None:
        super().__init__(task_id, state)
        self.task_id = task_id
        self.state = state

    def __str__(self) -> str:
        return (
            f"task {self.task_id} is {self.state} and has no result yet; ask again later, or see "
            f"budget.job({self.task_id!r}, owner=...)"
        )


class ResultGone(BudgetError, LookupError):
    """A job has ended, and nobody has its result any more.

    :param task_id: its task.
    """

    def __init__(self, task_id: str) -> None:
        super().__init__(task_id)
        self.task_id = task_id

    def __str__(self) -> str:
        return (
            f"task {self.task_id} has ended, and its result is kept no more: budget_result_seconds "
            "are over, or the result backend has dropped it; run it again under a new request"
        )


class NotQuarantined(BudgetError, LookupError):
    """No message with this id is in quarantine. Nothing was changed.

    :param some_id: the id that was looked for.
    """

    def __init__(self, some_id: str) -> None:
        super().__init__(some_id)
        self.some_id = some_id

    def __str__(self) -> str:
        return (
            f"no message {self.some_id!r} is in quarantine; see 'celery -A PROJ budget quarantine "
            "list'"
        )


class NotParked(BudgetError, LookupError):
    """Nothing with this id is parked. Nothing was changed.

    :param some_id: the id that was looked for.
    """

    def __init__(self, some_id: str) -> None:
        super().__init__(some_id)
        self.some_id = some_id

    def __str__(self) -> str:
        return (
            f"nothing {self.some_id!r} is parked; see 'celery -A PROJ budget parked list', and "
            f"'celery -A PROJ budget explain {shlex.quote(self.some_id)}' for what became of it"
        )


class RequestEnding(BudgetError):
    """A request that failed cannot run again yet: its result is still to be stored.

    Nothing was changed.

    :param task_id: its task.
    """

    def __init__(self, task_id: str) -> None:
        super().__init__(task_id)
        self.task_id = task_id

    def __str__(self) -> str:
        return (
            f"task {self.task_id} has failed just now, and its result is being stored; try again "
            "in a moment, or where its worker is gone when its lease is over"
        )


class RequestRuns(BudgetError):
    """A request cannot be cancelled any more: it has ended. Nothing was changed.

    :param task_id: its task.
    :param state: how it ended.
    """

    def __init__(self, task_id: str, state: str) -> None:
        super().__init__(task_id, state)
        self.task_id = task_id
        self.state = state

    def __str__(self) -> str:
        return (
            f"task {self.task_id} has ended and cannot be cancelled: it is {self.state} (see "
            f"'celery -A PROJ budget explain {shlex.quote(self.task_id)}')"
        )


class MissingExtra(BudgetError):
    """Something needs a package that is not installed. Nothing was changed.

    :param what: what was to be done.
    :param extra: the extra of celery-budget that brings the package.
    """

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(what, extra)
        self.what = what
        self.extra = extra

    def __str__(self) -> str:
        return (
            f"{self.what} needs a package that is not installed: pip install "
            f"'celery-budget[{self.extra}]'"
        )


class UnknownPrice(BudgetError, LookupError):
    """There is no price for a model. Nothing was reserved.

    Where a reply was recorded: its other units were, and in money the estimate, flagged.

    :param model: the model's name; empty where none is known.
    :param provider: whose price was looked for; none for any.
    """

    def __init__(self, model: str, provider: str | None = None) -> None:
        super().__init__(model, provider)
        self.model = model
        self.provider = provider

    def __str__(self) -> str:
        if not self.model:
            return "the reply does not name its model, and has no price without; give model="
        of = f" of {self.provider!r}" if self.provider else ""
        return (
            f"there is no price for all that the model {self.model!r}{of} charges; give provider= "
            "where the name alone does not tell it, or set its price in budget_prices"
        )


class ReservationExhausted(BudgetError):
    """A task with ``stop_at_hold=True`` has used more than is reserved for it. All is recorded.

    :param budget: the budget of which it was more.
    :param unit: what that counts.
    :param used: how much the request has used.
    :param reserved: how much was reserved for it.
    """

    def __init__(self, budget: str, unit: str, used: int, reserved: int) -> None:
        super().__init__(budget, unit, used, reserved)
        self.budget = budget
        self.unit = unit
        self.used = used
        self.reserved = reserved

    def __str__(self) -> str:
        return (
            f"the task has used {self.used} {self.unit} of budget {self.budget!r}, and "
            f"{self.reserved} were reserved; it is recorded in full: stop, or reserve more with "
            "usage.extend"
        )


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
    """A request does not fit a budget. It reserved nothing and was not published.

    All amounts are integers in the budget's unit, as they were when the request was refused.

    :param budget: the budget that was short, of all the request draws on.
    :param unit: what it counts.
    :param requested: the amount the request asked for.
    :param available: ``limit - reserved - spent``; negative where more was used than allowed.
    :param limit: the budget's limit in force.
    :param reserved: held by requests that have not ended yet.
    :param spent: used for good.
    :param reason: ``exhausted`` (what is spent leaves no room), ``held`` (it would fit if what is
        held came back), ``queued`` (there is room, and a request that was parked before goes
        ahead), ``blocked`` (the limit is 0), ``draining`` or ``closed``.
    :param most: up to which total of reserved and spent this request could have filled the budget:
        the limit, or the part of it at which its soft or hard stop is.
    :param retry_after: in how many seconds it could fit at the earliest, with a part of chance, so
        that those who are refused together do not come back together; none where trying again makes
        no sense.
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
        reason: str,
        most: int,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(
            budget, unit, requested, available, limit, reserved, spent, reason, most, retry_after
        )
        self.budget = budget
        self.unit = unit
        self.requested = requested
        self.available = available
        self.limit = limit
        self.reserved = reserved
        self.spent = spent
        self.reason = reason
        self.most = most
        self.retry_after = retry_after

    def __str__(self) -> str:
        why = _REASONS.get(self.reason, self.reason)
        if self.reason == "exhausted" and self.requested > self.most:
            why = "can never hold that much"
        stop = ""
        if self.most < self.limit:
            stop = f", but work of this kind stops at a total of {self.most},"
        return (
            f"budget {self.budget!r} {why}: {self.available} of "
            f"{self.limit} {self.unit} available "
            f"({self.reserved} reserved, {self.spent} spent){stop} "
            f"and {self.requested} were requested; "
            f"see 'celery -A PROJ budget explain --budget {shlex.quote(self.budget)}'"
        )


_REASONS = {
    "exhausted": "is exhausted",
    "held": "is held by requests that have not ended",
    "queued": "is kept for a request that has waited for longer",
    "blocked": "is blocked by its limit",
    "draining": "is draining and takes nothing new",
    "closed": "is closed",
}


class ParkingFull(BudgetExceeded):
    """A request does not fit a budget, and as much is parked as ``budget_max_parked`` allows.

    It is not parked; nothing was changed.

    :param bound: the setting.
    :param refused: what :class:`BudgetExceeded` has; its attributes are these.
    """

    def __init__(self, bound: int, *refused: Any) -> None:
        super().__init__(*refused)
        self.args = (bound, *self.args)
        self.bound = bound

    def __str__(self) -> str:
        return (
            f"{super().__str__()}; it was not parked, since budget_max_parked ({self.bound}) "
            "requests are: see 'celery -A PROJ budget parked list'"
        )


class OutboxFull(BudgetError):
    """More messages wait to be published than ``budget_max_outbox`` allows. Nothing was changed.

    :param messages: how many waited when they were last counted.
    :param bound: the setting.
    :param retry_after: in how many seconds it makes sense to try again, at the earliest.
    """

    def __init__(self, messages: int, bound: int, retry_after: float | None = None) -> None:
        super().__init__(messages, bound, retry_after)
        self.messages = messages
        self.bound = bound
        self.retry_after = retry_after

    def __str__(self) -> str:
        return (
            f"{self.messages} messages wait to be published, and budget_max_outbox is "
            f"{self.bound}; see that a relay runs ('celery -A PROJ budget relay --health') and "
            "that it reaches the broker, then try again"
        )


class QueueFull(BudgetError):
    """A lane takes no more: enough waits in it, or no limit of it leaves room for this request.

    Nothing was reserved and nothing published.

    :param lane: the lane that feeds the request's queue.
    :param reason: ``jobs`` or ``units``: as many wait as may; ``heavy``: the request alone is more
        than may be queued, or run, at a time.
    :param weight: the units that the request weighs.
    :param waiting: how many jobs, or units, waited when they were last counted.
    :param bound: the lane's limit.
    :param retry_after: in how many seconds it makes sense to ask again; none where it does not.
    """

    def __init__(
        self,
        lane: str,
        reason: str,
        weight: int,
        waiting: int,
        bound: int,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(lane, reason, weight, waiting, bound, retry_after)
        self.retry_after = retry_after
        self.lane = lane
        self.reason = reason
        self.weight = weight
        self.waiting = waiting
        self.bound = bound

    def __str__(self) -> str:
        if self.reason == "heavy":
            return (
                f"a request of {self.weight} units is more than lane {self.lane!r} lets through at "
                f"a time, which is {self.bound}; make it smaller, or raise the lane's "
                "max_queued_units, max_running_units and max_waiting_units "
                f"('celery -A PROJ budget lane set {shlex.quote(self.lane)}')"
            )
        return (
            f"lane {self.lane!r} is full: {self.waiting} {self.reason} wait, and "
            f"max_waiting_{self.reason} is {self.bound}; try again later, or see what holds it "
            f"back: 'celery -A PROJ budget lane show {shlex.quote(self.lane)}'"
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


class AttemptsSpent(BudgetError):
    """A task is not run again: its attempts, or the time for them, are used up.

    Stored as its result where the last attempt left no error of its own.

    :param task_id: the task.
    :param attempts: how often it ran.
    :param reason: ``max_attempts``, ``retry_within`` or ``deadline``.
    """

    def __init__(self, task_id: str, attempts: int, reason: str) -> None:
        super().__init__(task_id, attempts, reason)
        self.task_id = task_id
        self.attempts = attempts
        self.reason = reason

    def __str__(self) -> str:
        named = shlex.quote(self.task_id)
        if self.reason == "deadline":
            return (
                f"task {self.task_id} is not run again after attempt {self.attempts}: its deadline "
                f"has passed; see 'celery -A PROJ budget explain {named}'"
            )
        return (
            f"task {self.task_id} is not run again after attempt {self.attempts}: {self.reason}= "
            f"of its task; see 'celery -A PROJ budget explain {named}', and run it again by "
            f"'celery -A PROJ budget quarantine requeue {named}'"
        )


class DeadlinePassed(BudgetError):
    """The deadline of a running task has passed; see ``usage.check``.

    :param reservation_id: the reservation it runs under.
    :param deadline: when that was, in ISO 8601.
    """

    def __init__(self, reservation_id: str, deadline: str) -> None:
        super().__init__(reservation_id, deadline)
        self.reservation_id = reservation_id
        self.deadline = deadline

    def __str__(self) -> str:
        return (
            f"the deadline of reservation {self.reservation_id} was {self.deadline}: nobody waits "
            "for it any more; stop, or give its calls a later deadline="
        )


class ClaimLost(BudgetError):
    """An attempt does not hold its request any more: another one has taken its place.

    :param reservation_id: the reservation it ran under.
    """

    def __init__(self, reservation_id: str) -> None:
        super().__init__(reservation_id)
        self.reservation_id = reservation_id

    def __str__(self) -> str:
        return (
            f"this attempt of reservation {self.reservation_id} lost its claim while it ran, and "
            "its outcome will be refused: stop; see 'celery -A PROJ budget explain "
            f"{shlex.quote(self.reservation_id)}'"
        )


class DistributionError(BudgetError):
    """The ledger cannot be distributed, or a distributed one is asked for several roots at once.

    :param message: what is missing or was asked for, and what to do.
    """


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


class ReplicaError(StoreError):
    """The database that reports are read from (``budget_report_url``) failed. The ledger goes on.

    Nothing is read from the ledger's own database instead, which has other work to do; who wants it
    says so.

    :param url: of that database, without its password.
    :param said: what it said.
    :param retryable: whether the same call may succeed later without any change.
    """

    def __init__(self, url: str, said: str, retryable: bool = False) -> None:
        super().__init__(said, retryable)
        self.args = (url, said, retryable)
        self.url = url

    def __str__(self) -> str:
        return (
            f"the replica {self.url} of budget_report_url: {self.message}. Admissions, workers and "
            "relays do not need it. Mend or start it, take budget_report_url out, or read from the "
            "ledger's own database: 'celery -A PROJ budget --primary ...', 'with budget.primary():'"
        )
