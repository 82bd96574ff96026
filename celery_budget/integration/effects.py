"""``effect(session, key)`` and ``settle(session, value)``: what a task does once, however often it
runs, in a transaction of its own.

The proof of an effect, the messages published with it and the task's settlement are written in the
caller's transaction: all of it is committed with what the task did there, or none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kombu.exceptions import EncodeError

from celery_budget.core import losses
from celery_budget.core.budgets import check_text
from celery_budget.core.reservations import Begun, Closed, Outcome
from celery_budget.errors import BudgetError, ClaimLost, EffectError, InvalidName, NotRunning
from celery_budget.events import Logger
from celery_budget.integration.context import Current, current, installed_on
from celery_budget.integration.enlist import Enlistment
from celery_budget.integration.outcomes import undisturbed, written_value

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget
    from celery_budget.settlement import Attempt
    from celery_budget.store.enlisted import Enlisted

__all__ = ["Effect", "EffectBlock", "asettle", "called", "effect", "settle", "step_key"]

logger = Logger(__name__)


class Effect:
    """One effect of a request, in the block that may have it.

    True where it is to be had now, in this block; false where it was had before.
    """

    def __init__(self, key: str, first: bool, written: str | None) -> None:
        self._key = key
        self._first = first
        self._written = written

    def __bool__(self) -> bool:
        return self._first

    @property
    def written(self) -> str | None:
        """The same in JSON."""
        return self._written

    @property
    def value(self) -> Any:
        """What was stored with it, now or before; none where nothing was."""
        return None if self._written is None else json.loads(self._written)

    def store(self, value: Any) -> None:
        """Keep ``value`` for later calls, in place of what was stored before in this block.

        :param value: anything that JSON can hold; it is read as JSON gives it back.
        :raises EffectError: where it cannot, and where the effect was had before.
        """
        if not self._first:
            raise EffectError(
                f"effect {self._key!r} was had before, and keeps what was stored then; "
                "store a value only where it is true"
            )
        try:
            self._written = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise EffectError(
                f"the value of effect {self._key!r} cannot be written as JSON: {error}; store what "
                "can"
            ) from error


class EffectBlock:
    """A block in a caller's transaction that has an effect, or has had it; see :func:`effect`."""

    def __init__(self, running: Current, given: Any, key: str, any_isolation: bool) -> None:
        self._attempt = running.attempt
        self._key = key
        self._block = Enlistment(
            installed_on(running.task.app),
            given,
            immediate=False,
            partial=False,
            any_isolation=any_isolation,
            parent=running.attempt.reservation_id,
        )
        self._transaction = self._block.transaction
        self._effect = Effect(key, False, None)

    def __enter__(self) -> Effect:
        self._block.__enter__()
        try:
            self._begin()
        except BaseException as error:
            self._block.__exit__(type(error), error, error.__traceback__)
            raise
        return self._effect

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._block.__exit__(kind, error, traceback)
            if error is None:
                self._keep()
        except BaseException:
            self._withdraw()
            raise
        if error is not None:
            self._withdraw()

    async def __aenter__(self) -> Effect:
        await self._block.__aenter__()
        try:
            await self._transaction.awaited(self._begin)
        except BaseException as error:
            await self._block.__aexit__(type(error), error, error.__traceback__)
            raise
        return self._effect

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._block.__aexit__(kind, error, traceback)
            if error is None:
                await self._transaction.awaited(self._keep)
        except BaseException:
            await self._transaction.awaited(self._withdraw)
            raise
        if error is not None:
            await self._transaction.awaited(self._withdraw)

    def _begin(self) -> None:
        begun = self._attempt.begin_effect(self._transaction, self._key)
        if isinstance(begun, Closed):
            raise _refused(self._attempt, self._transaction)
        if isinstance(begun, Begun):
            self._effect = Effect(self._key, True, None)
        else:
            self._effect = Effect(self._key, False, begun.value)

    def _keep(self) -> None:
        """Write the value; the proof must be there still.

        :raises EffectError: where it was rolled back, and what followed was not.
        """
        if not self._effect:
            return
        written = self._effect.written
        if not self._attempt.keep_effect(self._transaction, self._key, written):
            raise EffectError(
                f"the proof of effect {self._key!r} was rolled back inside of its block; let the "
                "transaction, or the savepoint, end after the block"
            )

    def _withdraw(self) -> None:
        """Take the proof back, if the transaction still takes statements; else it goes anyway."""
        if self._effect:
            with suppress(BudgetError):
                self._attempt.withdraw_effect(self._transaction, self._key)


def effect(session: Any, key: str, *, any_isolation: bool = False) -> EffectBlock:
    """Have an effect once, in the transaction that ``session`` is in, however often the task runs.

    ``with effect(session, key) as first:``, ``async with`` for what is asynchronous. ``first`` is
    true where the effect is to be had now; its proof is committed or rolled back with all else in
    the transaction. In later calls, of this attempt or of any other of the same request, it is
    false; ``first.value`` is what ``first.store(value)`` has kept. What is published in the block
    is part of the transaction as well, as by :meth:`CeleryBudget.enlist`.

    Where the block raises there is no proof: let what it wrote be rolled back.

    :param session: as for :meth:`CeleryBudget.enlist`, with ``any_isolation``.
    :param key: which of the request's effects it is: text of 1 to 255 characters.
    :raises NotRunning: where this thread runs no task with a budget.
    :raises EffectError: for what is no key, and where the attempt has ended.
    :raises ClaimLost: when the block begins, where another attempt has taken this one's place.
    :raises EnlistError, StoreError: as :meth:`CeleryBudget.enlist`, and at the end of the block all
        that raises there.
    """
    checked = _checked("an effect's key", key)
    return EffectBlock(_running("effect()"), session, checked, any_isolation)


def settle(session: Any, value: Any, *, any_isolation: bool = False) -> None:
    """Settle the task that this thread runs, in the transaction that ``session`` is in.

    When that is committed the attempt has ended as returned, charged what was recorded; whatever
    the task does afterwards, its result is ``value``. Where it is rolled back nothing has happened,
    and the task ends as ever. Call it last: from here on the task's balances are locked.

    :param session: as for :meth:`CeleryBudget.enlist`, with ``any_isolation``.
    :param value: what the task returns.
    :raises NotRunning: where this thread runs no task with a budget.
    :raises ClaimLost: where another attempt has taken this one's place.
    :raises EffectError: where ``value`` cannot be a result, or the attempt has ended otherwise.
    :raises EnlistError, StoreError: as :meth:`CeleryBudget.enlist`.
    """
    settlement = _Settlement(session, value, any_isolation)
    with settlement.block:
        settlement.write()


async def asettle(session: Any, value: Any, *, any_isolation: bool = False) -> None:
    """As :func:`settle`, for an asynchronous session."""
    settlement = _Settlement(session, value, any_isolation)
    async with settlement.block:
        await settlement.block.transaction.awaited(settlement.write)


class _Settlement:
    """The end of the running attempt, in a block of its own."""

    def __init__(self, given: Any, value: Any, any_isolation: bool) -> None:
        running = _running("settle()")
        budget = installed_on(running.task.app)
        self._attempt = running.attempt
        self._value = value
        self._outcome = Outcome("returned", _written(budget, running, value))
        self.block = Enlistment(
            budget, given, immediate=False, partial=False, any_isolation=any_isolation
        )

    def write(self) -> None:
        transaction = self.block.transaction
        if not self._attempt.end_within(transaction, self._outcome, self._value):
            raise _refused(self._attempt, transaction)


def _written(budget: CeleryBudget, running: Current, value: Any) -> str | None:
    try:
        return written_value(budget, running.task, running.request, value)
    except EncodeError as error:
        raise EffectError(
            f"what task {running.task.name} is to return cannot be stored as a result: {error}"
            "; return what the result serializer can hold"
        ) from error


def called(
    attempt: Attempt, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a task's body; where that has settled the attempt, it has returned what it said then.

    What it raises afterwards is logged: the ledger has ended with the value.
    """
    try:
        value = body(*args, **kwargs)
    except Exception:
        if attempt.within is None or not undisturbed(attempt.stands):
            raise
        logger.exception(
            "attempt.settled_itself", attempt=attempt.number, reservation_id=attempt.reservation_id
        )
        return attempt.within.value
    if attempt.within is not None and undisturbed(attempt.stands):
        return attempt.within.value
    return value


def step_key(step: str) -> str:
    """Return the key of a step; see :func:`celery_budget.usage.idempotency_key`."""
    reservation_id = _running("idempotency_key()").attempt.reservation_id
    try:
        return losses.step_key(reservation_id, step)
    except InvalidName as error:
        raise EffectError(str(error)) from error


def _running(what: str) -> Current:
    running = current()
    if running is None:
        raise NotRunning(what)
    return running


def _checked(what: str, text: object) -> str:
    try:
        return check_text(text, what)
    except InvalidName as error:
        raise EffectError(str(error)) from error


def _refused(attempt: Attempt, transaction: Enlisted) -> BudgetError:
    """Return why the ledger refuses an attempt: it has ended, or somebody else has its claim."""
    if attempt.called or attempt.has_returned(transaction):
        return EffectError(
            f"this attempt of reservation {attempt.reservation_id} has ended; have its effects "
            "before, and settle it once"
        )
    return ClaimLost(str(attempt.reservation_id))
