"""Tasks that ask OpenAI's and Anthropic's models by their own clients.

The clients find the provider, or the stand-in, by their own variables: ``OPENAI_BASE_URL`` and
``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import openai
from celery import Celery

from celery_budget import BudgetLine, CeleryBudget, budgeted, cost, usage
from examples import local

GPT, CLAUDE = "gpt-4o-mini", "claude-haiku-4-5"
LONGEST_TOKENS = 300
#: What may pass: a provider that is busy or down.
PASSING = (
    openai.RateLimitError,
    openai.InternalServerError,
    anthropic.RateLimitError,
    anthropic.InternalServerError,
)

app = Celery("ask")
# So that this example's figures stay: without it the genai-prices package's own count.
app.conf.budget_prices = {
    GPT: {"input_mtok": "0.15", "output_mtok": "0.60"},
    CLAUDE: {"input_mtok": "1", "output_mtok": "5"},
}
budget = CeleryBudget(app)
local.keep_in(app)  # Put your broker, result backend and database here.


def declare(tokens: int, dollars: int) -> None:
    """Make the ledger and one tenant's budgets."""
    budget.init()
    budget.set("tenant:acme", limit=tokens, unit="tokens")
    budget.set("usd:acme", limit=dollars * 1_000_000, unit="micro-usd")


def tokens_in(prompt: str) -> int:
    """Expect a token for every three characters."""
    return len(prompt) // 3 + 10


def asks(model: str) -> Any:
    """Declare a task that asks a model once, or again where that may help."""
    declared = budgeted(
        budget=[
            "tenant:{tenant}",
            BudgetLine(
                "usd:{tenant}",
                cost(model=model, input_tokens=tokens_in, output_tokens=LONGEST_TOKENS),
            ),
        ],
        estimate=lambda prompt: tokens_in(prompt) + LONGEST_TOKENS,
        stage=model,
    )
    task = app.task(bind=True, acks_late=True, max_retries=3)
    return lambda function: declared(task(function))


# Whatever may be tried again is tried by Celery: the hold stays, and no worker waits meanwhile.
def gpt() -> openai.OpenAI:
    """Return OpenAI's client."""
    return openai.OpenAI(max_retries=0)


def claude() -> anthropic.Anthropic:
    """Return Anthropic's client."""
    return anthropic.Anthropic(max_retries=0)


class NoAnswer(Exception):
    """The provider has not answered. (Its client's own errors cannot be stored as results.)"""


@contextmanager
def asking(task: Any) -> Iterator[None]:
    """Try again what may pass: when the provider says, or in a moment.

    A stream that breaks off is not tried again: it is paid for, and charged the estimate.
    """
    try:
        yield
    except PASSING as error:
        after = error.response.headers.get("retry-after")
        raise task.retry(exc=failure(error), countdown=float(after or 0.5)) from error
    except (openai.OpenAIError, anthropic.AnthropicError, httpx.HTTPError) as error:
        raise failure(error) from error


def failure(error: Exception) -> NoAnswer:
    """Return what to raise instead of a client's error."""
    status = getattr(error, "status_code", None)
    return NoAnswer("the connection broke off" if status is None else f"status {status}")


@asks(GPT)
def chat(self: Any, prompt: str, tenant: str) -> str:
    """Ask by chat completions, whole."""
    with asking(self), gpt() as client:
        reply = client.chat.completions.create(
            model=GPT,
            messages=[{"role": "user", "content": prompt}],
            max_completion_tokens=usage.remaining(),
        )
    usage.record(reply)
    return reply.choices[0].message.content or ""


@asks(GPT)
def chat_stream(self: Any, prompt: str, tenant: str) -> str:
    """Ask by chat completions, as a stream."""
    said = ""
    with asking(self), gpt() as client:
        chunks = client.chat.completions.create(
            model=GPT,
            messages=[{"role": "user", "content": prompt}],
            max_completion_tokens=usage.remaining(),
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in usage.stream(chunks):
            for choice in chunk.choices:
                said += choice.delta.content or ""
    return said.strip()


@asks(GPT)
def respond(self: Any, prompt: str, tenant: str) -> str:
    """Ask by responses, whole."""
    with asking(self), gpt() as client:
        reply = client.responses.create(
            model=GPT, input=prompt, max_output_tokens=usage.remaining()
        )
    usage.record(reply)
    return reply.output_text


@asks(GPT)
def respond_stream(self: Any, prompt: str, tenant: str) -> str:
    """Ask by responses, as a stream."""
    said = ""
    with asking(self), gpt() as client:
        events = client.responses.create(
            model=GPT, input=prompt, max_output_tokens=usage.remaining(), stream=True
        )
        for event in usage.stream(events):
            if event.type == "response.output_text.delta":
                said += event.delta
    return said.strip()


@asks(CLAUDE)
def message(self: Any, prompt: str, tenant: str) -> str:
    """Ask by messages, whole."""
    with asking(self), claude() as client:
        reply = client.messages.create(
            model=CLAUDE,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=usage.remaining() or LONGEST_TOKENS,
        )
    usage.record(reply)
    return "".join(block.text for block in reply.content if block.type == "text")


@asks(CLAUDE)
def message_stream(self: Any, prompt: str, tenant: str) -> str:
    """Ask by messages, as a stream."""
    said = ""
    with asking(self), claude() as client:
        events = client.messages.create(
            model=CLAUDE,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=usage.remaining() or LONGEST_TOKENS,
            stream=True,
        )
        for event in usage.stream(events):
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                said += event.delta.text
    return said.strip()
