"""Django for tests of its scheduler: nothing but that, in the SQLite file ``DJANGO_DATABASE``."""

import os

SECRET_KEY = "tests"
INSTALLED_APPS = ["django_celery_beat"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["DJANGO_DATABASE"],
        # Its threads have a connection each, and the machine may be busy.
        "OPTIONS": {"timeout": 60},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
TIME_ZONE = "UTC"
USE_TZ = True
