"""What tasks have in common whose calls may be under a budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Task
from celery.exceptions import Reject

from celery_budget.core.authority import Authorize
from celery_budget.core.losses import Losses
from celery_budget.core.retries import Retries
from celery_budget.core.terms import Terms
from celery_budget.errors import NotAuthorized
from celery_budget.integration import eager
from celery_budget.integration.batch import by_itself
from celery_budget.integration.context import attempt_of, installed_on
from celery_budget.integration.execution import execute, guarded, say_started
from celery_budget.integration.retries import check_retry

__all__ = ["GatedTask"]


class GatedTask(Task):
    """A task whose calls may be under a budget: reserved, claimed on entry and settled on exit."""

    abstract = True
    Request = "celery_budget.integration.worker:BudgetRequest"

    def budget_draws(self, args: Any, kwargs: Any) -> bool:
        """Tell whether a call with these arguments is under a budget.

        :raises PolicyError: where that cannot be told.
        """
        raise NotImplementedError

    def budget_terms(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], unknown: type | None = None
    ) -> Terms | None:
        """Return what a call with these arguments asks for; none where it is under no budget.

        :param unknown: the type of what stands for arguments that are not known yet.
        :raises PolicyError, EstimateError, InvalidAmount, InvalidName: where it cannot be worked
            out.
        """
        raise NotImplementedError

    def budget_stops_at_hold(self, args: Any, kwargs: Any) -> bool:
        """Tell whether such a call stops where it has used more than is held for it."""
        return False

    def budget_enforced(self, args: Any, kwargs: Any) -> bool:
        """Tell whether such a call is refused, or waits, where it does not fit."""
        return True

    def budget_retries(self, args: Any, kwargs: Any) -> Retries:
        """Return how long such a call is tried."""
        return Retries()

    def budget_losses(self, args: Any, kwargs: Any) -> Losses:
        """Return what becomes of such a call's lost attempts."""
        return Losses()

    def budget_authorize(self, args: Any, kwargs: Any) -> Authorize | None:
        """Return the rule by which such a call may draw on budgets; none where it has none."""
        return None

    def budget_arguments(self, args: Any, kwargs: Any) -> Mapping[str, Any]:
        """Return the arguments of a call by their names, as far as they are known by them."""
        return dict(kwargs)

    def budget_reuses(self) -> bool:
        """Tell whether others may join such a call, so that its result is to be kept."""
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        following = super().__call__
        # A task that calls itself finds the request that it runs by, and that has its attempt.
        if self.request.called_directly or attempt_of(self.request) is not None:
            return following(*args, **kwargs)
        # Celery's own would hide the request under a new one; its tracer passes it over, too.
        body = self.run if following.__func__ is Task.__call__ else following
        if not self.budget_draws(args, kwargs):
            say_started(self.request)
            return body(*args, **kwargs)
        return execute(self, body, args, kwargs)

    @property
    def backend(self) -> Any:
        """The result backend; in a worker one that stores nothing but an attempt's outcome."""
        return guarded(Task.backend.fget(self))

    @backend.setter
    def backend(self, value: Any) -> None:
        self._backend = value

    def apply_async(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        """Publish a message of this task; see :meth:`celery.app.task.Task.apply_async`.

        With ``task_always_eager`` it runs at once, as by :meth:`apply`.

        :raises NotInstalled: where its application has no gate that could reserve it.
        :raises PolicyError: where it has no budget.
        """
        if self.budget_draws(args or (), kwargs or {}):
            installed_on(self.app).check_gate()
            if "request_id" in options and self.app.conf.task_always_eager:
                options = eager.with_task_id(self, args or (), kwargs or {}, rest, options)
        return super().apply_async(args, kwargs, *rest, **options)

    def apply(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        """Run this task in place; see :meth:`celery.app.task.Task.apply`.

        It is reserved and claimed first, and settled when its call has ended. The options
        ``request_id`` and ``finishing`` mean what they mean to :meth:`apply_async`; a request that
        was made before does not run again.

        :raises BudgetExceeded, UnknownBudget, RequestConflict, StoreError: it did not run. Also for
            a retry, which is settled then at what it has used.
        """
        following = super().apply
        if not self.budget_draws(args or (), kwargs or {}):
            return following(args, kwargs, *rest, **options)
        return eager.apply(self, following, tuple(args or ()), dict(kwargs or {}), rest, options)

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: Any = None,
        throw: bool = True,
        eta: Any = None,
        countdown: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """Retry this task; see :meth:`celery.app.task.Task.retry`.

        Where its policy lets no attempt follow, it does what Celery does beyond ``max_retries``: no
        message is written, and ``exc`` or the error that is being handled is raised.
        """
        if not self.request.called_directly:
            check_retry(self, exc, eta, countdown)
        try:
            return super().retry(args, kwargs, exc, throw, eta, countdown, *rest, **options)
        except Reject as rejected:
            # What Celery makes of every error of a publication; this one is the task's to see.
            if isinstance(rejected.reason, NotAuthorized):
                raise rejected.reason from rejected
            raise

    def on_replace(self, sig: Any) -> Any:
        """Run, or publish, what takes this task's place; in place the task is settled first.

        In no batch that is open: the task ends with it, whatever becomes of the batch.
        """
        if self.request.is_eager:
            eager.replaced(self.request)
        with by_itself():
            return super().on_replace(sig)
