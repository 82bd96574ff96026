"""What a lane is, and what its limits say."""

from __future__ import annotations

from typing import Any

import pytest

from celery_budget.core.declarations import tomllib
from celery_budget.core.lane_files import LaneChange, compare_lanes, parse_lanes, written_lanes
from celery_budget.core.lanes import LIMITS, MOST_QUEUES, Lane, Load
from celery_budget.errors import InvalidAmount, InvalidLane, InvalidName


@pytest.mark.parametrize(
    ("terms", "error"),
    [
        ({"name": ""}, InvalidName),
        ({"name": 7}, InvalidName),
        ({"queues": ()}, InvalidLane),
        ({"queues": ["q"]}, InvalidLane),
        ({"queues": (1,)}, InvalidLane),
        ({"queues": ("q", "q")}, InvalidLane),
        ({"queues": ("a\n",)}, InvalidName),
        ({"queues": tuple(map(str, range(MOST_QUEUES + 1)))}, InvalidLane),
        *(({limit: -1}, InvalidAmount) for limit in LIMITS),
        *(({limit: True}, InvalidAmount) for limit in LIMITS),
        ({"max_wait_us": 1.5}, InvalidAmount),
        ({"ageing": None}, InvalidAmount),
        ({"paused": 1}, InvalidLane),
        ({"preflight": None}, InvalidLane),
    ],
)
def test_what_is_no_lane(terms: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Lane(**{"name": "llm", "queues": ("q",), **terms})


def test_queues_are_in_order() -> None:
    assert Lane("llm", ("b", "a")) == Lane("llm", ("a", "b"))


@pytest.mark.parametrize(
    ("terms", "weight", "waiting", "refusal"),
    [
        ({}, 10**9, Load(10**9, 10**9), None),
        ({"max_waiting_jobs": 2}, 1, Load(1, 0), None),
        ({"max_waiting_jobs": 2}, 1, Load(2, 0), ("jobs", 2, 2)),
        ({"max_waiting_units": 5}, 3, Load(9, 2), None),
        ({"max_waiting_units": 5}, 4, Load(9, 2), ("units", 2, 5)),
        ({"max_waiting_units": 5}, 6, Load(), ("heavy", 0, 5)),
        ({"max_running_units": 5, "max_queued_units": 4}, 5, Load(), ("heavy", 0, 4)),
        ({"burst_units": 4}, 5, Load(), None),
    ],
)
def test_what_new_work_is_refused(
    terms: dict[str, Any], weight: int, waiting: Load, refusal: tuple[str, int, int] | None
) -> None:
    assert Lane("llm", ("q",), **terms).refusal(weight, waiting) == refusal


@pytest.mark.parametrize(
    ("terms", "queued", "running", "full"),
    [
        ({}, Load(9, 9), Load(9, 9), None),
        ({"max_running_jobs": 3}, Load(1, 0), Load(1, 0), None),
        ({"max_running_jobs": 3}, Load(2, 0), Load(1, 0), "running"),
        ({"max_running_units": 3}, Load(1, 2), Load(1, 1), "running"),
        ({"max_queued_jobs": 1}, Load(1, 0), Load(), "queued"),
        ({"max_queued_units": 1}, Load(1, 1), Load(), "queued"),
        ({"max_queued_units": 1}, Load(0, 0), Load(7, 7), None),
        ({"max_running_jobs": 0}, Load(), Load(), "running"),
    ],
)
def test_what_keeps_a_lane_from_releasing_anything(
    terms: dict[str, Any], queued: Load, running: Load, full: str | None
) -> None:
    assert Lane("llm", ("q",), **terms).full(queued, running) == full


def test_a_file_of_lanes_comes_back_as_it_was_written() -> None:
    lanes = [
        Lane("a b", ("q", "r"), max_running_units=7, max_wait_us=None, preflight=False),
        Lane("ü", ("s",), burst_units=1, max_wait_us=1_500_000, ageing=0),
    ]
    text = written_lanes({"own": lanes, "other": [Lane("x", ("q",))]}, "own")
    read = parse_lanes(tomllib.loads(text)["lane"], "own")
    assert read == {"own": tuple(lanes), "other": (Lane("x", ("q",)),)}


def test_what_is_deleted_comes_first_and_pausing_is_no_change() -> None:
    old, kept = Lane("old", ("q",)), Lane("kept", ("r",), paused=True)
    wanted = [Lane("new", ("q",)), Lane("kept", ("r",))]
    existing = {"old": old, "kept": kept}
    assert compare_lanes("root", existing, wanted, prune=True) == (
        LaneChange("root", "old", "close", old, None),
        LaneChange("root", "new", "add", None, wanted[0]),
    )
    assert [one.kind for one in compare_lanes("root", existing, wanted)] == ["add"]
    assert LaneChange(
        "root", "new", "add", None, Lane("new", ("q",), burst_units=1_000)
    ).fields == (
        ("queues", "", "q"),
        ("burst_units", "", "1_000"),
    )
