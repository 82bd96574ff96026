"""Whether the ledger adds up, and what of it is open, for people to read."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from celery_budget.reconcile.brokers import QueueStanding
from celery_budget.reconcile.kinds import STEPS, ago
from celery_budget.reconcile.proof import Reconciliation
from celery_budget.reconcile.steps import Pending, Step
from celery_budget.render.tables import verdict
from celery_budget.render.text import literal, number, table_of

__all__ = ["pending_table", "queues_table", "reconciliation_view"]

_BAD = "bold red"


def reconciliation_view(found: Reconciliation, repaired: Sequence[str] = ()) -> RenderableType:
    """What was repaired, the verdict, what is open by kind, and what becomes of each of it."""
    parts: list[RenderableType] = [literal(f"repaired: {one}") for one in repaired]
    parts.append(verdict(found, found.requests))
    parts += [literal(f"  {one}") for one in found.remedies]
    parts += [literal(f"note: {one}") for one in found.notes]
    if found.results is not None:
        count = len(found.unstored)
        said = f"results: {number(found.results)} looked up, {number(count)} not stored"
        parts.append(Text(said, _BAD if count else ""))
        parts += [literal(f"- {one}") for one in found.unstored]
    if found.pending:
        parts += [Text(), pending_table(found.pending)]
    if found.queues:
        parts += [Text(), queues_table(found.queues)]
    for one in found.pending:
        if one.steps:
            parts += [Text(), *_told(one)]
    return Group(*parts)


def pending_table(pending: Sequence[Pending]) -> RenderableType:
    """How much lacks each kind of step, and what becomes of it."""
    return table_of(
        ["open", "requests", "oldest", "overdue", "for", "what will happen"],
        (
            [
                literal(one.kind),
                number(one.count),
                ago(one.oldest_seconds * 1_000_000),
                Text(number(one.overdue) if one.overdue else "", _BAD),
                Text(ago(one.overdue_seconds * 1_000_000) if one.overdue else "", _BAD),
                literal(STEPS[one.kind][1]),
            ]
            for one in pending
        ),
        numbers=["requests", "oldest", "overdue", "for"],
    )


def queues_table(queues: Sequence[QueueStanding]) -> RenderableType:
    """Where published work waits that nobody has started."""
    return table_of(
        ["queue", "broker", "published", "oldest", "in the queue", "consumers"],
        (
            [
                literal(one.queue),
                literal(one.broker),
                number(one.published),
                ago(one.oldest_seconds * 1_000_000),
                "not known" if one.messages is None else number(one.messages),
                "" if one.consumers is None else Text(str(one.consumers), _quiet(one)),
            ]
            for one in queues
        ),
        numbers=["published", "oldest", "in the queue", "consumers"],
    )


def _quiet(one: QueueStanding) -> str:
    return _BAD if one.consumers == 0 else ""


def _told(one: Pending) -> list[RenderableType]:
    lines: list[RenderableType] = [line for step in one.steps for line in _step(step)]
    left = one.count - len(one.steps)
    if left > 0:
        lines.append(Text(f"- and {number(left)} more {one.kind}", "dim"))
    return [Text(one.kind, "bold"), *lines]


def _step(step: Step) -> list[RenderableType]:
    over = f" (overdue for {ago(step.overdue_seconds * 1_000_000)})" if step.overdue_seconds else ""
    named = f"{step.task_id} ({step.task_name})" if step.task_name else step.task_id
    return [
        Text.assemble(literal(f"- task {named}: {step.told}"), (over, _BAD)),
        *(literal(f"    {command}", "dim") for command in step.commands),
    ]
