"""What a task declares about lost attempts: whether it runs again, whom to ask, what to undo."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from celery_budget.core.budgets import check_text
from celery_budget.core.identity import derived_id
from celery_budget.errors import PolicyError

__all__ = ["CHARGE", "Losses", "LostAttempt", "step_key"]

#: That a lost attempt is charged and no other one follows.
CHARGE = "charge"


@dataclass(frozen=True)
class LostAttempt:
    """An attempt whose worker went away, as ``lookup=`` and ``compensate=`` get it.

    :ivar task_id: Celery's id of the task.
    :ivar task_name: the task's name.
    :ivar args: its positional arguments.
    :ivar kwargs: its keyword arguments.
    :ivar attempt: which of the request's attempts it is, from 1 on.
    :ivar used: what it has recorded of each unit.
    :ivar reservation_id: the request in the ledger.
    """

    task_id: str
    task_name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    attempt: int
    used: Mapping[str, int]
    reservation_id: UUID

    def idempotency_key(self, step: str) -> str:
        """Return what :func:`celery_budget.usage.idempotency_key` returned to the attempt.

        :raises InvalidName: for what is no step.
        """
        return step_key(self.reservation_id, step)


def step_key(reservation_id: UUID, step: object) -> str:
    """Return the key of a step of a request, for calls to somebody else.

    :raises InvalidName: for what is no step.
    """
    return str(derived_id("step", str(reservation_id), check_text(step, "a step")))


@dataclass(frozen=True)
class Losses:
    """What a task declares about lost attempts; nothing, unless given.

    :ivar on_lost: :data:`CHARGE` where no attempt follows a lost one; none where one does if its
        message was to be acknowledged late.
    :ivar lookup: asks somebody else what a lost attempt has used.
    :ivar compensate: undoes, or reports, what a lost attempt may have done.
    :raises PolicyError: for what means nothing.
    """

    on_lost: str | None = None
    lookup: Callable[[LostAttempt], Any] | None = None
    compensate: Callable[[LostAttempt], object] | None = None

    def __post_init__(self) -> None:
        if self.on_lost not in (None, CHARGE):
            raise PolicyError(f"on_lost= is {self.on_lost!r}; give {CHARGE!r}, or leave it out")
        for name in ("lookup", "compensate"):
            given = getattr(self, name)
            if given is not None and not _takes_one(given):
                raise PolicyError(
                    f"{name}= is {given!r}; give a plain function of one argument, the lost "
                    "attempt, or leave it out"
                )

    @property
    def may_rerun(self) -> bool:
        """Whether another attempt may follow a lost one."""
        return self.on_lost is None

    @property
    def inquires(self) -> bool:
        """Whether a lost attempt is asked about, or undone, before anything follows it."""
        return self.lookup is not None or self.compensate is not None


def _takes_one(given: object) -> bool:
    """Tell whether something can be called with one argument, and does its work when it is.

    What is called for its coroutine, or its generator, would never be run. What does not tell its
    parameters is taken at its word.
    """
    if not callable(given):
        return False
    for one in (given, getattr(given, "__call__", None)):  # noqa: B004
        if (
            inspect.iscoroutinefunction(one)
            or inspect.isgeneratorfunction(one)
            or inspect.isasyncgenfunction(one)
        ):
            return False
    try:
        inspect.signature(given).bind(None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True
