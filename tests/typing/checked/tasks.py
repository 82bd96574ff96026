"""Tasks of a Celery that has types, as the package celery-types gives it."""

from celery import Celery, Task, shared_task

from celery_budget import budgeted

app = Celery("shop")


@budgeted(budget="tenant", estimate=3)
@app.task(acks_late=True)
def above(prompt: str) -> int:
    return len(prompt)


@app.task
@budgeted(budget="tenant", estimate=3)
def beneath(prompt: str) -> int:
    return len(prompt)


@budgeted(budget="tenant", estimate=3)
@shared_task
def shared(prompt: str) -> int:
    return len(prompt)


@budgeted(budget="tenant", estimate=3)
def alone(prompt: str) -> int:
    return len(prompt)


def made(task: Task[[int], str]) -> None:
    reveal_type(budgeted(task, budget="tenant", estimate=3))  # is: Task[(int), str]


reveal_type(above)  # is: Task[(prompt: str), int]
reveal_type(beneath)  # is: Task[(prompt: str), int]
reveal_type(shared)  # is: Task[(prompt: str), int]
reveal_type(above.delay("a prompt"))  # is: AsyncResult[int]
reveal_type(alone.delay("a prompt"))  # is: AsyncResult[int]
reveal_type(alone.delay)  # is: (prompt: str) -> AsyncResult[int]
reveal_type(alone.apply_async(("a prompt",), request_id="r").get())  # is: int
reveal_type(alone.s("a prompt"))  # is: Signature[int]
reveal_type(alone.rate_limit)  # is: Any
above.delay(3)  # error
alone.delay(3)  # error
shared.delay("a prompt", 3)  # error
