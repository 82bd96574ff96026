"""Publications that are collected and admitted together: those of a canvas, or of a block of code.

The gate adds to the innermost batch that is open in its context. What belongs together (all that
one canvas publishes) is one unit: admitted as a whole, or not at all.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from celery.exceptions import Ignore

from celery_budget import admission, tracing
from celery_budget.admission import Publication, Transactions
from celery_budget.core.reservations import Reserved, Skipped
from celery_budget.errors import BudgetError, PolicyError
from celery_budget.integration.context import current_attempt
from celery_budget.integration.results import BackendResults
from celery_budget.store import Connection, Stop, Store
from celery_budget.store.batch import TURNED_AWAY
from celery_budget.store.requests import error_of
from celery_budget.tracing import Span

if TYPE_CHECKING:
    from typing_extensions import Self

    from celery_budget.integration.install import CeleryBudget

__all__ = ["Batch", "TurnedAway", "as_unit", "by_itself", "current_batch", "together"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class TurnedAway:
    """One of several publications that was not admitted, and why.

    :ivar task_id: the id that its task would have had.
    """

    task_id: str
    task_name: str
    error: BudgetError


@dataclass(frozen=True)
class _Scope:
    """A batch that is open in this context, and the unit that is."""

    batch: Batch
    unit: int | None


_scopes: ContextVar[tuple[_Scope, ...]] = ContextVar("budget_batches", default=())


class Batch:
    """A block whose publications are admitted together when it ends.

    Results are returned at once, and mean nothing until then: where the block ends with a refusal,
    or any error, nothing was reserved and nothing will be published. Threads that were started
    with this context (:func:`asyncio.to_thread` does) add to it as well.

    :ivar refused: with ``partial``, what was not admitted.
    :ivar parent: the reservation whose running attempt publishes all of it, if it is to be known.
    """

    def __init__(
        self,
        budget: CeleryBudget,
        transactions: Transactions,
        *,
        partial: bool = False,
        parent: uuid.UUID | None = None,
    ) -> None:
        if type(partial) is not bool:
            raise PolicyError(f"partial= is {partial!r}; give True or False")
        self.refused: list[TurnedAway] = []
        self.budget = budget
        self.parent = parent
        self._transactions = transactions
        self._partial = partial
        self._waiting: list[Publication] = []
        self._units = itertools.count(1)
        self._lock = threading.Lock()
        self._entered_once = False
        self._ended = False

    def __enter__(self) -> Self:
        if self._entered_once:
            raise PolicyError("a batch is one block; open another one for another block")
        self._entered_once = True
        _scopes.set((*_scopes.get(), _Scope(self, None)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()
        if _went_well(error):
            self.admit()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Of this task's context; the thread that admits has a copy of it.
        self._leave()
        if _went_well(error):
            await asyncio.to_thread(self.admit)

    def _leave(self) -> None:
        with self._lock:
            self._ended = True
        _scopes.set(tuple(scope for scope in _scopes.get() if scope.batch is not self))

    @property
    def ended(self) -> bool:
        """Whether its block has ended, so that nobody would admit what is added."""
        return self._ended

    def add(self, publication: Publication) -> None:
        """Take one more publication of the unit that is open; by itself it is one.

        :raises PolicyError: where the block has ended meanwhile, in another thread.
        """
        with as_unit(self) as unit, self._lock:
            if self._ended:
                raise PolicyError(
                    "the batch that this was to be admitted in has ended; see that what publishes "
                    "in a block is over before the block is"
                )
            self._waiting.append(replace(publication, unit=unit))

    def asked(self) -> Counter[str]:
        """Return how much of each budget is asked for by what waits."""
        asked: Counter[str] = Counter()
        with self._lock:
            for one in self._waiting:
                for line in one.request.lines if one.request else ():
                    asked[line.budget] += line.amount
        return asked

    def admit(self, unit: int | None = None) -> None:
        """Admit what was collected since, in one transaction: all, or none and the first error.

        With ``partial`` whatever unit fits; the others are :attr:`refused`. What continues work
        that runs is parked where it does not fit, and never an error.

        :param unit: only this one; the others wait on.
        :raises BudgetExceeded, UnknownBudget, RequestConflict, OutboxFull, QueueFull: nothing was
            changed.
        :raises StoreError: nothing is known to have been changed.
        """
        waiting = self._take(unit)
        transactions = self._transactions
        if transactions is self.budget.store and any(one.continuation for one in waiting):
            # A fault of the store must not become a failure of what has just finished.
            attempt = current_attempt(self.budget.app)
            transactions = _WaitedOut(self.budget.store, attempt.stop if attempt else None)
        if not waiting:
            return
        traced = tracing.of(self.budget.settings)
        with traced.span("budget.admit", "internal", links=[one.trace for one in waiting]) as span:
            span.set(messages=len(waiting))
            self._decide(transactions, waiting, span)

    def _decide(self, transactions: Transactions, waiting: list[Publication], span: Span) -> None:
        outcomes = admission.admit_many(
            transactions, self.budget.settings, waiting, partial=self._partial
        )
        span.set(admitted=sum(isinstance(outcome, Reserved) for outcome in outcomes))
        for one, outcome in zip(waiting, outcomes, strict=True):
            if one.request is None or not isinstance(outcome, (*TURNED_AWAY, Skipped)):
                continue
            error = error_of(outcome)
            if one.continuation:
                BackendResults(self.budget.app).failed(one.request.task_id, error)
            elif self._partial:
                self.refused.append(TurnedAway(one.request.task_id, one.request.task_name, error))
            else:
                raise error

    def _take(self, unit: int | None) -> list[Publication]:
        """Take out what waits, or what waits of one unit."""
        with self._lock:
            taken = [one for one in self._waiting if unit in (None, one.unit)]
            self._waiting = [one for one in self._waiting if unit not in (None, one.unit)]
        return taken

    def forget(self, unit: int) -> None:
        """Drop what a unit has collected: the block that published it has failed."""
        self._take(unit)

    def unit_ended(self, unit: int) -> None:
        """Do what is to be done when a unit is complete; here it waits for the block's end."""


def current_batch(budget: CeleryBudget) -> Batch | None:
    """Return the innermost batch of ``budget`` that is open in this context; none without one."""
    for scope in reversed(_scopes.get()):
        if scope.batch.budget is budget and not scope.batch.ended:
            return scope.batch
    return None


@contextmanager
def by_itself() -> Iterator[None]:
    """Have what is published inside be part of no batch that is open in this context."""
    token = _scopes.set(())
    try:
        yield
    finally:
        _scopes.reset(token)


def _went_well(error: BaseException | None) -> bool:
    """Tell whether a block's end is none that undoes it: a task that is replaced ends by Ignore."""
    return error is None or isinstance(error, Ignore)


@contextmanager
def as_unit(batch: Batch) -> Iterator[int]:
    """Have all that is published inside admitted as a whole, or not at all; yield its number."""
    scopes = _scopes.get()
    for scope in reversed(scopes):
        if scope.batch is batch and scope.unit is not None:
            # Part of a greater one.
            yield scope.unit
            return
    unit = next(batch._units)
    token = _scopes.set((*scopes, _Scope(batch, unit)))
    try:
        yield unit
    except BaseException:
        batch.forget(unit)
        raise
    finally:
        _scopes.reset(token)
    batch.unit_ended(unit)


@contextmanager
def together(budget: CeleryBudget) -> Iterator[Batch]:
    """Have all that is published inside admitted as a whole, in the batch that is open, if any."""
    batch = current_batch(budget)
    if batch is None:
        with Batch(budget, budget.store) as batch, as_unit(batch):
            yield batch
    else:
        with as_unit(batch):
            yield batch


class _WaitedOut:
    """The store's transactions, waiting for as long as the store's fault may pass."""

    def __init__(self, store: Store, stop: Stop | None) -> None:
        self._store = store
        self._stop = stop

    def run(
        self, function: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """As the store's own."""
        return self._store.wait_out(self._stop, function, *args, **kwargs)
