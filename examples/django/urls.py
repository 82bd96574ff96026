"""The one address."""

from __future__ import annotations

from django.urls import path

from examples.django.orders import views

urlpatterns = [path("orders", views.place)]
