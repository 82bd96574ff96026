"""For applications' own tests: a ledger that needs no service, what became of it, its clock.

``with in_memory(app):`` gives an application an empty ledger of its own for a block, a file of
SQLite that is gone afterwards. ``assert_reserved``, ``assert_held``, ``assert_settled``,
``assert_refused`` and ``assert_parked`` look at it, ``freeze_budget`` has it refuse, ``Clock``
moves its time and ``sweep`` does what a relay does from time to time. With pytest all of it is
fixtures; see ``docs/testing.md``. Nothing here imports pytest but its plugin.
"""

from celery_budget.testing.assertions import (
    Parked,
    Refusal,
    Request,
    assert_held,
    assert_parked,
    assert_refused,
    assert_reserved,
    assert_settled,
)
from celery_budget.testing.clock import Clock
from celery_budget.testing.freezing import freeze_budget
from celery_budget.testing.ledgers import in_memory, sweep

__all__ = [
    "Clock",
    "Parked",
    "Refusal",
    "Request",
    "assert_held",
    "assert_parked",
    "assert_refused",
    "assert_reserved",
    "assert_settled",
    "freeze_budget",
    "in_memory",
    "sweep",
]
