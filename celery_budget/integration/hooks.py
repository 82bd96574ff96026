"""The application's own functions that settings name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery.utils.imports import symbol_by_name

from celery_budget.errors import ConfigurationError
from celery_budget.settings import HOOKS, PREFIX, check_callable

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = ["hook_of"]


def hook_of(budget: CeleryBudget, name: str) -> Callable[..., Any] | None:
    """Return what a setting of :data:`~celery_budget.settings.HOOKS` names; none for nothing.

    :raises ConfigurationError: where that cannot be imported, or not be called.
    """
    given: Callable[..., Any] | str | None = getattr(budget.settings, name)
    if not isinstance(given, str):
        return given
    try:
        found: Callable[..., Any] = symbol_by_name(given)
    # Importing a module runs it.
    except Exception as exc:
        raise ConfigurationError(
            f"{PREFIX}{name} is {given!r}, and that cannot be imported ({exc!r}); give "
            f"'module:name' of a function that takes {HOOKS[name]}"
        ) from exc
    check_callable(name, found)
    return found
