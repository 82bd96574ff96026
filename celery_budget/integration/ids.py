"""Ids of tasks that Celery would give new ones each time: of links, and of a canvas as a whole."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from celery import Celery

from celery_budget.core.identity import checked_id, derived_id
from celery_budget.errors import PolicyError
from celery_budget.integration.inline import INLINE_TASKS, gated_task
from celery_budget.integration.task import policy_of
from celery_budget.integration.terms import CANVAS, terms_of

__all__ = [
    "begins_with_budget",
    "check_parts",
    "check_whole",
    "fix_link_ids",
    "identified",
    "is_named",
]

#: The kinds of signatures that are made of others.
CANVASES = ("chain", "group", "chord")

#: Gives the options of the task at a path in a canvas.
Options = Callable[[str, dict[str, Any]], dict[str, Any]]


def fix_link_ids(embed: dict[str, Any], reservation_id: uuid.UUID) -> dict[str, Any]:
    """Return a message's embedded signatures with an id for each link that has none.

    Celery gives callbacks a new id at each dispatch, so that a replay of the task would run them
    once more. Derived from the reservation, a link's id stays the same.
    """

    def options(path: str, given: dict[str, Any]) -> dict[str, Any]:
        return {"task_id": str(derived_id("link", str(reservation_id), path)), **given}

    fixed = dict(embed)
    for kind in ("callbacks", "errbacks"):
        signatures = fixed.get(kind)
        if signatures:
            fixed[kind] = [
                _with_options(signature, options, f"{kind}:{number}")
                for number, signature in enumerate(signatures)
            ]
    return fixed


def identified(
    app: Celery,
    canvas: Any,
    request_id: object,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Return a canvas whose tasks have ids that derive from ``request_id`` and their places in it.

    The same canvas under the same id is the same tasks once more. Request ids are an owner's: that
    of the first task with a budget among those that start first.

    :raises PolicyError: where what starts first has no budget and something later has.
    """
    named = checked_id("request_id", request_id)
    places = list(_places(canvas, ""))
    if not any(_has_budget(app, task) for _, task in places):
        return canvas
    first, owner = _beginning(app, canvas, args, kwargs or {})
    shape = json.dumps([(path, task["task"]) for path, task in places])
    made_of = hashlib.sha256(shape.encode()).hexdigest()
    whole = str(derived_id("canvas", owner, named))

    def options(path: str, given: dict[str, Any]) -> dict[str, Any]:
        # One task is the same in all canvases under this id, by which another one is found out.
        place = "first" if path == first else path
        task_id = str(derived_id("canvas", owner, named, place))
        return {"task_id": task_id, **given, CANVAS: [whole, made_of]}

    return _with_options(canvas, options, "")


def check_parts(app: Celery, canvas: Any) -> None:
    """Check that no part of a canvas with budgets has a request id of its own.

    :raises PolicyError: where one has: its id would be Celery's, and a repeat would run again.
    """
    if not any(_has_budget(app, task) for _, task in _places(canvas, "")):
        return
    for part in _parts(canvas):
        options = part.get("options") or {}
        if options.get("request_id") is not None:
            raise PolicyError(
                f"request id {options['request_id']!r} is on a part of a canvas, whose ids Celery "
                "makes; give request_id to the whole"
            )


def check_whole(app: Celery, canvas: Any) -> None:
    """Check that a chain can be reserved whole, as far as that is known before it is prepared.

    :raises PolicyError: where a step is no single task, or has no budget.
    """
    for number, step in enumerate(_steps(canvas), 1):
        if step.get("subtask_type") in CANVASES:
            raise PolicyError(
                f"step {number} of the chain is a {step['subtask_type']}; a chain that is reserved "
                "whole has single tasks only: leave reserve='chain' out to admit it step by step"
            )
        if not _has_budget(app, step):
            raise PolicyError(
                f"step {number} of the chain, {step['task']}, has no budget, and what follows it "
                "could not be given back where it fails: leave reserve='chain' out to admit it "
                "step by step"
            )


def _steps(canvas: Any) -> Iterator[Any]:
    for _, step in _members(canvas) or ():
        if step.get("subtask_type") == "chain":
            yield from _steps(step)
        else:
            yield step


def _parts(signature: Any) -> Iterator[Any]:
    """Yield all that a canvas is made of, at any depth."""
    for _, part in _members(signature) or ():
        yield part
        yield from _parts(part)


def begins_with_budget(app: Celery, canvas: Any) -> bool:
    """Tell whether any of the tasks that a canvas starts with has a budget."""
    return any(_has_budget(app, task) for _, task in _heads(canvas, ""))


def is_named(canvas: Any) -> bool:
    """Tell whether a canvas has a request id, or is part of one that has."""
    return any(CANVAS in task["options"] for _, task in _heads(canvas, ""))


def _has_budget(app: Celery, task: Any) -> bool:
    name = task["task"]
    if name in INLINE_TASKS:
        inline = gated_task(app, name)
        return inline is not None and inline.budget_draws(task["args"], task["kwargs"])
    return policy_of(app, name) is not None


def _beginning(
    app: Celery, canvas: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, str]:
    """Return the place and the first budget of the first task with one that a canvas starts with.

    :raises PolicyError: where it starts with none.
    """
    for path, task in _heads(canvas, ""):
        given = (
            (tuple(task["args"]), task["kwargs"])
            if task.get("immutable")
            else ((*args, *task["args"]), {**task["kwargs"], **kwargs})
        )
        terms = terms_of(app, task["task"], *given)
        if terms is not None:
            return path, terms.evaluation.budget
    raise PolicyError(
        "the request_id of a canvas is one of the budget that its first task names, and none of "
        "the tasks it starts with has a budget; have the canvas begin with one that has, or leave "
        "request_id out"
    )


def _heads(signature: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the tasks that a canvas starts with, and their places."""
    members = _members(signature)
    if members is None:
        yield path, signature
        return
    if signature["subtask_type"] == "chain":
        members = members[:1]
    for place, member in members:
        if place != "body":
            yield from _heads(member, f"{path}.{place}")


def _places(signature: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield all tasks of a canvas with their places."""
    members = _members(signature)
    if members is None:
        yield path, signature
    else:
        for place, member in members:
            yield from _places(member, f"{path}.{place}")


def _members(signature: Any) -> list[tuple[str, Any]] | None:
    """Return the members of a canvas with their places; none for a single task."""
    if signature.get("subtask_type") not in CANVASES:
        return None
    kwargs = signature.get("kwargs") or {}
    members: list[tuple[str, Any]] = []
    for key in ("tasks", "header"):
        of = kwargs.get(key)
        if isinstance(of, (list, tuple)):
            members.extend((f"{key}:{number}", one) for number, one in enumerate(of))
        elif of:
            members.append((key, of))
    if kwargs.get("body"):
        members.append(("body", kwargs["body"]))
    return members


def _with_options(signature: Any, options: Options, path: str) -> Any:
    """Return a copy of a signature and all it is made of, each with the options of its place."""
    if not isinstance(signature, dict):
        return signature
    fixed = type(signature).__new__(type(signature))
    if hasattr(signature, "__dict__"):
        # What it knows beside its items: its application and its task.
        vars(fixed).update(vars(signature))
    given = dict(signature.get("options") or {})
    dict.update(fixed, signature, options=options(path, given))
    members = _members(signature)
    if members:
        changed = {place: _with_options(one, options, f"{path}.{place}") for place, one in members}
        kwargs = dict(signature["kwargs"])
        for key in ("tasks", "header"):
            of = kwargs.get(key)
            if isinstance(of, (list, tuple)):
                kwargs[key] = [changed[f"{key}:{number}"] for number in range(len(of))]
            elif of:
                kwargs[key] = changed[key]
        if kwargs.get("body"):
            kwargs["body"] = changed["body"]
        dict.update(fixed, kwargs=kwargs)
    return fixed
