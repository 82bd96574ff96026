"""An order is placed with the work that it causes, or not at all."""

from __future__ import annotations

from collections.abc import Callable

from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.http import require_POST

from celery_budget.http import refusal_of
from examples.django.orders.models import Order
from examples.django.orders.tasks import write_letter
from examples.django.worker import budget


class Declined(Exception):
    """The customer cannot pay."""


def pay(order: Order, card: str) -> None:
    """Stand for what may still go wrong after the work was published.

    :raises Declined: for the one card that is known not to work.
    """
    if card == "expired":
        raise Declined


@require_POST
def place(request: HttpRequest) -> HttpResponse:
    """Place an order: the row, the hold on the budget and the message are one transaction."""
    customer = request.POST["customer"]
    try:
        with transaction.atomic():
            order = Order.objects.create(customer=customer, item=request.POST["item"])
            with budget.enlist(connection):
                order.task_id = write_letter.delay(order.pk, customer).id
            # Here it is admitted; a refusal has raised, and takes the order's row along.
            order.save(update_fields=["task_id"])
            pay(order, request.POST["card"])
    except Declined:
        return JsonResponse({"error": "declined"}, status=402)
    return JsonResponse({"order": order.pk}, status=201)


class Refusals:
    """Django's middleware that answers refusals with 429 and 503."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Pass a request on."""
        return self.get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """Answer what is a refusal."""
        refusal = refusal_of(error)
        if refusal is None:
            return None
        return HttpResponse(refusal.body, status=refusal.status, headers=dict(refusal.headers))
