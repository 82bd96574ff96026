"""``budget.enlist(connection)``: publications that are part of the caller's own transaction.

What is published in the block is admitted when it ends, on the caller's connection: business rows,
reservations and messages are committed together, or not at all.
"""

from __future__ import annotations

import uuid
from types import TracebackType
from typing import TYPE_CHECKING, Any

from celery_budget.errors import EnlistError, PolicyError
from celery_budget.integration.batch import Batch
from celery_budget.store.enlisted import Enlisted

if TYPE_CHECKING:
    from typing_extensions import Self

    from celery_budget.integration.install import CeleryBudget

__all__ = ["Enlistment"]


class Enlistment(Batch):
    """A block in a caller's transaction; see :meth:`CeleryBudget.enlist`.

    What is published in a savepoint that was opened inside of the block is admitted at once: only
    the database can take it back with that savepoint.
    """

    def __init__(
        self,
        budget: CeleryBudget,
        given: Any,
        *,
        immediate: bool,
        partial: bool,
        any_isolation: bool,
        parent: uuid.UUID | None = None,
    ) -> None:
        for name, value in (("immediate", immediate), ("any_isolation", any_isolation)):
            if type(value) is not bool:
                raise PolicyError(f"{name}= is {value!r}; give True or False")
        self._transaction = Enlisted(budget.store, given, budget.settings.root, any_isolation)
        super().__init__(budget, self._transaction, partial=partial, parent=parent)
        self._immediate = immediate

    @property
    def transaction(self) -> Enlisted:
        """The caller's transaction."""
        return self._transaction

    def __enter__(self) -> Self:
        if self._transaction.is_async:
            raise EnlistError("this connection is asynchronous; use 'async with' for it")
        self._transaction.open()
        return self._entered()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._transaction.flush()
            self._leave()
            if error is None:
                self.admit()
        finally:
            self._leave()
            self._transaction.leave()

    async def __aenter__(self) -> Self:
        if not self._transaction.is_async:
            raise EnlistError("this connection is not asynchronous; use 'with' for it")
        if self._immediate:
            raise EnlistError(
                "immediate=True cannot be for an asynchronous connection, on which delay() could "
                f"not await its admission; leave it out, or {_RUN_SYNC}"
            )
        await self._transaction.awaited(self._transaction.open)
        return self._entered()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                await self._transaction.awaited(self._transaction.flush)
            self._leave()
            if error is None:
                await self._transaction.awaited(self.admit)
        finally:
            self._leave()
            self._transaction.leave()

    def _entered(self) -> Self:
        super().__enter__()
        self._transaction.enter()
        return self

    def unit_ended(self, unit: int) -> None:
        """Admit a unit at once where the block's end would be too late for it.

        :raises EnlistError: where that would have to be awaited; it is not published.
        """
        deeper = self._transaction.is_deeper()
        if deeper and self._transaction.is_async:
            self.forget(unit)
            raise EnlistError(
                "this was published in a savepoint that was opened inside of the block, and is to "
                "be admitted at once, which delay() cannot await; open the block inside of the "
                f"savepoint, or {_RUN_SYNC}"
            )
        if deeper or self._immediate:
            self.admit(unit)


_RUN_SYNC = "publish in 'await session.run_sync(...)', with a block on the session that it is given"
