"""Who may draw on a budget: what an application's own rule is asked, and for whom.

Budgets are named by a task's arguments, and those come from whoever calls. The rule is asked before
anything is written; only what it allows is admitted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from celery_budget.core.estimators import is_thrown_in
from celery_budget.errors import NotAuthorized, PolicyError

__all__ = ["Authorize", "Draw", "ask", "calling", "check_authorize", "current_caller"]


@dataclass(frozen=True)
class Draw:
    """What ``authorize=`` is asked: whether this caller may draw on these budgets.

    :ivar task: the task's name.
    :ivar budgets: the estimates by the names of the budgets, those of a lane included; the owner
        first. Budgets above them are charged as well, and not named here.
    :ivar caller: what :func:`calling` was given; none where nobody has said it: in a worker, a
        script, beat.
    :ivar kind: ``new``; ``retry`` or ``continuation`` of running work; ``turn`` of a running task
        to a lane; ``delivered`` of a message that a worker has received without a reservation.
    :ivar running: the budgets that the request draws on which this follows from, or which publishes
        it; nothing where there is none.
    :ivar arguments: the task's arguments by their names; not part of its text.
    """

    task: str
    budgets: Mapping[str, int]
    caller: Any
    kind: str
    running: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)


#: A rule: allows a draw by what is true.
Authorize = Callable[[Draw], Any]

_caller: ContextVar[Any] = ContextVar("budget_caller", default=None)


@contextmanager
def calling(caller: Any) -> Iterator[None]:
    """Say for whom all is published inside of a block: what ``authorize=`` gets as the caller.

    In this thread or asyncio task, and in those that are started with its context, as by
    :func:`asyncio.to_thread`. It is not part of any message, nor kept in the ledger.

    :param caller: whatever the application knows its callers by.
    """
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)


def current_caller() -> Any:
    """Return for whom is published here; none where nobody has said it."""
    return _caller.get()


def check_authorize(rule: Any, what: str = "authorize=") -> None:
    """Check that a rule can be called, and answers at once.

    :raises PolicyError: where it cannot, or is a coroutine function, whose answer would be true
        before it was asked.
    """
    if rule is None:
        return
    if not callable(rule):
        raise PolicyError(f"{what} is {rule!r}; give a function that takes a Draw")
    if inspect.iscoroutinefunction(rule) or inspect.iscoroutinefunction(
        getattr(rule, "__call__", None)  # noqa: B004 - an object whose call is asynchronous
    ):
        raise PolicyError(
            f"{what} is {rule!r}, a coroutine function; it is asked in the thread that publishes, "
            "which waits for the answer: give a function that is not async"
        )


def ask(rules: Sequence[Authorize], draw: Draw) -> None:
    """Ask each rule; all have to allow it.

    :raises NotAuthorized: where one does not, by a false answer or by raising. What ends the
        process, or the time of a task, passes.
    """
    for rule in rules:
        reason = _refusal(rule, draw)
        if reason is not None:
            raise NotAuthorized(draw.task, list(draw.budgets), reason)


def _refusal(rule: Authorize, draw: Draw) -> str | None:
    try:
        answer = rule(draw)
        if inspect.isawaitable(answer):
            close = getattr(answer, "close", None)
            if close is not None:
                close()
            return "it has answered with something to be awaited"
        if inspect.isgenerator(answer) or inspect.isasyncgen(answer):
            return "it has answered with a generator"
        return None if answer else "refused"
    except NotAuthorized:
        raise
    except BaseException as error:
        if is_thrown_in(error):
            raise
        raise NotAuthorized(
            draw.task, list(draw.budgets), f"it raised {type(error).__name__}"
        ) from error
