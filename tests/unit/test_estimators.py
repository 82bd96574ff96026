"""Estimators: by name and version, within bounds, and whatever number they give."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded

from celery_budget.core import estimators as module
from celery_budget.core.estimators import Estimator, Estimators
from celery_budget.core.policies import BudgetLine, BudgetPolicy
from celery_budget.core.prices import cost
from celery_budget.errors import (
    BudgetError,
    EstimateError,
    EstimateOutOfBounds,
    InvalidAmount,
    InvalidName,
    PolicyError,
)
from celery_budget.integration import shadows
from celery_budget.integration.shadows import SLOW_CALLS, SLOW_SECONDS, Watch, ask_shadows

MAX = 2**63 - 1


def draft(prompt, pages=2):  # type: ignore[no-untyped-def]
    """The task."""


def evaluate(policy: BudgetPolicy, *args: object) -> int:
    signature = inspect.signature(draft)
    policy.check("shop.draft", signature)
    return policy.evaluate("shop.draft", signature, args, {}).estimate


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Estimators]:
    """A process without estimators."""
    registry = Estimators()
    monkeypatch.setattr("celery_budget.core.policies.estimators", registry)
    monkeypatch.setattr(module, "estimators", registry)
    return registry


def by_length(prompt: str) -> int:
    return len(prompt)


def by_pages(pages: int) -> int:
    return pages * 100


def test_a_task_names_its_estimator(registry: Estimators) -> None:
    policy = BudgetPolicy("b", "draft")
    registry.register("draft", by_length, version="7")
    assert evaluate(policy, "hello") == 5
    assert (policy.estimator, policy.estimator_version) == ("draft", "7")


def test_one_of_several_versions_is_named(registry: Estimators) -> None:
    registry.register("draft", by_length)
    registry.register("draft", by_pages, version="2")
    for policy in (BudgetPolicy("b", "draft:2"), BudgetPolicy("b", "draft", version="2")):
        assert evaluate(policy, "hello") == 200
        assert (policy.estimator, policy.estimator_version) == ("draft", "2")
    assert evaluate(BudgetPolicy("b", "draft:1"), "hello") == 5
    # A version that is only tried beside it is not what the name means.
    assert evaluate(BudgetPolicy("b", "draft", shadows=["draft:2"]), "hello") == 5
    said = "several versions; give one of draft:1, draft:2"
    with pytest.raises(PolicyError, match=said):
        evaluate(BudgetPolicy("b", "draft"), "hello")
    with pytest.raises(PolicyError, match=r"no estimator draft:3; there are draft:1, draft:2"):
        evaluate(BudgetPolicy("b", "draft:3"), "hello")
    with pytest.raises(PolicyError, match="give one of the two"):
        evaluate(BudgetPolicy("b", "draft:1", version="2"), "hello")


def test_a_name_that_nobody_registered_is_seen_at_the_first_use(registry: Estimators) -> None:
    with pytest.raises(PolicyError, match="no estimator 'draft'; import the module"):
        evaluate(BudgetPolicy("b", "draft"), "hello")


def test_a_decorated_function_is_an_estimator_and_can_be_called(registry: Estimators) -> None:
    @module.estimator("draft", version="2", at_most=1000)
    def own(prompt: str, /) -> int:
        return len(prompt)

    policy = BudgetPolicy("b", own)
    assert (evaluate(policy, "hello"), own("four")) == (5, 4)
    assert (policy.estimator, policy.estimator_version) == ("draft", "2")
    assert list(registry) == [own]
    with pytest.raises(PolicyError, match="estimate_version= '3'; leave that out"):
        BudgetPolicy("b", own, version="3")


def test_lines_have_estimators_of_their_own(registry: Estimators) -> None:
    registry.register("draft", by_length)
    registry.register("pages", by_pages, version="x")
    policy = BudgetPolicy(["a", BudgetLine("b", "pages"), BudgetLine("c", 3)], "draft", version="1")
    found = policy.evaluate("shop.draft", inspect.signature(draft), ("hello",), {})
    assert [line.amount for line in found.lines] == [5, 200, 3]
    assert (policy.estimator, policy.estimator_version) == ("draft", "1")


def test_an_estimator_takes_only_what_the_task_has(registry: Estimators) -> None:
    registry.register("draft", lambda team: 1)
    with pytest.raises(PolicyError, match=r"the estimate of shop\.draft wants team"):
        evaluate(BudgetPolicy("b", "draft"), "hello")


def test_a_version_means_one_function(registry: Estimators) -> None:
    first = registry.register("draft", by_length)
    again = registry.register("draft", by_length, at_most=9)
    assert registry.find("draft") is again is not first
    registry.register("ready", 5)
    registry.register("ready", 5)
    for name, other in (("draft", by_pages), ("ready", 6), ("draft", lambda prompt: 1)):
        with pytest.raises(PolicyError, match=f"{name}:1 is registered already"):
            registry.register(name, other)
    registry.register("any", lambda: 1)
    with pytest.raises(PolicyError, match="registered already"):
        registry.register("any", lambda: 2)


def test_an_estimator_under_another_name_keeps_its_bounds() -> None:
    inner = Estimator("inner", by_length, at_least=2, at_most=4)
    outer = Estimator("outer", inner, "9", at_most=8)
    assert (outer.estimate, outer.at_least, outer.at_most) == (by_length, 2, 8)
    assert outer.key == "outer:9"


NO_ESTIMATORS: list[Any] = [
    (("6x", 1), InvalidName, "name of an estimator is '6x'"),
    (("a:b", 1), InvalidName, "name of an estimator"),
    (("", 1), InvalidName, "name of an estimator"),
    ((None, 1), InvalidName, "name of an estimator"),
    (("a" * 101, 1), InvalidName, "name of an estimator"),
    (("a", 1, "1:2"), InvalidName, "version of an estimator is '1:2'"),
    (("a", 1, 2), InvalidName, "version of an estimator is 2"),
    (("a", 1.5), InvalidAmount, "the estimate of a:1 is 1.5"),
    (("a", "b"), InvalidAmount, "the estimate of a:1 is 'b'"),
    (("a", 1, "1", -1), InvalidAmount, "at_least= of estimator a:1"),
    (("a", 1, "1", None, True), InvalidAmount, "at_most= of estimator a:1"),
    (("a", 5, "1", 9, 8), PolicyError, "at_least=9 above at_most=8"),
    (("a", 5, "1", 6), EstimateOutOfBounds, "is 5, and estimator a:1 has at_least=6"),
    (("a", max), PolicyError, "does not tell its parameters"),
]


@pytest.mark.parametrize(("args", "kind", "said"), NO_ESTIMATORS)
def test_what_cannot_be_an_estimator_is_refused(
    args: Any, kind: type[BudgetError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        Estimator(*args)


class Panic(BaseException):
    """As a library in Rust raises."""


class Unshown(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("not even that")


class Number(int):
    """An integer that is not one."""


def fail(error: BaseException) -> Callable[[], Any]:
    def estimate() -> Any:
        raise error

    return estimate


def exit_now() -> int:
    raise SystemExit(3)


def endless() -> int:
    return endless()


#: Whatever an estimator gives that is no amount, and what it is told as.
WRONG: list[Any] = [
    ("nan", lambda: float("nan"), InvalidAmount),
    ("infinite", lambda: float("inf"), InvalidAmount),
    ("float", lambda: 10.0, InvalidAmount),
    ("negative", lambda: -1, InvalidAmount),
    ("true", lambda: True, InvalidAmount),
    ("none", lambda: None, InvalidAmount),
    ("text", lambda: "10", InvalidAmount),
    ("name", lambda: "draft", InvalidAmount),
    ("subclass", lambda: Number(5), InvalidAmount),
    ("above-64-bits", lambda: 2**63, InvalidAmount),
    ("huge", lambda: 10**5000, InvalidAmount),
    ("minus-huge", lambda: -(10**5000), InvalidAmount),
    ("raising", fail(ZeroDivisionError("by zero")), EstimateError),
    ("exiting", exit_now, EstimateError),
    ("panicking", fail(Panic("rust")), EstimateError),
    ("unshown", fail(Unshown()), EstimateError),
    ("endless", endless, EstimateError),
    ("below", Estimator("e", lambda: 4, at_least=5), EstimateOutOfBounds),
    ("above", Estimator("e", lambda: 6, at_most=5), EstimateOutOfBounds),
]
BY_NAME = [pytest.param(*row[1:], id=row[0]) for row in WRONG]


@pytest.mark.parametrize(("estimate", "kind"), BY_NAME)
def test_a_wrong_number_is_a_typed_error(estimate: Any, kind: type[BudgetError]) -> None:
    with pytest.raises(BudgetError) as caught:
        evaluate(BudgetPolicy("b", estimate), "hello")
    assert type(caught.value) is kind
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("thrown", [KeyboardInterrupt(), SoftTimeLimitExceeded()], ids=repr)
def test_what_is_thrown_into_the_thread_is_no_fault_of_the_estimator(
    thrown: BaseException,
) -> None:
    with pytest.raises(type(thrown)):
        evaluate(BudgetPolicy("b", fail(thrown)), "hello")
    with pytest.raises(type(thrown)):
        ask(Watch(), Estimator("e", fail(thrown)))


@pytest.mark.parametrize("amount", [5, 6, MAX])
def test_bounds_include_themselves(amount: int) -> None:
    bounded = Estimator("e", lambda: amount, at_least=5, at_most=MAX)
    assert evaluate(BudgetPolicy("b", bounded), "hello") == amount


def ask(watch: Watch, *several: Any, unknown: type | None = None, **arguments: Any) -> Any:
    policy = BudgetPolicy("b", 1, shadows=several)
    given = {"prompt": "hello", "pages": 2, **arguments}
    return ask_shadows(policy, "shop.draft", given, unknown, None, watch)


def test_shadows_are_asked_beside_the_estimator(registry: Estimators) -> None:
    registry.register("draft", by_pages, version="2")
    other = Estimator("other", 7)
    assert ask(Watch(), "draft:2", other) == {"draft:2": 200, "other:1": 7}
    registry.register("single", by_length, version="4")
    assert ask(Watch(), "single") == {"single:4": 5}


@pytest.mark.parametrize(("estimate", "kind"), BY_NAME)
def test_a_shadow_that_fails_is_left_out_and_told_once(
    estimate: Any, kind: type[BudgetError], caplog: pytest.LogCaptureFixture
) -> None:
    watch, bad = Watch(), Estimator("bad", estimate)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert ask(watch, bad, Estimator("good", 1)) == {"good:1": 1}
    [record] = [record for record in caplog.records if record.name == shadows.__name__]
    assert "shadow estimator bad:1 of shop.draft failed" in record.getMessage()


def test_a_traceback_is_logged_only_of_what_a_shadow_raised_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ask(Watch(), Estimator("far", lambda: 9, at_most=8), Estimator("bad", fail(ValueError("no"))))
    far, bad = [record for record in caplog.records if record.name == shadows.__name__]
    assert "far:1" in far.getMessage()
    assert "at_most=8" in far.getMessage()
    assert not far.exc_info
    assert bad.exc_info


def test_a_shadow_that_is_not_registered_is_left_out(
    registry: Estimators, caplog: pytest.LogCaptureFixture
) -> None:
    assert ask(Watch(), "gone:1") == {}
    assert "shadow estimator gone:1" in caplog.text
    # In money, without anybody who knows a price.
    assert ask(Watch(), Estimator("money", cost(model="m", input_tokens=1))) == {}


def test_a_shadow_of_what_is_not_known_yet_is_left_out_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unknown:
        pass

    watch = Watch()
    several = Estimator("length", by_length), Estimator("pages", by_pages)
    assert ask(watch, *several, unknown=Unknown, prompt=Unknown()) == {"pages:1": 200}
    assert not caplog.records


def test_a_slow_shadow_is_not_asked_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, asked = [0.0], [0]
    monkeypatch.setattr(shadows.time, "monotonic", lambda: now[0])

    def slow() -> int:
        asked[0] += 1
        now[0] += SLOW_SECONDS * (2 if asked[0] != SLOW_CALLS else 0.5)
        return 5

    watch, shadow = Watch(), Estimator("slow", slow)
    answers = [ask(watch, shadow) for _ in range(20)]
    # One that is quick once is given as many calls again.
    wanted = 2 * SLOW_CALLS
    assert answers == [{"slow:1": 5}] * wanted + [{}] * (20 - wanted)
    assert asked[0] == wanted
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "wrong",
    ["draft:2", [5], ["6"], [by_length], 7, ["a:"]],
    ids=["text", "number", "digits", "function", "none", "colon"],
)
def test_what_cannot_be_shadows_is_refused(wrong: Any) -> None:
    with pytest.raises(PolicyError, match="shadows="):
        BudgetPolicy("b", 1, shadows=wrong)
