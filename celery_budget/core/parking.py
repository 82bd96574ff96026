"""Waiting for budget: what a task declares about it, and which of several that wait come next.

Pure: the store reads a snapshot of what waits for one budget, and tries what is planned here. The
ledger decides about each.

What continues work comes first, oldest first. New requests are served in turns: each owner's first,
then each one's second, and so on; within a turn oldest first. A newcomer joins the turn after the
one that is being served, so that what came before it is passed by nobody for ever, however many
owners come.

What does not fit is passed by what does, be it parked as well or new, for a while. After that it
goes ahead: nothing else is admitted to that budget until it is. Only a request that would fit if
what others hold came back does so: one that is too large for what is left of the window waits for
the next and keeps nobody from the rest of this one.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from celery_budget.errors import PolicyError

__all__ = [
    "FALLBACK",
    "FIRST_TURN",
    "PARK",
    "RAISE",
    "Parking",
    "Plan",
    "Room",
    "Waiting",
    "in_order",
    "plan",
    "turn_of",
]

#: What becomes of a request that does not fit: its caller is told, or it waits. The third is the
#: first, of a task that tries several lanes before.
RAISE, PARK, FALLBACK = "raise", "park", "fallback"
#: Of work that goes on; turns of new requests begin after it.
GOES_ON, FIRST_TURN = 0, 1
#: No request waits longer: thirty years, in seconds.
MOST_SECONDS = 1_000_000_000


@dataclass(frozen=True)
class Parking:
    """What becomes of a request that is refused; nothing unless given.

    :ivar on_refused: ``raise`` or ``park``, or ``fallback`` of a task that has one; none for what
        the task declares, or else ``raise``.
    :ivar park_for: for how many seconds it waits for budget at most; none for what the task
        declares, or else ``budget_park_seconds``. Of what continues running work, which always
        waits, as well.
    :raises PolicyError: for what means nothing.
    """

    on_refused: str | None = None
    park_for: float | None = None

    def __post_init__(self) -> None:
        if self.on_refused not in (None, RAISE, PARK, FALLBACK):
            raise PolicyError(
                f"on_refused= is {self.on_refused!r}; give {RAISE!r}, {PARK!r} or {FALLBACK!r}"
            )
        given = self.park_for
        number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if given is not None and not (number and 0 < given <= MOST_SECONDS):
            raise PolicyError(
                f"park_for= is {given!r}; give a number of seconds above 0, at most {MOST_SECONDS}"
            )

    def check(self, lanes: Sequence[str]) -> None:
        """Check that it means something for a task that tries these lanes.

        :raises PolicyError: where it is to fall back on none.
        """
        if self.on_refused == FALLBACK and not lanes:
            raise PolicyError(
                f"on_refused= is {FALLBACK!r} and the task names no lanes; give it fallback=, a "
                "list of them"
            )

    def given_by(self, call: Parking) -> Parking:
        """Return the same with what one call says instead."""
        return Parking(
            self.on_refused if call.on_refused is None else call.on_refused,
            self.park_for if call.park_for is None else call.park_for,
        )

    @property
    def parks(self) -> bool:
        """Whether a new request waits where it does not fit."""
        return self.on_refused == PARK

    @property
    def park_us(self) -> int | None:
        """:attr:`park_for` in microseconds."""
        return None if self.park_for is None else max(1, int(self.park_for * 1_000_000))


@dataclass(frozen=True)
class Waiting:
    """One parked request, as it stands in the queue of the budget that was short.

    :ivar amount: how much more it needs of that budget.
    :ivar turn: see :func:`turn_of`.
    :ivar holds: whether it is the next attempt of a request that holds what it used.
    """

    parked_id: uuid.UUID
    amount: int
    turn: int
    since_us: int
    holds: bool = False

    @property
    def key(self) -> tuple[int, int, uuid.UUID]:
        """What orders a queue."""
        return self.turn, self.since_us, self.parked_id


@dataclass(frozen=True)
class Room:
    """What is left of a budget.

    :ivar new: for new requests: up to the soft stop. Negative where it takes nothing.
    :ivar finishing: for what continues work: up to the hard stop.
    :ivar possible: for new requests, if all that others hold came back but what waiting attempts
        have used.
    :ivar is_open: whether it takes what holds nothing yet.
    """

    new: int
    finishing: int
    possible: int
    is_open: bool = True


@dataclass(frozen=True)
class Plan:
    """What is to be tried, in this order, and what goes ahead of everything else, if anything."""

    tries: tuple[uuid.UUID, ...]
    ahead: uuid.UUID | None = None


def turn_of(own_last: int | None, first: int | None) -> int:
    """Return the turn that a new request joins.

    :param own_last: that of the last one of its owner that waits for the same budget; none where
        none does.
    :param first: the first turn of new requests that wait for it; none where none does.
    """
    if first is None:
        return FIRST_TURN
    return max(first, own_last or 0) + 1


def in_order(waiting: Iterable[Waiting]) -> list[Waiting]:
    """Return what waits for one budget in the order in which it is served."""
    return sorted(waiting, key=lambda one: one.key)


def plan(waiting: Iterable[Waiting], room: Room, aged_us: int) -> Plan:
    """Return what to try now of what waits for one budget.

    :param aged_us: what has waited since then or longer, and would fit if what others hold came
        back, goes ahead: of those the first. What follows it is not tried.
    """
    tries: list[uuid.UUID] = []
    taken = 0
    for one in in_order(waiting):
        if not (room.is_open or one.holds):
            continue
        left = room.finishing if one.turn == GOES_ON else room.new
        if one.amount <= left - taken:
            tries.append(one.parked_id)
            taken += one.amount
        elif one.since_us <= aged_us and not one.holds and one.amount <= room.possible:
            return Plan(tuple(tries), one.parked_id)
    return Plan(tuple(tries))
