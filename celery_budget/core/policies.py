"""What a task declares about its budget, and its evaluation over the arguments of one call."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from celery_budget.core.amounts import check_amount, shown
from celery_budget.core.authority import Authorize, check_authorize
from celery_budget.core.budgets import check_own_name, check_text
from celery_budget.core.calls import bound_arguments, call, wanted
from celery_budget.core.deadlines import Deadline
from celery_budget.core.estimators import Estimator, estimators, is_reference, is_thrown_in
from celery_budget.core.losses import Losses
from celery_budget.core.parking import Parking
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
    :ivar estimate: the amount to reserve in that budget's unit: an integer, a callable of the
        arguments, an :class:`~celery_budget.Estimator` or the name of a registered one; none for
        the task's ``estimate=``.
    :ivar charge: ``used``: what the task records is charged and the rest returned; ``start``: the
        whole amount is charged when an attempt starts, and none of it comes back.
    """

    budget: str | ByArguments
    estimate: int | str | ByArguments | None = None
    charge: str = USED

    def __post_init__(self) -> None:
        if not isinstance(self.budget, str) and not callable(self.budget):
            raise PolicyError(
                f"budget= is {self.budget!r}; give a name, a template such as 'tenant:{{tenant}}', "
                "a callable of the task's arguments, or a list of those or of BudgetLine"
            )
        if self.estimate is not None:
            _check_estimate(self.estimate)
        if self.charge not in CHARGES:
            raise PolicyError(f"charge= is {self.charge!r}; give {' or '.join(map(repr, CHARGES))}")


@dataclass(frozen=True)
class Evaluation:
    """A policy over one call.

    :ivar lines: what it draws on; the first is its owner's.
    :ivar arguments: the bound arguments.
    :ivar prices: by which prices its estimates in money were made; none where none is.
    :ivar tenant: whose share of a lane it counts to; none for its owner's.
    """

    lines: tuple[Line, ...]
    arguments: Mapping[str, object]
    prices: str | None = None
    tenant: str | None = None

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
    :ivar estimate: the amount to reserve: an integer, a callable of the arguments, an
        :class:`~celery_budget.Estimator` or the name of a registered one; none where each line has
        its own.
    :ivar stage: what reports group by; none for the task's name.
    :ivar version: the estimator's version, shown beside its drift; none for its own.
    :ivar shadows: estimators that are asked as well, and whose answers are only kept.
    :ivar stop_at_hold: whether the task is stopped where it has used more than is reserved for it.
    :ivar retries: how long it is tried.
    :ivar losses: what becomes of its lost attempts.
    :ivar fair_by: whose share of a lane it counts to, as a name, a template or a callable; none for
        the budget's that is named first.
    :ivar deadline: when each call of it is to be over.
    :ivar reuse: for how long its calls join one of the same work.
    :ivar parking: what becomes of its calls that do not fit.
    :ivar fallback: the lanes that its calls are tried in, in this order; none for the queue that
        Celery routes them to.
    :ivar enforce: whether its calls are refused where they do not fit; none for the setting's.
    :ivar authorize: the rule that is asked whether its callers may draw on its budgets.
    :ivar lines: what it draws on, with all estimates.
    :raises PolicyError: for a declaration that cannot work.
    :raises InvalidAmount: for a constant estimate that is no amount.

    A callable gets those of the task's arguments that its parameters name, defaults included;
    one with ``**kwargs`` gets them all.
    """

    budget: str | ByArguments | Sequence[str | ByArguments | BudgetLine]
    estimate: int | str | ByArguments | None = None
    stage: str | None = None
    version: str | None = None
    stop_at_hold: bool = False
    retries: Retries = field(default_factory=Retries)
    losses: Losses = field(default_factory=Losses)
    fair_by: str | ByArguments | None = None
    deadline: Deadline | None = None
    reuse: Reuse | None = None
    shadows: Sequence[str | Estimator] = ()
    parking: Parking = field(default_factory=Parking)
    fallback: Sequence[str] | None = None
    enforce: bool | None = None
    authorize: Authorize | None = None
    lines: tuple[BudgetLine, ...] = field(init=False)

    def __post_init__(self) -> None:
        several = isinstance(self.budget, (list, tuple))
        given = list(self.budget) if isinstance(self.budget, (list, tuple)) else [self.budget]
        if not given:
            raise PolicyError("budget= is an empty list; name the budgets the task draws on")
        if not several:
            # A number that is no amount is an error here, not a missing one.
            _check_estimate(self.estimate)
        lines = tuple(self._line(one) for one in given)
        object.__setattr__(self, "lines", lines)
        if (self.stage is not None and type(self.stage) is not str) or self.stage == "":
            raise PolicyError(f"stage= is {self.stage!r}; give a name or leave it out")
        if type(self.stop_at_hold) is not bool:
            raise PolicyError(f"stop_at_hold= is {self.stop_at_hold!r}; give True or False")
        if self.enforce is not None and type(self.enforce) is not bool:
            raise PolicyError(
                f"enforce= is {self.enforce!r}; give True or False, or leave it out for the "
                "setting budget_enforce"
            )
        if not (self.fair_by is None or isinstance(self.fair_by, str) or callable(self.fair_by)):
            raise PolicyError(
                f"fair_by= is {self.fair_by!r}; give a name, a template such as '{{tenant}}', or a "
                "callable of the task's arguments"
            )
        object.__setattr__(self, "fallback", _checked_lanes(self.fallback))
        self.parking.check(self.lanes)
        check_authorize(self.authorize)
        self._check_versions()

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes of :attr:`fallback`."""
        return tuple(self.fallback or ())

    def _check_versions(self) -> None:
        own = self.lines[0].estimate
        if isinstance(own, Estimator) and self.version not in (None, own.version):
            raise PolicyError(
                f"the estimator is {own.key} and estimate_version= {self.version!r}; leave that out"
            )
        if isinstance(self.shadows, str) or not isinstance(self.shadows, Sequence):
            raise PolicyError(f"shadows= is {self.shadows!r}; give a list of estimators")
        for one in self.shadows:
            if not isinstance(one, Estimator) and not is_reference(one):
                raise PolicyError(
                    f"shadows= has {one!r}; give estimators, or the names of registered ones such "
                    "as 'draft:2'"
                )
        object.__setattr__(self, "shadows", tuple(self.shadows))

    def _line(self, given: Any) -> BudgetLine:
        line = given if isinstance(given, BudgetLine) else BudgetLine(given)
        if line.estimate is not None:
            return line
        if self.estimate is None:
            raise PolicyError(
                f"budget {line.budget!r} has no estimate; give it one of its own, or the task "
                "estimate="
            )
        _check_estimate(self.estimate)
        return replace(line, estimate=self.estimate)

    @property
    def estimator(self) -> str:
        """The name of the first line's estimator, kept with each estimate."""
        estimate = self._of(self.lines[0])
        if isinstance(estimate, Estimator):
            return estimate.name
        if callable(estimate):
            return str(getattr(estimate, "__qualname__", type(estimate).__name__))
        return "constant"

    @property
    def estimator_version(self) -> str:
        """The version of the first line's estimator."""
        estimate = self._of(self.lines[0])
        if isinstance(estimate, Estimator):
            return estimate.version
        return "1" if self.version is None else str(self.version)

    def _of(self, line: BudgetLine) -> Any:
        """Return what estimates a line; of a name, the estimator that is registered.

        :raises PolicyError: where none is.
        """
        if isinstance(line.estimate, str):
            # The task's version is that of its first line's, which it is told of.
            version = self.version if line is self.lines[0] else None
            aside = [one.key if isinstance(one, Estimator) else one for one in self.shadows]
            named = None if version is None else str(version)
            return estimators.find(line.estimate, named, aside)
        return line.estimate

    def check(self, task_name: str, signature: inspect.Signature) -> None:
        """Check that the policy can be evaluated for a task with this ``signature``.

        :raises PolicyError: when a template or a callable names what the task does not take.
        """
        known = set(signature.parameters)
        for line in self.lines:
            _check_named("budget", line.budget, task_name, known)
            _check_named("estimate", self._of(line), task_name, known)
        _check_named("fair_by", self.fair_by, task_name, known)

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
        :raises EstimateError: where an estimator raises, or gives what is out of its bounds.
        :raises InvalidAmount: where an estimate is not an amount.
        :raises InvalidName: where a name cannot be a budget's.
        :raises UnknownPrice, MissingExtra: where an estimate is in money and has no price.
        """
        try:
            arguments = bound_arguments(signature, args, kwargs)
        except TypeError as exc:
            raise PolicyError(
                f"the arguments do not fit {task_name}{signature}: {exc}"
                "; call it with those that it takes"
            ) from exc
        known = _known(task_name, arguments, unknown)
        lines: list[Line] = []
        prices: list[str | None] = []
        for line in self.lines:
            name = _name(line.budget, "the budget's name", task_name, known, check_own_name)
            amount, price = _estimate(self._of(line), task_name, known, pricing)
            lines.append(Line(name, amount, line.charge))
            prices.append(price)
        tenant = None
        if self.fair_by is not None:
            tenant = _name(self.fair_by, _TENANT, task_name, known, _checked_tenant)
        return Evaluation(tuple(lines), arguments, joined(prices), tenant)

    def shadow(
        self,
        shadow: str | Estimator,
        task_name: str,
        arguments: Mapping[str, object],
        unknown: type | None = None,
        pricing: Pricing | None = None,
    ) -> tuple[str, int]:
        """Return what one of :attr:`shadows` is known by, and what it would have promised.

        :param arguments: the bound arguments of an evaluation.
        :raises BudgetError: where it cannot be had, in every way in which :meth:`evaluate` fails.
        """
        one = shadow if isinstance(shadow, Estimator) else estimators.find(shadow)
        known = _known(task_name, arguments, unknown)
        return one.key, _estimate(one, task_name, known, pricing)[0]


#: What a policy's ``fair_by`` gives, in errors.
_TENANT = "what fair_by= gives"


def _checked_lanes(given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    if not isinstance(given, (list, tuple)) or not given:
        raise PolicyError(
            f"fallback= is {given!r}; give a list of lanes to try in order, at least one"
        )
    names = tuple(check_text(one, "a lane of fallback=") for one in given)
    if len(set(names)) < len(names):
        raise PolicyError(f"fallback= names a lane twice: {', '.join(names)}; name it once")
    return names


def _checked_tenant(name: object) -> str:
    return check_text(name, _TENANT)


def joined(prices: Iterable[str | None]) -> str | None:
    """Return by which prices several estimates were made, each named once; none for none."""
    return "; ".join(dict.fromkeys(filter(None, prices))) or None


def _known(
    task_name: str, arguments: Mapping[str, object], unknown: type | None
) -> Mapping[str, object]:
    return arguments if unknown is None else _Known(task_name, arguments, unknown)


def _check_estimate(estimate: object) -> None:
    if not callable(estimate) and not is_reference(estimate):
        check_amount(estimate, "estimate=")


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


def _check_named(what: str, value: object, task_name: str, known: set[str]) -> None:
    """Check that the arguments exist which a template, or a callable, names."""
    if isinstance(value, str):
        for field_name in _fields(what, task_name, value):
            if field_name not in known:
                raise PolicyError(
                    f"{what} {value!r} of {task_name} names {field_name!r}, "
                    f"which is not one of its arguments ({', '.join(sorted(known)) or 'none'})"
                    "; name one that it has"
                )
    elif callable(value):
        missing = [name for name in wanted(value)[0] if name not in known]
        if missing:
            raise PolicyError(
                f"the {what} of {task_name} wants {', '.join(missing)}, "
                f"which {task_name} does not take"
                "; let it want those that the task takes"
            )


def _name(
    template: str | ByArguments,
    what: str,
    task_name: str,
    arguments: Mapping[str, object],
    check: Callable[[object], str],
) -> str:
    try:
        if isinstance(template, str):
            name: object = template.format_map(arguments)
        else:
            name = call(template, arguments)
    except BudgetError:
        raise
    except Exception as exc:
        raise PolicyError(
            f"{what} for {task_name} cannot be worked out: {exc!r}"
            "; correct it, or call it with arguments that it can work on"
        ) from exc
    try:
        return check(name)
    except InvalidName as exc:
        raise InvalidName(f"{what} for {task_name} cannot be worked out: {exc}") from exc


def _estimate(
    estimator: Any, task_name: str, arguments: Mapping[str, object], pricing: Pricing | None
) -> tuple[int, str | None]:
    """Return an estimate, and by which prices it was made; none where it is not in money."""
    estimate, prices = estimator, None
    try:
        if callable(estimate):
            estimate = call(estimate, arguments)
        if isinstance(estimate, Cost):
            # Made for this very call.
            estimate = call(estimate, arguments)
        if isinstance(estimate, Unpriced):
            if pricing is None:
                raise PolicyError(
                    f"the estimate for {task_name} is in money; no price is known"
                    "; set prices in budget_prices"
                )
            priced = pricing(estimate)
            estimate, prices = priced.amount, priced.prices
    except BudgetError:
        raise
    except BaseException as exc:
        if is_thrown_in(exc):
            raise
        raise EstimateError(
            f"the estimator of {task_name} raised {shown(exc)}"
            "; correct it, or call the task with arguments that it can work on"
        ) from exc
    amount = check_amount(estimate, f"the estimate for {task_name}")
    if isinstance(estimator, Estimator):
        estimator.check(amount, task_name)
    return amount, prices


def _fields(what: str, task_name: str, template: str) -> list[str]:
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as exc:
        raise PolicyError(
            f"{what} {template!r} of {task_name} is no template: {exc}; correct it, and write "
            "'{{' and '}}' for braces that are part of a name"
        ) from exc
    # "{a.b[0]}" starts from the argument a.
    return [field.split(".")[0].split("[")[0] for _, field, _, _ in parts if field is not None]
