"""Reuse: the request id that a call joins, found before Celery makes a task id of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from celery_budget.core.reuse import Reuse
from celery_budget.core.terms import Terms
from celery_budget.errors import PolicyError
from celery_budget.integration.task import policy_of
from celery_budget.integration.terms import terms_of
from celery_budget.store import enlisted, reuse

if TYPE_CHECKING:
    from celery_budget.admission import Transactions
    from celery_budget.integration.install import CeleryBudget

__all__ = ["forget", "request_id_of"]


def request_id_of(
    budget: CeleryBudget, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Return owner and request id of the run that a call joins; none for a task without ``reuse``.

    :raises PolicyError: where nobody can tell whether two calls are the same.
    """
    policy = policy_of(budget.app, name)
    if policy is None or policy.reuse is None:
        return None
    terms, kept = _terms(budget, name, args, kwargs)
    owner, key = terms.evaluation.budget, kept.key(terms.fingerprint)
    of = (budget.settings.root, owner, key, kept.kept_us)
    caller = _caller(budget)
    if caller is not None:
        return owner, caller.run(reuse.renewed, *of)
    found = budget.store.read(reuse.joined, *of)
    return owner, found or budget.store.run(reuse.renewed, *of)


def forget(
    budget: CeleryBudget, what: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], owner: str
) -> bool:
    """Have nobody join a run any more; see :meth:`CeleryBudget.forget`."""
    root = budget.settings.root
    if isinstance(what, str):
        return budget.store.run(reuse.forget, root, what, owner)
    name = getattr(what, "name", None)
    if not isinstance(name, str):
        raise PolicyError(
            f"forget() is for a task id, or a task and its arguments, not {what!r}"
            "; give one of these"
        )
    terms, kept = _terms(budget, name, args, kwargs)
    if terms.evaluation.budget != owner:
        return False
    return budget.store.run(reuse.forget_key, root, owner, kept.key(terms.fingerprint))


def _terms(
    budget: CeleryBudget, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Terms, Reuse]:
    terms = terms_of(budget.app, name, args, kwargs)
    policy = policy_of(budget.app, name)
    if terms is None or policy is None or policy.reuse is None:
        raise PolicyError(
            f"task {name} has no reuse=, so that no calls of it are joined"
            "; declare reuse= at the task first"
        )
    return terms, policy.reuse


def _caller(budget: CeleryBudget) -> Transactions | None:
    """Return the caller's transaction that the ledger's own connection would wait for."""
    for one in enlisted.transactions():
        if one.is_open_beside(budget.store) and not one.is_async and one.holds(budget.store):
            return one
    return None
