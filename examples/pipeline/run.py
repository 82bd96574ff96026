"""Start more papers than the budget has room for; see README.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_budget import BudgetExceeded
from examples import local
from examples.pipeline import papers

TENANT = "acme"


def start(what: str, publish: Callable[[], Any]) -> list[Any]:
    """Start a paper and say what is held then; return its result, if it was admitted."""
    try:
        result = publish()
    except BudgetExceeded as refusal:
        print(f"{what}: refused, {refusal.reason} at the soft stop of {refusal.most} tokens")
        return []
    balance = papers.budget.balance(f"tenant:{TENANT}")
    print(f"{what}: admitted, {balance.reserved} tokens held")
    return [result]


def main() -> int:
    """Run the example; return the exit status."""
    with local.folder() as folder:
        local.keep_in(papers.app, folder)
        papers.declare()
        try:
            results = [
                *start("note", lambda: papers.note("note", TENANT)),
                *start("whale", lambda: papers.paper("whale", 2, TENANT)),
                *start("heron", lambda: papers.paper("heron", 2, TENANT)),
                *start("otter", lambda: papers.paper("otter", 2, TENANT)),
                *start("raven", lambda: papers.paper("raven", 2, TENANT)),
            ]
            with local.worker("examples.pipeline.papers") as worker:
                worker.wait(
                    lambda: all(one.ready() for one in results) and local.closed(papers.budget)
                )
            for result in results:
                print(result.get())
            for drift in papers.budget.report().drift:
                print(f"{drift.stage}: {drift.actual} of {drift.estimated} tokens estimated")
            balance = papers.budget.balance(f"tenant:{TENANT}")
            print(f"spent: {balance.spent} of {balance.limit} tokens")
            start("raven", lambda: papers.paper("raven", 2, TENANT))
            return local.verdict(papers.budget)
        finally:
            papers.budget.store.dispose()


if __name__ == "__main__":
    local.run(main)
