"""Ids and fingerprints."""

from __future__ import annotations

import json
import time
import uuid
from datetime import date, datetime, timedelta, timezone
from datetime import time as clock_time
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_budget.core.identity import derived_id, fingerprint, new_id, task_id_of


def test_a_new_id_is_a_uuid7_of_now() -> None:
    before = time.time_ns() // 1_000_000
    made = new_id()
    after = time.time_ns() // 1_000_000
    assert made.version == 7
    assert made.variant == uuid.RFC_4122
    assert before <= made.int >> 80 <= after


def test_ids_that_are_made_later_sort_later(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1_700_000_000_000_000_000, 1_700_000_000_100_000_000, 1_000_000))
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    made = [new_id() for _ in range(100)]
    assert made == sorted(made)
    assert [str(one) for one in made] == sorted(map(str, made))


def test_new_ids_differ() -> None:
    assert len({new_id() for _ in range(10_000)}) == 10_000


def test_derived_ids_are_stable_and_of_version_5() -> None:
    made = derived_id("request", "b", "order-1")
    assert made == derived_id("request", "b", "order-1")
    assert made.version == 5
    # Changing this would give every repeat another task id.
    assert str(made) == "dafbfd26-21f7-584d-bc05-218b6c66c70d"


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("a", "b"), ("ab",)),
        (("a", "b"), ("b", "a")),
        (("a", ""), ("", "a")),
        (("a",), ("a", "")),
        (("1:a",), ("a", "1")),
        (("x1:y",), ("x", "y")),
        ((), ("",)),
    ],
)
def test_no_two_lists_of_names_share_an_id(one: tuple[str, ...], two: tuple[str, ...]) -> None:
    assert derived_id(*one) != derived_id(*two)


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_derived_ids_are_equal_for_equal_names_only(one: list[str], two: list[str]) -> None:
    assert (derived_id(*one) == derived_id(*two)) == (one == two)


def test_a_task_id_goes_by_owner_and_request() -> None:
    ids = {task_id_of(owner, request) for owner in ("a", "b") for request in ("a", "b", "1")}
    assert len(ids) == 6
    assert task_id_of("a", "1") == task_id_of("a", "1")


class Colour(Enum):
    RED = 1
    BLUE = "b"


class Level(IntEnum):
    LOW = 1


def digest(value: object) -> str:
    return fingerprint("task", {"value": value}).digest


NOON = datetime(2026, 1, 2, 12, tzinfo=timezone.utc)

SAME: list[Any] = [
    ((1, 2), [1, 2]),
    ({1, 2, 3}, {3, 2, 1}),
    ({"x", "y"}, frozenset({"y", "x"})),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"a": ({1: (2, [3])},)}, {"a": [{1: [2, (3,)]}]}),
    (b"raw", bytearray(b"raw")),
    (b"raw", memoryview(b"raw")),
    (10**5000, 10**5000),
    (float("nan"), float("nan")),
    (Colour.RED, Colour(1)),
    ("\ud800", "\ud800"),
]

DIFFERENT: list[Any] = [
    [1, 1.0, True, "1", b"1", Decimal(1), Level.LOW, [1], {1}, {1: 1}],
    [0, 0.0, -0.0, False, None, "", b"", [], {}, set()],
    [10**5000, 10**5000 + 1],
    [["ab"], ["a", "b"], [["a"], "b"], ["a", ["b"]]],
    [{"a": 1}, {"a": 2}, {"b": 1}, {"a": 1, "b": 1}, ["a", 1], [["a", 1]]],
    [{"a": {"b": 1}}, {"a": {}, "b": 1}],
    [Colour.RED, Colour.BLUE, "b", 1, "Colour.RED"],
    [Decimal("1.0"), Decimal("1.00"), "1.0"],
    [uuid.UUID(int=1), uuid.UUID(int=2), str(uuid.UUID(int=1))],
    [NOON, NOON.replace(tzinfo=None), NOON.isoformat(), NOON + timedelta(microseconds=1)],
    [date(2026, 1, 2), datetime(2026, 1, 2), clock_time(0, 0), "2026-01-02"],  # noqa: DTZ001
    ["é", "e\u0301"],
    ["?;", b"?;"],
]


@pytest.mark.parametrize(("one", "two"), SAME, ids=[str(number) for number in range(len(SAME))])
def test_equal_arguments_have_one_fingerprint(one: object, two: object) -> None:
    assert fingerprint("task", {"value": one}) == fingerprint("task", {"value": two})
    assert not fingerprint("task", {"value": one}).opaque


@pytest.mark.parametrize("values", DIFFERENT)
def test_types_and_values_tell_arguments_apart(values: list[object]) -> None:
    assert len({digest(value) for value in values}) == len(values)
    assert not any(fingerprint("task", {"value": value}).opaque for value in values)


def test_task_and_names_of_arguments_count() -> None:
    made = {
        fingerprint(task, arguments).digest
        for task in ("a", "b")
        for arguments in ({}, {"x": 1}, {"y": 1}, {"x": 1, "y": 1})
    }
    assert len(made) == 8


def test_a_fingerprint_carries_its_version() -> None:
    digits = "d0614ff7f42a33bf04163cbebd170946f1bb14494715ba6b1a6067ade446fd73"
    assert digest(1) == f"1:{digits}"


class Opaque:
    def __reduce__(self) -> Any:
        raise AssertionError("nothing is pickled")


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [1, x], lambda x: {"a": {"b": (x,)}}])
def test_what_has_no_written_form_is_left_out_and_flagged(wrap: Any) -> None:
    one, two = (fingerprint("task", {"value": wrap(Opaque())}) for _ in range(2))
    assert one == two
    assert one.opaque
    assert one != fingerprint("task", {"value": wrap(None)})


def test_other_arguments_count_beside_opaque_ones() -> None:
    assert digest([Opaque(), 1]) != digest([Opaque(), 2])
    assert digest([Opaque()]) != digest([Opaque(), Opaque()])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(json_values, json_values)
def test_fingerprints_are_equal_for_equal_json_only(one: object, two: object) -> None:
    same = json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)
    assert (digest(one) == digest(two)) == same


@given(json_values)
def test_a_trip_through_json_keeps_the_fingerprint(value: object) -> None:
    assert digest(value) == digest(json.loads(json.dumps(value)))
