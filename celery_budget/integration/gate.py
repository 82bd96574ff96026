"""The gate: every publication passes it, and a budgeted one is admitted instead of sent.

It stands in for ``app.amqp.send_task_message``, the one function through which Celery publishes
task messages of any origin. A signal would not do: Celery logs what a receiver raises and goes on.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from celery._state import get_current_worker_task

from celery_budget import admission, settlement, tracing, watching
from celery_budget.admission import Publication
from celery_budget.core.deadlines import Deadline
from celery_budget.core.identity import checked_id, new_id, task_id_of
from celery_budget.core.messages import WireMessage
from celery_budget.core.parking import PARK, Parking
from celery_budget.core.reservations import (
    Admitted,
    Missing,
    Refused,
    Reserved,
    ReserveRequest,
)
from celery_budget.errors import (
    BudgetError,
    PolicyError,
    RequestConflict,
    StoreError,
    UnsupportedPublication,
)
from celery_budget.events import Logger
from celery_budget.integration import fallbacks
from celery_budget.integration.authority import may_draw
from celery_budget.integration.batch import Batch, current_batch, together
from celery_budget.integration.capture import with_header
from celery_budget.integration.context import (
    HEADER,
    Delivered,
    answer,
    current_attempt,
    delivered_now,
    header,
    is_answered,
    parse_header,
)
from celery_budget.integration.deadlines import UNTIL, deadline_of, passed_on
from celery_budget.integration.fallbacks import CHOSEN, NEXT, Choice, Way
from celery_budget.integration.ids import fix_link_ids
from celery_budget.integration.releases import publishes_what_follows
from celery_budget.integration.results import BackendResults
from celery_budget.integration.reuse import request_id_of
from celery_budget.integration.sending import Sender, Unopened, queue_name
from celery_budget.integration.spooling import gives_back, stopping
from celery_budget.integration.terms import CANVAS, PLANNED, Terms, plan, terms_of
from celery_budget.settlement import Attempt
from celery_budget.spool import Patience
from celery_budget.store import Stop
from celery_budget.tracing import NOTHING, Span

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = ["Gate", "with_request_id"]

logger = Logger(__name__)


class Gate:
    """``send_task_message`` of an application with budgets.

    :param send: Celery's own.
    """

    def __init__(self, budget: CeleryBudget, send: Callable[..., Any], unopened: Unopened) -> None:
        self._budget = budget
        self._sender = Sender(budget, send, unopened)

    def __call__(self, producer: Any, name: str, message: Any, **options: Any) -> Any:
        attempt = current_attempt(self._budget.app)
        began = time.time_ns()
        origin = _origin(message, attempt)
        ours = _Ours.taken_from(options)
        call = _Call(producer, name, message, options, ours, origin, attempt)
        try:
            args, kwargs = _arguments(message)
            terms = terms_of(self._budget.app, name, args, kwargs)
            ours.check(name)
            if terms is None:
                return self._send_plain(call)
            with tracing.of(self._budget.settings).span(
                "budget.reserve", "producer", parent=_led(attempt), inner=True, start_ns=began
            ) as span:
                call = call._replace(span=span, terms=terms)
                request = self._request(call, terms)
                watching.describe(span, request, queue_name(options))
                return self._publish(call, request, terms.fallback)
        except StoreError:
            raise
        except BudgetError as error:
            if origin != "continuation":
                raise
            # Raising would turn the task that has just finished into a failure; it is the one
            # that cannot follow which failed.
            BackendResults(self._budget.app).failed(_task_id(message), error)
            return None

    def _request(self, call: _Call, terms: Terms) -> ReserveRequest:
        """Work out the request: whose budget, how much, and what it is to the running task."""
        name, message, attempt = call.name, call.message, call.attempt
        if not isinstance(message.body, tuple):
            raise UnsupportedPublication(
                f"task {name} has a budget and cannot be sent with task_protocol 1; use 2"
            )
        task_id = checked_id("a task id", _task_id(message))
        request_id, owner = task_id, terms.evaluation.budget
        deadline = call.deadline(terms)
        if call.ours.request_id is not None:
            request_id = checked_id("request_id", call.ours.request_id)
            _check_stands_for(request_id, owner, task_id)
        parking = terms.parking_of(call.ours.parking)
        request = ReserveRequest(
            reservation_id=new_id(),
            root=self._budget.settings.root,
            owner=owner,
            request_id=request_id,
            task_id=task_id,
            task_name=name,
            stage=terms.stage,
            fingerprint=_within(call.ours.made_of, terms.fingerprint.digest),
            estimator=terms.estimator,
            estimator_version=terms.version,
            lines=terms.evaluation.lines,
            prices=terms.evaluation.prices,
            tenant=terms.evaluation.tenant,
            shadows=terms.shadows(),
            opaque=terms.fingerprint.opaque,
            nesting=int(message.headers.get("replaced_task_nesting") or 0),
            parent=self._parent(call),
            retries=int(message.headers.get("retries") or 0),
            finishing=call.ours.finishing or call.origin != "new",
            deadline_us=deadline.at_us,
            within_us=deadline.within_us,
            parks=parking.parks and call.origin == "new",
            park_us=parking.park_us,
            enforced=terms.enforced,
        )
        delivered = delivered_now()
        if delivered is not None and delivered.task_id == task_id:
            return replace(request, unreserved=True)
        if call.origin == "retry":
            retried = attempt.reservation_id if attempt else _unclaimed(self._budget)
            return request if retried is None else replace(request, reservation_id=retried)
        return self._planned(call, request)

    def _parent(self, call: _Call) -> uuid.UUID | None:
        """Return the reservation that a publication follows from, or has an effect of."""
        if call.attempt is not None and call.origin == "continuation":
            return call.attempt.reservation_id
        batch = current_batch(self._budget) if call.origin == "new" else None
        return batch.parent if batch is not None else None

    def _planned(self, call: _Call, request: ReserveRequest) -> ReserveRequest:
        """Return the request under the reservation that its step was planned with, if it was."""
        found = parse_header(call.ours.planned)
        if found is None or found[0] != request.root or call.origin != "continuation":
            return request
        return replace(request, reservation_id=found[1], plan=found[1])

    def _publish(self, call: _Call, request: ReserveRequest, lanes: tuple[str, ...]) -> Any:
        """Have Celery's sender make the message, and admit it at the moment it would go out.

        In a batch it is admitted with the others. What the sender does afterwards
        (``after_task_publish``) happens for admitted requests only, unless they are in a batch; the
        ``task-sent`` event it may publish goes through the outbox as well.

        :param lanes: those it is tried in. For each that is, the sender makes a message.
        """
        args, kwargs, embed = call.message.body
        embed = fix_link_ids(embed, request.reservation_id)
        embed = passed_on(embed, Deadline(request.within_us, request.deadline_us))
        call.options["headers"] = {
            **(call.options.get("headers") or {}),
            # Celery's own mean something else, whatever a propagator calls its headers.
            **{
                name: value
                for name, value in call.span.carrier().items()
                if name not in call.message.headers
            },
            HEADER: header(request.root, request.reservation_id),
        }
        waits = request.unreserved or call.origin == "retry" or _is_step(request)
        batch = None if waits else current_batch(self._budget)
        whole = call.ours.reserve is not None and call.origin == "new"
        choice = self._choice(call, batch)
        ways = self._ways(call, request, lanes, choice if batch or whole else None)
        steps: list[ReserveRequest] = []
        if whole:
            head = ways[0].request
            steps, embed = plan(
                self._budget.app, head, embed, choice.step, partial(self._allow, call)
            )
            if steps:
                head = replace(head, plan=head.reservation_id, step=0)
                ways = [replace(ways[0], request=head)]
        call = call._replace(message=call.message._replace(body=(args, kwargs, embed)))
        opened = together(self._budget) if batch or steps else nullcontext()
        with opened as batch:
            for way in ways[:-1]:
                with suppress(*NEXT):
                    return self._go(call, way, steps, batch)
            return self._go(call, ways[-1], steps, batch)

    def _choice(self, call: _Call, batch: Batch | None) -> Choice:
        """Return what chooses the lanes of what is admitted together."""
        waits, stop = call.waiting
        return Choice(self._budget, waits, stop, Counter if batch is None else batch.asked)

    def _ways(
        self,
        call: _Call,
        request: ReserveRequest,
        lanes: tuple[str, ...],
        choice: Choice | None,
    ) -> list[Way]:
        """Return the ways that a request is tried by, in their order.

        :param choice: chooses one of them before, where it is admitted together with others.
        """
        waits, stop = call.waiting
        if not lanes:
            return [Way(request, call.options)]
        if call.origin == "retry":
            # One that has not claimed holds already what it asked for.
            if call.attempt is not None:
                request = fallbacks.kept(self._budget, request, stop)
            return [Way(request, call.options)]
        if _is_step(request) and call.ours.chosen is not None:
            lanes = (call.ours.chosen,)
        if choice is not None:
            return [choice.of(request, lanes, call.options)]
        return fallbacks.ways(self._budget, request, lanes, call.options, waits=waits, stop=stop)

    def _go(
        self, call: _Call, way: Way, steps: Sequence[ReserveRequest], batch: Batch | None
    ) -> Any:
        """Have the message made that goes this way, and admit it, or add it to the batch.

        :raises BudgetExceeded, QueueFull: where it is refused.
        """
        call = call._replace(options=way.options)
        self._allow(call, way.request, call.terms)
        decide = partial(self._decide, call, way) if batch is None else None
        sink = _Sink(self._budget, call, way.request, steps, batch, decide)
        return self._make(call, sink)

    def _make(self, call: _Call, sink: _Sink) -> Any:
        return self._sender.make(
            call.producer, call.name, call.message, call.options, sink, call.ours.order_key
        )

    def _allow(self, call: _Call, request: ReserveRequest, terms: Terms | None) -> None:
        """Have the application's rules say that the caller may draw on what a request names.

        :raises NotAuthorized: where one of them does not.
        """
        if terms is None:
            return
        kind = "delivered" if request.unreserved else call.origin
        running = None if call.attempt is None else call.attempt.reservation_id
        if running is None and call.origin == "retry":
            running = request.reservation_id
        may_draw(
            self._budget, request.task_name, terms, request.lines, kind, running, call.waiting[1]
        )

    def _decide(self, call: _Call, way: Way, wire: WireMessage) -> Admitted | None:
        """Admit one message by itself; none where its attempt has lost its fence."""
        store, settings, attempt = self._budget.store, self._budget.settings, call.attempt
        request = way.request
        if call.origin == "retry" and attempt is not None and not request.unreserved:
            return admission.retry(
                store,
                settings,
                request,
                wire,
                attempt.number,
                attempt.claim_id,
                attempt.stop,
                call.span,
            )
        if call.origin == "retry" and request.reservation_id == _unclaimed(self._budget):
            running = get_current_worker_task().request
            retries = int(running.retries or 0)
            try:
                retried = admission.retry_unclaimed(
                    store, settings, request, wire, retries, Patience(stopping), call.span
                )
            except StoreError:
                if not gives_back(self._budget, running):
                    raise
                retried = None
            answer(running, refused=retried is None)
            return retried
        if _is_step(request):
            stop = attempt.stop if attempt else None
            reached = admission.activate(store, settings, request, wire, stop, call.span)
            if not isinstance(reached, Missing):
                return reached
            request = replace(request, reservation_id=new_id(), plan=None)
            wire = with_header(wire, HEADER, header(request.root, request.reservation_id))
        delivered = delivered_now() if request.unreserved else None
        if delivered is not None:
            self._check_free(request, delivered)
        result = admission.admit(
            store,
            settings,
            request,
            wire,
            continuation=delivered.park if delivered else call.origin == "continuation",
            delivered=delivered is not None,
            last=way.last,
            stop=_stop_of(attempt, delivered),
            span=call.span,
        )
        if isinstance(result, Refused) and (delivered is None or not way.last):
            raise result.error()
        if delivered is not None:
            delivered.admitted = result
        return result

    def _check_free(self, request: ReserveRequest, delivered: Delivered) -> None:
        """Check that what came without a reservation does not have the id of somebody else's task.

        Its result would be stored over that task's.

        :raises RequestConflict: where it does.
        """
        store, root = self._budget.store, request.root
        owners = settlement.owners_of(store, root, request.task_id, delivered.stop)
        if owners and request.owner not in owners:
            raise RequestConflict(request.request_id, request.owner, request.task_id)

    def _send_plain(self, call: _Call) -> Any:
        """Send what draws on no budget.

        As Celery does, but for what follows a budgeted attempt, where a replay must find it again,
        what is published in a batch and what has an order: those go through the outbox.
        """
        if isinstance(call.message.body, tuple):
            args, kwargs, embed = call.message.body
            told = args, kwargs, passed_on(embed, call.deadline(None))
            call = call._replace(message=call.message._replace(body=told))
        batch, attempt = current_batch(self._budget), call.attempt
        follows = attempt is not None and call.origin == "continuation"
        if batch is None and not follows and call.ours.order_key is None:
            return self._sender.send(call.producer, call.name, call.message, **call.options)
        sink = _Sink(self._budget, call, None, [], batch, None, self._parent(call))
        with nullcontext() if batch is None else together(self._budget):
            return self._make(call, sink)


#: The options that callers give.
GIVEN = (
    "request_id",
    "finishing",
    "order_key",
    "reserve",
    "partial",
    "deadline",
    "on_refused",
    "park_for",
)


@dataclass(frozen=True)
class _Ours:
    """The options of a publication that are for us; Celery would make properties of them.

    :ivar planned: the reservation of a chain's step that was reserved with the whole chain.
    :ivar chosen: the lane that was chosen for it then.
    :ivar until_us: until when what it is part of is to be over, as its signature was told.
    :ivar canvas: the id of the canvas whose request id the task's id derives from.
    :ivar made_of: what that canvas is made of.
    """

    request_id: Any = None
    finishing: Any = False
    order_key: Any = None
    reserve: Any = None
    partial: Any = False
    deadline: Any = None
    on_refused: Any = None
    park_for: Any = None
    planned: Any = None
    chosen: Any = None
    until_us: int | None = None
    canvas: Any = None
    made_of: Any = None

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> _Ours:
        """Take them out of ``options``. Of a canvas they reach tasks without a budget as well."""
        if _OURS.isdisjoint(options):
            return _NONE
        flags = ("finishing", "partial")
        named = {name: options.pop(name, False if name in flags else None) for name in GIVEN}
        canvas, made_of = options.pop(CANVAS, None) or (None, None)
        planned, until_us = options.pop(PLANNED, None), options.pop(UNTIL, None)
        chosen = options.pop(CHOSEN, None)
        return cls(
            **named,
            planned=planned,
            chosen=chosen,
            until_us=until_us,
            canvas=canvas,
            made_of=made_of,
        )

    def check(self, name: str) -> None:
        """Check what was given.

        :raises PolicyError: where a value means nothing.
        """
        if type(self.finishing) is not bool:
            raise PolicyError(f"finishing= of {name} is {self.finishing!r}; give True or False")
        if self.partial is not False:
            raise PolicyError(
                f"partial= of {name}: one task is admitted or not; give it to a group"
            )
        if self.reserve not in (None, "chain"):
            raise PolicyError(
                f"reserve= of {name} is {self.reserve!r}; give 'chain', or leave it out to admit "
                "step by step"
            )
        if self.order_key is not None:
            checked_id(f"order_key= of {name}", self.order_key)
        if self.parking.parks and self.reserve is not None:
            raise PolicyError(
                f"on_refused={PARK!r} of {name}: a chain that is reserved whole is admitted or "
                "refused; leave reserve='chain' out, and its first step waits"
            )

    @property
    def parking(self) -> Parking:
        """What becomes of this call where it does not fit, as far as it says so.

        :raises PolicyError: where that means nothing.
        """
        return Parking(self.on_refused, self.park_for)


#: All of them, as a set that the options of a call mostly share nothing with.
_OURS = frozenset((*GIVEN, CANVAS, PLANNED, UNTIL, CHOSEN))
_NONE = _Ours()


class _Call(NamedTuple):
    """One call of Celery's sender, and what it is to the task that publishes.

    :ivar origin: ``new``; ``retry`` of the running attempt; ``continuation`` of work that was
        admitted (a chain's next step, a callback, a chord's body, a replacement), which is parked
        where it does not fit.
    :ivar terms: what it asks for; none for what draws on no budget.
    """

    producer: Any
    name: str
    message: Any
    options: dict[str, Any]
    ours: _Ours
    origin: str
    attempt: Attempt | None
    span: Span = NOTHING
    terms: Terms | None = None

    @property
    def waiting(self) -> tuple[bool, Stop | None]:
        """Whether a fault of the store is waited out, and what ends that.

        It is where a worker's task would fail by it.
        """
        delivered = delivered_now()
        waits = self.origin != "new" or delivered is not None
        return waits, _stop_of(self.attempt, delivered)

    def deadline(self, terms: Terms | None) -> Deadline:
        """Return when it is to be over: by its call, its task's policy, and what it is part of.

        That of a retry is its request's.
        """
        if self.origin == "retry":
            at_us = None if self.attempt is None else self.attempt.deadline_us
            return Deadline(at_us=at_us)
        own = Deadline.given(self.ours.deadline, self.name)
        if own is None and terms is not None:
            own = terms.deadline
        follows = self.attempt if self.origin == "continuation" else None
        return deadline_of(own, follows, self.ours.until_us)


class _Sink:
    """Takes what Celery's sender would have sent: first the message, then an event that tells it.

    :param request: none for a message without a budget.
    :param steps: of a chain that is reserved whole, its later ones.
    :param batch: where it waits for others.
    :param decide: admits it at once, where there is no batch.
    :param parent: of a message without a request: the reservation that it follows from.
    """

    def __init__(
        self,
        budget: CeleryBudget,
        call: _Call,
        request: ReserveRequest | None,
        steps: Sequence[ReserveRequest],
        batch: Batch | None,
        decide: Callable[[WireMessage], Admitted | None] | None,
        parent: uuid.UUID | None = None,
    ) -> None:
        self._budget = budget
        self._call = call
        self._request = request
        self._steps = steps
        self._batch = batch
        self._decide = decide
        self._parent = parent
        self._message: WireMessage | None = None
        self._admitted: Admitted | None = None

    def __call__(self, wire: WireMessage) -> None:
        if self._message is not None:
            self._take_event(wire, self._message)
            return
        self._message = wire
        continuation = self._call.origin == "continuation"
        attempt = self._call.attempt
        if self._request is None:
            parent = self._parent
            if self._batch is not None:
                canvas = self._call.ours.canvas
                self._batch.add(Publication(None, wire, parent=parent, canvas=canvas))
            else:
                stop = attempt.stop if attempt else None
                admission.enqueue(self._budget.store, self._budget.settings, wire, parent, stop)
        elif self._batch is not None:
            self._batch.add(
                Publication(
                    self._request,
                    wire,
                    continuation=continuation,
                    canvas=self._call.ours.canvas,
                    trace=self._call.span.carrier(),
                )
            )
            self._call.span.set(outcome="collected")
            for step in self._steps:
                self._batch.add(Publication(step, None))
        elif self._decide is not None:
            self._admitted = self._decide(wire)

    def _take_event(self, wire: WireMessage, message: WireMessage) -> None:
        """Have an event published by the relay, if what it tells of is to be."""
        request = self._request
        if self._batch is not None:
            needs = request.reservation_id if request else None
            self._batch.add(Publication(None, wire, needs=needs))
        elif request is None or isinstance(self._admitted, Reserved):
            try:
                admission.enqueue(self._budget.store, self._budget.settings, wire)
            except StoreError:
                logger.exception(
                    "message.event_lost", task=message.task_name, task_id=message.task_id
                )


def _led(attempt: Attempt | None) -> Mapping[str, Any]:
    """Return headers with the context that a publication follows from, if none is current."""
    if attempt is not None:
        return attempt.trace
    task = get_current_worker_task()
    return {} if task is None else vars(task.request)


def _within(made_of: Any, digest: str) -> str:
    """Return the fingerprint of a task that is part of a canvas: in another one it is another."""
    if made_of is None:
        return digest
    return f"1:{hashlib.sha256(f'{digest} {made_of}'.encode()).hexdigest()}"


def _is_step(request: ReserveRequest) -> bool:
    """Tell whether a request is a later step of a chain that was reserved whole."""
    return request.plan is not None and request.step is None


def _arguments(message: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(message.body, tuple):
        return tuple(message.body[0]), message.body[1]
    return tuple(message.body["args"]), message.body["kwargs"]


def _origin(message: Any, attempt: Attempt | None) -> str:
    task = get_current_worker_task()
    if attempt is None and task is not None and _is_retry(message, task.request):
        # It is retried before it has claimed, as by its before_start.
        return "retry"
    if attempt is not None and task is not None:
        if attempt.called:
            return "continuation"
        headers = message.headers
        # Of a chain that takes the task's place only the last step gets the task's id.
        nesting = int(headers.get("replaced_task_nesting") or 0)
        if nesting > int(task.request.replaced_task_nesting or 0):
            attempt.replaced = True
            return "continuation"
        if _is_retry(message, task.request):
            return "retry"
    return "continuation" if publishes_what_follows() else "new"


def _is_retry(message: Any, request: Any) -> bool:
    retries = int((message.headers or {}).get("retries") or 0)
    return _task_id(message) == request.id and retries > int(request.retries or 0)


def _unclaimed(budget: CeleryBudget) -> uuid.UUID | None:
    """Return the reservation whose delivery runs here and has not claimed; none without one."""
    task = get_current_worker_task()
    found = None if task is None else parse_header(getattr(task.request, HEADER, None))
    if found is None or found[0] != budget.settings.root or is_answered(task.request):
        return None
    return found[1]


def _task_id(message: Any) -> str:
    """Return the id of the task a message starts; protocol 1 has it in the body."""
    return str(message.headers["id"] if message.headers else message.body["id"])


def _stop_of(attempt: Attempt | None, delivered: Delivered | None) -> Stop | None:
    """Return what ends waiting for the ledger."""
    if attempt is not None:
        return attempt.stop
    return None if delivered is None else delivered.stop


def _check_stands_for(request_id: str, owner: str, task_id: str) -> None:
    expected = task_id_of(owner, request_id)
    if task_id != expected:
        raise PolicyError(
            f"request id {request_id!r} stands for task {expected}, and the task's id is "
            f"{task_id!r}; give one of the two, and none to the steps of a canvas, whose ids "
            "Celery makes"
        )


def with_request_id(
    budget: CeleryBudget, send_task: Callable[..., Any], unopened: Unopened
) -> Callable[..., Any]:
    """Return ``app.send_task`` so that ``request_id=`` fixes the task id, and so does ``reuse=``.

    The id must be known before Celery makes its own, since the result it returns is built from
    that; everything else is Celery's. What is wrong with the request is for the gate to say: it
    knows whether the publication follows a task that must not fail for it.
    """

    def send(name: str, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        if not rest and unopened.serves(name, options):
            options["producer"] = unopened.producer
        request_id = options.get("request_id")
        if request_id is None and options.get("task_id") is None:
            joins = request_id_of(budget, name, tuple(args or ()), kwargs or {})
            if joins is not None:
                owner, options["request_id"] = joins
                options["task_id"] = task_id_of(owner, options["request_id"])
        elif request_id is not None and options.get("task_id") is None:
            with suppress(BudgetError):
                terms = terms_of(budget.app, name, tuple(args or ()), kwargs or {})
                if terms is not None:
                    options["task_id"] = task_id_of(
                        terms.evaluation.budget, checked_id("request_id", request_id)
                    )
        return send_task(name, args, kwargs, *rest, **options)

    return send
