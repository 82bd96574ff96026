"""Place orders as a browser would; see README.md."""

from __future__ import annotations

from typing import Any

import django
from django.apps import apps
from django.core.management import call_command
from django.db import connections
from django.test import Client

from examples import local
from examples.django import worker

CUSTOMER = "acme"
ORDERS = [
    ("chair", "good"),
    ("table", "expired"),
    ("lamp", "good"),
    ("shelf", "good"),
    ("bed", "good"),
]


def place(client: Client, orders: Any, item: str, card: str) -> None:
    """Place an order and say what there is of it."""
    answer = client.post("/orders", {"customer": CUSTOMER, "item": item, "card": card})
    balance = worker.budget.balance(f"customer:{CUSTOMER}")
    outcome = answer.json().get("error", "placed")
    print(
        f"{item}: {answer.status_code} {outcome}; "
        f"{orders.objects.count()} orders, {balance.reserved} tokens held"
    )


def main() -> int:
    """Run the example; return the exit status."""
    with local.folder() as folder:
        django.setup()
        local.keep_in(worker.app, folder)
        call_command("migrate", verbosity=0)
        worker.budget.init()
        worker.budget.set(f"customer:{CUSTOMER}", limit=1_000, unit="tokens")
        orders, letters = apps.get_model("orders", "Order"), apps.get_model("orders", "Letter")
        try:
            client = Client(raise_request_exception=False)
            for item, card in ORDERS:
                place(client, orders, item, card)
            with local.worker("examples.django.worker") as running:
                running.wait(lambda: local.closed(worker.budget))
            for letter in letters.objects.order_by("order_id"):
                print(f"order {letter.order_id}: {letter.text}")
            balance = worker.budget.balance(f"customer:{CUSTOMER}")
            print(f"spent: {balance.spent} of {balance.limit} tokens")
            return local.verdict(worker.budget)
        finally:
            connections.close_all()
            worker.budget.store.dispose()


if __name__ == "__main__":
    local.run(main)
