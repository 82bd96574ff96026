"""The life of one request, as far as the ledger knows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from celery_budget.reconcile import isolation
from celery_budget.reconcile.following import Next, next_steps
from celery_budget.settings import Settings
from celery_budget.store import Connection, Store, lanes, quarantine, stories
from celery_budget.store import parked as parked_work

__all__ = ["Story", "explain"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Story:
    """The life of one request, as far as the ledger knows it.

    :ivar reservation: the request and its state. Beside those of a reservation: ``parked``,
        ``waiting`` for budget now; ``quarantined``; ``refused``, where a sampled refusal is all
        there is; and the states of a message that draws on no budget.
    :ivar changes: what it did to balances, in the order of time, with what they were then; see
        :class:`~celery_budget.reconcile.Entry`.
    :ivar folded: the budgets of which older changes are folded into a checkpoint, and gone.
    :ivar refusals: other tries of the same task that the budgets it draws on refused before, as far
        as the sample has kept them. Whether they were tries of this request is not known.
    :ivar parent: the request whose attempt made it; none without one.
    :ivar children: the first that its own attempts made; ``followed`` is how many there are.
    :ivar followers: messages without a budget that its attempts made, as long as they are known.
    :ivar steps: of a chain that was reserved whole: the later steps that have not begun.
    :ivar reused: whose calls get its result, and until when.
    :ivar untold: results that have still to be stored.
    :ivar next: what happens next, and when.
    :ivar left_out: of which of these how many earlier ones are not listed: of attempts, usage and
        so on the last thousand are.
    """

    reservation: Row
    lines: tuple[Row, ...] = ()
    messages: tuple[Row, ...] = ()
    attempts: tuple[Row, ...] = ()
    usage: tuple[Row, ...] = ()
    effects: tuple[Row, ...] = ()
    changes: tuple[Row, ...] = ()
    folded: tuple[str, ...] = ()
    extensions: tuple[Row, ...] = ()
    refusals: tuple[Row, ...] = ()
    parent: Row | None = None
    children: tuple[Row, ...] = ()
    followed: int = 0
    followers: tuple[Row, ...] = ()
    steps: tuple[Row, ...] = ()
    reused: tuple[Row, ...] = ()
    untold: tuple[Row, ...] = ()
    next: tuple[Next, ...] = ()
    left_out: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


def explain(store: Store, settings: Settings, some_id: str) -> list[Story]:
    """Return what is known of the requests that an id means, the oldest first.

    That of a task, a request, a reservation, a message of the outbox, or of what is parked or in
    quarantine. All is read at one moment, and nothing is locked.
    """
    return store.read(_explain, settings, some_id)


def _explain(connection: Connection, settings: Settings, some_id: str) -> list[Story]:
    root = settings.root
    found = [
        _of_reservation(connection, settings, row)
        for row in stories.find_reservations(connection, root, some_id)
    ]
    if found:
        return found
    found = [
        _of_parked(connection, settings, row)
        for row in stories.find_parked(connection, root, some_id)
    ]
    if found:
        return found
    isolated = quarantine.find(connection, root, some_id)
    if isolated is not None:
        shown = isolation.shown(isolated).as_dict()
        return [Story({**shown, "state": "quarantined", "quarantine": [shown]})]
    found = [
        _of_message(connection, settings, row)
        for row in stories.find_messages(connection, root, some_id)
    ]
    return found or [
        Story({**_plain(row), "state": "refused"})
        for row in stories.find_refusals(connection, root, some_id)
    ]


def _of_reservation(connection: Connection, settings: Settings, row: Any) -> Story:
    root, reservation_id = settings.root, row.reservation_id
    found, left_out = stories.story(connection, root, reservation_id)
    parts = {name: _all(rows) for name, rows in found.items()}
    parked = _all(stories.find_parked(connection, root, row.task_id))
    untold = [
        one
        for one in _all(stories.untold_of(connection, root, row.task_id))
        if one["reservation_id"] == str(reservation_id)
    ]
    waits = {
        "parked": [_without(one, "request") for one in parked],
        "quarantine": [
            one.as_dict()
            for one in isolation.of_request(connection, root, row.task_id, reservation_id)
        ],
    }
    children, followed = stories.children(connection, root, reservation_id)
    parent = None if row.parent_id is None else stories.kin(connection, root, row.parent_id)
    budgets = [line["budget"] for line in parts["lines"]]
    mine = [one for one in parked if one["reservation_id"] == str(reservation_id)]
    request = _without(_plain(row), "root")
    return Story(
        {**request, **waits},
        **parts,
        left_out=left_out,
        folded=tuple(
            sorted({budget for budget, _ in stories.folded(connection, root, reservation_id)})
        ),
        refusals=_all(
            stories.refused_before(connection, root, row.task_name, budgets, row.created_us)
        ),
        parent=None if parent is None else _plain(parent),
        children=_all(children),
        followed=followed,
        followers=_all(stories.messages_left(connection, root, reservation_id)),
        steps=_all(
            []
            if row.plan_id is None
            else stories.steps_after(connection, root, row.plan_id, row.step)
        ),
        reused=_all(stories.reused(connection, root, row.task_id)),
        untold=tuple(untold),
        next=next_steps(
            settings,
            request,
            parts["messages"],
            parts["attempts"],
            mine,
            untold,
            _lanes(connection, root, parts["messages"]),
        ),
    )


def _of_parked(connection: Connection, settings: Settings, row: Any) -> Story:
    """Return what is known of a request that waits for budget and was never admitted."""
    root, asked = settings.root, parked_work.request_of(row)
    shown = _without(_plain(row), "request")
    told = {
        "state": "parked",
        "stage": asked.stage,
        "estimator": asked.estimator,
        "estimator_version": asked.estimator_version,
        "prices": asked.prices,
        "shadows": asked.shadows,
        "parent_id": None if asked.parent is None else str(asked.parent),
        "request_deadline_us": asked.deadline_us,
    }
    lines = tuple(
        {
            "budget": line.budget,
            "charge": line.charge,
            "estimate": line.amount,
            "reserved": 0,
            "used": 0,
            "settled": 0,
        }
        for line in asked.lines
    )
    parent = None if asked.parent is None else stories.kin(connection, root, asked.parent)
    return Story(
        {**shown, **told},
        lines,
        parent=None if parent is None else _plain(parent),
        next=next_steps(settings, None, parked=[shown]),
    )


def _of_message(connection: Connection, settings: Settings, row: Any) -> Story:
    """Return what is known of a message that draws on no budget."""
    root, message = settings.root, _plain(row)
    parent = None if row.parent_id is None else stories.kin(connection, root, row.parent_id)
    return Story(
        {name: message[name] for name in ("task_id", "task_name", "state", "parent_id")},
        messages=(message,),
        parent=None if parent is None else _plain(parent),
        next=next_steps(settings, None, [message], lanes=_lanes(connection, root, [message])),
    )


def _lanes(
    connection: Connection, root: str, messages: Iterable[Row]
) -> dict[str, lanes.LaneStanding]:
    """Return how the lanes stand that hold any of these messages."""
    held = {one["lane"] for one in messages if one["state"] == "held"}
    return {
        one.lane.name: one
        for name in sorted(held)
        for one in lanes.standings(connection, root, name)
    }


def _all(rows: Iterable[Any]) -> tuple[Row, ...]:
    return tuple(map(_plain, rows))


def _plain(row: Any) -> Row:
    """Return a row as a dictionary of JSON's types."""
    return {
        name: value if isinstance(value, (int, float, bool, str, type(None))) else str(value)
        for name, value in row._mapping.items()
    }


def _without(row: Row, *names: str) -> Row:
    return {name: value for name, value in row.items() if name not in names}
