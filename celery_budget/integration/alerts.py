"""Who is told of alerts: the signal, and the callable of ``budget_on_alert``."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from celery_budget.alerting import Alerting, Drifted
from celery_budget.core.alerts import Alert
from celery_budget.integration.hooks import hook_of
from celery_budget.integration.signals import alert as alert_signal

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = ["alerting_of"]

#: Requests that were admitted within that time tell whether a stage drifts.
LATELY = timedelta(days=7)


def alerting_of(budget: CeleryBudget) -> Alerting:
    """Return the step of the relay that looks for alerts and tells them.

    :raises ConfigurationError: as :func:`~celery_budget.integration.hooks.hook_of`.
    """
    on_alert = hook_of(budget, "on_alert")

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
