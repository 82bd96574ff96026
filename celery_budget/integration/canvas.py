"""Groups, chords and chains: admitted as a whole where they are published as a whole.

Celery publishes a canvas one message after another. Its ``apply_async`` methods are wrapped here,
once for all applications: what they publish is one unit of one batch where the application has a
:class:`~celery_budget.CeleryBudget`. Nothing changes for those that have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from celery.canvas import _chain, _chord, group
from celery.result import GroupResult

from celery_budget.errors import PolicyError
from celery_budget.integration.batch import Batch, TurnedAway, current_batch, together
from celery_budget.integration.context import find_installed
from celery_budget.integration.ids import begins_with_budget, identified

__all__ = ["install"]

_ORIGINAL = "__celery_budget_original__"


def install() -> None:
    """Wrap the methods that publish a canvas; again changes nothing."""
    for kind, wrapped in ((group, _group), (_chain, _named), (_chord, _whole)):
        if not hasattr(kind.apply_async, _ORIGINAL):
            kind.apply_async = wrapped(kind.apply_async)


def _wrapping(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = wraps(original)(wrapper)
    setattr(wrapped, _ORIGINAL, original)
    return wrapped


def _named(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``request_id=`` name the canvas."""

    def apply_async(
        self: Any, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        if find_installed(self.app) is not None:
            self, options = _identify(self, args, kwargs, options)
        return original(self, args, kwargs, *rest, **options)

    return _wrapping(original, apply_async)


def _whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """As :func:`_named`, and admit all of a chord's header or nothing."""

    def apply_async(
        self: Any, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        app = self.app
        budget = find_installed(app)
        if budget is None:
            return original(self, args, kwargs, *rest, **options)
        if _taken(options, "partial"):
            raise PolicyError(
                "partial=True is not for a chord: its body waits for all of its header; publish a "
                "group, or leave partial out"
            )
        repeats = _has_request_id(self, options)
        self, options = _identify(self, args, kwargs, options)
        if app.conf.task_always_eager or not begins_with_budget(app, self):
            return original(self, args, kwargs, *rest, **options)
        with together(budget, repeats_whole=repeats):
            return original(self, args, kwargs, *rest, **options)

    return _wrapping(original, apply_async)


def _group(original: Callable[..., Any]) -> Callable[..., Any]:
    """As :func:`_named`, and admit all of a group or, with ``partial=True``, what fits."""

    def apply_async(
        self: Any, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        app = self.app
        budget = find_installed(app)
        if budget is None:
            return original(self, args, kwargs, *rest, **options)
        partial = _taken(options, "partial", self.options)
        repeats = _has_request_id(self, options)
        self, options = _identify(self, args, kwargs, options)
        if app.conf.task_always_eager or not begins_with_budget(app, self):
            return original(self, args, kwargs, *rest, **options)
        if not partial:
            with together(budget, repeats_whole=repeats):
                return original(self, args, kwargs, *rest, **options)
        if current_batch(budget) is not None:
            raise PolicyError(
                "a group with partial=True is decided at once, and what is published in a batch is "
                "decided at its end; give partial=True to the batch, or to the group outside of it"
            )
        with Batch(budget, budget.store, partial=True) as batch:
            result = original(self, args, kwargs, *rest, **options)
        return _without(app, result, batch.refused)

    return _wrapping(original, apply_async)


def _taken(options: dict[str, Any], name: str, more: dict[str, Any] | None = None) -> bool:
    value = options.pop(name, (more or {}).get(name, False))
    if type(value) is not bool:
        raise PolicyError(f"{name}= is {value!r}; give True or False")
    return value


def _has_request_id(canvas: Any, options: dict[str, Any]) -> bool:
    return options.get("request_id", canvas.options.get("request_id")) is not None


def _identify(
    canvas: Any, args: Any, kwargs: Any, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the canvas, its tasks named by its request id, if any, and options without that."""
    own = {name: value for name, value in options.items() if name != "request_id"}
    request_id = options.get("request_id", canvas.options.get("request_id"))
    if request_id is None:
        return canvas, own
    named = identified(canvas.app, canvas, request_id, tuple(args or ()), dict(kwargs or {}))
    dict.update(
        named,
        options={name: value for name, value in named.options.items() if name != "request_id"},
    )
    return named, own


def _without(app: Any, result: Any, refused: list[TurnedAway]) -> Any:
    """Return a group's result without the members that were refused, which it tells apart.

    Its ``refused`` says of each which task it was, and why.
    """
    gone = {one.task_id for one in refused}
    kept = [member for member in result.results if not gone.intersection(_ids(member))]
    left = result
    if len(kept) < len(result.results):
        left = app.GroupResult(result.id, kept, parent=result.parent)
        task = app.current_worker_task
        if task and task.request.children and task.request.children[-1] is result:
            task.request.children[-1] = left
    left.refused = tuple(refused)
    return left


def _ids(result: Any) -> Iterator[str]:
    """Yield the ids of all tasks that a member's result stands for."""
    node = result
    while node is not None:
        yield str(node.id)
        if isinstance(node, GroupResult):
            for member in node.results:
                yield from _ids(member)
        node = node.parent
