"""What can be seen of an application's ledger; it changes nothing and needs no broker."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal, InvalidOperation
from typing import Any

from celery import Celery

from celery_budget import alerting
from celery_budget import reconcile as shown
from celery_budget.core.alerts import StandingAlert
from celery_budget.core.budgets import Balance
from celery_budget.core.estimates import checked_quantile
from celery_budget.core.invoices import MOST_LINE
from celery_budget.core.periods import zone_named
from celery_budget.errors import (
    InvalidAmount,
    InvalidBudget,
    InvalidReport,
    InvoiceError,
    NotQuarantined,
)
from celery_budget.integration.capture import arguments_of
from celery_budget.integration.queues import KombuQueues
from celery_budget.integration.results import BackendResults
from celery_budget.reconcile.figures import GROUPINGS
from celery_budget.reconcile.totals import LAST_US
from celery_budget.settings import Settings
from celery_budget.store import ReadFrom, Replica, Store, budgets, read_from, roles

__all__ = ["Views"]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)

#: Seconds after which Redis and others deliver a message again that nobody acknowledged.
VISIBILITY = 3600


#: Whether this context reads from the ledger's own database, whatever budget_report_url says.
_primary: ContextVar[bool] = ContextVar("budget_primary", default=False)


class Views:
    """A ledger as it is looked at, found by its application's configuration when first needed."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._replica: Replica | None = None
        #: Whether all is read from the ledger's own database, as in :meth:`primary`.
        self.reads_primary = False
        self._settings: Settings | None = None

    @property
    def settings(self) -> Settings:
        """The settings, read from the application's configuration at first use.

        :raises ConfigurationError: where one is missing or cannot work.
        """
        if self._settings is None:
            settings = Settings.read(self.app.conf.get)
            options = self.app.conf.broker_transport_options or {}
            settings.check_retention(
                "the broker's visibility_timeout", options.get("visibility_timeout") or VISIBILITY
            )
            self._settings = settings
        return self._settings

    @property
    def store(self) -> Store:
        """The ledger's database; connects at first use."""
        if self._store is None:
            with self._lock:
                if self._store is None:
                    settings = self.settings
                    self._store = Store(
                        settings.database_url, settings.lock_seconds, settings.answer_seconds
                    )
        return self._store

    @property
    def reading(self) -> Store:
        """What all is read from that is only shown: the replica of ``budget_report_url``.

        The ledger's own database where there is none, and inside of :meth:`primary`.
        """
        if self.reads_primary or _primary.get():
            return self.store
        return self.replica or self.store

    @property
    def replica(self) -> Replica | None:
        """The database of ``budget_report_url``; connects at first use."""
        url = self.settings.report_url
        if url and self._replica is None:
            with self._lock:
                if self._replica is None:
                    settings = self.settings
                    self._replica = Replica(url, settings.lock_seconds, settings.answer_seconds)
        return self._replica

    @contextmanager
    def primary(self) -> Iterator[None]:
        """Show in a block what the ledger's own database says, not a replica of it.

        ``with budget.primary():`` for who has just changed something and looks at it, and while the
        replica of ``budget_report_url`` is down.
        """
        token = _primary.set(True)
        try:
            yield
        finally:
            _primary.reset(token)

    def read_from(self) -> ReadFrom:
        """Return which server all is read from that is shown, and how far it is behind.

        :raises ReplicaError: where the replica does not answer.
        """
        return read_from(self.reading)

    def role_statements(self, prefix: str = roles.PREFIX, *, templates: bool = False) -> list[str]:
        """Return SQL that makes least-privilege roles for the ledger's processes; changes nothing.

        As ``budget roles`` prints it; see ``docs/security.md``.

        :param prefix: what the names of the roles begin with.
        :param templates: whether callers and workers make budgets of templates.
        :raises ConfigurationError: where the ledger is not in PostgreSQL.
        :raises InvalidName: for a prefix that cannot be.
        """
        return self.store.read(roles.script, prefix, templates=templates)

    def balance(self, name: str) -> Balance:
        """Return ``limit``, ``reserved``, ``spent`` and ``available`` of the budget ``name``.

        :raises UnknownBudget: where there is none.
        """
        return self.reading.read(budgets.balance, self.settings.root, name)

    def balances(self) -> list[Balance]:
        """Return the balances of all budgets, by name."""
        return self.reading.read(budgets.balances_of, self.settings.root)

    def standing(self, name: str) -> shown.Standing | shown.Template:
        """Return how a budget or a template stands: terms, balance, all above, grants in force.

        :raises UnknownBudget: where there is none.
        """
        return shown.standing(self.reading, self.settings, name)

    def templates(self) -> list[shown.Template]:
        """Return all templates, by name."""
        return shown.templates(self.reading, self.settings)

    def grants(self, name: str, *, ended: bool = False) -> list[shown.Grant]:
        """Return the grants of the budget ``name`` that are in force, the last to end first.

        :param ended: those as well that are over.
        :raises UnknownBudget: where there is no such budget.
        """
        return shown.grants(self.reading, self.settings, name, ended)

    def journal(self, name: str, limit: int = 100) -> list[shown.Entry]:
        """Return the last ``limit`` changes of the balances of ``name``, the newest first.

        :raises UnknownBudget: where there is no such budget.
        """
        _check_number(limit, "entries")
        return shown.journal(self.reading, self.settings, name, limit)

    def quarantine(self, limit: int = 100) -> list[shown.Quarantined]:
        """Return the last ``limit`` of what is in quarantine, the last first.

        Messages that could not be published, whose requests have ended as ``unpublishable``, and
        requests that have failed for good. They hold no budget.
        """
        _check_number(limit, "messages")
        return shown.quarantined(self.reading, self.settings, limit)

    def quarantined(self, some_id: str) -> shown.Quarantined:
        """Return one that is in quarantine.

        :param some_id: its id there, or that of its task.
        :raises NotQuarantined: where there is none.
        """
        found = shown.find_quarantined(self.reading, self.settings, some_id, arguments_of)
        if found is None:
            raise NotQuarantined(some_id)
        return found

    def quarantine_is_full(self) -> bool:
        """Tell whether requests that fail for good are kept no more (``budget_max_quarantine``)."""
        return shown.quarantine_is_full(self.reading, self.settings)

    def parked(self, limit: int = 100) -> list[shown.ParkedRequest]:
        """Return what waits for budget, at most ``limit``; budget by budget, the next one first."""
        _check_number(limit, "requests")
        return shown.parked(self.reading, self.settings, limit)

    def queued(self) -> tuple[shown.Queued, ...]:
        """Return for each budget that anything waits for how much, and for how long."""
        return shown.queued(self.reading, self.settings)

    def report(
        self,
        since: datetime | timedelta | None = None,
        until: datetime | timedelta | None = None,
        budget: str | None = None,
        stage: str | None = None,
        by: str | None = None,
    ) -> shown.Report:
        """Return the ledger at one look: balances, what became of requests, and what that took.

        A request belongs to when it was admitted; all that becomes of it is counted there.

        :param since: only requests that were admitted from then on: an instant with a time zone, or
            a time before now.
        :param until: and before then.
        :param budget: only requests that draw on it.
        :param stage: only requests of it.
        :param by: group the figures as well, by ``tenant``, ``stage``, ``task``, ``day`` or
            ``estimator``.
        :raises InvalidReport: for a period without any time in it, or another grouping.
        :raises InvalidBudget: for an instant without a time zone.
        :raises UnknownBudget: where there is no such budget.
        """
        if by is not None and by not in GROUPINGS:
            raise InvalidReport(f"by= is {by!r}; give one of {', '.join(GROUPINGS)}")
        since_us, since_ago = _instant("since", since)
        until_us, until_ago = _instant("until", until)
        asked = shown.Asked(since_us, until_us, budget, stage)
        source = self.read_from()
        made = shown.report(self.reading, self.settings, asked, by, (since_ago, until_ago))
        return replace(made, read_from=source)

    def alerts(self) -> tuple[StandingAlert, ...]:
        """Return the alerts that stand, the newest first; the relay gives them."""
        return alerting.standing(self.reading, self.settings)

    def suggest(
        self,
        stage: str | None = None,
        quantile: float | Decimal | str = "0.95",
        since: datetime | timedelta | None = None,
    ) -> tuple[shown.Suggestion, ...]:
        """Suggest estimates by what was used, for each stage and unit.

        Of the last thousand requests of a stage whose usage was measured those count that succeeded
        at their first attempt. By nearest rank: a suggestion is what one of them used.

        :param stage: of that one only.
        :param quantile: for which share of the requests it is to be enough, above 0 and up to 1.
        :param since: only by requests that ended since then, with a time zone, or within that time.
        :raises InvalidAmount: for what is no such quantile.
        :raises InvalidBudget: for an instant without a time zone.
        """
        share = checked_quantile(quantile)
        since_us, lasting_us = _instant("since", since)
        return shown.suggest(self.reading, self.settings, stage, share, since_us, lasting_us)

    def overview(
        self,
        containing: str = "",
        state: str | None = None,
        limit: int = 1000,
        page: int | None = None,
        size: int = 50,
    ) -> shown.Overview:
        """Return how budgets, lanes, what waits, and relays stand, all of it at one moment.

        What is read is bounded by ``limit``: budgets by name, and of what is parked or in
        quarantine a tenth of that.

        :param containing: only what has this in its name or an id, in whatever case.
        :param state: only budgets that are ``open``, ``draining`` or ``closed``.
        :param page: only this page of the budgets, from 1 on, of ``size`` each; the last one where
            there are fewer.
        """
        asked = 1 if page is None else page
        for what, number in (("the limit", limit), ("the size of a page", size), ("a page", asked)):
            if type(number) is not int or number < 1:
                raise InvalidAmount(f"{what} is an integer from 1 on, not {number!r}; give one")
        source = self.read_from()
        seen = shown.overview(self.reading, self.settings, containing, state, limit, page, size)
        return replace(seen, read_from=source)

    def relays(self) -> tuple[shown.RelaySeen, ...]:
        """Return the relays that run, and those that ended without a word in the last hour."""
        return shown.relays(self.reading, self.settings)

    def reconcile(
        self,
        *,
        limit: int = 20,
        broker: bool = False,
        results: int = 0,
        told: Callable[[int, int], None] | None = None,
    ) -> shown.Reconciliation:
        """Return whether the ledger adds up, what does not, and what of it is open.

        :param limit: how much that lacks a step is told in words, of each kind.
        :param broker: ask the brokers for the queues that published work went to. One that does not
            answer within seconds is told as such.
        :param results: look up in the result backend the results of so many requests that have
            ended, those admitted last.
        :param told: called after each part of the proof with how many are done, and how many there
            are.
        """
        if type(limit) is not int or limit < 0:
            raise InvalidAmount(f"limit= is an integer from 0 on, not {limit!r}; give one")
        if type(results) is not int or results < 0:
            raise InvalidAmount(f"results= is an integer from 0 on, not {results!r}; give one")
        queues = KombuQueues(self.app) if broker else None
        try:
            source = self.read_from()
            found = shown.reconcile(
                self.reading,
                self.settings,
                limit=limit,
                queues=queues,
                stored=BackendResults(self.app),
                results=results,
                told=told,
            )
            return replace(found, read_from=source)
        finally:
            if queues is not None:
                queues.close()

    def compare_invoice(
        self,
        file: str | os.PathLike[str] | Iterable[str | bytes],
        *,
        columns: Mapping[str, str] | None = None,
        timezone: str = "UTC",
        provider: str | None = None,
        models: Mapping[str, str] | None = None,
        tolerance: float | Decimal | str = 0,
    ) -> shown.Comparison:
        """Compare a provider's own export of its usage or costs with the ledger, by day and model.

        Compared is what usage was recorded from providers' replies; see ``docs/reconcile.md``.

        :param file: its path, or an open file. It is read line by line.
        :param columns: its headers by ``day``, ``model``, ``input``, ``cached``, ``output``,
            ``cost`` and ``currency``, where they are not those of a known export; several are
            joined by ``+``, and add up.
        :param timezone: whose days count.
        :param provider: only records of this provider, by the name that they have; ``any`` for all.
            By default the one whose export it is, where that is known.
        :param models: the ledger's names of models by those of the export, where they differ.
        :param tolerance: up to how many per cent of the export a difference counts as none.
        :raises InvoiceError: where the file cannot be read.
        :raises InvalidPeriod: for an unknown time zone.
        :raises InvalidAmount: for what is no tolerance.
        """
        zone, percent = zone_named(timezone), _percent(tolerance)

        def compare(lines: Iterable[str | bytes], name: str) -> shown.Comparison:
            return shown.compare_invoice(
                self.reading,
                self.settings,
                lines,
                name=name,
                zone=zone,
                columns=columns,
                provider=provider,
                models=models,
                tolerance=percent,
            )

        if not isinstance(file, (str, os.PathLike)):
            return compare(file, str(getattr(file, "name", "the file")))
        try:
            with open(file, "rb") as opened:
                # A line that has no end is not read into memory.
                return compare(iter(lambda: opened.readline(MOST_LINE), b""), os.fspath(file))
        except OSError as error:
            raise InvoiceError(
                os.fspath(file), 0, f"it cannot be read: {error.strerror}"
            ) from error

    def explain(self, some_id: str) -> list[shown.Story]:
        """Return the life of the requests that an id means, the oldest first.

        That of a task, a request or a reservation; of a message of the outbox, of what is parked or
        in quarantine.
        """
        return shown.explain(self.reading, self.settings, some_id)

    def explain_budget(
        self, name: str, limit: int = 20, amount: int | None = None
    ) -> shown.BudgetStory:
        """Return what a budget is spent on and held by, what will free it, what waits for it.

        :param limit: how many holds, and how many requests that wait, are listed: the largest
            holds, and those whose turn is next. Counts are exact.
        :param amount: tell as well what a new request of so much would meet.
        :raises UnknownBudget: where there is no such budget.
        :raises InvalidBudget: for a template.
        """
        _check_number(limit, "holds")
        return shown.explain_budget(self.reading, self.settings, name, limit, amount)


def _check_number(limit: object, of: str) -> None:
    if type(limit) is not int or limit < 1:
        raise InvalidAmount(
            f"limit= is a number of {of}, an integer from 1 on, not {limit!r}; give one"
        )


def _percent(value: float | Decimal | str) -> Decimal:
    """Return a tolerance in per cent.

    :raises InvalidAmount: for what is none.
    """
    try:
        percent = Decimal(str(value))
    except InvalidOperation:
        percent = Decimal("NaN")
    if not percent.is_finite() or not 0 <= percent <= 100:
        raise InvalidAmount(
            f"a tolerance is a number of per cent from 0 to 100, not {value!r}; give one"
        )
    return percent


def _instant(name: str, given: Any) -> tuple[int | None, int | None]:
    """Return when that is, or how long before now, in microseconds."""
    if given is None:
        return None, None
    if isinstance(given, timedelta):
        # Longer than there are years with a name is as long as any.
        return None, max(-LAST_US, min(given // _MICROSECOND, LAST_US))
    if not isinstance(given, datetime) or given.utcoffset() is None:
        raise InvalidBudget(
            f"{name}= is {given!r}; give a datetime with a time zone, or a timedelta before now"
        )
    return max((given - _EPOCH) // _MICROSECOND, 0), None
