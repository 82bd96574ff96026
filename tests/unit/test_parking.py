"""What waits for budget: in which order it is served, what passes it, and what goes ahead."""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_budget.core.parking import (
    FIRST_TURN,
    GOES_ON,
    Parking,
    Plan,
    Room,
    Waiting,
    in_order,
    plan,
    turn_of,
)
from celery_budget.errors import PolicyError

OLD, AGED, NEW = 1, 50, 100


def waiting(number: int, amount: int = 10, **changes: Any) -> Waiting:
    plain = Waiting(uuid.UUID(int=number), amount, FIRST_TURN, NEW + number)
    return replace(plain, **changes)


def planned(found: Plan) -> tuple[list[int], int | None]:
    return [one.int for one in found.tries], found.ahead and found.ahead.int


def room(new: int, *, finishing: int | None = None, possible: int = 1000, **more: Any) -> Room:
    return Room(new, new if finishing is None else finishing, possible, **more)


def test_what_goes_on_comes_first_then_turns_then_age() -> None:
    queue = [
        waiting(1, turn=2),
        waiting(2, turn=1),
        waiting(3, turn=1, since_us=OLD),
        waiting(4, turn=GOES_ON),
        waiting(5, turn=GOES_ON, since_us=OLD),
    ]
    assert [one.parked_id.int for one in in_order(queue)] == [5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("own_last", "first", "turn"),
    [(None, None, FIRST_TURN), (None, 1, 2), (None, 7, 8), (1, 1, 2), (9, 7, 10), (7, 7, 8)],
)
def test_a_newcomer_joins_the_turn_after_the_one_that_is_served(
    own_last: int | None, first: int | None, turn: int
) -> None:
    assert turn_of(own_last, first) == turn


@pytest.mark.parametrize(
    ("queue", "left", "tries", "ahead"),
    [
        ([waiting(1), waiting(2), waiting(3)], room(25), [1, 2], None),
        ([], room(25), [], None),
        ([waiting(1)], room(-1, possible=-1), [], None),
        # What fits passes what does not, for a while.
        ([waiting(1, 60), waiting(2)], room(50), [2], None),
        # Then that goes ahead, and nothing after it is tried.
        ([waiting(1, 60, since_us=OLD), waiting(2)], room(50), [], 1),
        ([waiting(1), waiting(2, 60, since_us=OLD)], room(50), [], 2),
        ([waiting(1, turn=GOES_ON), waiting(2, 60, since_us=OLD)], room(50), [1], 2),
        # Not where it could not fit if all that is held came back.
        ([waiting(1, 60, since_us=OLD), waiting(2)], room(50, possible=59), [2], None),
        # Nor the next attempt of what holds budget itself: it might wait for its own.
        ([waiting(1, 60, since_us=OLD, holds=True), waiting(2)], room(50), [2], None),
        # What goes on has the room up to the hard stop.
        ([waiting(1, 60, turn=GOES_ON), waiting(2)], room(50, finishing=60), [1], None),
        ([waiting(1, 10, turn=GOES_ON), waiting(2)], room(5, finishing=60), [1], None),
        # A budget that drains lets only go on what it holds.
        (
            [waiting(1), waiting(2, turn=GOES_ON), waiting(3, turn=GOES_ON, holds=True)],
            room(50, is_open=False),
            [3],
            None,
        ),
        ([waiting(1, 60, since_us=OLD)], room(50, is_open=False), [], None),
    ],
)
def test_what_is_tried(
    queue: list[Waiting], left: Room, tries: list[int], ahead: int | None
) -> None:
    assert planned(plan(queue, left, AGED)) == (tries, ahead)


@dataclass
class Queue:
    """What waits for one budget, by whom, and what was served, in order."""

    waits: dict[Waiting, str] = field(default_factory=dict)
    served: list[Waiting] = field(default_factory=list)
    owners: dict[Waiting, str] = field(default_factory=dict)
    rank: dict[Waiting, int] = field(default_factory=dict)
    passed: dict[Waiting, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    number: int = 0

    def park(self, owner: str) -> None:
        own = [one.turn for one, whose in self.waits.items() if whose == owner]
        turn = turn_of(max(own, default=None), min((one.turn for one in self.waits), default=None))
        self.number += 1
        one = waiting(self.number, 1, turn=turn)
        self.waits[one] = self.owners[one] = owner
        self.rank[one] = len(own) + 1

    def serve(self) -> None:
        for parked_id in plan(self.waits, room(1), OLD).tries:
            [one] = [one for one in self.waits if one.parked_id == parked_id]
            owner = self.waits.pop(one)
            self.served.append(one)
            for left in self.waits:
                self.passed[left][owner] += 1


STEPS = st.lists(st.sampled_from(["a", "a", "a", "b", "c", "d", None, None, None]), max_size=60)


@given(STEPS)
def test_nobody_is_passed_for_long_whoever_floods(steps: list[str | None]) -> None:
    queue = Queue()
    for owner in steps:
        if owner is None:
            queue.serve()
        else:
            queue.park(owner)
    while queue.waits:
        queue.serve()
    for owner in "abcd":
        own = [one for one in queue.served if queue.owners[one] == owner]
        assert own == sorted(own, key=lambda one: one.since_us), "an owner's oldest comes first"
    for one, passed in queue.passed.items():
        for owner, often in passed.items():
            # The first that an owner has waiting is passed twice by each other one, at most.
            assert owner == queue.owners[one] or often <= queue.rank[one] + 1


def test_a_stream_of_newcomers_passes_nobody_for_ever() -> None:
    queue = Queue()
    for _ in range(3):
        queue.park("first")
    for number in range(50):
        queue.park(f"new {number}")
        queue.serve()
    owners = [queue.owners[one] for one in queue.served]
    assert owners.count("first") == 3


@pytest.mark.parametrize(
    "given_",
    [
        {"on_refused": "wait"},
        {"on_refused": True},
        {"park_for": 0},
        {"park_for": -1},
        {"park_for": True},
        {"park_for": "1h"},
        {"park_for": float("nan")},
        {"park_for": float("inf")},
        {"park_for": 1e10},
    ],
)
def test_what_means_nothing_is_an_error(given_: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match=next(iter(given_))):
        Parking(**given_)


def test_a_call_says_otherwise() -> None:
    declared = Parking("park", 60)
    assert declared.given_by(Parking()) == declared
    assert declared.given_by(Parking("raise", 5)) == Parking("raise", 5)
    assert (declared.parks, declared.park_us) == (True, 60_000_000)
    assert (Parking().parks, Parking().park_us) == (False, None)
    assert Parking(park_for=1e-9).park_us == 1
