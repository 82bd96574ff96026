"""Fallbacks: the lanes that a request is tried in, in order, and what each makes of it.

One that is published by itself is admitted in the first lane that takes it, in as many tries. One
that is admitted together with others goes where it would fit by a look before. Whatever dies in
between, the request is one: its ids are the same in each lane.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from celery import Celery
from celery._state import get_current_worker_task

from celery_budget import admission
from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.backpressure import Outlook
from celery_budget.core.lanes import Lane
from celery_budget.core.reservations import Line, ReserveRequest
from celery_budget.errors import BudgetExceeded, PolicyError, QueueFull, UnknownLane
from celery_budget.store import Stop, lanes

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = [
    "CHOSEN",
    "LANE",
    "NEXT",
    "Choice",
    "Way",
    "kept",
    "lane_of",
    "named",
    "outlook",
    "through",
    "towards",
    "ways",
]

#: The header that names the lane a request was admitted in.
LANE = "budget_lane"
#: The option of a chain's later step: the lane that was chosen for it when it was reserved.
CHOSEN = "budget_chosen"
#: What one lane refuses with, so that the next one is tried.
NEXT = (BudgetExceeded, QueueFull)


@dataclass(frozen=True)
class Way:
    """One way for a request to go.

    :ivar request: with what it draws on there.
    :ivar options: those of Celery's sender.
    :ivar lane: none for the queue that Celery routes it to.
    :ivar last: whether nothing else is tried after it.
    """

    request: ReserveRequest
    options: dict[str, Any]
    lane: Lane | None = None
    last: bool = True


def ways(
    budget: CeleryBudget,
    request: ReserveRequest,
    names: Sequence[str],
    options: dict[str, Any] | None,
    *,
    waits: bool = False,
    stop: Stop | None = None,
) -> list[Way]:
    """Return the ways of a request through the lanes with these names, in their order.

    :param options: those of Celery's sender; none for what is not sent.
    :param waits: wait a fault of the store out.
    :raises UnknownLane: where there is none.
    :raises PolicyError: where a lane has a budget that the request draws on already, and where the
        application does not know its queue.
    """
    known = named(budget, names, waits, stop)
    return [
        Way(
            replace(through(request, lane), parks=request.parks and lane is known[-1]),
            {} if options is None else towards(budget.app, options, lane),
            lane,
            lane is known[-1],
        )
        for lane in known
    ]


def named(budget: CeleryBudget, names: Sequence[str], waits: bool, stop: Stop | None) -> list[Lane]:
    """Return the lanes with these names, in their order.

    :param waits: wait a fault of the store out.
    :raises UnknownLane: where there is none.
    """
    root = budget.settings.root
    if waits:
        return budget.store.wait_out_reading(stop, lanes.named, root, names)
    return budget.store.read(lanes.named, root, names)


def through(request: ReserveRequest, lane: Lane) -> ReserveRequest:
    """Return a request as it is asked in a lane: with the lane's budgets.

    :raises PolicyError: where it draws on one of them already.
    """
    return replace(request, lines=(*request.lines, *lane.lines(request.weight)))


def towards(app: Celery, options: Mapping[str, Any], lane: Lane) -> dict[str, Any]:
    """Return the options of Celery's sender for the first queue of a lane, and a header naming it.

    :raises PolicyError: where the application knows no such queue.
    """
    left = ("exchange", "exchange_type", "routing_key", "declare")
    others = {name: value for name, value in options.items() if name not in left}
    headers = {**(options.get("headers") or {}), LANE: lane.name}
    return {**others, "queue": _queue(app, lane), "headers": headers}


def _queue(app: Celery, lane: Lane) -> Any:
    """Return a lane's first queue: by its name, or else by its routing key."""
    wanted, known = lane.queues[0], app.amqp.queues
    if wanted not in known:
        keyed = sorted(one.name for one in known.values() if one.routing_key == wanted)
        wanted = keyed[0] if keyed else wanted
    try:
        return known[wanted]
    except KeyError:
        raise PolicyError(
            f"lane {lane.name!r} feeds queue {wanted!r}, which {app} does not know; add it to "
            "task_queues"
        ) from None


def lane_of(request: Any) -> str | None:
    """Return the lane that the header of a running request names; none where it names none."""
    name = getattr(request, LANE, None)
    return name if isinstance(name, str) else None


def kept(budget: CeleryBudget, request: ReserveRequest, stop: Stop | None) -> ReserveRequest:
    """Return a retry's request, which stays in the lane that its task runs in.

    Where that is gone, what was held by it is asked for again as it was. Waits a fault of the store
    out.
    """
    task = get_current_worker_task()
    name = None if task is None else lane_of(task.request)
    if name is None:
        return request
    try:
        [lane] = named(budget, [name], True, stop)
    except UnknownLane:
        return request
    return through(request, lane)


@dataclass
class Choice:
    """Chooses the lanes of requests that are admitted together, by a look before.

    :ivar before: returns what those before ask of each budget, which is counted as gone.
    """

    budget: CeleryBudget
    waits: bool = False
    stop: Stop | None = None
    before: Callable[[], Counter[str]] = Counter

    @cached_property
    def asked(self) -> Counter[str]:
        """What those before ask, and what was chosen here since; looked up where it is needed."""
        return self.before()

    def of(self, request: ReserveRequest, names: Sequence[str], options: dict[str, Any]) -> Way:
        """Return the way by the first lane that would take a request now, or else by the last."""
        found = ways(self.budget, request, names, options, waits=self.waits, stop=self.stop)
        looked = [
            (way.lane, [self._with_others(line) for line in way.request.lines])
            for way in found
            if way.lane is not None
        ]
        number, _ = admission.outlook_through(
            self.budget.store,
            self.budget.settings,
            looked,
            request.weight,
            request.finishing,
            enforced=request.enforced,
            waits=self.waits,
            stop=self.stop,
        )
        chosen = replace(found[number].request, parks=request.parks)
        for line in chosen.lines:
            self.asked[line.budget] += line.amount
        return Way(chosen, found[number].options, found[number].lane)

    def step(
        self, request: ReserveRequest, names: Sequence[str]
    ) -> tuple[ReserveRequest, dict[str, Any]]:
        """Return a chain's later step in its lane, and the options by which it is found again."""
        if not names:
            return request, {}
        way = self.of(request, names, {})
        return way.request, {CHOSEN: way.options["headers"][LANE]}

    def _with_others(self, line: Line) -> Line:
        return replace(line, amount=min(MAX_AMOUNT, line.amount + self.asked[line.budget]))


def outlook(
    budget: CeleryBudget,
    lines: Sequence[Line],
    names: Sequence[str],
    finishing: bool,
    enforced: bool,
) -> Outlook:
    """Return whether any of these lanes would take a request with ``lines`` now.

    :raises UnknownLane: where there is none.
    """
    known = named(budget, names, False, None)
    weight = lines[0].amount
    looked = [(lane, (*lines, *lane.lines(weight))) for lane in known]
    return admission.outlook_through(
        budget.store, budget.settings, looked, weight, finishing, enforced=enforced
    )[1]
