"""``CeleryBudget(app)``: ties one application to its ledger."""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.utils.imports import symbol_by_name
from kombu.utils.objects import cached_property

from celery_budget import settlement
from celery_budget.core.reservations import Closed, Missing, Running
from celery_budget.errors import BudgetError, RequestRuns, UnknownRequest
from celery_budget.integration.context import find_installed, install_on
from celery_budget.integration.gate import Gate, with_request_id
from celery_budget.integration.ledger import Ledger
from celery_budget.integration.results import BackendResults

__all__ = ["CeleryBudget"]


class CeleryBudget(Ledger):
    """The budgets of one Celery application.

    Before or after the application's tasks are defined and its configuration is read; the
    ``budget_*`` settings are read when they are first needed. Every publication of a budgeted
    task of ``app`` is admitted from here on.

    :raises BudgetError: where the application has one already.
    """

    def __init__(self, app: Celery) -> None:
        if not isinstance(app, Celery):
            raise BudgetError(f"CeleryBudget is for a Celery application, not for {app!r}")
        if find_installed(app) is not None:
            raise BudgetError(f"{app} has its CeleryBudget already; make one for each application")
        super().__init__(app)
        install_on(app, self)
        self._install()

    def cancel(self, task_id: str) -> None:
        """End the request of a task that has not started; cancelling it again changes nothing.

        What it holds is given back, its message is dropped or, where a worker gets it all the
        same, ignored, and ``REVOKED`` is stored as its result. One that waits for a retry is
        settled at what it has used.

        :raises UnknownRequest: where nothing is known of it.
        :raises RequestRuns: where it runs or has run; nothing was changed.
        """
        outcome = settlement.cancel(self.store, self.settings, task_id)
        if isinstance(outcome, Missing):
            raise UnknownRequest(task_id)
        if isinstance(outcome, Running):
            raise RequestRuns(task_id, "running")
        if isinstance(outcome, Closed):
            raise RequestRuns(task_id, outcome.state)
        # After the ledger: a crash in between is made good by cancelling once more.
        BackendResults(self.app).ended(task_id, "cancelled")

    def _install(self) -> None:
        """Put the gate where all publications pass, and the lease step into workers.

        An ``app.amqp`` that was read before keeps its sender; there the sender is replaced. One
        that was not is built later, once the configuration is known, from a subclass.
        """
        app, budget = self.app, self
        if "amqp" in app.__dict__:
            app.amqp.send_task_message = Gate(self, app.amqp.send_task_message)
        else:
            base = symbol_by_name(app.amqp_cls)

            class BudgetAMQP(base):  # type: ignore[misc, valid-type]
                @cached_property
                def send_task_message(self) -> Any:
                    return Gate(budget, self._create_task_sender())

            app.amqp_cls = BudgetAMQP
        app.send_task = with_request_id(self, app.send_task)
        app.steps["worker"].add("celery_budget.integration.worker:LeaseStep")
