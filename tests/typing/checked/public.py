"""What type checkers know of the public API, whatever they know of Celery."""

from collections.abc import Iterator
from datetime import timedelta

from celery import Celery

from celery_budget import (
    BudgetedTask,
    BudgetLine,
    CeleryBudget,
    budgeted,
    cost,
    estimator,
    usage,
)
from celery_budget.testing import Clock, assert_refused, assert_reserved, freeze_budget, in_memory

app = Celery("shop")
budget = CeleryBudget(app)


@budgeted(budget="tenant:{tenant}", estimate=500)
def draft(prompt: str, tenant: str) -> int:
    return len(prompt)


@budgeted(budget="tenant", estimate=lambda prompt: len(prompt) // 3, bind=True, acks_late=True)
def bound(self: BudgetedTask, prompt: str) -> int:
    return len(prompt)


@estimator("draft", version="2")
def by_length(prompt: str) -> int:
    return len(prompt)


@budgeted(
    budget=["tenant", BudgetLine("calls", estimate=1, charge="start")],
    estimate=by_length,
    reuse=timedelta(hours=1),
    terminal=(ValueError,),
)
async def later(prompt: str) -> str:
    return prompt


class Draft(BudgetedTask):
    budget = "tenant:{tenant}"
    deadline = 60.0

    @staticmethod
    def estimate(tenant: str) -> int:
        return len(tenant)

    def run(self, tenant: str) -> str:
        return tenant


reveal_type(draft)  # is: BudgetedFunction[(prompt: str, tenant: str), int]
reveal_type(draft("a prompt", "acme"))  # is: int
reveal_type(draft.name)  # is: str
reveal_type(bound)  # is: BudgetedFunction[(prompt: str), int]
reveal_type(bound("a prompt"))  # is: int
reveal_type(by_length)  # is: Estimator
reveal_type(cost(model="some", input_tokens=3))  # is: Cost
draft(3, "acme")  # error
draft.delay()  # error
bound.delay(draft, "a prompt")  # error
draft("a prompt", "acme", 1)  # error
budgeted(estimate=3)  # error
budgeted(budget="tenant", estimate=3.5)  # error
budgeted(budget="tenant", estimate=3, deadline="soon")  # error
budgeted(budget=7, estimate=3)  # error
budgeted(budget="tenant", estimate=cost(model="some", input_tokens=3))

reveal_type(budget.balance("tenant"))  # is: Balance
reveal_type(budget.balance("tenant").available)  # is: int | None
reveal_type(budget.set("tenant", limit="10%", parent="all"))  # is: Budget
reveal_type(budget.grant("tenant", 3, until=timedelta(days=1)).repeated)  # is: bool
reveal_type(budget.job("id", owner="tenant"))  # is: Job
reveal_type(budget.would_admit(draft, ("a prompt",)))  # is: Outlook
reveal_type(budget.would_admit(draft).retry_after)  # is: float | None
reveal_type(budget.report(since=timedelta(days=1)))  # is: Report
reveal_type(budget.explain("id"))  # is: list[Story]
reveal_type(budget.alerts())  # is: tuple[StandingAlert, ...]
reveal_type(budget.lanes)  # is: Lanes
budget.set("tenant", limit=1.5)  # error
budget.job("id")  # error
budget.grant("tenant", "3")  # error

with budget.batch(partial=True) as batch:
    reveal_type(batch)  # is: Batch

reveal_type(usage.record(3, key="a"))  # is: bool
reveal_type(usage.remaining())  # is: int | None
reveal_type(usage.extend(3))  # is: bool
reveal_type(usage.cancelled())  # is: bool
reveal_type(usage.deadline())  # is: datetime | None
usage.extend("3")  # error


def chunks() -> Iterator[str]:
    yield "a"


reveal_type(usage.stream(chunks()))  # is: Iterator[str]

with in_memory(app, clock=Clock()) as ledger, freeze_budget("tenant", limit=None):
    reveal_type(ledger)  # is: CeleryBudget
    reveal_type(assert_reserved("tenant", 3)[0].held)  # is: int
    reveal_type(assert_refused(count=1)[0].reason)  # is: str
    assert_reserved(3)  # error
