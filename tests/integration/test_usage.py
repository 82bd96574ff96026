"""``usage`` in running tasks: replies, units and streams, what is left, and where to stop."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest

from celery_budget import (
    BudgetedTask,
    BudgetLine,
    InvalidAmount,
    InvalidReply,
    PolicyError,
    ReservationExhausted,
    UnknownPrice,
    budgeted,
    cost,
    metering,
    usage,
)
from celery_budget.integration import streams
from celery_budget.store import schema
from tests.integration.support import Shop
from tests.integration.tenant import WAIT, Tenant
from tests.messages import Told
from tests.replies import STREAMS, WHOLE, Dumped, LiteLLM, ToDict, load

PRICES = {"m-1": {"input_mtok": 1, "output_mtok": "2"}}
TENANT = "tenant:{tenant}"
MONEY = BudgetLine("usd", 500)


class Tasks:
    """A shop's tasks, made of bodies; each draws on tokens and on money."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        shop.budget.set("tenant:a", limit=10_000, unit="tokens")
        shop.budget.set("usd", limit=1_000_000, unit="micro-usd")

    def make(self, body: Callable[..., Any], name: str = "work", **policy: Any) -> Any:
        given = {"budget": [TENANT, MONEY], "estimate": 100, **policy}

        def work(tenant: str = "a") -> Any:
            return body()

        made = self.shop.app.task(name=f"usage.{name}", shared=False)(work)
        return budgeted(**given)(made)

    def run(self, body: Callable[..., Any], **policy: Any) -> Any:
        """Run a body in place; its result."""
        return self.make(body, **policy).apply().get()

    def spent(self) -> tuple[int, int]:
        """What was charged in tokens and in money; nothing is held any more, and it adds up."""
        tokens, money = (self.shop.budget.balance(name) for name in ("tenant:a", "usd"))
        assert (tokens.reserved, money.reserved) == (0, 0)
        assert self.shop.budget.reconcile().ok
        return tokens.spent, money.spent

    def flags(self) -> list[str]:
        [row] = self.shop.rows(schema.reservations)
        return [flag for flag in ("over", "unmetered") if getattr(row, flag)]

    def details(self) -> dict[str, Any]:
        """What the last record was read from."""
        found: dict[str, Any] = json.loads(self.shop.rows(schema.usage)[-1].details)
        return found


@pytest.fixture
def tasks(on_both: Shop) -> Tasks:
    return Tasks(on_both)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def estimated(request: pytest.FixtureRequest, make_shop: Callable[..., Shop]) -> Tasks:
    """As ``priced``, on either store."""
    url = {"postgresql": "postgres_url", "sqlite": "sqlite_url"}[request.param]
    return Tasks(make_shop(budget_prices=PRICES, budget_database_url=request.getfixturevalue(url)))


@pytest.fixture
def priced(make_shop: Callable[..., Shop]) -> Tasks:
    """With a price for the model ``m-1``: a dollar a million in, two out."""
    return Tasks(make_shop(budget_prices=PRICES))


def told(tokens_in: int = 40, tokens_out: int = 10, **more: Any) -> dict[str, Any]:
    """A reply of the model ``m-1``; by default 50 tokens, and 60 micro-dollars."""
    return {
        "id": "msg-1",
        "type": "message",
        "model": "m-1",
        "usage": {"input_tokens": tokens_in, "output_tokens": tokens_out},
        **more,
    }


# What is recorded.


@pytest.mark.parametrize("kind", [dict, Dumped, ToDict])
@pytest.mark.parametrize(("name", "charged", "how"), WHOLE, ids=[one[0] for one in WHOLE])
def test_a_reply_is_charged_in_tokens(
    priced: Tasks, name: str, charged: int, how: dict[str, Any], kind: Any
) -> None:
    assert priced.run(lambda: usage.record(kind(load(name)), model=how.get("model")), budget=TENANT)
    assert priced.spent() == (charged, 0)
    assert priced.details()["usage"]["input_tokens"] > 0


def test_a_reply_is_charged_in_money(priced: Tasks) -> None:
    assert priced.run(lambda: usage.record(told()))
    assert priced.spent() == (50, 60)
    assert priced.details() == {
        "provider": "anthropic",
        "model": "m-1",
        "api_flavor": "default",
        "usage": {"input_tokens": 40, "output_tokens": 10},
        "whole": True,
        "prices": "budget_prices m-1: input_mtok=1, output_mtok=2",
    }
    assert priced.flags() == []


def test_litellms_reply_is_charged_in_money(tasks: Tasks) -> None:
    assert tasks.run(lambda: usage.record(LiteLLM(load("litellm_anthropic"), "anthropic")))
    tokens, money = tasks.spent()
    assert (tokens, money > 0) == (1356, True)
    assert "anthropic/claude-sonnet-4-5" in tasks.details()["prices"]


def test_a_reply_counts_once_by_its_id(tasks: Tasks) -> None:
    def body() -> list[bool]:
        return [usage.record(load("openai_chat")), usage.record(Dumped(load("openai_chat")))]

    assert tasks.run(body, budget=TENANT) == [True, False]
    assert tasks.spent() == (2306, 0)


def test_one_without_an_id_counts_by_the_key_it_is_given(tasks: Tasks) -> None:
    reply = load("openai_embeddings")

    def body() -> list[bool]:
        return [usage.record(reply, key=key) for key in (None, None, "one", "one")]

    assert tasks.run(body, budget=TENANT) == [True, True, True, False]
    assert tasks.spent() == (24, 0)


def test_units_are_charged_together(tasks: Tasks) -> None:
    def body() -> list[bool]:
        return [usage.record({"tokens": 7, "micro-usd": 9}, key="one") for _ in range(2)]

    assert tasks.run(body) == [True, False]
    assert tasks.spent() == (7, 9)


@pytest.mark.parametrize(
    ("used", "how", "error"),
    [
        ({"tokens": 7, "micro-usd": -1}, {}, InvalidAmount),
        ({"tokens": float("nan")}, {}, InvalidAmount),
        ({"tokens": "7"}, {}, InvalidAmount),
        ({"tokens": None, "micro-usd": 1}, {}, InvalidAmount),
        ({"tokens": 7, "credits": 1}, {}, PolicyError),
        ({"": 7}, {}, ValueError),
        ({}, {}, InvalidAmount),
        ({"tokens": 7}, {"unit": "tokens"}, PolicyError),
        ({"tokens": 7}, {"key": ""}, ValueError),
        (1.5, {}, InvalidAmount),
        ([told()], {}, InvalidAmount),
        (told(-1), {}, InvalidReply),
        (told(float("nan")), {}, InvalidReply),
        (told(usage={"input_tokens": 3}), {}, InvalidReply),
        (told(usage={}), {}, InvalidReply),
        (told(), {"unit": "tokens"}, PolicyError),
        (told(), {"key": 7}, ValueError),
        (told(), {"provider": "nobody"}, InvalidReply),
        (told(), {"api_flavor": "nothing"}, InvalidReply),
        ({"usage": {"prompt_tokens": 1, "completion_tokens": 1}}, {}, InvalidReply),
        (Dumped({"text": "hello"}), {}, InvalidReply),
    ],
    ids=repr,
)
def test_nonsense_changes_nothing(
    priced: Tasks, used: Any, how: dict[str, Any], error: type[Exception]
) -> None:
    def body() -> None:
        usage.record(1, key="before")
        before = priced.shop.ledger()
        with pytest.raises(error):
            usage.record(used, **how)
        assert priced.shop.ledger() == before

    priced.run(body)


@pytest.mark.parametrize("fails", [False, True])
def test_a_reply_without_usage_is_charged_the_estimate(priced: Tasks, fails: bool) -> None:
    def body() -> None:
        assert usage.record(told(usage=None))
        if fails:
            raise LookupError

    assert priced.make(body).apply().state == ("FAILURE" if fails else "SUCCESS")
    assert priced.spent() == (100, 500)
    assert priced.flags() == ["unmetered"]
    assert priced.details()["usage"] is None


def test_it_is_charged_what_it_tells_later(priced: Tasks) -> None:
    def body() -> list[bool]:
        return [usage.record(told(usage=None)), usage.record(told()), usage.record(told())]

    assert priced.run(body) == [True, True, False]
    assert priced.spent() == (50, 60)
    assert priced.flags() == []


def test_what_has_no_price_is_not_free(priced: Tasks) -> None:
    def body() -> bool:
        for reply in (told(model="m-2"), told(model=None)):
            with pytest.raises(UnknownPrice):
                usage.record(reply)
        return usage.record(told(model="m-2"), model="m-1")

    # The price is told in the end; the tokens were counted at once.
    assert priced.run(body) is True
    assert priced.spent() == (50, 60)
    assert priced.flags() == []


def test_until_then_it_is_charged_the_estimate(priced: Tasks) -> None:
    result = priced.make(lambda: usage.record(told(model="m-2"))).apply()
    assert isinstance(result.result, UnknownPrice)
    assert priced.spent() == (50, 500)
    assert priced.flags() == ["unmetered"]


def test_who_draws_on_no_money_needs_no_price(priced: Tasks) -> None:
    assert priced.run(lambda: usage.record(told(model="m-2")), budget=TENANT)
    assert priced.spent() == (50, 0)


def test_units_by_the_names_of_the_package(tasks: Tasks) -> None:
    units = ("output_tokens", "cache_read_tokens", "output_reasoning_tokens", "requests")
    for unit in units:
        tasks.shop.budget.set(unit, limit=10_000, unit=unit)
    assert tasks.run(lambda: usage.record(load("openai_chat")), budget=list(units))
    spent = [tasks.shop.budget.balance(unit).spent for unit in units]
    assert spent == [300, 1920, 64, 1]


def test_the_unit_of_money_may_have_another_name(make_shop: Callable[..., Shop]) -> None:
    tasks = Tasks(make_shop(budget_prices=PRICES, budget_money_unit="millionths"))
    tasks.shop.budget.set("millions", limit=1000, unit="millionths")
    assert tasks.run(lambda: usage.record(told()), budget=[BudgetLine("millions", 500)])
    assert tasks.shop.budget.balance("millions").spent == 60


def test_a_task_that_is_called_records_on_its_caller(priced: Tasks) -> None:
    inner = priced.make(lambda: usage.record(told()), name="inner", budget="nowhere")

    def body() -> bool:
        assert usage.remaining() == 100
        done: bool = inner()
        assert usage.remaining() == 50
        return done

    assert priced.run(body)
    assert priced.spent() == (50, 60)
    assert len(priced.shop.rows(schema.reservations)) == 1


def test_outside_of_tasks_nothing_counts(priced: Tasks, caplog: pytest.LogCaptureFixture) -> None:
    before = priced.shop.ledger()
    assert not usage.record(told())
    assert not usage.record({"tokens": 3})
    assert list(usage.stream(iter([told()]))) == [told()]
    assert usage.remaining() is None
    usage.check()
    assert caplog.text.count("outside a budgeted task") == 3
    assert priced.shop.ledger() == before


# Streams.


class Source:
    """A provider's stream, which notes that it was closed and may die."""

    def __init__(self, chunks: list[Any], error: Exception | None = None) -> None:
        self._chunks = iter(chunks)
        self._error = error
        self.closed = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for chunk in self._chunks:
            return chunk
        if self._error is not None:
            raise self._error
        raise StopIteration

    def close(self) -> None:
        self.closed += 1


class AsyncSource(Source):
    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        await asyncio.sleep(0)
        try:
            return super().__next__()
        except StopIteration:
            raise StopAsyncIteration from None

    async def close(self) -> None:  # type: ignore[override]
        self.closed += 1


def read(source: Source, until: int | None = None, **how: Any) -> list[Any]:
    """Read a stream, to its end or until there are so many chunks."""

    async def read_it() -> list[Any]:
        seen = []
        async for chunk in usage.stream(source, **how):
            seen.append(chunk)
            if len(seen) == until:
                break
        return seen

    if isinstance(source, AsyncSource):
        return asyncio.run(read_it())
    seen = []
    for chunk in usage.stream(source, **how):
        seen.append(chunk)
        if len(seen) == until:
            break
    return seen


@pytest.fixture(params=[Source, AsyncSource])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize(("name", "charged"), STREAMS)
def test_a_stream_is_passed_on_and_charged(
    priced: Tasks, name: str, charged: int, kind: Any
) -> None:
    chunks = load(name)
    source = kind(chunks)

    def body() -> None:
        assert read(source) == chunks
        assert usage.remaining() == max(0, 100 - charged)
        # It counts by the reply's id.
        again = read(kind(chunks), key="again" if "bedrock" in name else None)
        assert again == chunks

    priced.run(body, budget=TENANT)
    total = charged * (2 if "bedrock" in name else 1)
    assert priced.spent()[0] == total
    assert priced.flags() == (["over"] if total > 100 else [])


CHUNKS = [
    {"type": "message_start", "message": told(30, 1)},
    {"type": "content_block_delta", "delta": {"text": "Hello"}},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn"},
        "usage": {"output_tokens": 15},
    },
    {"type": "message_stop"},
]


@pytest.mark.parametrize("how", ["left", "broken", "thrown"])
@pytest.mark.parametrize(
    ("chunks", "charged", "flags"),
    [
        # Nothing of it is known.
        (CHUNKS[1:2], (100, 500), ["unmetered"]),
        # What went in is known, and that more came out.
        (CHUNKS[:2], (100, 500), ["unmetered"]),
        # All is known that it used.
        (CHUNKS[:3], (45, 60), []),
    ],
    ids=["nothing", "some", "all"],
)
def test_a_stream_that_dies_is_charged_what_is_known(
    priced: Tasks,
    chunks: list[Any],
    charged: tuple[int, int],
    flags: list[str],
    how: str,
    kind: Any,
    told: Told,
) -> None:
    source = kind(chunks, ConnectionError("gone") if how == "broken" else None)

    def body() -> None:
        if how == "thrown":
            for chunk in usage.stream(Source(chunks)):
                if chunk is chunks[-1]:
                    raise LookupError
        else:
            read(source, None if how == "broken" else len(chunks))

    result = priced.make(body).apply()
    assert result.state == ("SUCCESS" if how == "left" else "FAILURE")
    assert priced.spent() == charged
    assert priced.flags() == flags
    if how != "thrown":
        assert source.closed == 1
    assert bool(told("reply.unfinished")) is (len(chunks) == 1)


def test_what_is_left_of_an_open_stream_is_recorded_with_the_tasks_end(priced: Tasks) -> None:
    kept = []

    def body() -> None:
        stream = usage.stream(Source(CHUNKS))
        kept.append(stream)
        next(stream)
        next(stream)
        next(stream)
        raise LookupError

    priced.make(body).apply()
    assert priced.spent() == (45, 60)
    kept.clear()
    gc.collect()
    assert priced.spent() == (45, 60)
    assert len(priced.shop.rows(schema.usage)) == 2


def test_a_stream_that_nobody_reads_is_not_recorded(priced: Tasks) -> None:
    def body() -> None:
        usage.stream(Source(CHUNKS))
        usage.record(1)

    priced.run(body, budget=TENANT)
    assert priced.spent() == (1, 0)


def test_a_stream_that_cannot_be_read_is_charged_the_estimate(priced: Tasks) -> None:
    seen = []

    def body() -> None:
        with pytest.raises(InvalidReply):
            seen.extend(usage.stream(["some", "text"]))

    priced.run(body)
    assert priced.spent() == (100, 500)
    assert priced.flags() == ["unmetered"]


@pytest.mark.parametrize("until", [1, None])
@pytest.mark.parametrize("how", ["for", "next", "async for", "anext"])
def test_what_can_be_read_in_both_ways_is_read_in_either(
    priced: Tasks, how: str, until: int | None
) -> None:
    """LiteLLM's streams have both."""
    source = AsyncSource(CHUNKS)

    async def read_it(stream: Any) -> list[Any]:
        if how == "anext":
            seen = [await anext(stream)]
            if until is None:
                seen += [chunk async for chunk in stream]
        else:
            seen = [chunk async for chunk in stream] if until is None else []
            async for chunk in stream:
                seen.append(chunk)
                break
        await stream.aclose()
        return seen

    def body() -> list[Any]:
        stream = usage.stream(source)
        if "a" in how:
            return asyncio.run(read_it(stream))
        seen = [next(stream)] if how == "next" else []
        for chunk in stream:
            if len(seen) == until:
                break
            seen.append(chunk)
        stream.close()
        return seen

    assert priced.run(body) == CHUNKS[:until]
    assert priced.spent() == ((45, 60) if until is None else (100, 500))


@pytest.mark.parametrize("key", [5, "", "x" * 256, "\x00"], ids=["5", "none", "long", "null"])
def test_what_is_no_key_is_told_before_a_stream_is_read(priced: Tasks, key: Any) -> None:
    source = Source(CHUNKS)

    def body() -> None:
        with pytest.raises(ValueError, match="usage key"):
            usage.stream(source, key)
        assert next(source) is CHUNKS[0]
        usage.record(1)

    priced.run(body, budget=TENANT)
    assert priced.spent() == (1, 0)


@pytest.mark.parametrize("left", [True, False])
def test_whatever_a_reply_cannot_be_read_for_it_is_charged(
    priced: Tasks, monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    def fail(*args: Any, **how: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(metering, "read", fail)
    result = priced.make(lambda: read(Source(CHUNKS), 2 if left else None)).apply()
    assert result.state == ("SUCCESS" if left else "FAILURE")
    assert priced.spent() == (100, 500)
    assert priced.flags() == ["unmetered"]


def test_a_stream_that_cannot_be_recorded_keeps_no_task_from_its_end(
    priced: Tasks, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    kept = []

    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    def body() -> None:
        for _ in range(2):
            kept.append(usage.stream(Source(CHUNKS)))
            next(kept[-1])
        usage.record({"tokens": 1, "micro-usd": 2})

    monkeypatch.setattr(streams, "record_reply", fail)
    priced.run(body)
    assert priced.spent() == (1, 2)
    assert len(told("reply.unrecorded")) == 2


@pytest.mark.parametrize("odd", ["x" * 256, "\x00", "\ud800"], ids=["long", "null", "surrogate"])
def test_a_reply_is_known_by_an_id_that_is_no_key(priced: Tasks, odd: str) -> None:
    def body() -> None:
        assert usage.record(told(id=odd))
        assert not usage.record(told(id=odd))
        assert usage.record(told(id=f"{odd}2"))

    priced.run(body)
    assert priced.spent() == (100, 120)


def test_an_unknown_price_is_told_at_the_end_of_a_stream(priced: Tasks) -> None:
    def body() -> None:
        reply = told(model="m-2")
        with pytest.raises(UnknownPrice):
            read(Source([{"type": "message_start", "message": reply}, *CHUNKS[1:]]))

    priced.run(body)
    assert priced.spent() == (55, 500)


def test_a_reply_is_counted_once_streamed_and_whole(priced: Tasks) -> None:
    def body() -> list[bool]:
        read(Source(CHUNKS), 2)
        # Of the part nothing was known for sure; of the whole all is.
        return [usage.record(told(30, 15)), usage.record(told(30, 15))]

    assert priced.run(body) == [True, False]
    assert priced.spent() == (45, 60)
    assert priced.flags() == []


# What is left, and where to stop.


def test_what_is_left(priced: Tasks) -> None:
    def body() -> list[int | None]:
        left = [usage.remaining(), usage.remaining("micro-usd")]
        usage.record(told())
        left += [usage.remaining(), usage.remaining("micro-usd")]
        usage.extend(30)
        left.append(usage.remaining("tokens"))
        usage.record(500)
        left.append(usage.remaining())
        with pytest.raises(PolicyError):
            usage.remaining("credits")
        return left

    assert priced.run(body) == [100, 500, 50, 440, 80, 0]


def over() -> None:
    usage.record(told(60, 10))
    usage.check()
    usage.record(told(40, 10, id="msg-2"))


def test_a_task_may_stop_at_its_hold(priced: Tasks) -> None:
    result = priced.make(over, stop_at_hold=True).apply()
    assert isinstance(result.result, ReservationExhausted)
    assert result.result.args == ("tenant:a", "tokens", 120, 100)
    # In full, in every unit.
    assert priced.spent() == (120, 140)
    assert priced.flags() == ["over"]


def test_others_do_not(priced: Tasks) -> None:
    assert priced.make(over).apply().state == "SUCCESS"
    assert priced.spent() == (120, 140)


def test_it_stops_at_the_next_check_too(priced: Tasks) -> None:
    def body() -> None:
        for stop in (lambda: usage.record(101), usage.check, lambda: usage.record(0)):
            with pytest.raises(ReservationExhausted):
                stop()
        usage.extend(50)
        usage.check()

    priced.run(body, stop_at_hold=True)
    assert priced.spent() == (101, 500)


def test_a_stream_stops_it_at_its_end(priced: Tasks) -> None:
    def body() -> None:
        seen = []
        with pytest.raises(ReservationExhausted):
            seen.extend(usage.stream(Source(CHUNKS)))

    priced.run(body, stop_at_hold=True, estimate=20)
    assert priced.spent() == (45, 60)


def test_every_way_to_declare_it(priced: Tasks) -> None:
    class Careful(BudgetedTask):
        abstract = True
        budget = TENANT
        estimate = 3
        stop_at_hold = True

    def work(tenant: str = "a") -> None:
        usage.record(5)

    app = priced.shop.app
    made = [
        app.task(name="usage.base", base=Careful, shared=False)(work),
        app.task(
            name="usage.options", base=BudgetedTask, budget=TENANT, estimate=3, stop_at_hold=True,
            shared=False,
        )(work),
        budgeted(budget=TENANT, estimate=3, stop_at_hold=True)(
            app.task(name="usage.above", shared=False)(work)
        ),
    ]  # fmt: skip
    for task in made:
        assert isinstance(task.apply().result, ReservationExhausted)
    assert isinstance(made[0].map(["a"]).apply().result, ReservationExhausted)
    with pytest.raises(PolicyError, match="stop_at_hold="):
        budgeted(budget=TENANT, estimate=3, stop_at_hold="yes")


# Estimates in money.


def test_a_cost_is_reserved_and_its_prices_are_kept(estimated: Tasks) -> None:
    tasks = estimated
    line = BudgetLine("usd", cost(model="m-1", input_tokens=40, output_tokens=lambda tenant: 30))
    task = tasks.make(lambda: usage.record(told()), budget=[TENANT, line])
    result = task.delay()
    assert tasks.shop.budget.balance("usd").reserved == 100
    [story] = tasks.shop.budget.explain(result.id)
    assert story.reservation["prices"] == "budget_prices m-1: input_mtok=1, output_mtok=2"
    assert task.apply().get()
    assert tasks.shop.budget.balance("usd").spent == 60


def test_a_cost_by_the_packages_prices(tasks: Tasks) -> None:
    estimate = cost(model="gpt-4o-mini", input_tokens=1_000_000, output_tokens=0)
    tasks.make(lambda: None, budget="usd", estimate=estimate).delay()
    [row] = tasks.shop.rows(schema.reservations)
    assert "openai/gpt-4o-mini" in row.prices
    assert row.prices.startswith("genai-prices ")
    assert tasks.shop.budget.balance("usd").reserved > 0
    assert row.estimator == "Cost"


def test_an_unknown_model_is_refused(tasks: Tasks) -> None:
    estimate = cost(model="m-2", input_tokens=1)
    task = tasks.make(lambda: None, budget="usd", estimate=estimate)
    for publish in (task.delay, task.apply):
        with pytest.raises(UnknownPrice) as caught:
            publish()
        assert caught.value.args == ("m-2", None)
    assert tasks.shop.rows(schema.reservations) == []


def test_a_retry_has_the_prices_of_its_time(estimated: Tasks) -> None:
    tasks = estimated
    estimate = cost(model="m-1", input_tokens=7)

    def work(self: Any) -> None:
        if not self.request.retries:
            budget = tasks.shop.budget
            object.__setattr__(budget.settings, "prices", {"m-1": {"input_mtok": Decimal(2)}})
            raise self.retry(countdown=0)
        usage.record(1)

    made = tasks.shop.app.task(name="usage.retried", shared=False, bind=True)(work)
    budgeted(budget="usd", estimate=estimate)(made).apply()
    [row] = tasks.shop.rows(schema.reservations)
    assert row.prices == "budget_prices m-1: input_mtok=2"
    [line] = tasks.shop.rows(schema.lines)
    assert line.estimate == 14


# In a real worker.


@pytest.mark.redis
@pytest.mark.postgres
class TestWorker:
    def test_a_reply(self, tenant: Tenant) -> None:
        result = tenant.task("reply").delay(tenant.name, "anthropic_messages")
        assert result.get(timeout=WAIT) is True
        tenant.spent(6449)
        [record] = tenant.story(result.id).usage
        assert json.loads(record["details"])["usage"]["cache_write_1h_tokens"] == 3

    @pytest.mark.parametrize(
        ("until", "spent", "state"), [(None, 29, "SUCCESS"), (2, 40, "FAILURE")]
    )
    def test_a_stream(self, tenant: Tenant, until: int | None, spent: int, state: str) -> None:
        result = tenant.task("streamed").delay(tenant.name, "openai_chat_stream", until)
        assert result.get(timeout=WAIT, propagate=False) is not None
        assert result.state == state
        tenant.spent(spent)
        assert tenant.story(result.id).reservation["unmetered"] is (until is not None)

    def test_a_stop(self, tenant: Tenant) -> None:
        result = tenant.task("careful").delay(tenant.name)
        with pytest.raises(ReservationExhausted) as caught:
            result.get(timeout=WAIT)
        assert caught.value.args == (tenant.budget, "tokens", 45, 40)
        tenant.spent(45)

    def test_a_worker_that_is_killed_after_the_call(self, tenant: Tenant) -> None:
        result = tenant.task("dies").delay(tenant.name)
        with pytest.raises(Exception, match=r"may not be run again|SIGKILL|exited"):
            result.get(timeout=WAIT)
        # More than the estimate: what was recorded is there.
        tenant.spent(50)
        assert tenant.story(result.id).reservation["state"] == "lost"


def test_a_chunk_that_cannot_be_read_is_told_and_passed_on(priced: Tasks, told: Told) -> None:
    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    odd = Odd()

    def body() -> None:
        assert list(usage.stream(Source([odd, *CHUNKS]))) == [odd, *CHUNKS]

    assert priced.make(body).apply().state == "SUCCESS"
    assert len(told("reply.unreadable")) == 1
