"""The ledger's database: the only SQL of the project, one module a table family.

A function takes the connection first and never opens, commits or retries; :class:`Store` does
that at the edges. Locks are taken in one order everywhere: reservations by id, then balances by
(root, budget, window, stripe), then the rows that belong to a reservation (outbox, parked).
"""

from sqlalchemy.engine import Connection

from celery_budget.store.engine import Stop, Store
from celery_budget.store.replica import ReadFrom, Replica, read_from

__all__ = ["Connection", "ReadFrom", "Replica", "Stop", "Store", "read_from"]
