"""The life of one request for people: facts, amounts, what happened when, and what comes next."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from celery_budget.reconcile import Story
from celery_budget.render.grids import MEANING
from celery_budget.render.text import facts, literal, moment, number, table_of
from celery_budget.render.timeline import events_of, shortened

__all__ = ["facts_of", "next_table", "stories_view"]

Row = dict[str, Any]

_FLAGS = ("over", "unmetered", "unreserved")
_AMOUNTS = ("estimate", "reserved", "used", "settled")


def stories_view(stories: Sequence[Story]) -> RenderableType:
    """The life of each request, an empty line between two."""
    parts: list[RenderableType] = []
    for story in stories:
        parts += [*([Text()] if parts else []), _view(story)]
    return Group(*parts)


def _view(story: Story) -> RenderableType:
    parts: list[RenderableType] = [facts(facts_of(story))]
    if story.lines:
        parts += [Text(), _amounts(story.lines)]
    if story.changes:
        parts += [Text(), _changes(story.changes)]
    if story.folded:
        parts += [literal(f"older changes of {', '.join(story.folded)} are folded and gone", "dim")]
    if story.left_out:
        told = ", ".join(f"{number(count)} of {name}" for name, count in story.left_out.items())
        parts += [literal(f"earlier ones are left out: {told}", "dim")]
    events = events_of(story)
    if events:
        rows = [(moment(event.at_us), literal(event.what)) for event in events]
        parts += [Text(), table_of(["when", "what"], rows, numbers=["when"])]
    if story.next:
        parts += [Text(), next_table([(one.at_us, one.what) for one in story.next])]
    if story.children or story.followers or story.steps:
        parts += [Text(), _followed(story)]
    if story.refusals:
        parts += [Text(), _refusals(story.refusals)]
    return Group(*parts)


def next_table(steps: Iterable[tuple[int | None, str]]) -> RenderableType:
    """What comes next, and when: without a time what is no matter of time."""
    rows = [("" if at_us is None else moment(at_us), literal(what)) for at_us, what in steps]
    return table_of(["by", "next"], rows, numbers=["by"])


def facts_of(story: Story) -> dict[str, str | None]:
    """Return what does not change, the state, and what the request waits for; none for nothing."""
    return dict(_facts(story))


def _facts(story: Story) -> Iterator[tuple[str, str | None]]:
    told = story.reservation
    task, task_id, reason = told["task_name"], told.get("task_id"), told.get("reason")
    yield "task", f"{task}[{task_id}]" if task_id else task
    yield "state", f"{told['state']}: {reason}" if reason else told["state"]
    for name, key in (
        ("owner", "owner"),
        ("request", "request_id"),
        ("reservation", "reservation_id"),
    ):
        yield name, told.get(key)
    yield "parent", _kin(story.parent) if story.parent else told.get("parent_id")
    yield "stage", told.get("stage")
    yield "lane", told.get("lane")
    if told.get("step") is not None:
        yield "plan", f"step {told['step'] + 1} of plan {told['plan_id']}"
    for message in story.messages:
        if message.get("tenant") is not None:
            yield "share", f"{number(message['weight'])} units, of tenant {message['tenant']}"
    if "estimator" in told:
        yield "estimator", f"{told['estimator']} version {told['estimator_version']}"
    if told.get("shadows"):
        answers = json.loads(told["shadows"])
        yield "shadows", ", ".join(f"{name}: {number(answers[name])}" for name in sorted(answers))
    yield "prices", told.get("prices")
    # Of what is parked the one is when it is given up.
    deadline = told.get("request_deadline_us" if told["state"] == "parked" else "deadline_us")
    yield "deadline", None if deadline is None else moment(deadline)
    yield "flags", "; ".join(f"{flag}: {MEANING[flag]}" for flag in _FLAGS if told.get(flag))
    if told.get("waived"):
        yield "waived", _waived(json.loads(told["waived"]))
    elif told.get("enforced") is False:
        yield "waived", "nothing yet; it would not be refused"
    yield from _waits(story)
    for one in story.reused:
        yield "reused", f"by calls of {one['owner']}, until {moment(one['until_us'])} at the least"


def _waits(story: Story) -> Iterator[tuple[str, str | None]]:
    told = story.reservation
    if told.get("parked_us") is not None:
        seconds = (told["unparked_us"] - told["parked_us"]) / 1_000_000
        yield "waited", f"{seconds:,.3f} s for budget {told['parked_budget']}"
    if told["state"] == "refused":
        yield "refused", _refused(told)
    for parked in told.get("parked") or ([told] if told["state"] == "parked" else []):
        since = (
            f"for {number(parked['amount'])} of budget {parked['budget']} since "
            f"{moment(parked['created_us'])}, given up at {moment(parked['deadline_us'])}"
        )
        yield "waits", since
    for isolated in told.get("quarantine") or []:
        why = (
            f"{isolated['reason']} since {moment(isolated['quarantined_us'])} "
            f"({isolated['quarantine_id']}): {isolated['error']}"
        )
        yield "quarantine", why


def _amounts(lines: Sequence[Row]) -> RenderableType:
    units = any(line.get("unit") for line in lines)
    windows = any(line.get("window_us") for line in lines)
    extended = any(line.get("extended") for line in lines)
    amounts = [*_AMOUNTS[:1], *(["extended"] if extended else []), *_AMOUNTS[1:]]
    rows: list[list[Text | str]] = [
        [
            literal(line["budget"]),
            *([literal(line.get("unit") or "")] if units else []),
            *([_window(line)] if windows else []),
            *(number(line[column]) for column in amounts),
        ]
        for line in lines
    ]
    columns = [
        "budget",
        *(["unit"] if units else []),
        *(["window"] if windows else []),
        *amounts,
    ]
    return table_of(columns, rows, numbers=amounts)


def _window(row: Row) -> str:
    return moment(row["window_us"]) if row.get("window_us") else "-"


def _changes(changes: Sequence[Row]) -> RenderableType:
    """What a request did to balances: each before and after."""
    windows = len({(one["budget"], one["window_us"]) for one in changes}) > len(
        {one["budget"] for one in changes}
    )
    rows: list[list[Text | str]] = [
        [
            literal(one["what"]),
            literal(one["budget"]),
            *([_window(one)] if windows else []),
            _before_after(one, "reserved"),
            _before_after(one, "spent"),
            moment(one["at_us"]),
        ]
        for one in changes
    ]
    columns = ["change", "budget", *(["window"] if windows else []), "reserved", "spent", "at"]

    def more(left_out: Sequence[Any]) -> list[Text | str]:
        return [f"and {number(len(left_out))} more", *[""] * (len(columns) - 1)]

    rows = shortened(rows, more)
    return table_of(columns, rows, numbers=["at", "reserved", "spent"])


def _before_after(change: Row, name: str) -> str:
    after = change[f"{name}_after"]
    before = after - change[name]
    return number(after) if before == after else f"{number(before)} -> {number(after)}"


def _kin(one: Row) -> str:
    return f"{one['task_name']}[{one['task_id']}], {one['state']}, {one['reservation_id']}"


def _followed(story: Story) -> RenderableType:
    rows: list[list[Text | str]] = [
        [literal(f"{one['task_name']}[{one['task_id']}]"), one["state"], one["reservation_id"]]
        for one in (*story.children, *story.steps)
    ]
    rows += [
        [literal(f"{one['task_name']}[{one['task_id']}]"), f"{one['state']}, no budget", "-"]
        for one in story.followers
    ]
    more = story.followed - len(story.children)
    if more > 0:
        rows.append([f"and {number(more)} more", "", ""])
    return table_of(["followed by", "state", "reservation"], rows)


def _refusals(refusals: Sequence[Row]) -> RenderableType:
    rows = [(moment(one["refused_us"]), literal(_refused(one))) for one in refusals]
    return table_of(["when", "refused before, of this task (a sample)"], rows, numbers=["when"])


def _waived(one: Row) -> str:
    """Return what a request that is not enforced would have been refused with, the last time."""
    if one["kind"] == "full":
        short = f"lane {one['lane']} takes no more: {one['reason']}"
    elif one["kind"] == "backlogged":
        short = f"{number(one['messages'])} messages wait, of at most {number(one['bound'])}"
    else:
        short = (
            f"{one['reason']}: {number(one['requested'])} {one['unit']} of budget {one['budget']}, "
            f"{number(one['reserved'])} reserved and {number(one['spent'])} spent of "
            f"{number(one['limit'])}"
        )
    return f"not enforced; it would have been refused ({short})"


def _refused(one: Row) -> str:
    told = f"budget {one['budget']}: {one['reason']}, {number(one['requested'])} requested"
    if one["reserved"] is None:
        return told
    return (
        f"{told}, {number(one['reserved'])} reserved and {number(one['spent'])} spent of "
        f"{number(one['limit_amount'])}"
    )
