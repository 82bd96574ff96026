"""``CeleryBudget(app)``: ties one application to its ledger."""

from __future__ import annotations

import threading
from typing import Any

from celery import Celery
from celery.utils.imports import symbol_by_name
from kombu.utils.objects import cached_property

from celery_budget import reconcile as ledger
from celery_budget.core.budgets import Balance
from celery_budget.errors import BudgetError
from celery_budget.integration.context import find_installed, install_on
from celery_budget.integration.gate import Gate, with_request_id
from celery_budget.settings import Settings
from celery_budget.store import Store, budgets, migrate

__all__ = ["CeleryBudget"]


class CeleryBudget:
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
        self.app = app
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._settings: Settings | None = None
        install_on(app, self)
        self._install()

    @property
    def settings(self) -> Settings:
        """The settings, read from the application's configuration at first use.

        :raises ConfigurationError: where one is missing or cannot work.
        """
        if self._settings is None:
            self._settings = Settings.read(self.app.conf.get)
        return self._settings

    @property
    def store(self) -> Store:
        """The ledger's database; connects at first use."""
        if self._store is None:
            with self._lock:
                if self._store is None:
                    self._store = Store(self.settings.database_url, self.settings.lock_seconds)
        return self._store

    def init(self) -> str:
        """Create the ledger's tables or bring them up to date; return their version."""
        return self.store.run(migrate.upgrade)

    def check(self) -> None:
        """Check that the ledger can be reached and has the tables this release needs.

        :raises SchemaError: where :meth:`init` is due.
        :raises StoreError: where it cannot be reached.
        """
        self.store.read(migrate.check)

    def set(self, name: str, *, limit: int | None, unit: str | None = None) -> None:
        """Create the budget ``name`` or change its limit; what was reserved and spent stays.

        :param limit: in ``unit``; 0 blocks everything, none is unlimited.
        :param unit: what it counts (``"tokens"``, ``"micro-usd"``); needed for a new budget.
        :raises InvalidName, InvalidAmount: for what cannot be a name or a limit.
        """
        terms = {"limit": limit, **({} if unit is None else {"unit": unit})}
        self.store.run(budgets.set_budget, self.settings.root, name, terms)

    def balance(self, name: str) -> Balance:
        """Return ``limit``, ``reserved``, ``spent`` and ``available`` of the budget ``name``.

        :raises UnknownBudget: where there is none.
        """
        return self.store.read(budgets.balance, self.settings.root, name)

    def balances(self) -> list[Balance]:
        """Return the balances of all budgets, by name."""
        return self.store.read(budgets.balances_of, self.settings.root)

    def report(self) -> ledger.Report:
        """Return balances, counts, drift and whether the ledger adds up."""
        return ledger.report(self.store, self.settings)

    def reconcile(self) -> ledger.Reconciliation:
        """Return whether the ledger adds up, and what does not."""
        return ledger.reconcile(self.store, self.settings)

    def explain(self, some_id: str) -> list[ledger.Story]:
        """Return the life of the requests with this task id, request id or reservation id."""
        return ledger.explain(self.store, self.settings, some_id)

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
