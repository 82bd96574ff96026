"""What models charge, and estimates in money."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import genai_prices
import pytest
from genai_prices import data_snapshot, types

from celery_budget import BudgetLine, cost
from celery_budget.core.policies import BudgetPolicy
from celery_budget.core.prices import Priced, Unpriced
from celery_budget.errors import (
    BudgetError,
    ConfigurationError,
    EstimateError,
    InvalidAmount,
    MissingExtra,
    PolicyError,
    UnknownPrice,
)
from celery_budget.metering import counted, package, price, read
from tests.replies import load


@pytest.fixture
def snapshot() -> Any:
    """Prices of a provider of our own; given back afterwards."""
    today = datetime.now(timezone.utc).date()
    of = types.ModelPrice
    models = [
        types.ModelInfo(
            id="dated",
            match=types.ClauseEquals("dated"),
            prices=[
                types.ConditionalPrice(
                    None, prices=of(input_mtok=Decimal(1), output_mtok=Decimal(2))
                ),
                types.ConditionalPrice(
                    types.StartDateConstraint(today - timedelta(days=1)),
                    prices=of(input_mtok=Decimal(3), output_mtok=Decimal(4)),
                ),
                types.ConditionalPrice(
                    types.StartDateConstraint(today + timedelta(days=2)),
                    prices=of(input_mtok=Decimal(500), output_mtok=Decimal(600)),
                ),
            ],
        ),
        types.ModelInfo(id="nothing", match=types.ClauseEquals("nothing"), prices=of()),
        types.ModelInfo(
            id="half", match=types.ClauseEquals("half"), prices=of(input_mtok=Decimal(1))
        ),
        types.ModelInfo(
            id="free",
            match=types.ClauseEquals("free"),
            prices=of(input_mtok=Decimal(0), output_mtok=Decimal(0)),
        ),
    ]
    whole = data_snapshot.get_snapshot()
    ours = types.Provider(
        id="ours",
        name="Ours",
        api_pattern="x",
        model_match=types.ClauseRegex("^(dated|nothing|half|free)$"),
        models=models,
    )
    data_snapshot.set_custom_snapshot(replace(whole, providers=[ours, *whole.providers]))
    yield today - timedelta(days=1)
    data_snapshot.set_custom_snapshot(None)


def asked(model: str, provider: str | None = None, **counts: int) -> Priced:
    return price(Unpriced(model, counts, provider), {})


def test_the_price_of_the_day_counts_and_is_named(snapshot: date) -> None:
    assert asked("dated", input_tokens=1_000_000, output_tokens=500_000) == Priced(
        5_000_000, f"genai-prices {genai_prices.__version__} ours/dated from {snapshot}"
    )


def test_money_is_rounded_up(snapshot: date) -> None:
    assert asked("dated", input_tokens=1).amount == 3
    assert (
        price(Unpriced("m", {"input_tokens": 1}), {"m": {"input_mtok": Decimal("0.15")}}).amount
        == 1
    )
    assert asked("free", input_tokens=5, output_tokens=5).amount == 0
    assert asked("dated", input_tokens=0, output_tokens=0).amount == 0


@pytest.mark.parametrize(
    ("model", "counts"),
    [
        ("who-knows", {"input_tokens": 1}),
        ("nothing", {"input_tokens": 0}),
        ("nothing", {"input_tokens": 1}),
        ("half", {"input_tokens": 1, "output_tokens": 1}),
    ],
)
def test_what_has_no_price_is_not_free(snapshot: date, model: str, counts: dict[str, int]) -> None:
    with pytest.raises(UnknownPrice) as caught:
        asked(model, **counts)
    assert caught.value.model == model
    assert asked("half", input_tokens=1).amount == 1


def test_another_providers_price_is_none(snapshot: date) -> None:
    with pytest.raises(UnknownPrice, match="'gpt-4o-mini' of 'ours'"):
        asked("gpt-4o-mini", "ours", input_tokens=1)
    with pytest.raises(UnknownPrice, match="'dated' of 'nobody'"):
        asked("dated", "nobody", input_tokens=1)


def test_a_configured_price_comes_first() -> None:
    configured = {
        "own": {"input_mtok": Decimal("0.5"), "output_mtok": Decimal(2)},
        "gpt-4o-mini": {"input_mtok": Decimal(1000)},
    }
    counts = {"input_tokens": 1_000_000, "output_tokens": 10}
    assert price(Unpriced("own", counts), configured) == Priced(
        500_020, "budget_prices own: input_mtok=0.5, output_mtok=2"
    )
    assert price(Unpriced("gpt-4o-mini", {"input_tokens": 5}), configured).amount == 5000
    with pytest.raises(UnknownPrice):
        price(Unpriced("gpt-4o-mini", counts), configured)
    with pytest.raises(ConfigurationError, match="input_price for 'own'"):
        price(Unpriced("own", counts), {"own": {"input_price": Decimal(1)}})


def test_cached_tokens_are_priced_as_such() -> None:
    configured = {"own": {"input_mtok": Decimal(10), "cache_read_mtok": Decimal(1)}}
    counts = {"input_tokens": 1000, "cache_read_tokens": 900}
    assert price(Unpriced("own", counts), configured).amount == 1000 + 900
    with pytest.raises(PolicyError, match="cannot be"):
        price(Unpriced("own", {"input_tokens": 1, "cache_read_tokens": 2}), configured)
    with pytest.raises(PolicyError, match="cannot be"):
        price(Unpriced("own", {"cache_read_tokens": 2}), configured)
    with pytest.raises(PolicyError, match="no price by tokens"):
        price(Unpriced("own", {"tokens": 2}), configured)


def test_a_reply_is_charged_its_price() -> None:
    configured = {"gpt-4o-mini-2024-07-18": {"input_mtok": Decimal(1), "output_mtok": Decimal(2)}}
    used, why = counted(read(load("openai_chat")), "micro-usd", configured)
    assert (used.amounts["micro-usd"], why) == (2006 + 600, None)
    used, _ = counted(read(load("openai_chat")), "cents", configured)
    assert "micro-usd" not in used.amounts
    assert used.amounts["cents"] == 2606


def test_a_reply_without_a_price_says_so() -> None:
    reply = load("mistral_chat")
    used, why = counted(read({**reply, "model": "x"}, provider="mistral"), "micro-usd", {})
    assert isinstance(why, UnknownPrice)
    assert set(used.incomplete) == {"micro-usd"}
    assert used.amounts["tokens"] == 50
    used, why = counted(read(load("bedrock_converse")), "micro-usd", {})
    assert "give model=" in str(why)
    named = read(load("bedrock_converse"), model="anthropic.claude-3-5-sonnet-20240620-v1:0")
    assert counted(named, "micro-usd", {})[1] is None


# Estimates.


def draft(prompt: str, tenant: str, limit: int = 800) -> None: ...


def pricing(what: Unpriced) -> Priced:
    return Priced(sum(what.counts.values()), f"{what.model} of {what.provider}")


def evaluate(*args: Any, estimate: Any = None, budget: Any = "b", known: Any = pricing) -> Any:
    policy = BudgetPolicy(budget, estimate)
    signature = inspect.signature(draft)
    policy.check("shop.draft", signature)
    return policy.evaluate("shop.draft", signature, args, {}, pricing=known)


def test_a_cost_is_estimated_by_the_arguments_it_names() -> None:
    estimate = cost(
        model="m", input_tokens=lambda prompt: 2 + len(prompt), output_tokens=lambda limit: limit
    )
    found = evaluate("four", "acme", estimate=estimate)
    assert (found.estimate, found.prices) == (806, "m of None")
    assert BudgetPolicy("b", estimate).estimator == "Cost"


def test_a_model_may_be_told_by_the_arguments_too() -> None:
    estimate = cost(
        model=lambda tenant: f"m-{tenant}", provider=lambda tenant: tenant, input_tokens=3
    )
    assert evaluate("x", "acme", estimate=estimate).prices == "m-acme of acme"


def test_an_estimator_may_make_a_cost() -> None:
    found = evaluate("four", "a", estimate=lambda prompt: cost(model="m", input_tokens=len(prompt)))
    assert (found.estimate, found.prices) == (4, "m of None")


def test_each_price_is_named_once() -> None:
    lines = [
        BudgetLine("a", cost(model="m", input_tokens=1)),
        BudgetLine("b", cost(model="m", input_tokens=2)),
        BudgetLine("c", cost(model="n", input_tokens=3)),
        BudgetLine("d", 4),
    ]
    found = evaluate("x", "acme", budget=lines)
    assert [line.amount for line in found.lines] == [1, 2, 3, 4]
    assert found.prices == "m of None; n of None"


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: cost(model="m"), PolicyError),
        (lambda: cost(model="", input_tokens=1), PolicyError),
        (lambda: cost(model=7, input_tokens=1), PolicyError),  # type: ignore[arg-type]
        (lambda: cost(model="m", provider="", input_tokens=1), PolicyError),
        (lambda: cost(model="m", input_tokens=-1), InvalidAmount),
        (lambda: cost(model="m", input_tokens=1.5), InvalidAmount),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_priced_is_an_error(make: Any, error: type[BudgetError]) -> None:
    with pytest.raises(error):
        make()


@pytest.mark.parametrize(
    ("estimate", "error"),
    [
        (cost(model="m", input_tokens=lambda missing: 1), PolicyError),
        (cost(model="m", input_tokens=lambda prompt: -1), InvalidAmount),
        (cost(model="m", input_tokens=lambda prompt: 1 / 0), EstimateError),
        (cost(model=lambda prompt: None, input_tokens=1), PolicyError),
    ],
)
def test_so_is_one_of_the_arguments(estimate: Any, error: type[BudgetError]) -> None:
    with pytest.raises(error):
        evaluate("x", "acme", estimate=estimate)


def test_an_unknown_price_refuses() -> None:
    def unknown(what: Unpriced) -> Priced:
        raise UnknownPrice(what.model, what.provider)

    with pytest.raises(UnknownPrice):
        evaluate("x", "acme", estimate=cost(model="m", input_tokens=1), known=unknown)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    package._package.cache_clear()
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    with pytest.raises(MissingExtra, match=r"celery-budget\[prices\]"):
        asked("gpt-4o-mini", input_tokens=1)
