"""Rules of tasks and their results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from celery_budget.core.checkup import Facts
from celery_budget.core.rules.rule import Seen, Skipped, named, rule

__all__: list[str] = []

#: Brokers that no other host reaches: an application with these is being tried.
LOCAL = ("filesystem", "memory")


@rule(
    "gate",
    "error",
    "publications pass the gate",
    "what passes by the gate is published without a budget",
    "set amqp_cls before 'CeleryBudget(app)'",
)
def _gate(facts: Facts) -> list[Seen]:
    return [facts.gate_error] if facts.gate_error else []


@rule(
    "other-base",
    "error",
    "tasks that name a budget have one",
    "Celery keeps budget= and estimate= as plain attributes of a task with another base class: its "
    "calls are published without a budget",
    "use @budgeted(...), or base=BudgetedTask on the task",
)
def _other_base(facts: Facts) -> list[Seen]:
    wrong = [task.name for task in facts.tasks if task.says_budget and not task.budgeted]
    return [f"{named(wrong)}: budget= with a base class that does not know it"] if wrong else []


@rule(
    "not-enforced",
    "warning",
    "budgets are enforced",
    "what does not fit is admitted over the limit, and only counted: in production nothing but "
    "'budget report' stands between a task and its provider",
    "once the report says what you want, set budget_enforce to True, or give the task enforce=True",
)
def _not_enforced(facts: Facts) -> Iterable[Seen] | Skipped:
    shared = [one for one in facts.brokers if one.transport not in LOCAL]
    if facts.store.dialect == "sqlite" and not shared:
        return Skipped("does not apply: ledger and broker are of one host", applies=False)
    wrong = [task.name for task in facts.budgeted if not task.enforced]
    return [f"{named(wrong)}: nothing is refused"] if wrong else []


@rule(
    "early-rerun",
    "error",
    "tasks that are to run again on a lost worker are acknowledged late",
    "the message of a task that is acknowledged early is gone with its worker: it is charged as "
    "lost, and does not run again",
    "set acks_late=True (task_acks_late) on the task, or take reject_on_worker_lost out",
)
def _early_rerun(facts: Facts) -> list[Seen]:
    wrong = [
        task.name for task in facts.budgeted if task.reject_on_worker_lost and not task.acks_late
    ]
    return [f"{named(wrong)}: reject_on_worker_lost without acks_late"] if wrong else []


@rule(
    "acks-on-failure",
    "warning",
    "failed tasks are acknowledged",
    "the broker is given back the message of a task that has failed, of which the ledger says that "
    "it has ended: it comes again and again, and is dropped each time",
    "set task_acks_on_failure_or_timeout to True; for other attempts use retries",
)
def _acks_on_failure(facts: Facts) -> list[Seen]:
    wrong = [task.name for task in facts.budgeted if task.acks_late and not task.acks_on_failure]
    return [f"{named(wrong)}: acks_on_failure_or_timeout is off"] if wrong else []


@rule(
    "prefetch",
    "warning",
    "workers take few messages ahead",
    "what a worker has taken waits in its memory: limits of lanes, fair shares and priorities do "
    "not reach it, and it waits for that worker alone",
    "set worker_prefetch_multiplier to 1",
)
def _prefetch(facts: Facts) -> Iterator[Seen]:
    if facts.prefetch == 0 or facts.prefetch > 16:
        most = facts.prefetch or "without a bound"
        yield f"worker_prefetch_multiplier is {facts.prefetch}: taken ahead by a process: {most}"
    for worker in facts.workers or ():
        if worker.prefetch > 1000:
            yield f"{worker.name} takes {worker.prefetch:,} messages at a time"


@rule(
    "result-backend",
    "warning",
    "results are stored",
    "budget.result() and chords need a result backend; what a request came to is not told without",
    "set result_backend",
)
def _backend(facts: Facts) -> list[Seen]:
    return [] if facts.backend not in ("", "disabled") else ["there is no result_backend"]


def _expires(facts: Facts) -> float | None:
    """Return when results expire; none where they never do, or there are none."""
    return facts.result_expires if facts.backend not in ("", "disabled") else None


@rule(
    "result-expires",
    "error",
    "results are kept as long as they are given",
    "budget.result() is to give a result for budget_result_seconds, and nobody has it any more",
    "set result_expires to budget_result_seconds at least",
)
def _result_expires(facts: Facts) -> list[Seen]:
    expires = _expires(facts)
    if expires is None or expires >= facts.result_seconds:
        return []
    return [
        f"result_expires is {expires:g} s, and budget_result_seconds is {facts.result_seconds:g}"
    ]


@rule(
    "reuse-expires",
    "error",
    "results are kept as long as runs are joined",
    "a call that joins a run which has ended gets its task id, and nobody has a result for it any "
    "more",
    "set result_expires to the longest reuse= at least",
)
def _reuse_expires(facts: Facts) -> list[Seen]:
    expires = _expires(facts)
    longer = [
        task.name
        for task in facts.budgeted
        if expires is not None and task.reuse_seconds is not None and task.reuse_seconds > expires
    ]
    return [f"result_expires is {expires:g} s; {named(longer)}: reuse= is longer"] if longer else []


@rule(
    "ignore-result",
    "warning",
    "tasks with a budget store their results",
    "budget.job() and budget.result() have nothing to tell of what such a task returned",
    "set ignore_result=False (task_ignore_result) where results are asked for",
)
def _ignore_result(facts: Facts) -> list[Seen]:
    wrong = [task.name for task in facts.budgeted if task.ignore_result]
    if not wrong or facts.backend in ("", "disabled"):
        return []
    return [f"{named(wrong)}: ignore_result"]
