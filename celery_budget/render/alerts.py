"""Alerts that stand, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from celery_budget.core.alerts import StandingAlert
from celery_budget.render.text import literal, table_of

__all__ = ["alerts_view"]


def alerts_view(found: Sequence[StandingAlert]) -> RenderableType:
    """Return the alerts as a table, or say that there is none."""
    if not found:
        return Text("no alert stands")
    return table_of(
        ("since (UTC)", "kind", "what", "told"),
        [
            [
                literal(f"{one.alert.since:%Y-%m-%d %H:%M:%S}"),
                literal(one.alert.kind),
                literal(one.alert.message),
                literal(_told(one)),
            ]
            for one in found
        ],
    )


def _told(one: StandingAlert) -> str:
    if one.told is not None:
        return f"{one.told:%Y-%m-%d %H:%M:%S}"
    if one.state == "failed":
        return f"no, after {one.tries} tries"
    return "not yet" if not one.tries else f"not yet, tried {one.tries} times"
