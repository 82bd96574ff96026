"""Ready estimators: by characters, by tiktoken and by a request's parameters."""

from __future__ import annotations

import inspect
import sys
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from celery_budget import estimators
from celery_budget.core.estimators import Estimator
from celery_budget.core.policies import BudgetPolicy
from celery_budget.errors import (
    BudgetError,
    EstimateError,
    InvalidAmount,
    MissingExtra,
    PolicyError,
)
from celery_budget.estimators import by_characters, by_request, by_tiktoken

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "name": "ann", "content": [
        {"type": "text", "text": "what is it"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10_000}},
    ]},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_use", "id": "t", "name": "see", "input": {"é": 1}},
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "ok"}]},
    ]},
]  # fmt: skip
#: What of these a model reads.
READ = ["be brief", "what is it", "ann", "look", "{}", "see", '{"é": 1}', "ok"]


def estimate(estimator: Any, **arguments: Any) -> int:
    """By a task that takes these arguments."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.Signature([inspect.Parameter(name, keyword) for name in arguments])
    policy = BudgetPolicy("b", estimator)
    policy.check("shop.draft", signature)
    return policy.evaluate("shop.draft", signature, (), arguments).estimate


CHARACTERS: list[Any] = [
    ("hello", 1, 5),
    ("hello", "1/4", 2),
    ("hello", "0.25", 2),
    ("hell", Fraction(1, 4), 1),
    ("hello", Decimal("1.5"), 8),
    ("", "1/3", 0),
    (None, 1, 0),
    (["one", "two"], 1, 6),
    (("one", None, ["x"]), 1, 4),
    (MESSAGES, 1, sum(map(len, READ))),
    (MESSAGES[0], 1, 8),
    # Exact, where a float is not.
    ("x" * 30, "1/10", 3),
    ("é" * 3, 1, 3),
]


@pytest.mark.parametrize(
    ("value", "ratio", "units"), CHARACTERS, ids=[str(n) for n in range(len(CHARACTERS))]
)
def test_by_characters(value: Any, ratio: Any, units: int) -> None:
    assert estimate(by_characters("prompt", units_per_character=ratio), prompt=value) == units


def test_several_arguments_and_what_each_message_costs() -> None:
    made = by_characters("prompt", "messages", units_per_character=1, per_message=4, plus=3)
    wanted = 2 + sum(map(len, READ)) + 4 * len(MESSAGES) + 3
    assert estimate(made, prompt="ab", messages=MESSAGES, other=object()) == wanted
    assert (made.name, made.version) == ("characters", "1+4+3")
    assert by_characters("prompt").version == "1/3"
    assert by_characters("prompt", name="n", version="v", at_most=7).key == "n:v"


@pytest.mark.parametrize("value", [5, b"bytes", object(), {"content": 3.5}, [[1]]], ids=type)
def test_what_is_no_text_cannot_be_counted(value: Any) -> None:
    with pytest.raises(EstimateError, match="neither text nor messages"):
        estimate(by_characters("prompt"), prompt=value)


@pytest.mark.parametrize("ratio", [0, -1, 0.25, "x", "1/0", True, None, "nan"], ids=repr)
def test_a_ratio_is_exact_and_above_nothing(ratio: Any) -> None:
    with pytest.raises(PolicyError, match="units_per_character="):
        by_characters("prompt", units_per_character=ratio)


@pytest.mark.parametrize("names", [(), ("a b",), (5,)], ids=repr)
def test_an_estimator_counts_named_arguments(names: Any) -> None:
    with pytest.raises(PolicyError, match="give those of the task's arguments"):
        by_characters(*names)
    with pytest.raises(PolicyError, match=r"estimate of shop\.draft wants prompt"):
        estimate(by_characters("prompt"), text="x")


def small_encoding() -> Any:
    """An encoding that needs no network: bytes, and one merge."""
    import tiktoken

    ranks = {bytes([number]): number for number in range(256)} | {b"he": 256, b"hell": 257}
    ranks |= {b"ll": 258}
    return tiktoken.Encoding(
        "small", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={"<|end|>": 300}
    )


def test_by_tiktoken() -> None:
    encoding = small_encoding()
    made = by_tiktoken("prompt", encoding=encoding, plus=0, per_message=0)
    for text in ("hello", "ab<|end|>", "é", ""):
        wanted = len(encoding.encode(text, disallowed_special=()))
        assert estimate(made, prompt=text) == wanted
    assert estimate(made, prompt="hello") < 5
    # What somebody wrote is no special token.
    assert estimate(made, prompt="<|end|>") > 1
    assert (made.name, made.version) == ("tiktoken", "small")
    chat = by_tiktoken("messages", encoding=encoding)
    text = sum(len(encoding.encode(one, disallowed_special=())) for one in READ)
    assert estimate(chat, messages=MESSAGES) == text + 3 * len(MESSAGES) + 3
    assert chat.version == "small+3+3"


def test_tiktoken_is_imported_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = by_tiktoken("prompt", encoding="never_loaded")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(MissingExtra, match=r"celery-budget\[tiktoken\]"):
        estimate(made, prompt="x")


def test_an_encoding_is_found_by_name_or_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    encoding, asked = small_encoding(), []

    def find(name: str) -> Any:
        asked.append(name)
        return encoding

    monkeypatch.setattr(tiktoken, "get_encoding", find)
    monkeypatch.setattr(tiktoken, "encoding_for_model", find)
    monkeypatch.setattr(estimators, "_encoding", estimators._encoding.__wrapped__)
    for made in (by_tiktoken("p", encoding="small"), by_tiktoken("p", model="gpt-small")):
        assert estimate(made, p="hello") == len(encoding.encode("hello")) + 3
    assert asked == ["small", "gpt-small"]


def test_a_vocabulary_that_cannot_be_had_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    def find(name: str) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", find)
    with pytest.raises(EstimateError, match="no network"):
        estimate(by_tiktoken("p", encoding="far_away"), p="hello")


@pytest.mark.parametrize("options", [{}, {"model": "m", "encoding": "e"}], ids=repr)
def test_an_encoding_is_named_once(options: Any) -> None:
    with pytest.raises(PolicyError, match="model= or encoding="):
        by_tiktoken("prompt", **options)


CHARS = by_characters("messages", units_per_character=1)
REQUESTS: list[Any] = [
    ({"max_tokens": 100}, 105),
    ({"max_completion_tokens": 10, "max_tokens": 100}, 15),
    ({"max_tokens": 100, "n": 3}, 305),
    ({"max_tokens": 100, "n": None}, 105),
    ({"max_output_tokens": 7, "max_tokens": None}, 12),
    ({}, 55),
    ({"n": 2}, 105),
]


@pytest.mark.parametrize(("parameters", "units"), REQUESTS, ids=repr)
def test_by_request(parameters: Any, units: int) -> None:
    made = by_request(CHARS, default_output=50)
    assert estimate(made, messages="hello", **parameters) == units
    whole = by_request(CHARS, of="body", default_output=50)
    assert estimate(whole, body={"messages": "hello", "model": "m", **parameters}) == units
    assert made.key == "request:characters-1"


def test_what_goes_in_may_be_a_number_or_a_function() -> None:
    assert estimate(by_request(5), max_tokens=10) == 15
    assert estimate(by_request(lambda prompt: 2 * len(prompt)), prompt="ab", max_tokens=10) == 14
    assert estimate(by_request(lambda **given: len(given)), a=1, max_tokens=10) == 12


WRONG: list[Any] = [
    (by_request(5), {}, EstimateError, "bounds its output by none of max_completion_tokens"),
    (by_request(5), {"max_tokens": 1.5}, InvalidAmount, "the most that may come out"),
    (by_request(5), {"max_tokens": -1}, InvalidAmount, "the most that may come out"),
    (by_request(5), {"max_tokens": 1, "n": True}, InvalidAmount, "n of a request"),
    (by_request(5), {"max_tokens": 2**62, "n": 4}, InvalidAmount, r"estimate for shop\.draft"),
    (by_request(5, of="body"), {"body": "x"}, EstimateError, "'body' is str and no mapping"),
    (by_request(lambda: 0.5), {"max_tokens": 1}, InvalidAmount, "what goes in is 0.5"),
    (
        by_request(Estimator("e", lambda: 9, at_most=8)), {"max_tokens": 1},
        EstimateError, "what goes in is 9",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("made", "arguments", "kind", "said"), WRONG, ids=[str(n) for n in range(len(WRONG))]
)
def test_a_request_that_does_not_tell_is_refused(
    made: Any, arguments: Any, kind: type[BudgetError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        estimate(made, **arguments)


@pytest.mark.parametrize("options", [{"of": "a b"}, {"default_output": -1}], ids=repr)
def test_what_cannot_be_a_requests_estimator(options: Any) -> None:
    with pytest.raises(BudgetError):
        by_request(5, **options)
    with pytest.raises(InvalidAmount):
        by_request(1.5)  # type: ignore[arg-type]
