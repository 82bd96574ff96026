"""Balances, budgets and their changes for JSON: amounts as exact integers, ratios as they are."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from celery_budget.core.budgets import MILLION, Balance, Budget, Share
from celery_budget.core.declarations import Change
from celery_budget.core.lane_files import LaneChange, terms_of
from celery_budget.core.lanes import Lane

__all__ = ["balance_as_dict", "budget_as_dict", "change_as_dict", "lane_as_dict"]


def balance_as_dict(balance: Balance) -> dict[str, Any]:
    """Return a balance for JSON."""
    return {**asdict(balance), "available": balance.available}


def budget_as_dict(budget: Budget) -> dict[str, Any]:
    """Return a budget as it is declared, under the keys of ``budgets.toml``.

    A limit is an integer, a share such as ``"10%"``, or none for unlimited.
    """
    return {
        "name": budget.name,
        "unit": budget.unit,
        "limit": str(budget.limit) if isinstance(budget.limit, Share) else budget.limit,
        "parent": budget.parent,
        "period": budget.period.kind,
        "timezone": budget.period.timezone,
        "anchor_day": budget.period.anchor_day,
        "soft_stop": budget.soft_stop / MILLION,
        "hard_stop": budget.hard_stop / MILLION,
        "stripes": budget.stripes,
        "weight": budget.weight,
        "alert_at": None if budget.alert_at is None else [one / MILLION for one in budget.alert_at],
    }


def lane_as_dict(lane: Lane) -> dict[str, Any]:
    """Return a lane as it is declared, under the keys of ``budgets.toml``."""
    return {"name": lane.name, **terms_of(lane)}


def change_as_dict(change: Change | LaneChange) -> dict[str, Any]:
    """Return a change for JSON: what the budget is before and after, and the keys that differ."""
    return {
        "root": change.root,
        "name": change.name,
        "what": "lane" if isinstance(change, LaneChange) else "budget",
        "kind": change.kind,
        "before": None if change.before is None else _as_dict(change.before),
        "after": None if change.after is None else _as_dict(change.after),
        "changed": [key for key, _, _ in change.fields],
    }


def _as_dict(declared: Budget | Lane) -> dict[str, Any]:
    return lane_as_dict(declared) if isinstance(declared, Lane) else budget_as_dict(declared)
