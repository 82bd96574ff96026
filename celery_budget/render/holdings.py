"""One budget for people: how it stands, what holds it, what will free it, what waits for it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from celery_budget.core.budgets import Balance
from celery_budget.reconcile import Asking, BudgetStory
from celery_budget.render.stories import next_table
from celery_budget.render.text import instant, literal, number, table_of

__all__ = ["budget_view"]

_NUMBERS = ("limit", "reserved", "spent", "room")


def budget_view(told: BudgetStory) -> RenderableType:
    """How a budget stands, then what holds it, frees it, waits for it, and was refused."""
    parts: list[RenderableType] = [_levels(told)]
    for part in _parts(told):
        parts += [Text(), part]
    return Group(*parts)


def _levels(told: BudgetStory) -> RenderableType:
    """The budget and all above it, with what each leaves to new work."""
    balances = (told.standing.balance, *told.standing.above)
    rows = [_level(told, balance) for balance in balances]
    columns = ["budget", "unit", "limit", "reserved", "spent", "room", ""]
    return table_of(columns, rows, numbers=_NUMBERS)


def _level(told: BudgetStory, balance: Balance) -> list[Text | str]:
    room = told.rooms[balance.budget]
    marks = [balance.state] if balance.state != "open" else []
    if room == 0 and balance.state == "open":
        marks.append("short")
    return [
        literal(balance.budget),
        literal(balance.unit),
        number(balance.limit),
        number(balance.reserved),
        number(balance.spent),
        number(room),
        Text(", ".join(marks), "yellow"),
    ]


def _parts(told: BudgetStory) -> Iterator[RenderableType]:
    if told.asking is not None:
        yield _asking(told.asking)
    yield _summary(told)
    if told.holds:
        yield _holds(told)
    past = [window for window in told.windows if not window.is_open]
    if past:
        rows = [(instant(one.start_us), number(one.reserved), number(one.spent)) for one in past]
        columns = ["held from a window that has ended, begun (UTC)", "reserved", "spent"]
        yield table_of(columns, rows, numbers=columns)
    if told.frees:
        yield next_table([(one.at_us, one.what) for one in told.frees])
    if told.parked:
        yield _waiting(told)
    if told.refusals:
        yield _refusals(told)


def _asking(asking: Asking) -> RenderableType:
    error = asking.outlook.error
    if error is None:
        return Text(f"A new request of {number(asking.amount)} would be admitted now.", "green")
    after = error.retry_after
    again = "" if after is None else f"; it could fit in {after:,.0f} s at the earliest"
    return literal(f"A new request of {number(asking.amount)} would be refused: {error}{again}")


def _summary(told: BudgetStory) -> RenderableType:
    requests, held = sum(told.holding.values()), sum(told.held.values())
    if not requests:
        return Text("No request holds any of it.")
    states = ", ".join(
        f"{number(count)} {state} ({number(told.held[state])})"
        for state, count in told.holding.items()
    )
    holds = "request holds" if requests == 1 else "requests hold"
    return literal(f"{number(requests)} {holds} {number(held)}: {states}")


def _holds(told: BudgetStory) -> RenderableType:
    rows: list[list[Text | str]] = []
    for hold in told.holds:
        step = hold.next[0] if hold.next else None
        by = "" if step is None or step.at_us is None else f", by {instant(step.at_us)} (UTC)"
        where = hold.state if hold.worker is None else f"{hold.state} on {hold.worker}"
        rows.append(
            [
                number(hold.held),
                literal(f"{hold.task_name}[{hold.task_id}]"),
                literal(hold.owner),
                literal(where),
                instant(hold.since_us),
                literal("" if step is None else f"{step.what}{by}"),
            ]
        )
    rest = sum(told.holding.values()) - len(told.holds)
    if rest > 0:
        shown = sum(hold.held for hold in told.holds)
        left = number(sum(told.held.values()) - shown)
        rows.append([left, f"{number(rest)} more, each of them less", "", "", "", ""])
    columns = ["held", "by", "owner", "state", "since (UTC)", "next"]
    return table_of(columns, rows, numbers=["held", "since (UTC)"])


def _waiting(told: BudgetStory) -> RenderableType:
    rows: list[list[Text | str]] = []
    for one in told.waiting:
        marks = [
            *(["goes ahead of all"] if one.ahead else []),
            *(["has run before"] if one.runs_on else []),
        ]
        rows.append(
            [
                number(one.amount),
                literal(f"{one.task_name}[{one.task_id}]"),
                literal(one.owner),
                instant(one.since_us),
                instant(one.deadline_us),
                Text(", ".join(marks)),
            ]
        )
    if told.parked > len(told.waiting):
        more = f"{number(told.parked - len(told.waiting))} more after these"
        rows.append(["", more, "", "", "", ""])
    times = ["since (UTC)", "given up (UTC)"]
    columns = ["needs", "waits", "owner", *times, ""]
    many = "request waits" if told.parked == 1 else "requests wait"
    return Group(
        Text(f"{number(told.parked)} {many} for it, in the order of their turns"),
        table_of(columns, rows, numbers=["needs", *times]),
    )


def _refusals(told: BudgetStory) -> RenderableType:
    rows: list[list[Text | str]] = [
        [
            literal(one.reason),
            number(one.count),
            instant(one.last_us),
            number(one.requested),
            literal(one.task_name),
        ]
        for one in told.refusals
    ]
    columns = ["refused", "times", "last (UTC)", "of", "task"]
    return table_of(columns, rows, numbers=["times", "last (UTC)", "of"])
