"""What a task declares about its budget, and its evaluation over the arguments of one call."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from celery_budget.core.amounts import check_amount
from celery_budget.core.budgets import check_own_name
from celery_budget.core.calls import call, wanted
from celery_budget.core.deadlines import Deadline
from celery_budget.core.losses import Losses
from celery_budget.core.prices import Cost, Pricing, Unpriced
from celery_budget.core.reservations import CHARGES, USED, Line
from celery_budget.core.retries import Retries
from celery_budget.core.reuse import Reuse
from celery_budget.errors import BudgetError, EstimateError, InvalidName, PolicyError

__all__ = ["BudgetLine", "BudgetPolicy", "Evaluation", "joined"]

#: A value, or a callable that gets the task's bound arguments it names.
ByArguments = Callable[..., Any]


@dataclass(frozen=True)
class BudgetLine:
    """One of several budgets that a task draws on, each with an estimate and a charge rule.

    :ivar budget: the budget's name, a template over the task's arguments or a callable of them, as
        for :func:`~celery_budget.budgeted`.
    :ivar estimate: the amount to reserve in that budget's unit: an integer or a callable of the
        arguments; none for the task's ``estimate=``.
    :ivar charge: ``used``: what the task records is charged and the rest returned; ``start``: the
        whole amount is charged when an attempt starts, and none of it comes back.
    """

    budget: str | ByArguments
    estimate: int | ByArguments | None = None
    charge: str = USED

    def __post_init__(self) -> None:
        if not isinstance(self.budget, str) and not callable(self.budget):
            raise PolicyError(
                f"budget= is {self.budget!r}; give a name, a template such as 'tenant:{{tenant}}', "
                "a callable of the task's arguments, or a list of those or of BudgetLine"
            )
        if self.estimate is not None and not callable(self.estimate):
            check_amount(self.estimate, "estimate=")
        if self.charge not in CHARGES:
            raise PolicyError(f"charge= is {self.charge!r}; give {' or '.join(map(repr, CHARGES))}")


@dataclass(frozen=True)
class Evaluation:
    """A policy over one call.

    :ivar lines: what it draws on; the first is its owner's.
    :ivar arguments: the bound arguments.
    :ivar prices: by which prices its estimates in money were made; none where none is.
    """

    lines: tuple[Line, ...]
    arguments: Mapping[str, object]
    prices: str | None = None

    @property
    def budget(self) -> str:
        """The budget named first: the owner."""
        return self.lines[0].budget

    @property
    def estimate(self) -> int:
        """The estimate for the budget named first."""
        return self.lines[0].amount


@dataclass(frozen=True)
class BudgetPolicy:
    """What ``@budgeted`` was given.

    :ivar budget: the budget's name: a template over the task's arguments
        (``"tenant:{tenant}"``) or a callable of them; or a list of those and of
        :class:`BudgetLine`.
    :ivar estimate: the amount to reserve: an integer or a callable of the arguments; none where
        each line has its own.
    :ivar stage: what reports group by; none for the task's name.
    :ivar version: the estimator's version, shown beside its drift.
    :ivar stop_at_hold: whether the task is stopped where it has used more than is reserved for it.
    :ivar retries: how long it is tried.
    :ivar losses: what becomes of its lost attempts.
    :ivar deadline: when each call of it is to be over.
    :ivar reuse: for how long its calls join one of the same work.
    :ivar lines: what it draws on, with all estimates.
    :raises PolicyError: for a declaration that cannot work.
    :raises InvalidAmount: for a constant estimate that is no amount.

    A callable gets those of the task's arguments that its parameters name, defaults included;
    one with ``**kwargs`` gets them all.
    """

    budget: str | ByArguments | Sequence[str | ByArguments | BudgetLine]
    estimate: int | ByArguments | None = None
    stage: str | None = None
    version: str = "1"
    stop_at_hold: bool = False
    retries: Retries = field(default_factory=Retries)
    losses: Losses = field(default_factory=Losses)
    deadline: Deadline | None = None
    reuse: Reuse | None = None
    lines: tuple[BudgetLine, ...] = field(init=False)

    def __post_init__(self) -> None:
        several = isinstance(self.budget, (list, tuple))
        given = list(self.budget) if isinstance(self.budget, (list, tuple)) else [self.budget]
        if not given:
            raise PolicyError("budget= is an empty list; name the budgets the task draws on")
        if not several:
            # A number that is no amount is an error here, not a missing one.
            self._check_estimate()
        lines = tuple(self._line(one) for one in given)
        object.__setattr__(self, "lines", lines)
        if (self.stage is not None and type(self.stage) is not str) or self.stage == "":
            raise PolicyError(f"stage= is {self.stage!r}; give a name or leave it out")
        if type(self.stop_at_hold) is not bool:
            raise PolicyError(f"stop_at_hold= is {self.stop_at_hold!r}; give True or False")

    def _check_estimate(self) -> None:
        if not callable(self.estimate):
            check_amount(self.estimate, "estimate=")

    def _line(self, given: Any) -> BudgetLine:
        line = given if isinstance(given, BudgetLine) else BudgetLine(given)
        if line.estimate is not None:
            return line
        if self.estimate is None:
            raise PolicyError(
                f"budget {line.budget!r} has no estimate; give it one of its own, or the task "
                "estimate="
            )
        self._check_estimate()
        return replace(line, estimate=self.estimate)

    @property
    def estimator(self) -> str:
        """The name of the first line's estimator, kept with each estimate."""
        estimate = self.lines[0].estimate
        if callable(estimate):
            return str(getattr(estimate, "__qualname__", type(estimate).__name__))
        return "constant"

    def check(self, task_name: str, signature: inspect.Signature) -> None:
        """Check that the policy can be evaluated for a task with this ``signature``.

        :raises PolicyError: when a template or a callable names what the task does not take.
        """
        known = set(signature.parameters)
        for line in self.lines:
            _check_line(line, task_name, known)

    def evaluate(
        self,
        task_name: str,
        signature: inspect.Signature,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        unknown: type | None = None,
        pricing: Pricing | None = None,
    ) -> Evaluation:
        """Work out the budgets and the estimates for one call.

        :param unknown: the type of what stands for arguments that are not known yet; nothing may
            depend on them.
        :param pricing: looks prices up, for estimates in money.
        :raises PolicyError: where the arguments do not fit the signature or a name fails.
        :raises EstimateError: where an estimator raises.
        :raises InvalidAmount: where an estimate is not an amount.
        :raises InvalidName: where a name cannot be a budget's.
        :raises UnknownPrice, MissingExtra: where an estimate is in money and has no price.
        """
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise PolicyError(f"the arguments do not fit {task_name}{signature}: {exc}") from exc
        bound.apply_defaults()
        arguments = bound.arguments
        known = arguments if unknown is None else _Known(task_name, arguments, unknown)
        lines: list[Line] = []
        prices: list[str | None] = []
        for line in self.lines:
            name = _name(line, task_name, known)
            amount, price = _estimate(line, task_name, known, pricing)
            lines.append(Line(name, amount, line.charge))
            prices.append(price)
        return Evaluation(tuple(lines), arguments, joined(prices))


def joined(prices: Iterable[str | None]) -> str | None:
    """Return by which prices several estimates were made, each named once; none for none."""
    return "; ".join(dict.fromkeys(filter(None, prices))) or None


class _Known(dict[str, object]):
    """Arguments of which some are not known yet: asking for one of those is an error."""

    def __init__(self, task_name: str, arguments: Mapping[str, object], unknown: type) -> None:
        super().__init__(arguments)
        self._task_name = task_name
        self._unknown = unknown

    def __getitem__(self, name: str) -> object:
        value = super().__getitem__(name)
        if isinstance(value, self._unknown):
            raise PolicyError(
                f"the budget of {self._task_name} depends on {name!r}, which is {value!r}; reserve "
                "the chain step by step, or have its budgets and estimates depend on what is known"
            )
        return value


def _check_line(line: BudgetLine, task_name: str, known: set[str]) -> None:
    if isinstance(line.budget, str):
        for field_name in _fields(task_name, line.budget):
            if field_name not in known:
                raise PolicyError(
                    f"budget {line.budget!r} of {task_name} names {field_name!r}, "
                    f"which is not one of its arguments ({', '.join(sorted(known)) or 'none'})"
                )
    for what, value in (("budget", line.budget), ("estimate", line.estimate)):
        if callable(value):
            missing = [name for name in wanted(value)[0] if name not in known]
            if missing:
                raise PolicyError(
                    f"the {what} of {task_name} wants {', '.join(missing)}, "
                    f"which {task_name} does not take"
                )


def _name(line: BudgetLine, task_name: str, arguments: Mapping[str, object]) -> str:
    try:
        if isinstance(line.budget, str):
            name: object = line.budget.format_map(arguments)
        else:
            name = call(line.budget, arguments)
    except BudgetError:
        raise
    except Exception as exc:
        raise PolicyError(
            f"the budget's name for {task_name} cannot be worked out: {exc!r}"
        ) from exc
    try:
        return check_own_name(name)
    except InvalidName as exc:
        raise InvalidName(f"the budget of {task_name} cannot be worked out: {exc}") from exc


def _estimate(
    line: BudgetLine, task_name: str, arguments: Mapping[str, object], pricing: Pricing | None
) -> tuple[int, str | None]:
    """Return an estimate, and by which prices it was made; none where it is not in money."""
    estimate: object = line.estimate
    try:
        if callable(estimate):
            estimate = call(estimate, arguments)
        if isinstance(estimate, Cost):
            # Made for this very call.
            estimate = call(estimate, arguments)
        if isinstance(estimate, Unpriced):
            if pricing is None:
                raise PolicyError(f"the estimate for {task_name} is in money; no price is known")
            priced = pricing(estimate)
            return check_amount(priced.amount, f"the estimate for {task_name}"), priced.prices
    except BudgetError:
        raise
    except Exception as exc:
        raise EstimateError(f"the estimator of {task_name} raised {exc!r}") from exc
    return check_amount(estimate, f"the estimate for {task_name}"), None


def _fields(task_name: str, template: str) -> list[str]:
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as exc:
        raise PolicyError(f"budget {template!r} of {task_name} is no template: {exc}") from exc
    # "{a.b[0]}" starts from the argument a.
    return [field.split(".")[0].split("[")[0] for _, field, _, _ in parts if field is not None]
