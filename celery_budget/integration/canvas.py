"""Groups, chords and chains: admitted as a whole where they are published as a whole.

Celery publishes a canvas one message after another. Its ``apply_async`` methods are wrapped here,
once for all applications: what they publish is one unit of one batch where the application has a
:class:`~celery_budget.CeleryBudget`. Nothing changes for those that have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from celery.canvas import _chain, _chord, group
from celery.result import GroupResult

from celery_budget.core.deadlines import Deadline, earliest
from celery_budget.core.identity import derived_id
from celery_budget.core.parking import PARK
from celery_budget.errors import PolicyError
from celery_budget.integration.batch import Batch, TurnedAway, current_batch, together
from celery_budget.integration.chords import told_at_admission
from celery_budget.integration.context import find_installed
from celery_budget.integration.deadlines import UNTIL, until_us, with_until
from celery_budget.integration.ids import (
    begins_with_budget,
    check_parts,
    check_whole,
    identified,
    is_named,
)
from celery_budget.integration.terms import CANVAS

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = ["install"]

_ORIGINAL = "__celery_budget_original__"

#: The options that are for the whole, and not for its tasks.
OURS = ("request_id", "partial")


def install() -> None:
    """Wrap the methods that publish a canvas; again changes nothing."""
    for kind, wrapped in ((group, _group), (_chain, _named), (_chord, _whole)):
        if not hasattr(kind.apply_async, _ORIGINAL):
            kind.apply_async = wrapped(kind.apply_async)
    if not hasattr(_chord.freeze, _ORIGINAL):
        _chord.freeze = _frozen(_chord.freeze)


def _wrapping(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = wraps(original)(wrapper)
    setattr(wrapped, _ORIGINAL, original)
    return wrapped


@dataclass(frozen=True)
class _Given:
    """A canvas that is published, and what was said for it as a whole.

    :ivar canvas: the canvas, its tasks named if it has a request id; without the options below.
    """

    canvas: Any
    options: dict[str, Any]
    request_id: Any
    partial: bool
    reserve: Any


def _given(canvas: Any, args: Any, kwargs: Any, options: dict[str, Any]) -> _Given:
    """Take out what is said for the whole, which Celery would give to each of its tasks.

    :raises PolicyError: where that means nothing, or a part has a request id of its own.
    """
    app = canvas.app
    said = {name: options.get(name, canvas.options.get(name)) for name in (*OURS, "reserve")}
    rest = {name: value for name, value in options.items() if name not in OURS}
    partial = said["partial"]
    if partial is None and not ("partial" in options or "partial" in canvas.options):
        partial = False
    if type(partial) is not bool:
        raise PolicyError(f"partial= is {partial!r}; give True or False")
    on_refused = options.get("on_refused", canvas.options.get("on_refused"))
    if on_refused == PARK and isinstance(canvas, (group, _chord)) and not partial:
        raise PolicyError(
            "on_refused='park' is not for a group or a chord, which is admitted whole or refused: "
            "publish its tasks by themselves, or give a group partial=True as well, where each "
            "that does not fit waits"
        )
    if any(name in canvas.options for name in OURS):
        canvas = canvas.clone()
        canvas.options = {name: value for name, value in canvas.options.items() if name not in OURS}
    check_parts(app, canvas)
    if said["request_id"] is not None:
        given = tuple(args or ()), dict(kwargs or {})
        canvas = identified(app, canvas, said["request_id"], *given)
    return _Given(canvas, rest, said["request_id"], partial, said["reserve"])


def _named(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``request_id=`` name a chain, and ``reserve="chain"`` mean what it says."""

    def apply_async(
        self: Any, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        if find_installed(self.app) is None:
            return original(self, args, kwargs, *rest, **options)
        given = _given(self, args, kwargs, options)
        if given.partial:
            raise PolicyError(
                "partial=True is not for a chain: leave it out; it is admitted step by step, or "
                "whole with reserve='chain'"
            )
        if given.reserve is not None and not self.app.conf.task_always_eager:
            check_whole(self.app, given.canvas)
        return original(given.canvas, args, kwargs, *rest, **given.options)

    return _wrapping(original, apply_async)


def _whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``request_id=`` name a chord, and admit all of its header or nothing."""

    def apply_async(
        self: Any, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        app = self.app
        budget = find_installed(app)
        if budget is None:
            return original(self, args, kwargs, *rest, **options)
        given = _given(self, args, kwargs, options)
        if given.partial:
            raise PolicyError(
                "partial=True is not for a chord: its body waits for all of its header; publish a "
                "group, or leave partial out"
            )
        if given.reserve is not None:
            raise PolicyError(
                "reserve= is not for a chord: nobody can tell what its body needs before its "
                "header has ended; leave it out"
            )
        given = replace(given, canvas=_body_told(given.canvas, given.options))
        if not _is_collected(budget, given.canvas):
            return original(given.canvas, args, kwargs, *rest, **given.options)
        with _as_one(budget, given.canvas):
            return original(given.canvas, args, kwargs, *rest, **given.options)

    return _wrapping(original, apply_async)


def _body_told(canvas: Any, options: dict[str, Any]) -> Any:
    """Return a chord whose body is told of the deadline of the whole, that of its call.

    Where the result backend cannot count its members, a task without a budget publishes the body.
    """
    said = options.get("deadline", canvas.options.get("deadline"))
    deadline = Deadline.given(said, "a chord") or Deadline()
    until = earliest(until_us(deadline), options.get(UNTIL, canvas.options.get(UNTIL)))
    if until is None:
        return canvas
    told = canvas.clone()
    told.body = with_until(canvas.body, until)
    return told


def _frozen(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have a chord in a canvas with a request id give its group the same id each time."""

    def freeze(self: Any, *rest: Any, **options: Any) -> Any:
        if CANVAS in self.options and not isinstance(self.tasks, group):
            group_id = str(derived_id("header", self.options["task_id"]))
            self.tasks = group(self.tasks, app=self.app, task_id=group_id)
        return original(self, *rest, **options)

    return _wrapping(original, freeze)


def _group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``request_id=`` name a group; admit all of it or, with ``partial=True``, what fits."""

    def apply_async(
        self: Any, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        app = self.app
        budget = find_installed(app)
        if budget is None:
            return original(self, args, kwargs, *rest, **options)
        given = _given(self, args, kwargs, options)
        if not _is_collected(budget, given.canvas):
            result = original(given.canvas, args, kwargs, *rest, **given.options)
            return _without(app, result, []) if given.partial else result
        if not given.partial:
            with _as_one(budget, given.canvas):
                return original(given.canvas, args, kwargs, *rest, **given.options)
        if current_batch(budget) is not None:
            raise PolicyError(
                "a group with partial=True is decided at once, and what is published in a batch is "
                "decided at its end; give partial=True to the batch, or to the group outside of it"
            )
        with Batch(budget, budget.store, partial=True) as batch:
            result = original(given.canvas, args, kwargs, *rest, **given.options)
        return _without(app, result, batch.refused)

    return _wrapping(original, apply_async)


def _is_collected(budget: CeleryBudget, canvas: Any) -> bool:
    """Tell whether a canvas is admitted, and not published by Celery as ever."""
    if budget.app.conf.task_always_eager:
        return False
    return current_batch(budget) is not None or begins_with_budget(budget.app, canvas)


@contextmanager
def _as_one(budget: CeleryBudget, canvas: Any) -> Iterator[None]:
    """Have a canvas admitted as a whole and, where it has a request id, the backend told once."""
    with together(budget) as batch:
        named = is_named(canvas)
        with told_at_admission(budget.app.backend, batch) if named else nullcontext():
            yield


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
