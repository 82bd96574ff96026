"""Lanes as code: the tables ``[lane.NAME]`` of ``budgets.toml``, beside the budgets."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from celery_budget.core.budgets import check_text
from celery_budget.core.lanes import LIMITS, Lane
from celery_budget.errors import BudgetError, InvalidBudget

__all__ = ["LaneChange", "compare_lanes", "parse_lanes", "terms_of", "written_lanes"]

_NONE = "none"
_SECOND_US = 1_000_000

#: The keys of a table: the types of their values, and what to give.
_KEYS: dict[str, tuple[tuple[type, ...], str]] = {
    "queues": ((list,), 'a list of names in quotes, such as ["llm"]'),
    "budgets": ((list,), 'a list of names in quotes, such as ["free-tokens"]'),
    **dict.fromkeys(LIMITS, ((int, str), 'an integer, or "none"')),
    "max_wait_seconds": ((int, float, str), 'a number of seconds, or "none"'),
    "preflight": ((bool,), "true or false"),
    "ageing": ((int,), "an integer"),
    "root": ((str,), "text in quotes"),
}


@dataclass(frozen=True)
class LaneChange:
    """What is to be done with one lane; ``before`` and ``after`` are its declarations.

    :ivar kind: ``add``, ``change`` or ``close``, where it is deleted.
    """

    root: str
    name: str
    kind: Literal["add", "change", "close"]
    before: Lane | None
    after: Lane | None

    @property
    def fields(self) -> tuple[tuple[str, str, str], ...]:
        """The terms that become others: key, text before and text after, in the file's words."""
        if self.after is None:
            return ()
        before = {} if self.before is None else terms_of(self.before)
        base = before or terms_of(Lane(self.name, ("-",)))
        return tuple(
            (key, _plain(before[key]) if before else "", _plain(value))
            for key, value in terms_of(self.after).items()
            if value != base[key]
        )


def terms_of(lane: Lane) -> dict[str, Any]:
    """Return a lane's terms in the words of the file, with none for no limit."""
    wait = lane.max_wait_us
    return {
        "queues": list(lane.queues),
        "budgets": [str(one) for one in lane.budgets],
        **{key: getattr(lane, key) for key in LIMITS},
        "max_wait_seconds": None if wait is None else _seconds(wait),
        "preflight": lane.preflight,
        "ageing": lane.ageing,
    }


def parse_lanes(
    tables: object, root: str, source: str = "budgets.toml"
) -> dict[str, tuple[Lane, ...]]:
    """Return the lanes that the table ``lane`` of a file declares, by root.

    :param root: whose the lanes are that name none.
    :raises InvalidBudget: for a table that declares no lane, and where two of them feed one queue.
    """
    if not isinstance(tables, dict) or not all(isinstance(one, dict) for one in tables.values()):
        raise InvalidBudget(f"{source}: begin each lane with a table, such as [lane.llm]")
    by_root: dict[str, list[Lane]] = {}
    for name, terms in tables.items():
        where = f"{source}, [lane.{name}]"
        try:
            of_root = check_text(_typed(where, "root", terms.get("root", root)), "a root")
            by_root.setdefault(of_root, []).append(_lane(where, name, terms))
        except InvalidBudget:
            raise
        except BudgetError as error:
            raise InvalidBudget(f"{where}: {error}") from error
    for lanes in by_root.values():
        fed: dict[str, str] = {}
        for lane in lanes:
            for queue in lane.queues:
                other = fed.setdefault(queue, lane.name)
                if other != lane.name:
                    raise InvalidBudget(
                        f"{source}: queue {queue!r} is fed by lanes {other!r} and {lane.name!r}; a "
                        "queue has one lane"
                        "; take it out of the other"
                    )
    return {of_root: tuple(lanes) for of_root, lanes in by_root.items()}


def _lane(where: str, name: str, terms: Mapping[str, Any]) -> Lane:
    for key, value in terms.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_KEYS)}"
            raise InvalidBudget(f"{where}: there is no key {key!r}; {hint}; correct it")
        _typed(where, key, value)
    given: dict[str, Any] = {
        key: None if value == _NONE else value for key, value in terms.items() if key != "root"
    }
    if "max_wait_seconds" in given:
        seconds = given.pop("max_wait_seconds")
        given["max_wait_us"] = None if seconds is None else round(seconds * _SECOND_US)
    queues = tuple(given.pop("queues", ()))
    return Lane(name, queues, **given)


def _typed(where: str, key: str, value: Any) -> Any:
    types, advice = _KEYS[key]
    text = isinstance(value, str) and key != "root" and value != _NONE
    if type(value) not in types or text:
        kind = type(value).__name__
        raise InvalidBudget(f"{where}: {key} is {value!r} ({kind}); give {advice}")
    return value


def written_lanes(lanes: Mapping[str, Sequence[Lane]], root: str) -> str:
    """Return the tables that :func:`parse_lanes` turns into these lanes; roots, then lanes by name.

    :param lanes: by root.
    :param root: the one that needs no naming.
    """
    tables = []
    for of_root, declared in sorted(lanes.items()):
        other = {} if of_root == root else {"root": of_root}
        for lane in sorted(declared, key=lambda one: one.name):
            plain = terms_of(Lane(lane.name, lane.queues))
            stated = {
                key: _NONE if value is None else value
                for key, value in terms_of(lane).items()
                if key == "queues" or value != plain[key]
            }
            pairs = "".join(f"{key} = {_toml(value)}\n" for key, value in (stated | other).items())
            tables.append(f"[lane.{_toml(lane.name)}]\n{pairs}")
    return "\n".join(tables)


def compare_lanes(
    root: str, existing: Mapping[str, Lane], wanted: Sequence[Lane], prune: bool = False
) -> tuple[LaneChange, ...]:
    """Return what makes the ``existing`` lanes of a root the ``wanted`` ones; nothing twice.

    What is deleted comes first, so that its queues are free.

    :param prune: whether what is not wanted is deleted.
    """
    target = {lane.name: lane for lane in wanted}
    gone = sorted(existing.keys() - target.keys()) if prune else []
    changes = [LaneChange(root, name, "close", existing[name], None) for name in gone]
    for name, after in sorted(target.items()):
        before = existing.get(name)
        if before is None:
            changes.append(LaneChange(root, name, "add", None, after))
        elif before.terms != after.terms:
            changes.append(LaneChange(root, name, "change", before, after))
    return tuple(changes)


def _seconds(us: int) -> int | float:
    whole, rest = divmod(us, _SECOND_US)
    return us / _SECOND_US if rest else whole


def _plain(value: Any) -> str:
    if value is None:
        return _NONE
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:_}"
    if isinstance(value, list):
        return ", ".join(value) or _NONE
    return str(value)


def _toml(value: Any) -> str:
    # A JSON string is a TOML string but for U+007F, and names have no control characters.
    if isinstance(value, (str, list)):
        return json.dumps(value, ensure_ascii=False)
    return _plain(value)
