"""The Celery application of the Django project: ``celery -A examples.django.worker worker``.

In a project of yours this is ``celery.py``.
"""

from __future__ import annotations

import os

from celery import Celery

from celery_budget import CeleryBudget
from examples import local

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "examples.django.settings")

app = Celery("orders")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["examples.django.orders"])
budget = CeleryBudget(app)
local.keep_in(app)  # In a project of yours: CELERY_BROKER_URL and CELERY_RESULT_BACKEND.
