"""The business rows."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """What a customer has ordered."""

    customer = models.CharField(max_length=50)
    item = models.CharField(max_length=200)
    task_id = models.CharField(max_length=50, blank=True)


class Letter(models.Model):
    """The letter to an order; one, however often its task runs."""

    order = models.ForeignKey(Order, models.CASCADE, related_name="letters")
    text = models.TextField()
