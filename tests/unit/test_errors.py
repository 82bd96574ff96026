"""Errors survive the trip to whoever waits for the result, and say what to do."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from typing import Any

import pytest

from celery_budget import errors
from celery_budget.errors import BudgetError

#: For each error how it is made and what its text has to tell.
MADE: dict[str, tuple[tuple[Any, ...], list[str]]] = {
    "AttemptLost": (("t-1",), ["t-1", "budget explain t-1"]),
    "AttemptsSpent": (
        ("t-1", 3, "max_attempts"), ["t-1", "after attempt 3: max_attempts=", "requeue t-1"],
    ),
    "BudgetExceeded": (
        ("tenant:acme", "tokens", 12, 7, 100, 60, 33, "held", 90, 12.5),
        ["'tenant:acme'", "held by requests", "stops at a total of 90", "7 of 100 tokens",
         "60 reserved", "33 spent", "12 were requested",
         "budget explain --budget tenant:acme'"],
    ),
    "ParkingFull": (
        (5, "tenant:acme", "tokens", 12, 7, 100, 60, 33, "queued", 100),
        ["'tenant:acme'", "kept for a request that has waited", "budget_max_parked (5)",
         "budget parked list", "budget explain --budget tenant:acme'"],
    ),
    "ClaimLost": (("r-1",), ["r-1", "its outcome will be refused", "budget explain r-1"]),
    "DeadlinePassed": (
        ("r-1", "2030-01-01T00:00:00+00:00"), ["r-1", "2030-01-01T00:00:00", "later deadline="],
    ),
    "EstimateOutOfBounds": (
        ("shop.draft", "draft:2", 7, None, 5),
        ["shop.draft is 7", "draft:2 has at_most=5", "correct the estimator"],
    ),
    "InvalidKey": (("''",255), ["usage key ''", "1 to 255"]),
    "InvoiceError": (("usage.csv", 17, "'x' is no day"), ["usage.csv, line 17: 'x' is no day"]),
    "HoldsOpen": (("b", "the closing", 3), ["'b'", "3 of its requests", "close b --drain"]),
    "KeyConflict": (("k-1", "grant"), ["'k-1'", "another grant", "a new key"]),
    "MissingExtra": (
        ("a price", "prices"), ["a price needs", "pip install 'celery-budget[prices]'"],
    ),
    "NotAuthorized": (
        ("shop.draft", ["tenant:acme", "lane"], "it raised KeyError"),
        ["shop.draft", "'tenant:acme', 'lane'", "it raised KeyError", "with calling(...)"],
    ),
    "ReservationExhausted": (
        ("tenant:acme", "tokens", 12, 10),
        ["12 tokens", "'tenant:acme'", "10 were", "usage.extend"],
    ),
    "UnknownPrice": (("m-1", "p"), ["'m-1'", "'p'", "provider=", "budget_prices"]),
    "ReplicaError": (
        ("postgresql://r/b", "refused"),
        ["postgresql://r/b of budget_report_url: refused", "budget --primary", "budget.primary()"],
    ),
    "RequestConflict": (("order-1", "b", "t-1"), ["'order-1'", "'b'", "t-1"]),
    "NotParked": (("6f0c",), ["'6f0c'", "budget parked list", "budget explain 6f0c"]),
    "NotQuarantined": (("6f0c",), ["'6f0c'", "budget quarantine list"]),
    "NotRunning": (("effect()",), ["effect() is for a task", "none runs in this thread"]),
    "OutboxFull": ((7, 5, 2.5), ["7 messages", "budget_max_outbox is 5", "relay --health"]),
    "QueueFull": (
        ("llm", "jobs", 7, 5, 4),
        ["lane 'llm' is full", "5 jobs wait", "max_waiting_jobs is 4", "budget lane show llm"],
    ),
    "UnknownLane": (("llm",), ["'llm'", "budget lane list", "lane set llm --queue"]),
    "RequestEnding": (("t-1",), ["t-1", "is being stored", "try again"]),
    "RequestNotRun": (("t-1", "expired"), ["t-1", "expired", "budget explain t-1"]),
    "ResultGone": (("t-1",), ["t-1", "budget_result_seconds", "new request"]),
    "ResultNotReady": (("t-1", "queued"), ["t-1", "queued", "budget.job('t-1'"]),
    "RequestRuns": (("t-1", "settled"), ["t-1", "settled", "budget explain t-1"]),
    "StoreError": (("the database failed", True), ["the database failed"]),
    "UnknownBudget": (("b",), ["'b'", "budget set b --limit"]),
    "UnknownRequest": (("t-1",), ["'t-1'", "admitted or parked"]),
}  # fmt: skip

TREE = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, BudgetError)
}


def make(name: str) -> tuple[BudgetError, list[str]]:
    args, said = MADE.get(name, (("what happened",), ["what happened"]))
    return TREE[name](*args), said


def test_the_module_exports_its_tree() -> None:
    assert set(errors.__all__) == set(TREE)
    assert set(MADE) <= set(TREE)


@pytest.mark.parametrize("name", TREE)
def test_an_error_survives_pickling_and_copying(name: str) -> None:
    error, _ = make(name)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301 - our own bytes
        assert (type(again), again.args, vars(again)) == (type(error), error.args, vars(error))
        assert (str(again), repr(again)) == (str(error), repr(error))
    for again in (copy.copy(error), copy.deepcopy(error)):
        assert vars(again) == vars(error)


@pytest.mark.parametrize("name", TREE)
def test_an_error_survives_a_json_result_backend(name: str) -> None:
    error, _ = make(name)
    # What Celery stores of an exception: its class and its args.
    again = TREE[name](*json.loads(json.dumps(error.args)))
    assert (str(again), vars(again)) == (str(error), vars(error))


@pytest.mark.parametrize("name", TREE)
def test_an_error_tells_what_and_what_to_do(name: str) -> None:
    error, said = make(name)
    for words in said:
        assert words in str(error)
    for value in error.args:
        assert repr(value) in repr(error)


def test_an_exceeded_budget_shows_every_figure() -> None:
    error, _ = make("BudgetExceeded")
    assert vars(error) == {
        "budget": "tenant:acme", "unit": "tokens", "requested": 12, "available": 7,
        "limit": 100, "reserved": 60, "spent": 33, "reason": "held", "most": 90,
        "retry_after": 12.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("InvalidAmount", ValueError),
        ("InvalidName", ValueError),
        ("UnknownBudget", LookupError),
        ("EstimateError", errors.PolicyError),
    ],
)
def test_errors_are_also_what_python_calls_them(name: str, base: type[Exception]) -> None:
    assert issubclass(TREE[name], base)


def test_a_store_error_is_not_retryable_unless_it_says_so() -> None:
    assert errors.StoreError("x").retryable is False
