"""Budgets for people: balances as a tree, one budget in full, changes, grants, journals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from celery_budget.core.budgets import MILLION, Balance, Budget, Share, most, thresholds_text
from celery_budget.core.declarations import Change
from celery_budget.core.lane_files import LaneChange
from celery_budget.reconcile import Entry, Grant, Standing, Template
from celery_budget.render.text import UNLIMITED, facts, literal, moment, number, table_of

__all__ = [
    "balances_table",
    "budgets_view",
    "changes_table",
    "journal_table",
    "ratio",
    "standing_facts",
    "standing_view",
    "tree",
]

_AMOUNTS = ("limit", "reserved", "spent", "available")
_CHANGED = ("reserved", "spent", "reserved then", "spent then")

_BAD = "bold red"
_ODD = "yellow"

#: How far a budget is indented beneath its parent.
_INDENT = 2


def ratio(parts: int) -> str:
    """Return parts per million as a percentage."""
    return str(Share(parts))


def budgets_view(balances: Sequence[Balance], templates: Sequence[Template]) -> RenderableType:
    """All budgets with their balances, then the templates, if there are any."""
    if not templates:
        return balances_table(balances)
    return Group(
        *([balances_table(balances), Text()] if balances else []),
        Text("Templates, for budgets yet unseen", "bold"),
        _templates_table(templates),
    )


def balances_table(balances: Sequence[Balance]) -> RenderableType:
    """One row for each budget, beneath its parent; marked where there is something to say.

    Over-committed is a budget of which more was used than its limit allows.
    """
    if not balances:
        return Text(
            "There are no budgets yet; create one with "
            "'celery -A PROJ budget set NAME --limit N --unit UNIT'."
        )
    periodic = any(balance.period != "total" for balance in balances)
    rows = (_balance_row(balance, depth, periodic) for balance, depth in tree(balances))
    columns = ["budget", "unit", *(["period"] if periodic else []), *_AMOUNTS, ""]
    return table_of(columns, rows, numbers=_AMOUNTS)


def tree(balances: Sequence[Balance]) -> Iterator[tuple[Balance, int]]:
    """Yield balances with their depth, children by name beneath their parents."""
    names = {balance.budget for balance in balances}
    below: dict[str | None, list[Balance]] = {}
    for balance in sorted(balances, key=lambda one: one.budget, reverse=True):
        below.setdefault(balance.parent if balance.parent in names else None, []).append(balance)
    waiting = [(balance, 0) for balance in below.get(None, ())]
    while waiting:
        balance, depth = waiting.pop()
        yield balance, depth
        waiting += [(child, depth + 1) for child in below.get(balance.budget, ())]


def _balance_row(balance: Balance, depth: int, periodic: bool) -> list[Text | str]:
    over = balance.available is not None and balance.available < 0
    marks = [balance.state] if balance.state != "open" else []
    return [
        Text(" " * _INDENT * depth, overflow="fold").append_text(literal(balance.budget)),
        literal(balance.unit),
        *([balance.period if balance.period != "total" else ""] if periodic else []),
        number(balance.limit),
        number(balance.reserved),
        number(balance.spent),
        Text(number(balance.available), _BAD if over else ""),
        Text(", ".join([*marks, *(["overcommitted"] if over else [])]), _BAD if over else _ODD),
    ]


def _templates_table(templates: Sequence[Template]) -> RenderableType:
    rows: list[list[Text | str]] = []
    for template in templates:
        budget = template.budget
        rows.append(
            [
                literal(budget.name),
                literal(budget.unit),
                _limit(budget),
                literal(budget.parent or ""),
                _period(budget),
                number(template.made),
                Text("" if template.state == "open" else template.state, _ODD),
            ]
        )
    columns = [
        "template",
        "unit",
        "limit",
        "parent" if any(one.budget.parent for one in templates) else "",
        "period" if any(one.budget.period.kind != "total" for one in templates) else "",
        "made",
        "",
    ]
    return table_of(columns, rows, numbers=["limit", "made"])


def _limit(budget: Budget) -> str:
    """Return a limit as it is declared."""
    return str(budget.limit) if isinstance(budget.limit, Share) else number(budget.limit)


def _period(budget: Budget) -> str:
    """Return a period in words; empty for the total."""
    period = budget.period
    if period.kind == "total":
        return ""
    day = f", from day {period.anchor_day}" if period.kind in ("week", "month") else ""
    return f"{period.kind} in {period.timezone}{day}"


def standing_view(standing: Standing | Template) -> RenderableType:
    """One budget or template in full: its terms, all above it, its grants."""
    if isinstance(standing, Template):
        return facts(standing_facts(standing))
    parts: list[RenderableType] = [facts(standing_facts(standing)), Text()]
    # From the top, as in the list of all budgets.
    parts.append(balances_table([*reversed(standing.above), standing.balance]))
    if standing.grants:
        parts += [Text(), _grants_table(standing.grants)]
    return Group(*parts)


def standing_facts(standing: Standing | Template) -> dict[str, str | None]:
    """Return a budget's or a template's terms in words, by name; none for what it does not have."""
    return _template_facts(standing) if isinstance(standing, Template) else _facts(standing)


def _template_facts(template: Template) -> dict[str, str | None]:
    budget = template.budget
    return {
        "template": budget.name,
        "state": template.state,
        "unit": budget.unit,
        "limit": _limit(budget) + (" of the parent's" if isinstance(budget.limit, Share) else ""),
        "parent": budget.parent,
        "period": _period(budget),
        **_stops(budget, None),
        "weight": _weight(budget),
        "alerts at": None if budget.alert_at is None else thresholds_text(budget.alert_at),
        "made": f"{number(template.made)} budget{'' if template.made == 1 else 's'}",
    }


def _facts(standing: Standing) -> dict[str, str | None]:
    budget, balance = standing.budget, standing.balance
    window = None
    if balance.end_us is not None:
        window = f"{moment(balance.start_us)} to {moment(balance.end_us)}"
    room = UNLIMITED if standing.room is None else number(standing.room)
    by = "" if standing.room_of in (None, budget.name) else f", by {standing.room_of!r}"
    return {
        "budget": budget.name,
        "state": balance.state,
        "unit": budget.unit,
        "limit": _limit_in_force(standing),
        "parent": budget.parent,
        "period": _period(budget),
        "window": window,
        **_stops(budget, balance.limit),
        "weight": _weight(budget),
        "alerts at": None if budget.alert_at is None else thresholds_text(budget.alert_at),
        "new work": f"{room}{by}",
        "template": standing.template,
    }


def _limit_in_force(standing: Standing) -> str:
    """Return the limit that counts, and what it comes from where that is not itself."""
    budget, granted = standing.budget, sum(grant.amount for grant in standing.grants)
    parts = []
    if isinstance(budget.limit, Share):
        parts.append(f"{budget.limit} of {budget.parent!r}")
    elif granted and budget.limit is not None:
        parts.append(number(budget.limit))
    if granted and standing.balance.limit is not None:
        parts.append(f"{number(granted)} granted")
    come = f" ({' and '.join(parts)})" if parts else ""
    blocks = ", blocks everything" if standing.blocked else ""
    return f"{number(standing.balance.limit)}{come}{blocks}"


def _stops(budget: Budget, limit: int | None) -> dict[str, str | None]:
    """Return the stops that stop anything before the limit, with the amounts they stop at."""

    def told(stop: int) -> str | None:
        if stop == MILLION:
            return None
        return ratio(stop) + ("" if limit is None else f": {number(most(limit, stop))}")

    return {"soft stop": told(budget.soft_stop), "hard stop": told(budget.hard_stop)}


def _weight(budget: Budget) -> str | None:
    """Return its share of a lane, where that is not as everybody's."""
    return {0: "0, goes last", 1: None}.get(budget.weight, number(budget.weight))


def _grants_table(grants: Sequence[Grant]) -> RenderableType:
    rows: list[list[Text | str]] = [
        [
            literal(grant.key),
            number(grant.amount),
            "never" if grant.until_us is None else moment(grant.until_us),
            literal(grant.who),
            literal(grant.reason or ""),
        ]
        for grant in grants
    ]
    reasons = any(grant.reason for grant in grants)
    return table_of(
        ["grant", "amount", "ends", "by", "reason" if reasons else ""], rows, numbers=["amount"]
    )


def changes_table(changes: Sequence[Change | LaneChange], root: str) -> RenderableType:
    """What becomes another, one row for each term; that of a root of its own where not ``root``."""
    rows: list[list[Text | str]] = []
    for change in changes:
        of_root = "" if change.root == root else change.root
        begin: list[Text | str] = [
            Text(change.kind, _KINDS[change.kind]),
            literal(f"lane {change.name}" if isinstance(change, LaneChange) else change.name),
            literal(of_root),
        ]
        for field in change.fields or (("", "", ""),):
            rows.append([*begin, *map(literal, field)])
            begin = ["", "", ""]
    others = any(change.root != root for change in changes)
    return table_of(["", "budget", "root" if others else "", "term", "before", "after"], rows)


_KINDS: Mapping[str, str] = {"add": "green", "change": "", "reopen": "green", "close": _ODD}


def journal_table(entries: Sequence[Entry]) -> RenderableType:
    """The changes of one budget's balances, with what they were after each."""
    if not entries:
        return Text("Nothing was drawn on it yet.")
    windows = len({entry.window_us for entry in entries} - {0}) > 0
    columns = [
        *(["window"] if windows else []),
        "entry",
        "when",
        "what",
        *_CHANGED,
        "by",
        "reservation" if any(entry.reservation_id for entry in entries) else "",
        "reason" if any(entry.reason for entry in entries) else "",
    ]
    return table_of(columns, _entry_rows(entries, windows), numbers=["entry", "when", *_CHANGED])


def _entry_rows(entries: Iterable[Entry], windows: bool) -> Iterator[list[Text | str]]:
    for entry in entries:
        yield [
            *([moment(entry.window_us) if entry.window_us else ""] if windows else []),
            number(entry.entry),
            moment(entry.at_us),
            literal(entry.what),
            _signed(entry.reserved),
            _signed(entry.spent),
            number(entry.reserved_after),
            number(entry.spent_after),
            literal(entry.who),
            literal(entry.reservation_id or ""),
            literal(entry.reason or ""),
        ]


def _signed(amount: int) -> str:
    return f"{amount:+,}" if amount else "0"
