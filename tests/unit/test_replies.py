"""Replies of each documented shape, read."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from celery_budget.errors import BudgetError, InvalidReply, MissingExtra
from celery_budget.metering import Gathered, counted, is_reply, package, read
from tests.replies import (
    STREAMS,
    WHOLE,
    Dumped,
    LiteLLM,
    PlainlyDumped,
    ToDict,
    load,
)

#: What is told apart, by the package's names.
COUNTS: dict[str, dict[str, int]] = {
    "openai_chat": {
        "input_tokens": 2006, "output_tokens": 300, "cache_read_tokens": 1920,
        "input_audio_tokens": 16, "output_audio_tokens": 12, "output_reasoning_tokens": 64,
    },
    "openai_responses": {
        "input_tokens": 360, "output_tokens": 87, "cache_read_tokens": 256,
        "output_reasoning_tokens": 30,
    },
    "openai_embeddings": {"input_tokens": 8, "output_tokens": 0},
    "anthropic_messages": {
        "input_tokens": 5946, "output_tokens": 503, "cache_read_tokens": 1800,
        "cache_write_tokens": 2051, "cache_write_5m_tokens": 2048, "cache_write_1h_tokens": 3,
    },
    "google_generate_content": {
        "input_tokens": 120, "output_tokens": 90, "cache_read_tokens": 100,
        "input_audio_tokens": 16, "output_reasoning_tokens": 50,
    },
    "mistral_chat": {"input_tokens": 16, "output_tokens": 34},
    "mistral_embeddings": {"input_tokens": 15, "output_tokens": 0},
    "bedrock_converse": {
        "input_tokens": 825, "output_tokens": 60, "cache_read_tokens": 600,
        "cache_write_tokens": 100,
    },
    "litellm_anthropic": {
        "input_tokens": 1313, "output_tokens": 43, "cache_read_tokens": 1000,
        "cache_write_tokens": 300,
    },
}  # fmt: skip
PROVIDERS = {
    "openai_chat": "openai",
    "openai_responses": "openai",
    "openai_embeddings": "openai",
    "anthropic_messages": "anthropic",
    "google_generate_content": "google",
    "mistral_chat": "mistral",
    "mistral_embeddings": "mistral",
    "bedrock_converse": "aws",
    "litellm_anthropic": "litellm",
}


def tokens(reply: Any) -> int:
    used, _ = counted(reply, "micro-usd", {})
    return used.amounts["tokens"]


@pytest.mark.parametrize(("name", "charged", "how"), WHOLE, ids=[one[0] for one in WHOLE])
def test_a_reply_is_read_by_its_shape(name: str, charged: int, how: dict[str, Any]) -> None:
    reply = read(load(name), **how)
    assert reply.counts is not None
    assert {**reply.counts, **COUNTS[name]} == reply.counts
    assert (reply.provider, reply.whole) == (PROVIDERS[name], True)
    assert tokens(reply) == charged
    used, _ = counted(reply, "micro-usd", {})
    assert {**used.amounts, **COUNTS[name]} == used.amounts
    assert (used.amounts["requests"], used.amounts["output_citation_tokens"]) == (1, 0)
    assert used.incomplete <= {"micro-usd"}


@pytest.mark.parametrize("kind", [Dumped, PlainlyDumped, ToDict])
@pytest.mark.parametrize("name", [one[0] for one in WHOLE])
def test_so_is_an_object_of_its_client(name: str, kind: Any) -> None:
    reply = load(name)
    assert is_reply(kind(reply))
    assert read(kind(reply)) == read(reply)


def test_a_reply_has_the_providers_id() -> None:
    assert {name: read(load(name)).id for name in COUNTS} == {
        "openai_chat": "chatcmpl-B9MBs8CjcvOU2jLn4n570S5qMJKcT",
        "openai_responses": "resp_67ccd2bed1ec8190b14f964abc0542670bb6a6b452d3795b",
        "openai_embeddings": None,
        "anthropic_messages": "msg_013Zva2CMHLNnXjNJJKqJ2EF",
        "google_generate_content": "mAitaLmkHPPlz7IPvtfUqQ4",
        "mistral_chat": "cmpl-e5cc70bb28c444948073e77776eb30ef",
        "mistral_embeddings": "embd-aad6fc62b17349b192ef09225058bc45",
        "bedrock_converse": "fd3b5c3e-0e3c-4d1f-9d0f-6a4b7f3f7c9a",
        "litellm_anthropic": "chatcmpl-565d891b-a42e-4c39-8d14-82a1f5208885",
    }


def test_googles_older_client_has_names_of_its_own() -> None:
    reply = load("google_generate_content")
    of = reply["usageMetadata"]
    snake = {
        "candidates": reply["candidates"],
        "model_version": reply["modelVersion"],
        "response_id": reply["responseId"],
        "usage_metadata": {
            "prompt_token_count": of["promptTokenCount"],
            "candidates_token_count": of["candidatesTokenCount"],
            "cached_content_token_count": of["cachedContentTokenCount"],
            "thoughts_token_count": of["thoughtsTokenCount"],
            "prompt_tokens_details": [
                {"modality": one["modality"], "token_count": one["tokenCount"]}
                for one in of["promptTokensDetails"]
            ],
        },
    }
    found = read(snake)
    assert (found.id, found.model) == (reply["responseId"], reply["modelVersion"])
    assert found.counts is not None
    assert found.counts["input_audio_tokens"] == 16
    assert tokens(found) == 210


@pytest.mark.parametrize(
    ("provider", "priced"),
    [("anthropic", "anthropic/"), ("vertex_ai", "google/"), ("bedrock", "aws/")],
)
def test_litellms_replies_are_priced_by_their_provider(provider: str, priced: str) -> None:
    reply = load("litellm_anthropic")
    if provider == "vertex_ai":
        reply["model"] = "gemini-2.5-flash"
    elif provider == "bedrock":
        reply["model"] = "anthropic.claude-3-5-sonnet-20240620-v1:0"
    found = read(LiteLLM(reply, provider))
    assert (found.provider, found.flavor) == (provider, "chat")
    assert tokens(found) == 1356
    used, why = counted(found, "micro-usd", {})
    assert why is None
    assert priced in str(used.details)


def test_several_providers_count_in_one_shape_in_their_own_ways() -> None:
    reply = load("openai_chat")
    reply["model"] = "grok-4"
    found = read(reply)
    # It does not count what was reasoned among what came out.
    assert found.provider == "x-ai"
    assert tokens(found) == 2306 + 64
    assert tokens(read(reply, provider="openai")) == 2306


def test_what_cannot_be_told_is_asked_for() -> None:
    reply = load("openai_chat")
    for model in (None, "our-own-7b"):
        reply["model"] = model
        with pytest.raises(InvalidReply, match="give provider="):
            read(reply)
        assert tokens(read(reply, provider="openai")) == 2306
    with pytest.raises(InvalidReply, match="does not know a provider 'nobody'"):
        read(reply, provider="nobody")
    assert tokens(read(reply, provider="openai", flavor="chat")) == 2306
    with pytest.raises(InvalidReply, match="cannot be read as responses"):
        read(reply, provider="openai", flavor="responses")
    bare = {"usage": {"input_tokens": 3, "output_tokens": 4}}
    with pytest.raises(InvalidReply, match="several providers"):
        read(bare)
    assert tokens(read(bare, provider="anthropic")) == 7
    with pytest.raises(InvalidReply, match="as responses or default, but as"):
        read(bare, provider="cerebras")


def wrong(name: str, path: list[str], value: Any) -> dict[str, Any]:
    """A recorded reply with one value changed; gone where it is ``...``."""
    reply: dict[str, Any] = copy.deepcopy(load(name))
    at = reply
    for step in path[:-1]:
        at = at[step]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return reply


NONSENSE = [-1, float("nan"), float("inf"), 1.5, True, "12", None, ..., 2**70]


@pytest.mark.parametrize("value", NONSENSE, ids=repr)
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("openai_chat", ["usage", "completion_tokens"]),
        ("openai_responses", ["usage", "input_tokens"]),
        ("openai_embeddings", ["usage", "prompt_tokens"]),
        ("anthropic_messages", ["usage", "output_tokens"]),
        ("mistral_chat", ["usage", "prompt_tokens"]),
        ("bedrock_converse", ["usage", "outputTokens"]),
    ],
)
def test_nonsense_is_an_error(name: str, path: list[str], value: Any) -> None:
    with pytest.raises(BudgetError):
        read(wrong(name, path, value), provider=PROVIDERS[name])


@pytest.mark.parametrize(
    "value", [one for one in NONSENSE if one not in (None, ...)] + [[], {}, b"1"], ids=repr
)
@pytest.mark.parametrize("name", ["promptTokenCount", "candidatesTokenCount"])
def test_so_it_is_where_the_package_takes_it_for_nothing(name: str, value: Any) -> None:
    """Google leaves out what is 0; what is no number is not."""
    with pytest.raises(BudgetError):
        read(wrong("google_generate_content", ["usageMetadata", name], value))


@pytest.mark.parametrize("value", ["12", [], True], ids=repr)
@pytest.mark.parametrize(
    "path",
    [
        ["usage", "prompt_tokens_details", "cached_tokens"],
        ["usage", "completion_tokens_details", "reasoning_tokens"],
    ],
    ids=["cached", "reasoned"],
)
def test_so_is_a_part_that_is_no_number(path: list[str], value: Any) -> None:
    with pytest.raises(InvalidReply):
        read(wrong("openai_chat", path, value))


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 1.5, 2007, 2**70], ids=repr)
def test_so_is_a_part_that_cannot_be(value: Any) -> None:
    path = ["usage", "prompt_tokens_details", "cached_tokens"]
    with pytest.raises(InvalidReply):
        read(wrong("openai_chat", path, value))


@pytest.mark.parametrize(
    "value",
    [{}, {"type": "x"}, {"usage": {}}, {"object": "response", "usage": {}}, Dumped({}), ToDict({}),
     PlainlyDumped(7)],  # type: ignore[arg-type]
    ids=repr,
)  # fmt: skip
def test_what_is_no_reply_is_an_error(value: Any) -> None:
    with pytest.raises(InvalidReply):
        read(value)


@pytest.mark.parametrize(
    "value",
    [{}, {"tokens": 3}, {"tokens": "3"}, {"model": 3, "usage": 5}, 7, "x", None, Dumped, [1]],
    ids=repr,
)
def test_amounts_and_units_are_no_replies(value: Any) -> None:
    assert not is_reply(value)


@pytest.mark.parametrize("name", [one[0] for one in WHOLE])
def test_a_reply_without_usage_tells_nothing(name: str) -> None:
    reply = load(name)
    key = "usageMetadata" if "usageMetadata" in reply else "usage"
    for bare in ({**reply, key: None}, {n: v for n, v in reply.items() if n != key}):
        found = read(bare)
        assert (found.counts, found.id) == (None, read(reply).id)
        used, why = counted(found, "micro-usd", {})
        assert why is None
        assert {"tokens", "micro-usd", "input_tokens"} <= set(used.incomplete)
        assert "requests" not in used.incomplete


@pytest.mark.parametrize("kind", [dict, Dumped, ToDict])
@pytest.mark.parametrize(("name", "charged"), STREAMS)
def test_a_stream_is_as_good_as_a_whole_reply(name: str, charged: int, kind: Any) -> None:
    gathered = Gathered()
    for chunk in load(name):
        gathered.add(kind(chunk))
    assert gathered.finished
    assert tokens(read(gathered.reply)) == charged


@pytest.mark.parametrize(("name", "charged"), STREAMS)
def test_a_stream_that_has_not_ended_has_not_told_all(name: str, charged: int) -> None:
    *begun, last = load(name)
    gathered = Gathered()
    for chunk in begun:
        gathered.add(chunk)
    if last == {"type": "message_stop"}:
        assert gathered.finished
        return
    assert not gathered.finished
    found = read(gathered.reply, whole=False)
    assert found.whole is False
    assert tokens(found) <= charged


def test_what_has_no_numbers_changes_nothing() -> None:
    gathered = Gathered()
    for chunk in ("text", b"bytes", 7, None, ["x"], {}, {"type": "ping"}):
        gathered.add(chunk)
    assert gathered.reply == {}


def test_clients_that_wrap_their_chunks() -> None:
    gathered = Gathered()
    for chunk in load("mistral_chat_stream"):
        gathered.add(Dumped({"data": chunk}))
    assert tokens(read(gathered.reply)) == 21


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    package._package.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "genai_prices", None)
    with pytest.raises(MissingExtra, match=r"celery-budget\[prices\]"):
        read(load("openai_chat"))
    monkeypatch.undo()
    assert tokens(read(load("openai_chat"))) == 2306
