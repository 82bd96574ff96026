"""Each way to declare the same budgeted task."""

from __future__ import annotations

from typing import Any

from celery import Celery, Task, shared_task

from celery_budget import BudgetedTask, budgeted

BUDGET: dict[str, Any] = {"budget": "tenant:{tenant}", "estimate": lambda size, tenant: size}
NAME = "declared.draft"


def fresh() -> Any:
    """A function of its own: a declaration leaves its mark on the function."""

    def draft(size: int, tenant: str, extra: int = 0) -> int:
        """Return what it was given."""
        return size + extra

    return draft


# Each placement declares one task on an application that is current, and returns what the user has.


def above_task(app: Celery) -> Any:
    return budgeted(**BUDGET)(app.task(name=NAME, acks_late=True)(fresh()))


def above_ready_task(app: Celery) -> Any:
    return budgeted(**BUDGET)(app.task(name=NAME, acks_late=True, lazy=False)(fresh()))


def beneath_task(app: Celery) -> Any:
    return app.task(name=NAME, acks_late=True)(budgeted(**BUDGET)(fresh()))


def above_shared(app: Celery) -> Any:
    return budgeted(**BUDGET)(shared_task(name=NAME, acks_late=True)(fresh()))


def beneath_shared(app: Celery) -> Any:
    return shared_task(name=NAME, acks_late=True)(budgeted(**BUDGET)(fresh()))


def alone(app: Celery) -> Any:
    return budgeted(name=NAME, acks_late=True, **BUDGET)(fresh())


def with_base(app: Celery) -> Any:
    return app.task(name=NAME, base=BudgetedTask, acks_late=True, **BUDGET)(fresh())


def with_shared_base(app: Celery) -> Any:
    return shared_task(name=NAME, base=BudgetedTask, acks_late=True, **BUDGET)(fresh())


def class_based(app: Celery) -> Any:
    class Draft(BudgetedTask):
        name = NAME
        acks_late = True
        budget = "tenant:{tenant}"
        estimate = staticmethod(lambda size, tenant: size)

        def run(self, size: int, tenant: str, extra: int = 0) -> int:
            return size + extra

    return app.register_task(Draft())


def budgeted_instance(app: Celery) -> Any:
    class Draft(Task):
        name = NAME
        acks_late = True

        def run(self, size: int, tenant: str, extra: int = 0) -> int:
            return size + extra

    return budgeted(**BUDGET)(app.register_task(Draft()))


def bound(app: Celery) -> Any:
    def draft(self: Any, size: int, tenant: str, extra: int = 0) -> int:
        assert self.name == NAME
        return size + extra

    return budgeted(**BUDGET)(app.task(name=NAME, bind=True, acks_late=True)(draft))


def bound_beneath(app: Celery) -> Any:
    def draft(self: Any, size: int, tenant: str, extra: int = 0) -> int:
        assert self.name == NAME
        return size + extra

    return app.task(name=NAME, bind=True, acks_late=True)(budgeted(**BUDGET)(draft))


def bound_alone(app: Celery) -> Any:
    def draft(self: Any, size: int, tenant: str, extra: int = 0) -> int:
        assert self.name == NAME
        return size + extra

    return budgeted(name=NAME, bind=True, acks_late=True, **BUDGET)(draft)


def own_app_task(app: Celery) -> Any:
    class Own(app.Task):
        mine = True

    task = budgeted(**BUDGET)(app.task(name=NAME, base=Own, acks_late=True)(fresh()))
    assert task.mine
    return task


def own_budgeted_base(app: Celery) -> Any:
    class Tenants(BudgetedTask):
        budget = "tenant:{tenant}"

        @staticmethod
        def estimate(size: int) -> int:
            return size

    return app.task(name=NAME, base=Tenants, acks_late=True)(fresh())


def autoretry(app: Celery) -> Any:
    return budgeted(**BUDGET)(
        app.task(name=NAME, acks_late=True, autoretry_for=(ValueError,), retry_backoff=2)(fresh())
    )


def autoretry_alone(app: Celery) -> Any:
    return budgeted(name=NAME, acks_late=True, autoretry_for=(ValueError,), **BUDGET)(fresh())


PLACEMENTS = [
    above_task,
    above_ready_task,
    beneath_task,
    above_shared,
    beneath_shared,
    alone,
    with_base,
    with_shared_base,
    class_based,
    budgeted_instance,
    bound,
    bound_beneath,
    bound_alone,
    own_app_task,
    own_budgeted_base,
    autoretry,
    autoretry_alone,
]
