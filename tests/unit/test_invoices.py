"""Reading a provider's export: known shapes, exact amounts, and errors that name their line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date, timezone, tzinfo
from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest

from celery_budget.core.invoices import MOST_LINE, Billed, read
from celery_budget.errors import InvoiceError

DAY = date(2026, 11, 30)

OPENAI_USAGE = (
    "start_time,end_time,start_time_iso,end_time_iso,project_id,num_model_requests,user_id,"
    "api_key_id,model,batch,service_tier,input_tokens,output_tokens,input_cached_tokens\n"
)
OPENAI_COSTS = (
    "start_time,end_time,start_time_iso,end_time_iso,amount_value,amount_currency,line_item,"
    "project_id,organization_id,organization_name\n"
)
ANTHROPIC_USAGE = (
    "usage_date_utc,model_version,api_key,workspace,usage_type,context_window,"
    "usage_input_tokens_no_cache,usage_input_tokens_cache_write_5m,"
    "usage_input_tokens_cache_write_1h,usage_input_tokens_cache_read,usage_output_tokens,"
    "web_search_count\n"
)
ANTHROPIC_COST = (
    "usage_date_utc,model,workspace,api_key,usage_type,context_window,token_type,cost_usd,"
    "cost_type\n"
)


def lines(
    text: str | Iterable[str | bytes],
    columns: Mapping[str, str] | None = None,
    zone: tzinfo = timezone.utc,
) -> list[Billed]:
    split = text.splitlines(keepends=True) if isinstance(text, str) else text
    _, billed = read(split, "usage.csv", zone, columns)
    return list(billed)


def whole(**amounts: int | str) -> dict[str, Decimal]:
    return {name: Decimal(amount) for name, amount in amounts.items()}


def test_openai_usage() -> None:
    text = OPENAI_USAGE + (
        "1796000000,1796086400,2026-11-30T00:00:00+00:00,2026-12-01T00:00:00+00:00,proj,5,,,"
        "gpt-4o-mini-2024-07-18,False,,5000,1000,4000\n"
        "1796086400,1796172800,2026-12-01T00:00:00+00:00,2026-12-02T00:00:00+00:00,,,,,,,,,,\n"
    )
    shape, billed = read(text.splitlines(True), "usage.csv", timezone.utc)
    assert (shape.name, shape.provider) == ("OpenAI usage", "openai")
    assert list(billed) == [
        Billed(2, DAY, "gpt-4o-mini-2024-07-18", whole(input=5000, cached=4000, output=1000)),
        Billed(3, date(2026, 12, 1), "", {}),
    ]


def test_openai_costs() -> None:
    begins = "1796000000,1796086400,2026-11-30T00:00:00+00:00,2026-12-01T00:00:00+00:00,"
    text = OPENAI_COSTS + (
        begins
        + '0.8958740000000000,usd,"gpt-4o-2024-08-06, cached input",,org,Personal\n'
        + begins
        + "-0.10,usd,web search tool calls,,org,Personal\n"
    )
    assert [(one.model, one.amounts) for one in lines(text)] == [
        ("gpt-4o-2024-08-06", {"cost": Decimal("0.8958740000000000")}),
        ("web search tool calls", whole(cost="-0.10")),
    ]


def test_anthropic_usage_has_what_came_from_a_cache_beside_what_did_not() -> None:
    text = ANTHROPIC_USAGE + (
        "2026-11-30,claude-sonnet-4-5-20250929,key,Default,standard,≤ 200k,2095,2048,3,1800,503,0\n"
    )
    shape, billed = read(text.splitlines(True), "usage.csv", timezone.utc)
    assert shape.provider == "anthropic"
    assert list(billed) == [
        Billed(2, DAY, "claude-sonnet-4-5-20250929", whole(input=5946, cached=1800, output=503))
    ]


def test_anthropic_cost() -> None:
    text = ANTHROPIC_COST + (
        "2026-11-30,Claude Sonnet 4.5,Default,key,message,≤ 200k,output,18.71,token\n"
    )
    assert lines(text) == [Billed(2, DAY, "Claude Sonnet 4.5", whole(cost="18.71"))]


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_columns_are_known_by_common_names(mark: str) -> None:
    text = mark.join(["Date", "Model", "Prompt Tokens", "completion_tokens", "cost_usd"]) + "\n"
    text += mark.join(["2026-11-30", "m", "7", "3", "0.000001"]) + "\n"
    assert lines(text) == [Billed(2, DAY, "m", whole(input=7, output=3, cost="0.000001"))]


def test_columns_can_be_given_and_add_up() -> None:
    text = "When,SKU,a,b,USD\n2026-11-30,m,7,3,1e-3\n"
    columns = {"day": "When", "model": "SKU", "input": "a+b", "cost": "USD"}
    assert lines(text, columns) == [Billed(2, DAY, "m", whole(input=10, cost="0.001"))]


@pytest.mark.parametrize(
    ("text", "zone", "day"),
    [
        ("2026-11-30", "America/New_York", DAY),
        ("2026-11-30T23:30:00Z", "UTC", DAY),
        ("2026-11-30T23:30:00+00:00", "Europe/Berlin", date(2026, 12, 1)),
        ("2026-11-30 23:30:00", "UTC", DAY),
        ("1796081400", "UTC", DAY),
        ("1796081400", "Europe/Berlin", date(2026, 12, 1)),
    ],
    ids=["a date", "an instant", "of a zone", "without a zone", "seconds", "seconds of a zone"],
)
def test_days_are_those_of_the_zone(text: str, zone: str, day: date) -> None:
    [one] = lines(f"day,cost\n{text},1\n", zone=ZoneInfo(zone))
    assert one.day == day


def test_amounts_are_exact_to_the_last_digit() -> None:
    [one] = lines("day,input,output,cost\n2026-11-30,9223372036854775807,0,0." + "0" * 28 + "1\n")
    assert one.amounts["input"] == Decimal(2**63 - 1)
    assert f"{one.amounts['cost']:f}" == "0." + "0" * 28 + "1"


def test_bytes_a_byte_order_mark_and_empty_lines_are_read() -> None:
    found = lines([b"\xef\xbb\xbfday,cost\r\n", b"\r\n", b"2026-11-30,1\r\n"])
    assert found == [Billed(3, DAY, "", whole(cost=1))]


HEAD = "day,model,input,cost\n"

WRONG = {
    "nothing": ("", 1, "there is no line of headers"),
    "no day": ("model,input\n", 1, "no column is known for the day"),
    "no amount": ("day,model\n", 1, "or none for tokens or cost, among 'day', 'model'; say which"),
    "a header twice": ("day,cost,cost\n", 1, "the header 'cost' is there twice"),
    "no number": (HEAD + "2026-11-30,m,many,1\n", 2, "'many' is no number of input"),
    "a grouped number": (HEAD + '2026-11-30,m,"1,000",1\n', 2, "'1,000' is no number of input"),
    "not a number": (HEAD + "2026-11-30,m,1,NaN\n", 2, "'NaN' is no number of cost"),
    "too large": (HEAD + "2026-11-30,m,1,1e99\n", 2, "'1e99' is no number of cost"),
    "too small": (HEAD + "2026-11-30,m,1,1e-99\n", 2, "'1e-99' has more digits than any cost"),
    "negative tokens": (HEAD + "2026-11-30,m,-1,1\n", 2, "'-1' is no number of tokens"),
    "parts of a token": (HEAD + "2026-11-30,m,1.5,1\n", 2, "'1.5' is no number of tokens"),
    "no date": (HEAD + "30.11.2026,m,1,1\n", 2, "'30.11.2026' is no day"),
    "another form": (HEAD + "20261130,m,1,1\n", 2, "'20261130' is no day"),
    "any day": (HEAD + "9999-12-31,m,1,1\n", 2, "'9999-12-31' is no day"),
    "the last instant": (HEAD + "9999-12-31T23:59:59Z,m,1,1\n", 2, "is no day"),
    "before all days": (HEAD + "0001-01-01T00:00:00+14:00,m,1,1\n", 2, "is no day"),
    "no such date": (HEAD + "2026-11-31,m,1,1\n", 2, "'2026-11-31' is no day"),
    "broken off": (HEAD + "2026-11-30,m,1,1\n2026-11-30,m\n", 3, "it has 2 fields"),
    "two files": (HEAD + "2026-11-30,m,1,1\n" + HEAD, 3, "the headers come again"),
    "a zero byte": (HEAD + "2026-11-30,\0,1,1\n", 2, "this is no line of a CSV file"),
    "an endless line": (HEAD + "m" * MOST_LINE, 2, "this is no line of a CSV file"),
    "an open quote": (HEAD + '2026-11-30,"m,1,1\n', 2, "unexpected end of data"),
    "another currency": (
        "day,cost,currency\n2026-11-30,1,EUR\n", 2, "the cost is in 'eur', and the ledger's in",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_read_is_told_with_its_line(what: str) -> None:
    text, line, said = WRONG[what]
    with pytest.raises(InvoiceError) as raised:
        lines(text)
    assert str(raised.value).startswith(f"usage.csv, line {line}: ")
    assert said in str(raised.value)


def test_a_line_that_is_not_text_is_told() -> None:
    with pytest.raises(InvoiceError, match=r"line 3: it is not UTF-8 text"):
        lines([b"day,cost\n", b"2026-11-30,1\n", "2026-11-30,ä\n".encode("latin-1")])


def test_the_same_line_twice_in_a_providers_export_is_told() -> None:
    one = "2026-11-30,m,key,Default,standard,≤ 200k,1,0,0,0,1,0\n"
    with pytest.raises(InvoiceError, match="line 3: this line is there twice"):
        lines(ANTHROPIC_USAGE + one + one)
    twice = lines("day,cost\n2026-11-30,1\n2026-11-30,1\n")
    assert len(twice) == 2, "of any other export two may be the same"


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"day": "day", "tokens": "input"}, "'tokens' is no column to map; give day, model"),
        ({"day": "When", "cost": "cost"}, "there is no header 'When', but 'day', 'model'"),
        ({"cost": "cost"}, "no column is known for the day"),
    ],
    ids=["no such field", "no such header", "no day"],
)
def test_columns_that_cannot_be_are_told(columns: dict[str, str], said: str) -> None:
    with pytest.raises(InvoiceError, match=said):
        lines(HEAD, columns)
