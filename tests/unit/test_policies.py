"""Policies over the arguments of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from celery_budget.core.policies import BudgetPolicy, Evaluation
from celery_budget.errors import BudgetError, EstimateError, InvalidAmount, InvalidName, PolicyError

Call = Callable[..., Any]


def draft(tenant, pages=2, *, mode="fast"):  # type: ignore[no-untyped-def]
    """The task."""


def open_ended(tenant, *rest, **more):  # type: ignore[no-untyped-def]
    """A task that takes anything."""


def evaluate(
    policy: BudgetPolicy, *args: object, task: Call = draft, **kwargs: object
) -> Evaluation:
    signature = inspect.signature(task)
    policy.check("shop.draft", signature)
    return policy.evaluate("shop.draft", signature, args, kwargs)


def positional(tenant, /):  # type: ignore[no-untyped-def]
    return f"p:{tenant}"


def positional_and_all(tenant, /, **arguments):  # type: ignore[no-untyped-def]
    return f"{tenant}:{sorted(arguments)}"


class Named:
    def __call__(self, mode: str) -> str:
        return f"m:{mode}"


NAMES: list[Any] = [
    ("fixed", "fixed"),
    ("tenant:{tenant}", "tenant:acme"),
    ("{tenant}/{mode}/{pages:03d}", "acme/fast/002"),
    ("{tenant!r}", "'acme'"),
    ("{{{tenant}}}", "{acme}"),
    ("{tenant[0]}{tenant.__class__.__name__}", "astr"),
    (lambda tenant: f"t:{tenant}", "t:acme"),
    (lambda pages, tenant: f"{tenant}{pages}", "acme2"),
    (lambda tenant, region="eu": f"{tenant}-{region}", "acme-eu"),
    (lambda tenant, mode="slow": f"{tenant}-{mode}", "acme-fast"),
    (lambda **all_of_them: ",".join(sorted(all_of_them)), "mode,pages,tenant"),
    (lambda tenant, **others: f"{tenant}{len(others)}", "acme2"),
    (lambda tenant, *rest: f"{tenant}{rest}", "acme()"),
    (lambda: "none", "none"),
    (positional, "p:acme"),
    (positional_and_all, "acme:['mode', 'pages']"),
    (partial(lambda tenant, suffix: tenant + suffix, suffix="!"), "acme!"),
    (Named(), "m:fast"),
]


@pytest.mark.parametrize(("budget", "name"), NAMES)
def test_a_name_is_worked_out_from_the_arguments(budget: Any, name: str) -> None:
    found = evaluate(BudgetPolicy(budget, 1), "acme")
    assert (found.budget, found.estimate) == (name, 1)
    assert found.arguments == {"tenant": "acme", "pages": 2, "mode": "fast"}


ESTIMATES: list[Any] = [
    (0, 0),
    (2**63 - 1, 2**63 - 1),
    (lambda pages: pages * 1000, 5000),
    (lambda tenant, pages: len(tenant) + pages, 9),
    (lambda: 7, 7),
]


@pytest.mark.parametrize(("estimate", "amount"), ESTIMATES)
def test_an_estimate_is_worked_out_from_the_arguments(estimate: Any, amount: int) -> None:
    assert evaluate(BudgetPolicy("b", estimate), "acme", pages=5).estimate == amount


def test_a_task_that_takes_anything() -> None:
    policy = BudgetPolicy("{tenant}:{more[region]}", lambda rest, more: len(rest) + len(more))
    found = evaluate(policy, "acme", 1, 2, task=open_ended, region="eu")
    assert (found.budget, found.estimate) == ("acme:eu", 3)


BAD = [None, float("nan"), 1.5, -1, True, "6", 2**63]


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_an_estimate_that_is_no_amount_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidAmount, match=r"estimate for shop\.draft"):
        evaluate(BudgetPolicy("b", lambda: bad), "acme")
    with pytest.raises(InvalidAmount, match="estimate="):
        BudgetPolicy("b", bad)


UNKNOWN: list[Any] = [
    ("{team}", 1, r"names 'team'.*mode, pages, tenant"),
    ("{}", 1, "names ''"),
    ("{0}", 1, "names '0'"),
    ("{tenant", 1, "no template"),
    ("b", lambda team: 1, "estimate of shop.draft wants team"),
    (lambda team, tenant, size: "b", 1, "budget of shop.draft wants team, size"),
    ("b", max, "does not tell its parameters"),
]


@pytest.mark.parametrize(("budget", "estimate", "said"), UNKNOWN)
def test_what_the_task_does_not_take_is_seen_at_the_check(
    budget: Any, estimate: Any, said: str
) -> None:
    with pytest.raises(PolicyError, match=said):
        BudgetPolicy(budget, estimate).check("shop.draft", inspect.signature(draft))


@pytest.mark.parametrize(
    ("budget", "stage", "said"),
    [(7, None, "budget= is 7"), (None, None, "None"), ("b", "", "stage=")],
)
def test_a_declaration_that_cannot_work_is_refused(budget: Any, stage: Any, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        BudgetPolicy(budget, 1, stage=stage)


def fail(tenant):  # type: ignore[no-untyped-def]
    raise KeyError(tenant)


def fail_as_ours(tenant):  # type: ignore[no-untyped-def]
    raise BudgetError("ours")


def test_an_estimator_that_raises_is_told_apart() -> None:
    with pytest.raises(EstimateError, match=r"estimator of shop\.draft raised KeyError") as caught:
        evaluate(BudgetPolicy("b", fail), "acme")
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(BudgetError, match=r"^ours$"):
        evaluate(BudgetPolicy("b", fail_as_ours), "acme")


@pytest.mark.parametrize("budget", [fail, "{tenant.missing}", "{tenant[x]}", "{pages:%q}"])
def test_a_name_that_cannot_be_worked_out_is_told(budget: Any) -> None:
    with pytest.raises(PolicyError, match=r"name for shop\.draft cannot be worked out"):
        evaluate(BudgetPolicy(budget, 1), "acme")


@pytest.mark.parametrize(("fair_by", "tenant"), [(None, None), *NAMES])
def test_whose_share_it_is_is_worked_out_alike(fair_by: Any, tenant: str | None) -> None:
    found = evaluate(BudgetPolicy("b", 1, fair_by=fair_by), "acme")
    assert (found.budget, found.tenant) == ("b", tenant)


@pytest.mark.parametrize("fair_by", [fail, "{tenant.missing}", "{tenant[x]}", "{pages:%q}"])
def test_a_share_that_cannot_be_worked_out_is_told(fair_by: Any) -> None:
    with pytest.raises(PolicyError, match=r"fair_by= gives for shop\.draft cannot be worked out"):
        evaluate(BudgetPolicy("b", 1, fair_by=fair_by), "acme")


@pytest.mark.parametrize("name", ["", "e\u0301", "a\nb", "x" * 256, 7, None])
def test_a_share_that_no_name_stands_for_is_refused(name: Any) -> None:
    with pytest.raises(InvalidName, match="what fair_by= gives"):
        evaluate(BudgetPolicy("b", 1, fair_by=lambda: name), "acme")


def test_a_share_names_arguments_of_the_task() -> None:
    for fair_by, said in (
        ("{team}", r"fair_by '\{team\}' of shop.draft names 'team'"),
        ("{tenant", "no template"),
        (lambda team: "b", "fair_by of shop.draft wants team"),
    ):
        with pytest.raises(PolicyError, match=said):
            BudgetPolicy("b", 1, fair_by=fair_by).check("shop.draft", inspect.signature(draft))
    with pytest.raises(PolicyError, match="fair_by= is 7"):
        BudgetPolicy("b", 1, fair_by=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "e\u0301", "a\nb", "x" * 256, 7, None])
def test_a_name_that_cannot_be_one_is_refused(name: Any) -> None:
    with pytest.raises(InvalidName):
        evaluate(BudgetPolicy(lambda: name, 1), "acme")
    if isinstance(name, str) and name:
        with pytest.raises(InvalidName):
            evaluate(BudgetPolicy("{tenant}", 1), name)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1, 2, 3), {}), (("acme",), {"x": 1}), (("a",), {"tenant": "b"})],
)
def test_arguments_that_do_not_fit_are_told(args: Any, kwargs: Any) -> None:
    with pytest.raises(PolicyError, match=r"do not fit shop\.draft\(tenant, pages=2"):
        evaluate(BudgetPolicy("b", 1), *args, **kwargs)


@pytest.mark.parametrize(
    ("estimate", "name"),
    [(7, "constant"), (fail, "fail"), (Named(), "Named"), (SimpleNamespace.__init__, None)],
)
def test_an_estimator_has_a_name(estimate: Any, name: str | None) -> None:
    assert BudgetPolicy("b", estimate).estimator == (name or "SimpleNamespace.__init__")
