"""The work that an order causes."""

from __future__ import annotations

from django.db import connection, transaction

from celery_budget import budgeted, effect, usage
from examples.django.orders.models import Letter, Order
from examples.django.worker import app

ESTIMATE = 300


@budgeted(budget="customer:{customer}", estimate=ESTIMATE, stage="letter")
@app.task(acks_late=True)
def write_letter(order_id: int, customer: str) -> str:
    """Have a model write the letter to an order, and keep it."""
    order = Order.objects.get(pk=order_id)
    text = f"Dear {customer}, your {order.item} is on its way."  # Your model writes here.
    usage.record(200, key=usage.idempotency_key("letter"))
    with transaction.atomic(), effect(connection, "letter") as first:
        # False in an attempt that follows one whose worker was killed after this was committed.
        if first:
            Letter.objects.create(order=order, text=text)
            first.store(text)
    return str(first.value)
