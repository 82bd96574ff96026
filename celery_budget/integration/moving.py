"""An application on another ledger for a while, as its tests have it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from celery import Celery
from celery._state import _get_active_apps
from kombu.utils.imports import symbol_by_name

from celery_budget.errors import BudgetError
from celery_budget.integration.context import find_installed, installed_on

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = ["moved", "the_budget_of"]

#: What an application's CeleryBudget has found by its configuration.
_FOUND = ("_store", "_settings", "_replica")
_CACHED = ("brokers", "spool", "closings")


def the_budget_of(target: Any = None) -> CeleryBudget:
    """Return the budget of an application; that of the only one that has a budget by default.

    :param target: an application, its budget, or where either is found: ``"shop.tasks:app"``.
    :raises NotInstalled: for an application that has no budget.
    :raises BudgetError: for what is no application, and where several have a budget, or none.
    """
    if isinstance(target, str):
        target = symbol_by_name(target)
    if target is None:
        having = [app for app in _get_active_apps() if find_installed(app) is not None]
        if len(having) != 1:
            raise BudgetError(
                f"{len(having) or 'no'} applications have a CeleryBudget here, and not one; import "
                "the module that makes yours, or say which one is meant"
            )
        [target] = having
    app = target if isinstance(target, Celery) else getattr(target, "app", None)
    if not isinstance(app, Celery):
        raise BudgetError(
            f"{target!r} is neither a Celery application nor its CeleryBudget; give one of the two"
        )
    return installed_on(app)


@contextmanager
def moved(budget: CeleryBudget, configuration: Mapping[str, Any]) -> Iterator[None]:
    """Have an application use other settings, and so another ledger, in a block.

    What was reserved before stays in the ledger where that was done. No thread of ours may run for
    the application meanwhile: none of a worker, none of a relay.
    """
    own = vars(budget)
    before = {name: own.pop(name) for name in (*_FOUND, *_CACHED) if name in own}
    own.update(dict.fromkeys(_FOUND))
    with _configured(budget.app, configuration):
        try:
            yield
        finally:
            if own["_store"] is not None:
                own["_store"].dispose()
            for name in _CACHED:
                own.pop(name, None)
            own.update(before)


@contextmanager
def _configured(app: Celery, configuration: Mapping[str, Any]) -> Iterator[None]:
    """Put some settings before those of an application; what is set meanwhile stays.

    Its result backend is made anew, for the block and after it.
    """
    # Configured it is by the first look: what was said before that is taken over then.
    app.conf.get("task_always_eager")
    maps, first = app.conf.maps, dict(configuration)
    maps.insert(0, first)
    _forget_backend(app)
    try:
        yield
    finally:
        maps[:] = [one for one in maps if one is not first]
        _forget_backend(app)


def _forget_backend(app: Celery) -> None:
    """Have an application make its result backend again, in each thread."""
    app._backend_cache = None
    app._local = threading.local()
