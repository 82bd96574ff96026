"""Ask twelve questions of an assistant with a free lane and a paid one; see README.md."""

from __future__ import annotations

from collections import Counter
from typing import Any

from celery_budget import BudgetExceeded
from examples import local
from examples.fallback import assistant

QUESTIONS = ["hard: why?", *(f"easy: what is {number} + 1?" for number in range(11))]


def ask() -> list[Any]:
    """Ask all questions, before any worker runs; return the results of those that were admitted."""
    results = []
    for question in QUESTIONS:
        try:
            results.append(assistant.answer.delay(question, "acme"))
        except BudgetExceeded as refusal:
            print(f"refused: {question} ({refusal.budget} has {refusal.available} left)")
    for lane, count in assistant.budget.report().lanes.items():
        print(f"admitted in lane {lane}: {count}")
    return results


def main() -> int:
    """Run the example; return the exit status."""
    with local.folder() as folder:
        local.keep_in(assistant.app, folder)
        assistant.declare()
        try:
            results = ask()
            with local.worker("examples.fallback.assistant", "-Q", "free,paid") as worker:
                worker.wait(
                    lambda: all(one.ready() for one in results) and local.closed(assistant.budget)
                )
            for text, count in sorted(Counter(one.get() for one in results).items()):
                print(f"{count} x {text}")
            for budget in ("free", "paid"):
                balance = assistant.budget.balance(budget)
                print(f"{budget}: {balance.spent} of {balance.limit} tokens spent")
            return local.verdict(assistant.budget)
        finally:
            assistant.budget.store.dispose()


if __name__ == "__main__":
    local.run(main)
