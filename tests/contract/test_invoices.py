"""A provider's export beside the ledger: what both say, what only one does, and by how much."""

from __future__ import annotations

import json
from datetime import datetime, timezone, tzinfo
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from celery_budget import reconcile
from celery_budget.core.usage import Used
from tests.contract.support import RETURNED, Ledger

#: Noon of a day, in microseconds.
NOON_US = int(datetime(2026, 11, 30, 12, tzinfo=timezone.utc).timestamp()) * 1_000_000
DAY_US = 86_400_000_000

HEAD = "day,model,input,cached,output,cost\n"


@pytest.fixture
def spent(ledger: Ledger) -> Ledger:
    ledger.set("b", 1_000_000)
    ledger.set("usd", 1_000_000, "micro-usd")
    return ledger


def record(
    ledger: Ledger,
    model: str | None = "m",
    *,
    at_us: int = NOON_US,
    counts: tuple[int, int, int] = (100, 40, 10),
    money: int | None = 250,
    assumed: int | None = None,
    **details: Any,
) -> None:
    """Have a task record a reply, at a time of the past."""
    read, cached, wrote = counts
    request = ledger.reserve(1000, *([] if money is None else [("usd", 1000)]))
    attempt = ledger.run(request)
    usage = {"input_tokens": read, "cache_read_tokens": cached, "output_tokens": wrote}
    told = {"provider": "openai", "model": model, "usage": usage, "whole": True, **details}
    amounts: dict[str | None, int] = {"tokens": read + wrote}
    if money is not None:
        amounts["micro-usd"] = money
    attempt.write(Used(amounts, True, (), json.dumps(told)), "reply")
    attempt.end(RETURNED)
    attempt.close()
    where = {"reservation_id": request.reservation_id}
    ledger.put("usage", {"recorded_us": at_us}, **where)
    if assumed is not None:
        ledger.put("usage", {"assumed": assumed}, unit="micro-usd", **where)


def compare(
    ledger: Ledger, text: str, zone: tzinfo = timezone.utc, **of: Any
) -> reconcile.Comparison:
    return reconcile.compare_invoice(
        ledger.store,
        ledger.settings,
        text.splitlines(keepends=True),
        name="usage.csv",
        zone=zone,
        **of,
    )


def shown(found: reconcile.Comparison) -> list[Any]:
    """Each difference in short."""
    return [
        (
            f"{one.day:%m-%d}",
            one.model,
            one.where,
            {name: str(value.difference) for name, value in one.measures.items()},
        )
        for one in found.differences
    ]


def test_the_same_is_the_same(spent: Ledger) -> None:
    record(spent)
    record(spent, counts=(1, 0, 2), money=5)
    record(spent, "other", at_us=NOON_US + DAY_US)
    found = compare(
        spent,
        HEAD + "2026-11-30,m,60,40,12,0.000255\n2026-11-30,m,41,0,0,0\n"
        "2026-12-01,other,100,40,10,0.00025\n",
    )
    assert (found.ok, found.same, found.differences) == (True, 2, ())
    assert {name: str(one.ledger) for name, one in found.totals.items()} == {
        "input": "201", "cached": "80", "output": "22", "cost": "0.000505",
    }  # fmt: skip
    assert {name: one.difference for name, one in found.totals.items()} == dict.fromkeys(
        found.totals, Decimal(0)
    )
    json.dumps(found.as_dict())


def test_what_differs_is_named_by_day_and_model(spent: Ledger) -> None:
    record(spent)
    record(spent, "only here")
    record(spent, at_us=NOON_US - DAY_US)
    record(spent, at_us=NOON_US + 5 * DAY_US)
    found = compare(
        spent,
        HEAD + "2026-11-30,m,110,40,10,0.0005\n2026-11-30,only there,1,0,1,0.1\n"
        "2026-12-01,m,1,0,1,0.1\n",
    )
    assert not found.ok
    assert shown(found) == [
        ("11-30", "m", "both", {"input": "10", "cost": "0.00025"}),
        (
            "11-30", "only here", "ledger",
            {"input": "-100", "cached": "-40", "output": "-10", "cost": "-0.00025"},
        ),
        ("11-30", "only there", "invoice", {"input": "1", "output": "1", "cost": "0.1"}),
        ("12-01", "m", "invoice", {"input": "1", "output": "1", "cost": "0.1"}),
    ]  # fmt: skip
    of_m = found.differences[0].measures["cost"]
    assert (of_m.invoice, of_m.ledger, of_m.percent) == (
        Decimal("0.0005"), Decimal("0.00025"), Decimal("50.00"),
    )  # fmt: skip


@pytest.mark.parametrize(("tolerance", "ok"), [("0", False), ("9.08", False), ("9.1", True)])
def test_a_tolerance_is_in_per_cent_of_the_export(spent: Ledger, tolerance: str, ok: bool) -> None:
    record(spent)
    text = "day,model,input\n2026-11-30,m,110\n"
    assert compare(spent, text, tolerance=Decimal(tolerance)).ok is ok


def test_a_cost_that_was_rounded_up_is_the_same(spent: Ledger) -> None:
    for _ in range(3):
        record(spent, money=1)
    assert compare(spent, "day,model,cost\n2026-11-30,m,0.0000003\n").ok
    assert not compare(spent, "day,model,cost\n2026-11-30,m,0.0000061\n").ok


def test_what_was_assumed_is_no_cost(spent: Ledger) -> None:
    record(spent, money=250, assumed=50, whole=False)
    found = compare(spent, "day,model,cost\n2026-11-30,m,0.0002\n")
    assert (found.ok, found.partial) == (True, 1)


def test_days_are_those_of_the_zone(spent: Ledger) -> None:
    record(spent, at_us=NOON_US + DAY_US // 2 - 1)
    record(spent, at_us=NOON_US + DAY_US // 2)
    one = "100,40,10,0.00025\n"
    assert compare(spent, f"{HEAD}2026-11-30,m,{one}2026-12-01,m,{one}").ok
    two = "200,80,20,0.0005\n"
    assert compare(spent, f"{HEAD}2026-12-01,m,{two}", ZoneInfo("Europe/Berlin")).ok


def test_only_records_of_the_exports_provider_count(spent: Ledger) -> None:
    record(spent)
    record(spent, "claude", provider="anthropic")
    text = "day,model,input\n2026-11-30,m,100\n"
    assert [one.model for one in compare(spent, text).differences] == ["claude"]
    assert compare(spent, text, provider="openai").ok
    of_openai = (
        "start_time_iso,model,input_tokens,output_tokens,input_cached_tokens\n"
        "2026-11-30T00:00:00+00:00,m,100,10,40\n"
    )
    assert compare(spent, of_openai).provider == "openai"
    assert compare(spent, of_openai).ok
    assert not compare(spent, of_openai, provider="any").ok


def test_a_model_may_have_another_name_there(spent: Ledger) -> None:
    record(spent)
    text = "day,model,input\n2026-11-30,The Model,100\n"
    assert not compare(spent, text).ok
    assert compare(spent, text, models={"The Model": "m"}).ok


def test_without_models_days_are_compared(spent: Ledger) -> None:
    record(spent)
    record(spent, "other")
    found = compare(spent, "day,input\n2026-11-30,201\n")
    assert shown(found) == [("11-30", "", "both", {"input": "1"})]
    assert compare(spent, "day,model,input\n2026-11-30,,200\n").ok


def test_records_without_a_model_are_counted_and_not_compared(spent: Ledger) -> None:
    record(spent)
    _, attempt = spent.start(10)
    attempt.record(4)
    spent.put("usage", {"recorded_us": NOON_US})
    found = compare(spent, "day,model,input\n2026-11-30,m,100\n")
    assert (found.ok, found.unnamed) == (True, 1)


def test_a_cost_that_the_ledger_does_not_know_is_not_compared(spent: Ledger) -> None:
    record(spent, money=None)
    found = compare(spent, "day,model,input,cost\n2026-11-30,m,100,0.1\n")
    assert (found.ok, found.unpriced) == (True, 1)
    found = compare(spent, "day,model,cost\n2026-11-30,m,0.1\n")
    assert shown(found) == [("11-30", "m", "both", {"cost": "0.1"})], "there is nothing else"
    assert found.differences[0].measures["cost"].ledger is None


def test_an_empty_export_has_nothing_to_compare(spent: Ledger) -> None:
    record(spent)
    found = compare(spent, HEAD)
    assert (found.first, found.same, found.totals) == (None, 0, {})


def test_many_records_are_read_page_by_page(spent: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_budget.store.spending.PAGE", 2)
    for _ in range(5):
        record(spent)
    assert compare(spent, HEAD + "2026-11-30,m,500,200,50,0.00125\n").ok
