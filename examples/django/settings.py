"""Django's settings: the ledger is in Django's own database."""

from __future__ import annotations

import os
from pathlib import Path

from examples import local

DATABASE = Path(os.environ.get(local.FOLDER, ".")).resolve() / "ledger.db"

SECRET_KEY = "only for this example"  # noqa: S105 - no session or form is signed with it
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "testserver"]
ROOT_URLCONF = "examples.django.urls"
INSTALLED_APPS = ["examples.django.orders"]
MIDDLEWARE = ["examples.django.orders.views.Refusals"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": DATABASE,
        # SQLite has one writer: wait for it at the beginning, not in the middle.
        "OPTIONS": {"timeout": 30, "transaction_mode": "IMMEDIATE"},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True

# The same database: only then can an order and its work be committed together.
CELERY_BUDGET_DATABASE_URL = f"sqlite:///{DATABASE}"
