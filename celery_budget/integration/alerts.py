"""Who is told of alerts: the signal, and the callable of ``budget_on_alert``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from celery.utils.imports import symbol_by_name

from celery_budget.alerting import Alerting, Drifted
from celery_budget.core.alerts import Alert
from celery_budget.errors import ConfigurationError
from celery_budget.integration.signals import alert as alert_signal
from celery_budget.settings import check_callable

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = ["alerting_of", "on_alert_of"]

#: Requests that were admitted within that time tell whether a stage drifts.
LATELY = timedelta(days=7)


def on_alert_of(budget: CeleryBudget) -> Callable[[Alert], Any] | None:
    """Return what ``budget_on_alert`` names; none where it names nothing.

    :raises ConfigurationError: where that cannot be imported, or not be called from a thread.
    """
    given = budget.settings.on_alert
    if not isinstance(given, str):
        return given
    try:
        found = symbol_by_name(given)
    # Importing a module runs it.
    except Exception as exc:
        raise ConfigurationError(
            f"budget_on_alert is {given!r}, and that cannot be imported ({exc!r}); give "
            "'module:name' of a function that takes an alert"
        ) from exc
    check_callable(found)
    call: Callable[[Alert], Any] = found
    return call


def alerting_of(budget: CeleryBudget) -> Alerting:
    """Return the step of the relay that looks for alerts and tells them.

    :raises ConfigurationError: as :func:`on_alert_of`.
    """
    on_alert = on_alert_of(budget)

    def tell(alert: Alert, tries: int) -> None:
        # In a thread of its own: what is called finds its application as a task does.
        budget.app.set_current()
        if tries == 1:
            # What a receiver raises is logged by the signal.
            alert_signal.send(sender=budget.app, alert=alert)
        if on_alert is not None:
            on_alert(alert)

    return Alerting(
        budget.store,
        budget.settings,
        tell,
        lambda: _drifts(budget),
        lambda: len(budget.reconcile(limit=0).mismatches),
    )


def _drifts(budget: CeleryBudget) -> list[Drifted]:
    return [
        Drifted(
            f"{one.stage} ({one.estimator}:{one.version})",
            one.ratio,
            one.ceiling,
            one.requests,
        )
        for one in budget.report(since=LATELY).drift
        if one.above and one.ratio is not None and one.ceiling is not None
    ]
