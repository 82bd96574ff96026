"""What a task declares about its budget, and its evaluation over the arguments of one call."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from celery_budget.core.amounts import check_amount
from celery_budget.core.budgets import check_name
from celery_budget.errors import BudgetError, EstimateError, InvalidName, PolicyError

__all__ = ["BudgetPolicy", "Evaluation"]

#: A value, or a callable that gets the task's bound arguments it names.
ByArguments = Callable[..., Any]


@dataclass(frozen=True)
class Evaluation:
    """A policy over one call: the budget drawn on, the estimate, and the bound arguments."""

    budget: str
    estimate: int
    arguments: Mapping[str, object]


@dataclass(frozen=True)
class BudgetPolicy:
    """What ``@budgeted`` was given.

    :ivar budget: the budget's name: a template over the task's arguments
        (``"tenant:{tenant}"``) or a callable of them.
    :ivar estimate: the amount to reserve: an integer or a callable of the arguments.
    :ivar stage: what reports group by; none for the task's name.
    :ivar version: the estimator's version, shown beside its drift.

    A callable gets those of the task's arguments that its parameters name, defaults included;
    one with ``**kwargs`` gets them all.
    """

    budget: str | ByArguments
    estimate: int | ByArguments
    stage: str | None = None
    version: str = "1"

    def __post_init__(self) -> None:
        if not isinstance(self.budget, str) and not callable(self.budget):
            raise PolicyError(
                f"budget= is {self.budget!r}; give a name, a template such as 'tenant:{{tenant}}' "
                "or a callable of the task's arguments"
            )
        if not callable(self.estimate):
            check_amount(self.estimate, "estimate=")
        if (self.stage is not None and type(self.stage) is not str) or self.stage == "":
            raise PolicyError(f"stage= is {self.stage!r}; give a name or leave it out")

    @property
    def estimator(self) -> str:
        """The estimator's name, kept with each estimate."""
        if callable(self.estimate):
            return str(getattr(self.estimate, "__qualname__", type(self.estimate).__name__))
        return "constant"

    def check(self, task_name: str, signature: inspect.Signature) -> None:
        """Check that the policy can be evaluated for a task with this ``signature``.

        :raises PolicyError: when a template or a callable names what the task does not take.
        """
        known = set(signature.parameters)
        if isinstance(self.budget, str):
            for field in _fields(task_name, self.budget):
                if field not in known:
                    raise PolicyError(
                        f"budget {self.budget!r} of {task_name} names {field!r}, "
                        f"which is not one of its arguments ({', '.join(sorted(known)) or 'none'})"
                    )
        for what, value in (("budget", self.budget), ("estimate", self.estimate)):
            if callable(value):
                missing = [name for name in _wanted(value)[0] if name not in known]
                if missing:
                    raise PolicyError(
                        f"the {what} of {task_name} wants {', '.join(missing)}, "
                        f"which {task_name} does not take"
                    )

    def evaluate(
        self,
        task_name: str,
        signature: inspect.Signature,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> Evaluation:
        """Work out the budget and the estimate for one call.

        :raises PolicyError: where the arguments do not fit the signature or the name fails.
        :raises EstimateError: where the estimator raises.
        :raises InvalidAmount: where the estimate is not an amount.
        :raises InvalidName: where the name cannot be a budget's.
        """
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise PolicyError(f"the arguments do not fit {task_name}{signature}: {exc}") from exc
        bound.apply_defaults()
        arguments = bound.arguments
        return Evaluation(
            self._name(task_name, arguments), self._estimate(task_name, arguments), arguments
        )

    def _name(self, task_name: str, arguments: Mapping[str, object]) -> str:
        try:
            if isinstance(self.budget, str):
                name: object = self.budget.format_map(arguments)
            else:
                name = _call(self.budget, arguments)
        except BudgetError:
            raise
        except Exception as exc:
            raise PolicyError(
                f"the budget's name for {task_name} cannot be worked out: {exc!r}"
            ) from exc
        try:
            return check_name(name)
        except InvalidName as exc:
            raise InvalidName(f"the budget of {task_name} cannot be worked out: {exc}") from exc

    def _estimate(self, task_name: str, arguments: Mapping[str, object]) -> int:
        estimate: object = self.estimate
        if callable(self.estimate):
            try:
                estimate = _call(self.estimate, arguments)
            except BudgetError:
                raise
            except Exception as exc:
                raise EstimateError(f"the estimator of {task_name} raised {exc!r}") from exc
        return check_amount(estimate, f"the estimate for {task_name}")


def _fields(task_name: str, template: str) -> list[str]:
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as exc:
        raise PolicyError(f"budget {template!r} of {task_name} is no template: {exc}") from exc
    # "{a.b[0]}" starts from the argument a.
    return [field.split(".")[0].split("[")[0] for _, field, _, _ in parts if field is not None]


def _wanted(function: ByArguments) -> tuple[list[str], list[str], bool]:
    """Return the names ``function`` needs, those it takes besides, and whether it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as exc:
        raise PolicyError(
            f"{function!r} does not tell its parameters; wrap it in a function that names the "
            "arguments it wants"
        ) from exc
    needed: list[str] = []
    optional: list[str] = []
    any_name = False
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            any_name = True
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            (needed if parameter.default is parameter.empty else optional).append(parameter.name)
    return needed, optional, any_name


def _call(function: ByArguments, arguments: Mapping[str, object]) -> object:
    needed, optional, any_name = _wanted(function)
    names = arguments if any_name else [*needed, *optional]
    by_name = {name: arguments[name] for name in names if name in arguments}
    positional = [
        by_name.pop(parameter.name)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.name in by_name
    ]
    return function(*positional, **by_name)
