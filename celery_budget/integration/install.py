"""``CeleryBudget(app)``: ties one application to its ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from celery import Celery
from celery.bin.base import CeleryOption
from celery.canvas import Signature
from celery.exceptions import SoftTimeLimitExceeded
from celery.utils.imports import symbol_by_name
from kombu.utils.objects import cached_property

from celery_budget import admission, reconcile, settlement, telling, tracing
from celery_budget.closings import Closings
from celery_budget.core.authority import Authorize
from celery_budget.core.backpressure import Outlook
from celery_budget.core.checkup import Checkup
from celery_budget.core.estimators import Estimators, estimators
from celery_budget.core.jobs import Job
from celery_budget.core.policies import BudgetLine
from celery_budget.core.reservations import Cancelling, Closed, Missing
from celery_budget.errors import (
    BudgetError,
    NotInstalled,
    NotParked,
    PolicyError,
    RequestRuns,
    UnknownRequest,
)
from celery_budget.integration import canvas, eager_canvas, fallbacks, jobs, reuse
from celery_budget.integration.batch import Batch
from celery_budget.integration.brokers import Brokers
from celery_budget.integration.capture import last_of_chord
from celery_budget.integration.checkup import ASK_SECONDS, check_up
from celery_budget.integration.context import find_installed, install_on
from celery_budget.integration.enlist import Enlistment
from celery_budget.integration.gate import Gate, with_request_id
from celery_budget.integration.hooks import hook_of
from celery_budget.integration.ledger import Ledger
from celery_budget.integration.reprs import short_repr
from celery_budget.integration.results import BackendResults
from celery_budget.integration.sending import Unopened
from celery_budget.integration.terms import lines_of_call
from celery_budget.spool import Spool

__all__ = ["CeleryBudget"]

#: Celery hands its value to each step of a worker.
_RELAY_OPTION = CeleryOption(
    ("--budget-relay",),
    is_flag=True,
    help_group="Features",
    help="Publish what was admitted to a budget, from this worker's main process.",
)


#: How long a worker that is asked to kill a process is waited for.
ANSWER_SECONDS = 3.0


class CeleryBudget(Ledger):
    """The budgets of one Celery application.

    Before or after the application's tasks are defined and its configuration is read; the
    ``budget_*`` settings are read when they are first needed. Every publication of a budgeted
    task of ``app`` is admitted from here on.

    :raises BudgetError: where the application has one already.
    """

    def __init__(self, app: Celery) -> None:
        if not isinstance(app, Celery):
            raise BudgetError(
                f"CeleryBudget is for a Celery application, not for {app!r}; give it one"
            )
        if find_installed(app) is not None:
            raise BudgetError(f"{app} has its CeleryBudget already; make one for each application")
        super().__init__(app)
        install_on(app, self)
        tracing.let_through(SoftTimeLimitExceeded)
        self._install()

    @property
    def estimators(self) -> Estimators:
        """The estimators that are registered in this process, for ``estimate="NAME"``."""
        return estimators

    @cached_property
    def brokers(self) -> Brokers:
        """The brokers that messages may go to: the application's, and ``budget_brokers``."""
        return Brokers(self.app, self.settings.brokers)

    @cached_property
    def authorize(self) -> Authorize | None:
        """What ``budget_authorize`` names; none where it names nothing.

        :raises ConfigurationError: where that cannot be imported, or not be called.
        """
        return hook_of(self, "authorize")

    @cached_property
    def spool(self) -> Spool:
        """What this application's workers could not tell the ledger."""
        return Spool(self.settings.spool, f"{self.store.place} {self.settings.root}")

    @cached_property
    def closings(self) -> Closings | None:
        """The attempts of this process that are to be closed; none where each is closed at once."""
        # SQLite has one writer, and no round trip to save.
        one_by_one = self.store.dialect == "sqlite"
        return None if one_by_one else Closings(self.store, self.settings.root)

    def cancel(
        self, task_id: str, terminate: bool = False, signal: str = "SIGTERM"
    ) -> Literal["ended", "requested", "terminated"]:
        """Cancel the request of a task; cancelling it again changes nothing.

        ``"ended"`` where it does not run: what it holds is given back, its message is dropped or,
        where a worker gets it all the same, ignored, and ``REVOKED`` is stored as its result; by
        the sweep, where the result backend is down. One that waits for a retry is settled at what
        it has used.

        ``"requested"`` where it runs: the task sees it by :func:`celery_budget.usage.cancelled`,
        and goes on unless it looks. What it comes to is settled as ever; only a retry ends as
        cancelled instead, and it does not run again should its worker be lost.

        ``"terminated"`` where its worker has said that it kills the process that runs it.

        :param terminate: have its worker kill the process that runs it, as Celery's
            ``revoke(…, terminate=True)`` does; it is charged the greater of recorded and estimated.
            Waits up to three seconds for an answer. Nobody is asked where it runs in place.
        :param signal: by which signal.
        :raises UnknownRequest: where nothing is known of it.
        :raises RequestRuns: where it has run and ended; nothing was changed.
        :raises Exception: as ``app.control.revoke``, once the request is marked as cancelled.
        """
        outcome = settlement.cancel(self.store, self.settings, task_id, last_of_chord)
        if isinstance(outcome, Missing):
            raise UnknownRequest(task_id)
        if isinstance(outcome, Closed):
            raise RequestRuns(task_id, outcome.state)
        if isinstance(outcome, Cancelling):
            node = outcome.worker.rpartition("/")[0]
            if terminate and "@" in node and self._terminate(task_id, node, signal):
                return "terminated"
            return "requested"
        telling.tell_task(self.store, self.settings.root, BackendResults(self.app).ended, task_id)
        return "ended"

    def discard_parked(self, some_id: str) -> None:
        """Cancel what is parked; see :meth:`cancel`. Its result says that it was cancelled.

        :param some_id: its id there, or that of its task.
        :raises NotParked: where nothing with this id is parked.
        """
        found = reconcile.find_parked(self.store, self.settings, some_id)
        if found is None:
            raise NotParked(some_id)
        self.cancel(found.task_id)

    def _terminate(self, task_id: str, node: str, signal: str) -> bool:
        """Have a worker kill the process that runs a task; return whether it says that it does."""
        replies = self.app.control.revoke(
            task_id,
            destination=[node],
            terminate=True,
            signal=signal,
            reply=True,
            timeout=ANSWER_SECONDS,
            limit=1,
        )
        said = [reply.get("ok") for one in replies or () for reply in one.values()]
        return any(task_id in str(ok) for ok in said)

    def job(self, task_id: str, *, owner: str) -> Job:
        """Return how a job stands: its state, what it has used, its times, its progress.

        A few reads of the ledger, however often it was retried, and one of the result backend while
        it runs. Of a task that has replaced itself, what it has become.

        :param owner: whose it is: the budget that it names first.
        :raises UnknownRequest: where nothing is known of it, or it is another owner's.
        """
        return jobs.find(self, task_id, owner)

    def result(self, task_id: str, *, owner: str) -> Any:
        """Return what a job's task has returned, or raise what it has raised.

        For ``budget_result_seconds`` from its end; of a task with ``reuse=`` for that time at the
        least, from the ledger.

        :param owner: as for :meth:`job`.
        :raises UnknownRequest: as by :meth:`job`.
        :raises ResultNotReady: where it has not ended, or its result is still being stored.
        :raises ResultGone: where that time is over, or nobody has the result any more.
        :raises TaskRevokedError: where it was cancelled, or its time was over, as by Celery.
        :raises Exception: what the task has raised; as the result backend does, where it fails.
        """
        return jobs.result(self, task_id, owner)

    def forget(self, what: Any, args: Any = (), kwargs: Any = None, *, owner: str) -> bool:
        """Have calls join a run no more: the next one runs again, under a new reservation.

        What was kept of its result goes. One that is in flight goes on, for those who have its id.

        :param what: the run's task id; or a task with ``reuse=``, whose call with ``args`` and
            ``kwargs`` is meant.
        :param owner: whose it is: the budget that it names first.
        :return: false where none would be joined, or it is another owner's.
        :raises PolicyError: for a task without ``reuse=``, and arguments that it cannot have.
        """
        return reuse.forget(self, what, tuple(args), kwargs or {}, owner)

    def would_admit(
        self,
        task: Any = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        lines: Mapping[str, int] | Sequence[BudgetLine] | None = None,
        finishing: bool = False,
        queue: str | None = None,
    ) -> Outlook:
        """Tell whether a publication would be admitted now; nothing is changed and nothing locked.

        ``budget.would_admit(draft, ("acme",))``: as true or false, with ``error`` (what the
        publication would raise) and ``retry_after``. It holds nothing: by the time of the
        publication another one may have been faster. What is not looked at is whether the request
        was made before, which would be admitted whatever is left. Of a task with ``fallback=`` all
        lanes are looked at, and the error is the last one's.

        :param task: a task, its name, or the signature of a single task.
        :param args: its arguments, as of ``apply_async``; of a signature what is added to its own.
        :param kwargs: the same.
        :param lines: instead of a task, amounts by budgets, or lines with constant estimates.
        :param finishing: as of ``apply_async``.
        :param queue: where it would go, if not where Celery routes it: the lane of that is looked
            at; of ``lines=`` no lane is, without it.
        :raises PolicyError, EstimateError, InvalidAmount, InvalidName: where it cannot be worked
            out what is asked for.
        :raises StoreError: where the ledger cannot be read.
        """
        asked, lanes, routed, own = lines_of_call(self.app, task, args, kwargs or {}, lines)
        enforced = self.settings.enforce if own is None else own
        if not asked:
            return Outlook(True)
        if lanes:
            return fallbacks.outlook(self, asked, lanes, finishing, enforced)
        return admission.outlook(
            self.store, self.settings, asked, finishing, queue or routed, enforced=enforced
        )

    def batch(self, *, partial: bool = False) -> Batch:
        """Admit all that is published in a block together when it ends, in one transaction.

        ``with budget.batch():``, or ``async with``. A constant number of statements admits any
        number of publications, those of tasks without a budget included. All are admitted, or none
        and the end of the block raises; nothing is published where the block itself raises. In a
        block inside of another one publications belong to the inner.

        :param partial: admit what fits; ``batch.refused`` tells of what did not, a canvas being
            one.
        :raises BudgetExceeded, UnknownBudget, RequestConflict, OutboxFull, QueueFull, StoreError:
            at the end.
        """
        return Batch(self, self.store, partial=partial)

    def enlist(
        self,
        connection: Any,
        *,
        immediate: bool = False,
        partial: bool = False,
        any_isolation: bool = False,
    ) -> Enlistment:
        """Admit what is published in a block in the transaction that ``connection`` is in.

        ``with budget.enlist(session):``, ``async with`` for what is asynchronous. It is committed
        or rolled back with all else in that transaction; that is left to the caller, always. As
        with :meth:`batch` everything is admitted when the block ends, or nothing; after a refusal
        the transaction can go on. What is published in a savepoint inside of the block is admitted
        at once.

        :param connection: to the ledger's own database: a SQLAlchemy ``Session``, ``Connection``,
            ``AsyncSession`` or ``AsyncConnection``, a psycopg ``Connection`` or
            ``AsyncConnection``, Django's ``connection`` or a ``sqlite3.Connection``.
        :param immediate: admit each publication at once instead.
        :param partial: as for :meth:`batch`.
        :param any_isolation: take transactions above READ COMMITTED as well, whose races end in a
            :class:`StoreError` for the caller to run them again.
        :raises EnlistError: where the connection cannot be enlisted.
        :raises BudgetExceeded, UnknownBudget, RequestConflict, OutboxFull, QueueFull, StoreError:
            at the end.
        """
        return Enlistment(
            self, connection, immediate=immediate, partial=partial, any_isolation=any_isolation
        )

    async def publish(self, signature: Signature, **options: Any) -> Any:
        """Publish a signature without blocking the event loop; return its result.

        ``await budget.publish(draft.s(1), countdown=5)`` is ``draft.s(1).apply_async(countdown=5)``
        in a thread with this context: it takes part in blocks that are open. Where the task that
        awaits it is cancelled meanwhile, the thread goes on: it may have been admitted or not. With
        a ``request_id`` it can be published once more in either case.

        :param signature: of a task, or any canvas.
        :param options: of ``apply_async``.
        """
        if not isinstance(signature, Signature):
            raise PolicyError(
                f"publish() is for a signature, not for {signature!r}; give task.s(...)"
            )
        return await asyncio.to_thread(signature.apply_async, **options)

    def checkup(self, timeout: float = ASK_SECONDS) -> Checkup:
        """Return what would break the guarantees of the running configuration, with the remedy.

        Looks at configuration, tasks, brokers, ledger, relays and workers, as ``budget check``
        does; what cannot be reached is among what is found. Changes nothing.

        :param timeout: how many seconds workers are given to answer.
        :raises ConfigurationError: where a setting cannot work at all.
        """
        return check_up(self, timeout)

    def check_gate(self) -> None:
        """Check that publications of the application pass the gate.

        :raises NotInstalled: where ``app.amqp_cls`` was set afterwards, so that they do not.
        """
        if not isinstance(self.app.amqp.send_task_message, Gate):
            raise NotInstalled(
                f"{self.app} publishes by an AMQP class that was set after its CeleryBudget was "
                "made, past all budgets; set amqp_cls before 'CeleryBudget(app)'"
            )

    def _install(self) -> None:
        """Put the gate where all publications pass, and the steps of leases and relay into workers.

        An ``app.amqp`` that was read before keeps its sender; there the sender is replaced. One
        that was not is built later, once the configuration is known, from a subclass.
        """
        app, budget = self.app, self
        unopened = Unopened(self)
        if "amqp" in app.__dict__:
            app.amqp.send_task_message = Gate(self, app.amqp.send_task_message, unopened)
        else:
            base = symbol_by_name(app.amqp_cls)

            class BudgetAMQP(base):  # type: ignore[misc, valid-type]
                @cached_property
                def send_task_message(self) -> Any:
                    # The base's own, whatever it made of Celery's.
                    return Gate(budget, super().send_task_message, unopened)

                def as_task_v2(
                    self,
                    task_id: str,
                    name: str,
                    args: Any = None,
                    kwargs: Any = None,
                    *rest: Any,
                    argsrepr: str | None = None,
                    kwargsrepr: str | None = None,
                    **options: Any,
                ) -> Any:
                    if argsrepr is None:
                        argsrepr = short_repr(args or (), self.argsrepr_maxsize)
                    if kwargsrepr is None:
                        kwargsrepr = short_repr(kwargs or {}, self.kwargsrepr_maxsize)
                    return super().as_task_v2(
                        task_id,
                        name,
                        args,
                        kwargs,
                        *rest,
                        argsrepr=argsrepr,
                        kwargsrepr=kwargsrepr,
                        **options,
                    )

            app.amqp_cls = BudgetAMQP
        app.send_task = with_request_id(self, app.send_task, unopened)
        canvas.install()
        eager_canvas.install()
        app.steps["worker"].add("celery_budget.integration.worker:LeaseStep")
        app.steps["worker"].add("celery_budget.integration.received:ReceivedStep")
        app.steps["worker"].add("celery_budget.integration.companion:RelayStep")
        app.steps["consumer"].add("celery_budget.integration.unclaimed:ConsumerStep")
        app.user_options["worker"].add(_RELAY_OPTION)
