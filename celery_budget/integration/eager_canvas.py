"""Canvases that run in place: their tasks' ids are those that they have when they are published.

Celery's ``apply`` gives a chain's id to each of its steps, by which they would be one request. It
is wrapped here, once for all applications; nothing changes for those without a
:class:`~celery_budget.CeleryBudget`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from celery.canvas import _chain, _chord, group

from celery_budget.integration.context import find_installed
from celery_budget.integration.ids import identified

__all__ = ["install"]

_ORIGINAL = "__celery_budget_original__"


def install() -> None:
    """Wrap the methods that run a canvas in place; again changes nothing."""
    for kind in (group, _chain, _chord):
        if not hasattr(kind.apply, _ORIGINAL):
            kind.apply = _wrapped(kind.apply)


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``request_id=`` name the canvas, and give a chain's id to its last step."""

    @wraps(original)
    def apply(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        if find_installed(self.app) is None:
            return original(self, args, kwargs, **options)
        request_id = options.pop("request_id", self.options.get("request_id"))
        if request_id is not None:
            self = _without(self, "request_id")
            self = identified(self.app, self, request_id, tuple(args or ()), dict(kwargs or {}))
        if isinstance(self, _chain):
            task_id = options.pop("task_id", self.options.get("task_id"))
            if task_id is not None and self.tasks:
                self = _without(self, "task_id")
                self.tasks[-1].set(task_id=task_id)
        return original(self, args, kwargs, **options)

    setattr(apply, _ORIGINAL, original)
    return apply


def _without(canvas: Any, option: str) -> Any:
    """Return a copy of a canvas that lacks one of its own options."""
    copy = canvas.clone()
    copy.options.pop(option, None)
    return copy
