"""Signals of ours, sent as Celery sends its own: what a receiver raises is logged."""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = ["alert", "park_expired"]

#: Something has come to a threshold: the first time that it is told, before ``budget_on_alert`` is
#: called, by the relay that tells it. The sender is the application; ``alert`` a
#: :class:`~celery_budget.Alert`.
alert = Signal(name="alert", providing_args={"alert"})

#: A request waited too long for budget and is given up: it will not run. Sent by the process that
#: runs the sweep, when the ledger has said so; not again if that process dies just then. The sender
#: is the application; ``given_up`` a :class:`~celery_budget.GivenUp`.
park_expired = Signal(name="park_expired", providing_args={"given_up"})
