"""Celery's map and starmap, which run another task's body for each item, inside one message.

They are under a budget where the task that they call has one: what all items ask for is reserved
for the one message, and settled on it. ``chunks`` publishes a group of starmaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from celery import Celery
from celery._state import _get_active_apps, connect_on_app_finalize

from celery_budget.core.authority import Authorize
from celery_budget.core.losses import Losses
from celery_budget.core.retries import Retries
from celery_budget.core.terms import Terms, summed
from celery_budget.errors import PolicyError
from celery_budget.integration.gated import GatedTask
from celery_budget.integration.task import budgeted_task, find_task, recast

__all__ = ["INLINE_TASKS", "InlineTask", "gated_task", "upgrade_inline"]


class InlineTask(GatedTask):
    """Celery's own task that calls another one for each item.

    Of the signature that it is given Celery uses the task alone: neither its arguments nor its
    options. Without items nothing is called: such a message asks for nothing, and is under no
    budget.
    """

    abstract = True

    #: Whether an item is all the arguments of its call, and not the only one.
    unpacks: bool = False

    def budget_draws(self, args: Any, kwargs: Any) -> bool:
        inner, items = self._inner(args, kwargs)
        return inner is not None and any(
            inner.budget_draws(call, {}) for call in self._calls(items)
        )

    def budget_terms(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], unknown: type | None = None
    ) -> Terms | None:
        inner, items = self._inner(args, kwargs)
        if inner is None:
            return None
        calls = list(self._calls(items))
        terms = [inner.budget_terms(call, {}, unknown) for call in calls]
        drawing = [one for one in terms if one is not None]
        if not drawing:
            return None
        return summed(self.name, drawing, {"task": inner.name, "items": calls})

    def budget_stops_at_hold(self, args: Any, kwargs: Any) -> bool:
        inner, _ = self._inner(args, kwargs)
        return inner is not None and inner.budget_stops_at_hold((), {})

    def budget_enforced(self, args: Any, kwargs: Any) -> bool:
        inner, _ = self._inner(args, kwargs)
        return inner is None or inner.budget_enforced((), {})

    def budget_retries(self, args: Any, kwargs: Any) -> Retries:
        inner, _ = self._inner(args, kwargs)
        return Retries() if inner is None else inner.budget_retries((), {})

    def budget_losses(self, args: Any, kwargs: Any) -> Losses:
        # Whom to ask is told with the arguments of one call; here are those of many.
        inner, _ = self._inner(args, kwargs)
        return Losses() if inner is None else Losses(inner.budget_losses((), {}).on_lost)

    def budget_authorize(self, args: Any, kwargs: Any) -> Authorize | None:
        inner, _ = self._inner(args, kwargs)
        return None if inner is None else inner.budget_authorize((), {})

    def apply(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        given = _given(args or (), kwargs or {})
        if isinstance(given.get("it"), Iterable):
            # Looked at for its estimates and again by its body.
            given["it"] = list(given["it"])
        return super().apply((), given, *rest, **options)

    def _inner(self, args: Any, kwargs: Any) -> tuple[GatedTask | None, Any]:
        """Return the task that is called, if its calls may be under a budget, and the items."""
        given = _given(args, kwargs)
        called = given.get("task")
        name = called.get("task") if isinstance(called, dict) else getattr(called, "name", called)
        inner = gated_task(self.app, name) if isinstance(name, str) else None
        return inner, given.get("it")

    def _calls(self, items: Any) -> Iterable[tuple[Any, ...]]:
        """Yield the arguments of each call.

        :raises PolicyError: for items that Celery could not go through.
        """
        if not isinstance(items, Iterable):
            raise PolicyError(f"{self.name} goes through the items of {items!r}; give a list")
        for item in items:
            if not self.unpacks:
                yield (item,)
            elif isinstance(item, Iterable):
                yield tuple(item)
            else:
                raise PolicyError(
                    f"an item of {self.name} is all the arguments of one call; {item!r} is none"
                    "; give a tuple of them"
                )


class _StarmapTask(InlineTask):
    abstract = True
    unpacks = True


#: Celery's own tasks that run another task's body inside their message.
INLINE_TASKS: dict[str, type[InlineTask]] = {
    "celery.map": InlineTask,
    "celery.starmap": _StarmapTask,
}


def _given(args: Any, kwargs: Any) -> dict[str, Any]:
    return {**dict(zip(("task", "it"), args, strict=False)), **kwargs}


def gated_task(app: Celery, name: str) -> GatedTask | None:
    """Return the task ``name`` if its calls may be under a budget; none otherwise."""
    if name not in INLINE_TASKS:
        return budgeted_task(app, name)
    task = find_task(app, name)
    if task is not None and not isinstance(task, InlineTask):
        recast(task, INLINE_TASKS[name])
    return task if isinstance(task, InlineTask) else None


def upgrade_inline(app: Celery) -> None:
    """Have an application's map and starmap ask for what their items ask for."""
    for name in INLINE_TASKS:
        gated_task(app, name)


def _upgrade_when_final(app: Celery) -> None:
    app.on_after_finalize.connect(lambda **_: upgrade_inline(app), weak=False)


connect_on_app_finalize(_upgrade_when_final)
for _app in list(_get_active_apps()):
    if _app.finalized:
        upgrade_inline(_app)
