"""Budgeted tasks: the base class, the decorator in all its places, and their policies."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    overload,
)

from celery import Celery, Task
from celery._state import (
    _get_active_apps,
    _set_current_app,
    _tls,
    connect_on_app_finalize,
    get_current_app,
)
from celery.local import PromiseProxy, Proxy

from celery_budget import metering
from celery_budget.core.authority import Authorize
from celery_budget.core.calls import bound_arguments
from celery_budget.core.deadlines import Deadline
from celery_budget.core.estimators import Estimator
from celery_budget.core.identity import fingerprint
from celery_budget.core.losses import Losses, LostAttempt
from celery_budget.core.parking import Parking
from celery_budget.core.policies import BudgetLine, BudgetPolicy
from celery_budget.core.prices import Cost, Priced, Unpriced
from celery_budget.core.retries import Retries
from celery_budget.core.reuse import Reuse
from celery_budget.core.terms import Terms
from celery_budget.errors import PolicyError
from celery_budget.integration.context import installed_on
from celery_budget.integration.gated import GatedTask
from celery_budget.integration.shadows import ask_shadows

if TYPE_CHECKING:
    from celery.canvas import Signature
    from celery.result import AsyncResult, EagerResult

__all__ = [
    "BudgetedTask",
    "budgeted",
    "budgeted_task",
    "find_task",
    "policy_of",
    "recast",
    "signature_of",
    "upgrade_marked",
]

P = ParamSpec("P")
R = TypeVar("R")

#: What names a budget: text, a template, or a callable of the task's arguments.
Drawn = str | Callable[..., str]
#: What tells how much is reserved.
Promised = int | str | Callable[..., int] | Estimator | Cost

#: Where a function carries the policy of the task that is made of it.
MARK = "__budget_policy__"
#: Where it carries those of tasks that had been made of it, by their names: Celery makes the same
#: tasks in other applications.
MARKS = "__budget_policies__"


class BudgetedTask(GatedTask):
    """A task that draws on a budget.

    Set ``budget`` and ``estimate``, and if you like ``stage``, ``estimate_version``, ``shadows``,
    ``stop_at_hold``, ``max_attempts``, ``retry_within``, ``terminal``, ``on_lost``, ``lookup``,
    ``compensate``, ``fair_by``, ``deadline``, ``on_refused``, ``park_for``, ``fallback``,
    ``enforce``, ``authorize``, ``reuse`` and ``version``, as class attributes or as options of
    ``@app.task(base=BudgetedTask, …)``; they mean what they mean to :func:`budgeted`. Its message
    is reserved before it is dispatched, its attempt is claimed before its body runs, and what it
    used is settled before anything follows from it. A subclass with a ``__call__`` or a ``retry``
    of its own has to call this one. A task without ``budget`` and ``estimate`` is an error when it
    is first used, and when a worker starts.
    """

    abstract = True

    if TYPE_CHECKING:
        # Not there unless a class, or its task decorator, sets them.
        budget: Any
        estimate: Any
        stage: str | None
        estimate_version: str | None
        shadows: Sequence[str | Estimator]
        stop_at_hold: bool
        max_attempts: int | None
        retry_within: float | None
        terminal: type[Exception] | Sequence[type[Exception]]
        on_lost: str | None
        lookup: Any
        compensate: Any
        fair_by: Any
        deadline: float | datetime | None
        on_refused: str | None
        park_for: float | None
        fallback: Sequence[str] | None
        enforce: bool | None
        authorize: Any
        reuse: str | float | timedelta | None
        version: str | int

    #: The policy, made of the attributes above; none for a base class that sets no budget.
    budget_policy: BudgetPolicy | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Not getattr: a callable must not become a method.
        budget = inspect.getattr_static(cls, "budget", None)
        estimate = inspect.getattr_static(cls, "estimate", None)
        if "budget_policy" in cls.__dict__ or (budget is None and estimate is None):
            return
        several = isinstance(budget, (list, tuple))
        if budget is None or (estimate is None and not several):
            missing = "budget" if budget is None else "estimate"
            raise PolicyError(
                f"{cls.__name__} is a budgeted task without {missing}=; declare it at the task"
            )
        cls.budget_policy = BudgetPolicy(
            _plain(budget),
            _plain(estimate),
            cls.__dict__.get("stage", getattr(cls, "stage", None)),
            getattr(cls, "estimate_version", None),
            getattr(cls, "stop_at_hold", False),
            Retries(
                getattr(cls, "max_attempts", None),
                getattr(cls, "retry_within", None),
                getattr(cls, "terminal", ()),
            ),
            Losses(
                getattr(cls, "on_lost", None),
                _plain(inspect.getattr_static(cls, "lookup", None)),
                _plain(inspect.getattr_static(cls, "compensate", None)),
            ),
            fair_by=_plain(inspect.getattr_static(cls, "fair_by", None)),
            deadline=Deadline.given(getattr(cls, "deadline", None), cls.__name__),
            shadows=getattr(cls, "shadows", ()),
            parking=Parking(getattr(cls, "on_refused", None), getattr(cls, "park_for", None)),
            fallback=getattr(cls, "fallback", None),
            enforce=getattr(cls, "enforce", None),
            authorize=_plain(inspect.getattr_static(cls, "authorize", None)),
            reuse=Reuse.given(getattr(cls, "reuse", None), getattr(cls, "version", "1")),
        )

    def budget_draws(self, args: Any, kwargs: Any) -> bool:
        _policy(self)
        return True

    def budget_terms(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], unknown: type | None = None
    ) -> Terms:
        policy = _policy(self)
        evaluation = policy.evaluate(
            self.name, signature_of(self), tuple(args), kwargs, unknown, self._price
        )
        return Terms(
            policy.stage or self.name,
            policy.estimator,
            policy.estimator_version,
            evaluation,
            fingerprint(self.name, evaluation.arguments),
            deadline=policy.deadline,
            parking=policy.parking,
            fallback=policy.lanes,
            enforced=self.budget_enforced((), {}),
            authorize=policy.authorize,
            ask_shadows=functools.partial(
                ask_shadows, policy, self.name, evaluation.arguments, unknown, self._price
            ),
        )

    def budget_stops_at_hold(self, args: Any, kwargs: Any) -> bool:
        return _policy(self).stop_at_hold and self.budget_enforced(args, kwargs)

    def budget_enforced(self, args: Any, kwargs: Any) -> bool:
        own = _policy(self).enforce
        return installed_on(self.app).settings.enforce if own is None else own

    def budget_retries(self, args: Any, kwargs: Any) -> Retries:
        return _policy(self).retries

    def budget_losses(self, args: Any, kwargs: Any) -> Losses:
        return _policy(self).losses

    def budget_authorize(self, args: Any, kwargs: Any) -> Authorize | None:
        return _policy(self).authorize

    def budget_arguments(self, args: Any, kwargs: Any) -> Mapping[str, Any]:
        return bound_arguments(signature_of(self), tuple(args), kwargs)

    def budget_reuses(self) -> bool:
        return _policy(self).reuse is not None

    def _price(self, what: Unpriced) -> Priced:
        return metering.price(what, installed_on(self.app).settings.prices)


def _plain(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod) else value


class _Made(Protocol):
    """A task as some decorator has made it, whose own type stays."""

    @property
    def delay(self) -> Callable[..., Any]: ...
    @property
    def apply_async(self) -> Callable[..., Any]: ...


Made = TypeVar("Made", bound=_Made)


class _Decorator(Protocol):
    """What ``@budgeted(…)`` is to what it stands on."""

    @overload
    def __call__(self, target: Made, /) -> Made: ...
    @overload
    def __call__(self, target: Callable[P, R], /) -> BudgetedFunction[P, R]: ...


class _BoundDecorator(Protocol):
    """The same with ``bind=True``: callers do not give the task, its function's first argument."""

    def __call__(self, target: Callable[Concatenate[Any, P], R], /) -> BudgetedFunction[P, R]: ...


@overload
def budgeted(
    *,
    budget: Drawn | Sequence[Drawn | BudgetLine],
    estimate: Promised | None = None,
    stage: str | None = None,
    estimate_version: str | None = None,
    shadows: Sequence[str | Estimator] = (),
    stop_at_hold: bool = False,
    max_attempts: int | None = None,
    retry_within: float | None = None,
    terminal: type[Exception] | Sequence[type[Exception]] = (),
    on_lost: str | None = None,
    lookup: Callable[[LostAttempt], Any] | None = None,
    compensate: Callable[[LostAttempt], object] | None = None,
    fair_by: Drawn | None = None,
    deadline: float | datetime | None = None,
    reuse: str | float | timedelta | None = None,
    version: str | int = "1",
    on_refused: str | None = None,
    park_for: float | None = None,
    fallback: Sequence[str] | None = None,
    enforce: bool | None = None,
    authorize: Authorize | None = None,
    bind: Literal[True],
    **task_options: Any,
) -> _BoundDecorator: ...
@overload
def budgeted(
    *,
    budget: Drawn | Sequence[Drawn | BudgetLine],
    estimate: Promised | None = None,
    stage: str | None = None,
    estimate_version: str | None = None,
    shadows: Sequence[str | Estimator] = (),
    stop_at_hold: bool = False,
    max_attempts: int | None = None,
    retry_within: float | None = None,
    terminal: type[Exception] | Sequence[type[Exception]] = (),
    on_lost: str | None = None,
    lookup: Callable[[LostAttempt], Any] | None = None,
    compensate: Callable[[LostAttempt], object] | None = None,
    fair_by: Drawn | None = None,
    deadline: float | datetime | None = None,
    reuse: str | float | timedelta | None = None,
    version: str | int = "1",
    on_refused: str | None = None,
    park_for: float | None = None,
    fallback: Sequence[str] | None = None,
    enforce: bool | None = None,
    authorize: Authorize | None = None,
    bind: Literal[False] = ...,
    **task_options: Any,
) -> _Decorator: ...
@overload
def budgeted(
    target: Made, /, *, budget: Drawn | Sequence[Drawn | BudgetLine], **terms: Any
) -> Made: ...
@overload
def budgeted(
    target: Callable[P, R], /, *, budget: Drawn | Sequence[Drawn | BudgetLine], **terms: Any
) -> BudgetedFunction[P, R]: ...
def budgeted(
    target: Any = None,
    /,
    *,
    budget: Drawn | Sequence[Drawn | BudgetLine],
    estimate: Promised | None = None,
    stage: str | None = None,
    estimate_version: str | None = None,
    shadows: Sequence[str | Estimator] = (),
    stop_at_hold: bool = False,
    max_attempts: int | None = None,
    retry_within: float | None = None,
    terminal: type[Exception] | Sequence[type[Exception]] = (),
    on_lost: str | None = None,
    lookup: Callable[[LostAttempt], Any] | None = None,
    compensate: Callable[[LostAttempt], object] | None = None,
    fair_by: Drawn | None = None,
    deadline: float | datetime | None = None,
    reuse: str | float | timedelta | None = None,
    version: str | int = "1",
    on_refused: str | None = None,
    park_for: float | None = None,
    fallback: Sequence[str] | None = None,
    enforce: bool | None = None,
    authorize: Authorize | None = None,
    **task_options: Any,
) -> Any:
    """Give a task a budget.

    Above or beneath ``@app.task`` or ``@shared_task``, or alone on a function, where it equals
    ``@shared_task(base=BudgetedTask, …)`` and takes that decorator's options as well.

    :param budget: the budget's name, a template over the task's arguments
        (``"tenant:{tenant}"``) or a callable of those it names. A list of those, or of
        :class:`~celery_budget.BudgetLine` where they differ in estimate or charge rule, draws on
        all of them or on none; the first is the request's owner.
    :param estimate: the amount to reserve before dispatch: an integer in the budget's unit, a
        callable of the arguments it names, an :class:`~celery_budget.Estimator`, or the name of one
        that is registered, with its version or without: ``"draft:2"``.
    :param stage: what reports group by; the task's name unless given.
    :param estimate_version: tells versions of the estimator apart in reports; of a registered one,
        which of its versions it is.
    :param shadows: estimators, or names of registered ones, that are asked for each request as
        well. What they would have promised is kept beside the estimate and shown in reports;
        nothing is reserved by it, and where one fails nothing is kept of it.
    :param stop_at_hold: whether a record by which the task has used more than is reserved for it
        raises ``ReservationExhausted``, when it is made.
    :param max_attempts: how often one request runs in all: retries, and runs after a lost worker or
        a rejected delivery, included.
    :param retry_within: for how many seconds from the start of the first attempt another one may
        start.
    :param terminal: errors after which it is not retried, whatever ``autoretry_for`` or the task
        itself says. With any of the three a request that fails is kept in quarantine.
    :param on_lost: ``"charge"`` where no attempt follows one whose worker went away: it is charged
        the greater of recorded and estimated. Otherwise one follows where the message is
        acknowledged late.
    :param lookup: asks somebody else what a lost attempt has used, before anything follows it. It
        gets a :class:`~celery_budget.LostAttempt` and returns what that used in all: an amount, a
        mapping of units to amounts, a provider's reply or a list of those; or none while nobody can
        tell, and is called again until ``budget_lookup_seconds`` are over.
    :param compensate: undoes, or reports, what a lost attempt may have done that no ``lookup`` has
        confirmed. It gets the same, and is called again where it raises.
    :param fair_by: whose share of a lane the request counts to: a name, a template over the task's
        arguments or a callable of those it names; the name of the first budget unless given.
    :param deadline: when all of a request is to be over, its waiting, attempts and retries
        together: seconds from its call, or a datetime with a time zone. The call's own
        ``deadline=`` counts before it.
    :param reuse: for how long after its end a run is joined by calls of the same owner with the
        same arguments, as they join one in flight: ``"24h"``, seconds or a timedelta. One run, one
        reservation, one task id; its result is kept in the ledger meanwhile.
    :param version: of what the task does, for ``reuse``: calls of another one do not join.
    :param on_refused: ``"park"`` where a call that does not fit waits for budget instead of raising
        ``BudgetExceeded``; ``apply_async(on_refused=…)`` says otherwise for one call.
    :param park_for: for how many seconds at most; ``budget_park_seconds`` unless given.
    :param fallback: names of lanes, tried in this order in one admission: a request draws on the
        lane's budgets beside its own, and goes to the lane's queue. What the last one refuses is
        refused, or with ``on_refused="park"`` waits for that one.
    :param enforce: ``False`` where calls that do not fit are admitted all the same, over the limit,
        and counted as what would have been refused; ``True`` where they are refused whatever
        ``budget_enforce`` says, which counts unless this is given.
    :param authorize: asked with a :class:`~celery_budget.Draw` before anything is written: whether
        whoever publishes a call may draw on the budgets that its arguments name. What is false, or
        raised, is a ``NotAuthorized``. ``budget_authorize`` is asked as well, and both have to
        allow it.
    :raises PolicyError: for a declaration that cannot work.
    :raises InvalidAmount: for a constant estimate that is no amount.
    """
    retries = Retries(max_attempts, retry_within, terminal)  # type: ignore[arg-type]
    losses = Losses(on_lost, lookup, compensate)
    policy = BudgetPolicy(
        budget,
        estimate,
        stage,
        estimate_version,
        stop_at_hold,
        retries,
        losses,
        fair_by=fair_by,
        deadline=Deadline.given(deadline, "a task"),
        shadows=shadows,
        parking=Parking(on_refused, park_for),
        fallback=fallback,
        enforce=enforce,
        reuse=Reuse.given(reuse, version),
        authorize=authorize,
    )

    def decorate(target: Any) -> Any:
        # type() and not isinstance(): a proxy claims the class of what it stands for, and would
        # have to make it for that.
        is_proxy = issubclass(type(target), Proxy)
        if task_options and (is_proxy or isinstance(target, Task)):
            raise PolicyError(
                f"@budgeted does not take {', '.join(task_options)} above a task decorator; give "
                "task options to that one"
            )
        if is_proxy:
            _upgrade_later(target, policy)
            return target
        if isinstance(target, Task):
            _upgrade_made(target, policy)
            return target
        if not callable(target):
            raise PolicyError(
                f"@budgeted is for functions and tasks, not for {target!r}; put it above one"
            )
        return BudgetedFunction(target, policy, task_options)

    return decorate if target is None else decorate(target)


class BudgetedFunction(Generic[P, R]):
    """What ``@budgeted`` makes of a plain function.

    To a task decorator above it, it is that function, with a mark that gives the task its budget.
    To everybody else it is the shared task of that function, made in the current application when
    it is first needed.
    """

    #: Every one there is: a worker makes the tasks of those that no decorator has taken.
    made: ClassVar[list[BudgetedFunction[..., Any]]] = []

    if TYPE_CHECKING:
        # Its task's, with the function's own arguments; all else of it is of any type.
        name: str

        def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]: ...
        def s(self, *args: Any, **kwargs: Any) -> Signature[R]: ...
        def si(self, *args: P.args, **kwargs: P.kwargs) -> Signature[R]: ...
        def signature(
            self, args: Any = None, kwargs: Any = None, **options: Any
        ) -> Signature[R]: ...
        def apply_async(
            self,
            args: Sequence[Any] | None = None,
            kwargs: Mapping[str, Any] | None = None,
            **options: Any,
        ) -> AsyncResult[R]: ...
        def apply(
            self,
            args: Sequence[Any] | None = None,
            kwargs: Mapping[str, Any] | None = None,
            **options: Any,
        ) -> EagerResult[R]: ...

    def __init__(
        self, function: Callable[P, R], policy: BudgetPolicy, options: dict[str, Any]
    ) -> None:
        functools.update_wrapper(self, function)
        setattr(self, MARK, policy)
        setattr(function, MARK, policy)
        self._function = function
        self._options = options
        # Celery takes an object's signature from its __call__, and the name in what it says of
        # wrong arguments from its class.
        self.__dict__["__call__"] = function
        self.__class__ = type(function.__name__, (BudgetedFunction,), {})
        BudgetedFunction.made.append(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        call = self.task_in(get_current_app()) if self._options.get("bind") else self._function
        result: R = call(*args, **kwargs)
        return result

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self._function.__get__(instance, owner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return getattr(self.task_in(get_current_app()), name)

    def __repr__(self) -> str:
        return f"<budgeted {self.__qualname__}>"

    def task_in(self, app: Celery) -> Any:
        """Return the function's task in ``app``: the one a decorator made, or a shared one."""
        app.finalize(auto=True)
        for task in list(app.tasks.values()):
            if _function_of(task) in (self, self._function):
                _upgrade_if_marked(task)
                return task
        return self._make(app)

    def _make(self, app: Celery) -> Any:
        policy: BudgetPolicy = getattr(self, MARK)
        # Not shared with other applications: in one of them a decorator may have made, or be
        # about to make, a task of this function with options of its own.
        options = {"base": BudgetedTask, **self._options, "lazy": False, "shared": False}
        task = app.task(**options)(self._function)
        _upgrade(task, policy)
        return task


def _function_of(task: Any) -> Any:
    return getattr(type(task), "__wrapped__", None)


def find_task(app: Celery, name: str) -> Any:
    """Return the task ``name``; none where it is not known here."""
    if app.finalized or app.autofinalize:
        return app.tasks.get(name)
    return app._tasks.get(name)


def budgeted_task(app: Celery, name: str) -> BudgetedTask | None:
    """Return the task ``name`` if it has a budget; none where it has none or is not known here."""
    task = find_task(app, name)
    if task is not None and not isinstance(task, BudgetedTask):
        _upgrade_if_marked(task)
    return task if isinstance(task, BudgetedTask) else None


def policy_of(app: Celery, name: str) -> BudgetPolicy | None:
    """Return the policy of the task ``name``; none where it has none or is not known here."""
    task = budgeted_task(app, name)
    return None if task is None else _policy(task)


def _policy(task: Any) -> BudgetPolicy:
    """Return the policy of a budgeted task.

    :raises PolicyError: where its class was given none: forgetting it must not lift the budget.
    """
    policy: BudgetPolicy | None = type(task).budget_policy
    if policy is None:
        _upgrade_if_marked(task)
        policy = type(task).budget_policy
    if policy is None:
        raise PolicyError(
            f"task {task.name} has the base BudgetedTask and neither budget= nor estimate=; "
            "give both, or another base"
        )
    return policy


def signature_of(task: Any) -> inspect.Signature:
    """Return the signature that a task's arguments are bound by, without ``self``.

    :raises PolicyError: where the task's policy names what it does not take.
    """
    cached = type(task).__dict__.get("_budget_signature")
    if cached is None:
        cached = inspect.signature(task.run)
        _policy(task).check(task.name, cached)
        type(task)._budget_signature = cached
    result: inspect.Signature = cached
    return result


def upgrade_marked(app: Celery) -> None:
    """Give every task of ``app`` whose function is marked its budget, and make what is missing."""
    for task in list(app.tasks.values()):
        if not isinstance(task, BudgetedTask):
            _upgrade_if_marked(task)
    for function in BudgetedFunction.made:
        function.task_in(app)


def _upgrade_if_marked(task: Any) -> None:
    function = _function_of(task)
    policy = getattr(function, MARKS, {}).get(task.name) or getattr(function, MARK, None)
    if policy is not None:
        _upgrade(task, policy)


def _upgrade(task: Any, policy: BudgetPolicy) -> None:
    """Turn an existing task into a budgeted one, in place."""
    if type(task).__dict__.get("budget_policy") is not policy:
        recast(task, BudgetedTask, budget_policy=policy)


def recast(task: Any, base: type[GatedTask], **attributes: Any) -> None:
    """Give an existing task a class with ``base`` in it, in place: it may be referred to already.

    What it had from its own classes stays, beneath ``base``: a ``__call__`` or an ``apply_async``
    of theirs must not pass by claim or gate.
    """
    cls = type(task)
    attributes["__module__"] = cls.__module__
    if issubclass(cls, base):
        bases: tuple[type, ...] = (cls,)
    else:
        bases = (base, cls)
        if cls.Request is not Task.Request:
            attributes["Request"] = cls.Request
    task.__class__ = type(cls.__name__, bases, attributes)
    # Celery may have built its tracer around the class before.
    task.__trace__ = None


def _upgrade_made(task: Any, policy: BudgetPolicy) -> None:
    """Upgrade a task that Celery's decorator has made, and mark its function for the others."""
    _upgrade(task, policy)
    function = _function_of(task)
    if function is not None:
        marks = getattr(function, MARKS, {})
        setattr(function, MARKS, {**marks, task.name: policy})


def _upgrade_later(proxy: Any, policy: BudgetPolicy) -> None:
    """Upgrade what a proxy stands for as soon as it exists; evaluating it now would be too early.

    ``@app.task`` gives a promise that tells when it is kept; ``@shared_task`` a proxy that finds
    its task in whatever application is current.
    """
    if issubclass(type(proxy), PromiseProxy):
        proxy.__then__(lambda: _upgrade_made(proxy._get_current_object(), policy))
        return

    def upgrade_in(app: Celery) -> None:
        current = _tls.current_app
        app.set_current()
        try:
            _upgrade(proxy._get_current_object(), policy)
        finally:
            _set_current_app(current)

    def upgrade_when_final(app: Celery) -> None:
        # The order among these callbacks is not fixed; after all of them the task is there.
        app.on_after_finalize.connect(lambda **_: upgrade_in(app), weak=False)

    connect_on_app_finalize(upgrade_when_final)
    for app in list(_get_active_apps()):
        if app.finalized:
            upgrade_in(app)


def _upgrade_when_final(app: Celery) -> None:
    app.on_after_finalize.connect(lambda **_: upgrade_marked(app), weak=False)


connect_on_app_finalize(_upgrade_when_final)
