"""Ask models of a stand-in by the providers' real clients; see README.md."""

from __future__ import annotations

import os
from typing import Any

from celery_budget import BudgetExceeded
from examples import local
from examples.provider import ask, standin

OWNER = "tenant:acme"
QUESTIONS = [
    (ask.chat, "Why is the sky blue?"),
    (ask.chat_stream, "Why is the sea salt?"),
    (ask.respond, "Why is the grass green?"),
    (ask.respond_stream, "Why is the night dark?"),
    (ask.message, "Why is the sun warm?"),
    (ask.message_stream, "Why is the moon cold?"),
    (ask.chat, "[busy] Why is the wind loud?"),
    (ask.message, "[down] Why is the rain wet?"),
    (ask.message, "[wrong] Why?"),
    (ask.chat_stream, "[cut] Why is the snow white?"),
    (ask.chat, "Why is this one too much?"),
]
LIMIT_TOKENS, LIMIT_DOLLARS = 3_300, 1


def publish() -> list[tuple[str, Any]]:
    """Ask all questions; return the results of those that were admitted."""
    asked = []
    for task, prompt in QUESTIONS:
        try:
            asked.append((prompt, task.delay(prompt, "acme")))
        except BudgetExceeded as refusal:
            print(f"refused: {prompt} ({refusal.available} of {refusal.limit} tokens left)")
    return asked


def tell(prompt: str, result: Any) -> None:
    """Say what became of a question."""
    job = ask.budget.job(result.id, owner=OWNER)
    used = job.usage.get("tokens", 0)
    print(f"{prompt} {job.state}, {used} tokens, attempts: {job.attempts}: {result.result}")


def main() -> int:
    """Run the example; return the exit status."""
    with local.folder() as folder, standin.running() as provider:
        os.environ.update(
            OPENAI_BASE_URL=f"{provider.url}/v1",
            OPENAI_API_KEY="none",
            ANTHROPIC_BASE_URL=provider.url,
            ANTHROPIC_API_KEY="none",
        )
        local.keep_in(ask.app, folder)
        ask.declare(LIMIT_TOKENS, LIMIT_DOLLARS)
        try:
            asked = publish()
            print(f"calls of the provider before a worker runs: {provider.calls}")
            with local.worker("examples.provider.ask") as worker:
                worker.wait(
                    lambda: all(one.ready() for _, one in asked) and local.closed(ask.budget)
                )
            for prompt, result in asked:
                tell(prompt, result)
            tokens, money = ask.budget.balance(OWNER), ask.budget.balance("usd:acme")
            report = ask.budget.report()
            print(f"calls of the provider: {provider.calls}, counted there: {provider.tokens}")
            print(f"spent: {tokens.spent} tokens, {money.spent} micro-usd")
            print(f"charged by estimate: {report.counts['unmetered']}")
            return local.verdict(ask.budget)
        finally:
            ask.budget.store.dispose()


if __name__ == "__main__":
    local.run(main)
