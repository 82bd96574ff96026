"""The same tasks in a plain application and in one with budgets, and a note of what they saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery import Celery, chain, chord, group
from celery._state import get_current_worker_task
from kombu import Exchange, Queue

from celery_budget import budgeted, usage

TENANT = "tenant:{tenant}"
#: What each run of a budgeted task is expected to use, and what it does use.
ESTIMATE, USED = 6, 5

#: Headers whose way through the system is watched.
WATCHED = ("traceparent", "tracestate", "x_request")


@dataclass(frozen=True)
class Run:
    """One run of a task's body.

    :ivar request: id, replace nesting and retries of the message that it belongs to.
    :ivar draws: whether the task has a budget.
    :ivar value: the first argument, with its type.
    :ivar watched: the headers of :data:`WATCHED` that came with it.
    """

    task: str
    request: tuple[str, int, int]
    draws: bool
    value: str
    priority: int | None
    watched: dict[str, Any]


class Tasks:
    """The tasks of one application, by name.

    :ivar tenant: whose budget is drawn on.
    :ivar ran: what has run, in order.
    """

    work: Any
    plain: Any
    total: Any
    fail: Any
    caught: Any
    mapped: Any
    retried: Any
    autoretried: Any
    replaced: Any

    def __init__(self, app: Celery, *, budgets: bool) -> None:
        self.app = app
        self.tenant = ""
        self.ran: list[Run] = []
        self._budgets = budgets
        _declare(self)

    def queue(self, name: str) -> str:
        return f"{self.app.conf.task_default_queue}-{name}"

    def told(self) -> list[tuple[str, int, str]]:
        """What has run, as it is in every application: each task, its retries and its value."""
        return sorted((run.task, run.request[2], run.value) for run in self.ran)

    def add(self, *, draws: bool, **options: Any) -> Callable[[Callable[..., Any]], None]:
        """Make a task of a function, with a budget where it draws on one and there are any."""
        budget: Any = options.pop("budget", TENANT)

        def decorate(function: Callable[..., Any]) -> None:
            name = f"paths.{function.__name__}"
            task = self.app.task(name=name, bind=True, shared=False, **options)(function)
            if draws and self._budgets:
                task = budgeted(budget=budget, estimate=ESTIMATE)(task)
            setattr(self, function.__name__, task)

        return decorate

    def note(self, task: Any, value: Any, *, draws: bool = True) -> None:
        """Note a run, and use what each run uses."""
        request = get_current_worker_task().request
        watched = {name: request.get(name) for name in WATCHED if request.get(name) is not None}
        self.ran.append(
            Run(
                task.name,
                (str(request.id), int(request.replaced_task_nesting or 0), request.retries),
                draws,
                repr(value),
                (request.delivery_info or {}).get("priority"),
                watched,
            )
        )
        if draws and self._budgets:
            usage.record(USED)


def _declare(tasks: Tasks) -> None:
    @tasks.add(draws=True, acks_late=True)
    def work(self: Any, value: Any, tenant: str) -> Any:
        tasks.note(self, value)
        return value

    @tasks.add(draws=False)
    def plain(self: Any, value: Any) -> Any:
        tasks.note(self, value, draws=False)
        return value

    @tasks.add(draws=True)
    def total(self: Any, values: list[Any], tenant: str) -> Any:
        """A chord's body."""
        tasks.note(self, sorted(values))
        return sum(values)

    @tasks.add(draws=True)
    def fail(self: Any, value: Any, tenant: str) -> None:
        tasks.note(self, value)
        raise ValueError(value)

    @tasks.add(draws=True)
    def caught(self: Any, failed_id: str, tenant: str = "") -> None:
        """An errback that is published with the failed task's id."""
        tasks.note(self, "failed")

    @tasks.add(draws=True, budget=lambda item: f"tenant:{item[1]}")
    def mapped(self: Any, item: list[Any]) -> Any:
        """Take one argument, as ``map`` gives."""
        tasks.note(self, item[0])
        return item[0]

    @tasks.add(draws=True, max_retries=3)
    def retried(self: Any, value: Any, tenant: str, **how: Any) -> Any:
        """Retry once, as ``how`` says."""
        tasks.note(self, value)
        if self.request.retries:
            return value
        if "eta" in how:
            how["eta"] = self.app.now() + timedelta(seconds=how["eta"])
        if "queue" in how:
            how["queue"] = tasks.queue(how["queue"])
        raise self.retry(**how)

    @tasks.add(
        draws=True, autoretry_for=(ValueError,), retry_kwargs={"countdown": 0}, max_retries=2
    )
    def autoretried(self: Any, value: Any, tenant: str) -> Any:
        """Fail twice."""
        tasks.note(self, value)
        if self.request.retries < 2:
            raise ValueError(value)
        return value

    @tasks.add(draws=True)
    def replaced(self: Any, by: str, tenant: str) -> None:
        tasks.note(self, by)
        step = tasks.work
        raise self.replace(
            {
                "budgeted": lambda: step.s(1, tenant),
                "unbudgeted": lambda: tasks.plain.s(1),
                "group": lambda: group(step.s(1, tenant), tasks.plain.s(2)),
                "chain": lambda: chain(step.s(1, tenant), tasks.plain.s(), step.s(tenant)),
                "chord": lambda: chord(
                    [step.s(1, tenant), step.s(2, tenant)], tasks.total.s(tenant)
                ),
            }[by]()
        )


def conf(prefix: str) -> dict[str, Any]:
    """The settings of an application whose queues, exchanges and routing keys begin so."""
    direct, topic = Exchange(prefix), Exchange(f"{prefix}-topic", type="topic")
    ranked = {"x-max-priority": 9}
    return {
        "task_queues": [
            Queue(prefix, direct, routing_key=prefix),
            Queue(f"{prefix}-other", direct, routing_key=f"{prefix}-other"),
            Queue(f"{prefix}-topic", topic, routing_key=f"{prefix}.#"),
            Queue(f"{prefix}-ranked", direct, routing_key="ranked", queue_arguments=ranked),
        ],
        "task_default_queue": prefix,
        "task_default_exchange": prefix,
        "task_default_routing_key": prefix,
        "accept_content": ["json", "pickle", "yaml", "msgpack"],
        "result_chord_retry_interval": 0.05,
    }
