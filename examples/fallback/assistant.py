"""The application of the fallback example: questions that are free, until they are not.

Two lanes serve one task. The free one stands for a provider's free plan of 1,000 tokens; the paid
one for a key that costs money. Each has a queue and a budget of its own, both below what must not
be crossed:

- The free budget's limit is 950: a hard stop under the plan's ceiling. Its soft stop is at eighty
  per cent: new questions may take 760, and what is above is for what has been started.
- The paid budget is the one way out when the free one is used up, and it is metered the same way.
"""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_budget import BudgetExceeded, CeleryBudget, budgeted, usage
from examples import local

app = Celery("assistant")
budget = CeleryBudget(app)
local.keep_in(app)  # Put your broker, result backend and database here.


def declare() -> None:
    """Make the ledger, its budgets and its lanes."""
    budget.init()
    budget.set("tenant:acme", limit=10_000, unit="tokens")
    budget.set("free", limit=950, unit="tokens", soft_stop=0.8)
    budget.set("paid", limit=500, unit="tokens", soft_stop=0.8)
    for name in ("free", "paid"):
        # Workers cannot be asked where their remote control is off.
        budget.lanes.set(name, queues=[name], budgets=[name], preflight=False)


@budgeted(budget="tenant:{tenant}", estimate=100, fallback=["free", "paid"])
@app.task(bind=True, acks_late=True)
def answer(self: Any, question: str, tenant: str) -> str:
    """Answer a question; a hard one asks the paid model as well, where its budget lets it."""
    lane = self.request.budget_lane
    usage.record(40, key="first try")
    if not question.startswith("hard"):
        return f"{lane}: an answer"
    try:
        usage.turn_to("paid", estimate=60)
    except BudgetExceeded:
        return f"{lane}: as good an answer as it gets"
    usage.record(60, key="second try")
    return f"{lane}, then paid: a good answer"
