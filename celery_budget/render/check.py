"""What ``budget check`` has found, as text."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from celery_budget.core.checkup import Checkup, Finding
from celery_budget.render.text import facts, literal, table_of

__all__ = ["check_view"]


def check_view(found: Checkup, everything: bool = False) -> RenderableType:
    """Return the findings one after another, then those that could not be looked at, and a sum.

    :param everything: also what is right.
    """
    parts: list[RenderableType] = []
    for one in (*found.of("error"), *found.of("warning")):
        parts += [_finding(one), Text()]
    for level in ("skipped", "ok") if everything else ("skipped",):
        some = found.of(level)
        if some:
            rows = [[literal(one.id), literal(one.seen)] for one in some]
            parts += [table_of((level, "why" if level == "skipped" else "what"), rows), Text()]
    return Group(*parts, Text(_sum(found)))


def _finding(one: Finding) -> RenderableType:
    return facts({one.level: f"{one.id}: {one.seen}", "why": one.why, "remedy": one.remedy})


def _sum(found: Checkup) -> str:
    counts = {level: len(found.of(level)) for level in ("error", "warning", "skipped", "ok")}
    errors = "no error" if not counts["error"] else f"{counts['error']} error"
    plural = "s" if counts["error"] > 1 else ""
    warnings = f"{counts['warning']} warning{'' if counts['warning'] == 1 else 's'}"
    return f"{errors}{plural}, {warnings}, {counts['ok']} ok, {counts['skipped']} not looked at"
