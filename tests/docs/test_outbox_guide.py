"""The guide from django-celery-outbox, with the package itself: none lost, none doubled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.cluster import WAIT, eventually
from tests.docs.pages import ROOT, blocks_of, write_files
from tests.services.postgres import plain_url

PAGE = ROOT / "docs" / "howto" / "migrate-from-django-celery-outbox.md"

pytest.importorskip("django_celery_outbox", reason="the extra test is not installed")

SETTINGS = """
import os
SHOP = os.environ["SHOP"]
SECRET_KEY = "tests"
ALLOWED_HOSTS = ["testserver"]
ROOT_URLCONF = "urls"
INSTALLED_APPS = ["orders", "django_celery_outbox"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
MONITORING_METRICS_ENABLED = False
from urllib.parse import urlsplit
at = urlsplit(os.environ["LEDGER"])
DATABASES = {"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": at.path[1:], "HOST": at.hostname,
    "PORT": at.port, "USER": at.username, "PASSWORD": at.password or "",
}}
CELERY_BROKER_URL = "filesystem://"
CELERY_BROKER_TRANSPORT_OPTIONS = {
    "data_folder_in": SHOP + "/messages", "data_folder_out": SHOP + "/messages",
    "processed_folder": SHOP + "/processed", "control_folder": SHOP + "/control",
    "polling_interval": 0.05,
}
CELERY_RESULT_BACKEND = "file://" + SHOP + "/results"
CELERY_WORKER_ENABLE_REMOTE_CONTROL = False
CELERY_BUDGET_DATABASE_URL = os.environ["LEDGER"]
CELERY_OUTBOX_APP = "proj.celery.app"
"""

MODELS = """
from django.db import models

class Order(models.Model):
    tenant = models.CharField(max_length=100)
    prompt = models.TextField()

    class Meta:
        app_label = "orders"

class Run(models.Model):
    order = models.ForeignKey(Order, on_delete=models.CASCADE)

    class Meta:
        app_label = "orders"
"""

#: What the project had before: the old outbox alone.
BEFORE = {
    "proj/celery.py": """
import os
from django_celery_outbox import OutboxCelery
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "proj.settings")
app = OutboxCelery("proj")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["orders"])
""",
    "orders/tasks.py": """
from celery import shared_task

@shared_task(acks_late=True)
def write(order_id, tenant):
    from orders.models import Order, Run
    Run.objects.create(order=Order.objects.get(pk=order_id))
""",
}

BEGIN = """
import proj, django
django.setup()
from django.core.management import call_command
from django.db import connection, transaction
from orders.models import Order, Run
from orders.tasks import write

call_command("migrate", verbosity=0)
with connection.schema_editor() as editor:
    editor.create_model(Order)
    editor.create_model(Run)

for number in range(4):
    try:
        with transaction.atomic():
            order = Order.objects.create(tenant="acme", prompt="Write a haiku.")
            write.delay(order.pk, order.tenant)
            if number == 3:
                raise LookupError
    except LookupError:
        pass
"""

MOVED = """
import json
import proj, django
django.setup()
from django.db import transaction
from django.test import Client
from orders.models import Order
from orders.tasks import write
from proj.celery import budget

statuses = [
    Client().post("/orders", {"prompt": "Write an ode."}, headers={"X-Tenant": "blue"}).status_code
    for _ in range(3)
]
from django.db import connection
try:
    with transaction.atomic():
        order = Order.objects.create(tenant="blue", prompt="Write an ode.")
        with budget.enlist(connection):
            write.delay(order.pk, order.tenant)
        raise LookupError
except LookupError:
    pass
print(json.dumps([statuses, budget.balance("tenant:blue").reserved]))
"""

STANDING = """
import json
import proj, django
django.setup()
from proj.celery import budget
acme, blue = budget.balance("tenant:acme"), budget.balance("tenant:blue")
told = [acme.spent, acme.reserved, blue.spent, blue.reserved, budget.reconcile().ok]
print(json.dumps(told))
"""


class Project:
    """A project before and after, over one database and one broker."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self.shop = folder / "shop"
        self.before, self.after = folder / "before", folder / "after"
        for name in ("messages", "processed", "control", "results"):
            (self.shop / name).mkdir(parents=True)
        for place in (self.before, self.after):
            files = {**BEFORE, "proj/settings.py": SETTINGS, "orders/models.py": MODELS}
            for name, text in files.items():
                path = place / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            (place / "orders" / "__init__.py").touch()
            (place / "urls.py").write_text("urlpatterns = []\n", encoding="utf-8")
            loads = "from proj.celery import app as celery_app\n"
            (place / "proj" / "__init__.py").write_text(loads, encoding="utf-8")
        write_files(PAGE, self.after)
        settings = self.after / "proj" / "settings.py"
        settings.write_text(f"{SETTINGS}\nfrom proj.moved import *\n", encoding="utf-8")
        urls = "from django.urls import path\nfrom orders import views\n"
        urls += 'urlpatterns = [path("orders", views.create)]\n'
        (self.after / "urls.py").write_text(urls, encoding="utf-8")
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, place: Path, *words: str) -> subprocess.Popen[bytes]:
        with (self.shop / "said.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=place,
                env=self._environment(place),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.started.append(process)
        return process

    def do(self, place: Path, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=place,
            env=self._environment(place),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def told(self, place: Path, program: str) -> Any:
        return json.loads(self.do(place, "-c", program).splitlines()[-1])

    def rows(self, sql: str) -> list[Any]:
        with psycopg.connect(plain_url(self.url), autocommit=True) as connection:
            found = connection.execute(sql.encode())
            return found.fetchall() if found.description else []

    def _environment(self, place: Path) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if "CELERY" not in name}
        return {
            **inherited,
            "SHOP": str(self.shop),
            "LEDGER": self.url,
            "DJANGO_SETTINGS_MODULE": "proj.settings",
            "PYTHONPATH": str(place),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def stop(self) -> None:
        for process in self.started:
            process.send_signal(signal.SIGTERM)
        for process in self.started:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def project(tmp_path: Path, postgres_url: str) -> Iterator[Project]:
    made = Project(tmp_path, postgres_url)
    yield made
    made.stop()


@pytest.mark.timeout(300)
def test_rows_of_the_old_outbox_and_new_calls_all_run_once(project: Project) -> None:
    [empty] = [block.text for block in blocks_of(PAGE) if block.language == "sql"]
    project.do(project.before, "-c", BEGIN)
    assert project.rows(empty) == [(3, 0)]

    project.do(project.after, "-m", "celery", "-A", "proj", "budget", "init")
    terms = ["tenant:*", "--limit", "none", "--unit", "tokens", "--period", "month"]
    project.do(project.after, "-m", "celery", "-A", "proj", "budget", "set", *terms)
    assert project.told(project.after, MOVED) == [[202] * 3, 2400]
    # New calls are in the ledger alone, and what was rolled back is nowhere.
    assert project.rows(empty) == [(3, 0)]
    assert project.rows("SELECT count(*) FROM orders_order") == [(6,)]

    worker = ["celery", "-A", "proj", "worker", "--pool", "solo", "--budget-relay"]
    project.start(project.after, *worker, "--without-mingle", "--without-gossip")
    # A relay that died between sending a row and deleting it: its row is sent twice.
    names = "SELECT string_agg(column_name, ', ') FROM information_schema.columns WHERE table_name = 'celery_outbox' AND column_name <> 'id'"  # fmt: skip # noqa: E501 - one statement
    [[columns]] = project.rows(names)
    project.rows(
        f"INSERT INTO celery_outbox ({columns}) "  # noqa: S608 - its own columns
        f"SELECT {columns} FROM celery_outbox LIMIT 1"
    )
    assert project.rows(empty) == [(4, 0)]
    old = ["django", "celery_outbox_relay", "--idle-time", "0.05"]
    project.start(project.before, *old)
    eventually(
        lambda: project.rows("SELECT count(DISTINCT order_id) FROM orders_run"),
        until=lambda found: found == [(6,)],
        seconds=60,
        what="a run of each order",
    )
    eventually(lambda: project.rows(empty), until=lambda found: found == [(0, 0)], what="no rows")
    eventually(
        lambda: project.told(project.after, STANDING),
        # Those of the old outbox are admitted by the worker, and charged all the same.
        until=lambda found: found == [18, 0, 18, 0, True],
        what="all settled at what it used",
    )
    assert project.rows("SELECT order_id, count(*) FROM orders_run GROUP BY 1 HAVING count(*) > 1") == []  # fmt: skip # noqa: E501 - one statement
    assert project.rows("SELECT count(*) FROM orders_run") == [(6,)]
