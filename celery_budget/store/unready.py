"""What must be committed on its own before a transaction can go on."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy.engine import Connection

__all__ = ["Unready"]


class Unready(Exception):
    """A row is missing that must not be made in this transaction, as others would wait for it.

    :class:`~celery_budget.store.Store` rolls back, calls ``prepare`` in a transaction of its own
    and starts anew.
    """

    def __init__(self, what: str, prepare: Callable[[Connection], object]) -> None:
        super().__init__(what)
        self.prepare = prepare
