"""What the pages have as code for a project does what they say of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import WAIT
from tests.docs.pages import ROOT, blocks_of, write_files

HOWTO = ROOT / "docs" / "howto"
TUTORIAL = ROOT / "docs" / "tutorial.md"


def run(folder: Path, program: str, **environment: str) -> Any:
    """Run a program in a folder, and return what it prints at last, as JSON."""
    inherited = {name: value for name, value in os.environ.items() if "CELERY" not in name}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**inherited, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


EXISTING = """
import json
import shop
from celery_budget import BudgetExceeded
from shop.celery import app, budget
from shop.tasks import draft

app.conf.task_always_eager = True
budget.init()
budget.set("tenant:*", limit=None, unit="tokens")
text = draft.delay("Write a haiku.", "acme").get()
spent = budget.balance("tenant:acme").spent
budget.set("tenant:acme", limit=800)
try:
    draft.delay("Write a sonnet.", "acme")
    refused = None
except BudgetExceeded as refusal:
    refused = refusal.reason
print(json.dumps([text, spent, refused, app.tasks["shop.tasks.draft"].acks_late]))
"""


def test_an_existing_project_gets_budgets_from_outside(tmp_path: Path) -> None:
    page = HOWTO / "existing-project.md"
    write_files(page, tmp_path)
    tasks = (tmp_path / "shop" / "tasks.py").read_text("utf-8")
    assert "budget" not in tasks
    # The page gives options of a task from outside as well.
    [annotations] = [one.text for one in blocks_of(page) if "task_annotations" in one.text]
    with (tmp_path / "shop" / "celery.py").open("a", encoding="utf-8") as file:
        file.write(annotations)
    found = run(tmp_path, EXISTING, SHOP_LEDGER=f"sqlite:///{tmp_path}/ledger.db")
    assert found == ["WRITE A HAIKU.", 6, "exhausted", True]


BY_NAME = """
import json
from celery import Celery
from celery_budget import BudgetExceeded, CeleryBudget

app = Celery("shop")
app.conf.budget_database_url = {url!r}
budget = CeleryBudget(app)

@app.task(name="mailer.send")
def send(to):
    return to

{block}
budget.init()
budget.set("mail:*", limit=1, unit="mails")
send.delay("somebody")
held = budget.balance("mail:somebody").reserved
try:
    send.delay("somebody")
    refused = None
except BudgetExceeded as refusal:
    refused = refusal.budget
print(json.dumps([held, refused]))
"""


def test_a_task_of_somebody_elses_gets_a_budget_by_its_name(tmp_path: Path) -> None:
    blocks = blocks_of(HOWTO / "existing-project.md")
    [block] = [one.text for one in blocks if "on_after_finalize" in one.text]
    program = BY_NAME.format(url=f"sqlite:///{tmp_path}/ledger.db", block=block)
    assert run(tmp_path, program) == [1, "mail:somebody"]


FASTAPI = """
import json
from fastapi.testclient import TestClient
from api import api
from shop import budget

budget.init()
budget.set("tenant:acme", limit=250, unit="tokens")
budget.set("tenant:blue", limit=250, unit="tokens")
client = TestClient(api)
acme, blue = {"X-API-Key": "secret-of-acme"}, {"X-API-Key": "secret-of-blue"}
found = []

def say(answer, *keys):
    told = answer.json() if answer.headers.get("content-type") == "application/json" else {}
    found.append([answer.status_code, *(told.get(key) for key in keys)])
    return told

def post(prompt, key, headers=acme):
    sent = {**headers, "Idempotency-Key": key}
    return client.post("/drafts", json={"prompt": prompt}, headers=sent)

one = say(post("Write a haiku.", "1"))["id"]
found.append(say(post("Write a haiku.", "1"))["id"] == one)
say(post("Write a sonnet.", "1"))
say(post("Write a sonnet.", "2"))
refused = post("Write an ode.", "3")
say(refused, "error", "reason")
found.append(int(refused.headers["Retry-After"]) > 0)
say(client.get(f"/drafts/{one}", headers=acme), "state", "used")
say(client.get(f"/drafts/{one}", headers=blue))
say(client.get(f"/drafts/{one}"))
say(client.get(f"/drafts/{one}/result", headers=acme), "detail")
say(client.delete(f"/drafts/{one}", headers=blue))
say(client.delete(f"/drafts/{one}", headers=acme), "cancelled")
say(client.get(f"/drafts/{one}", headers=acme), "state")
say(post("Write an ode.", "3"))
print(json.dumps(found))
"""


def test_fastapi_answers_as_its_page_says(tmp_path: Path) -> None:
    write_files(TUTORIAL, tmp_path)
    write_files(HOWTO / "fastapi.md", tmp_path)
    assert run(tmp_path, FASTAPI) == [
        [202],
        [202],
        True,
        [409],
        [202],
        [429, "over_budget", "held"],
        True,
        [200, "queued", {}],
        [404],
        [422],
        [409, "queued"],
        [404],
        [202, "ended"],
        [200, "cancelled"],
        [202],
    ]


DJANGO_SETTINGS = """
import os
SECRET_KEY = "tests"
ALLOWED_HOSTS = ["testserver"]
ROOT_URLCONF = "urls"
INSTALLED_APPS = ["orders"]
MIDDLEWARE = ["proj.middleware.Refusals"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
{databases}
DATABASES["default"]["NAME"] = os.environ["SHOP"]
CELERY_BUDGET_DATABASE_URL = "sqlite:///" + os.environ["SHOP"]
"""

DJANGO_URLS = """
from django.urls import path
from orders import views
urlpatterns = [path("orders", views.create)]
"""

DJANGO = """
import json, os
import proj
import django
os.environ["DJANGO_SETTINGS_MODULE"] = "proj.settings"
django.setup()
from django.db import connection
from django.test import Client
from orders.models import Order
from orders.tasks import write
from proj.celery import app, budget

with connection.schema_editor() as editor:
    editor.create_model(Order)
budget.init()
budget.set("tenant:*", limit=1000, unit="tokens")
client = Client()
found = []

def post(prompt):
    answer = client.post("/orders", {"prompt": prompt}, headers={"X-Tenant": "acme"})
    return [answer.status_code, answer.json().get("reason"), Order.objects.count()]

found.append(post("Write a haiku."))
found.append(budget.balance("tenant:acme").reserved)
found.append(post("Write a sonnet."))
found.append(budget.reconcile().ok)
# What the worker does with it, in place.
other = Order.objects.create(tenant="blue", prompt="Write an ode.")
write.apply((other.pk, "blue"), throw=True)
other.refresh_from_db()
found.append([other.text, budget.balance("tenant:blue").spent])
print(json.dumps(found))
"""


def test_django_has_no_order_without_its_task(tmp_path: Path) -> None:
    page = HOWTO / "django.md"
    write_files(page, tmp_path)
    (tmp_path / "orders" / "__init__.py").touch()
    [databases] = [one.text for one in blocks_of(page) if "transaction_mode" in one.text]
    settings = DJANGO_SETTINGS.format(databases=databases)
    (tmp_path / "proj" / "settings.py").write_text(settings, encoding="utf-8")
    (tmp_path / "urls.py").write_text(DJANGO_URLS, encoding="utf-8")
    assert run(tmp_path, DJANGO, SHOP=str(tmp_path / "shop.db")) == [
        [202, None, 1],
        800,
        [429, "held", 1],
        True,
        ["WRITE AN ODE.", 6],
    ]


PLANS = """
import json
from datetime import datetime
from zoneinfo import ZoneInfo
import plans
from shop import budget, draft

budget.init()
plans.sign_up("acme", "small", "America/New_York", 17)
draft.delay("Write a haiku.", "acme")
for _ in range(2):
    plans.top_up("acme", 50_000, "invoice-4711")
shown = plans.allowance("acme")
plans.change_plan("acme", "large")
local = plans.next_month("acme").astimezone(ZoneInfo("America/New_York"))
print(json.dumps([
    shown["limit"], shown["used"], shown["held for running work"], shown["left"],
    plans.allowance("acme")["limit"], [local.day, local.hour, local.minute],
    datetime.fromisoformat(shown["renewed"]) == local,
]))
"""


def test_allowances_are_by_month_in_the_customers_zone(tmp_path: Path) -> None:
    write_files(TUTORIAL, tmp_path)
    write_files(HOWTO / "monthly-allowances.md", tmp_path)
    assert run(tmp_path, PLANS) == [
        150_000, 0, 104, 149_896, 2_050_000, [17, 0, 0], True,
    ]  # fmt: skip


BACKUP = """
import json, os, sqlite3
from shop import budget, data, draft

budget.init()
budget.set("tenant:acme", limit=250, unit="tokens")
draft.delay("Write a haiku.", "acme")
os.chdir(data)
{block}
os.replace("ledger-backup.db", "restored.db")
from celery import Celery
from celery_budget import CeleryBudget
app = Celery("restored", set_as_current=False)
app.conf.budget_database_url = f"sqlite:///{{data}}/restored.db"
restored = CeleryBudget(app)
print(json.dumps([restored.balance("tenant:acme").reserved, restored.reconcile().ok]))
"""


def test_a_backup_of_sqlite_is_a_whole_ledger(tmp_path: Path) -> None:
    write_files(TUTORIAL, tmp_path)
    blocks = blocks_of(HOWTO / "backup-and-restore.md")
    [block] = [one.text for one in blocks if "sqlite3" in one.text]
    assert run(tmp_path, BACKUP.format(block=block)) == [104, True]


STREAMING = """
import json
from types import SimpleNamespace
from celery import Celery
from celery_budget import CeleryBudget, budgeted, usage

app = Celery("shop")
app.conf.update(budget_database_url={url!r}, task_always_eager=True)
budget = CeleryBudget(app)
asked = []


class Chunk(SimpleNamespace):
    def model_dump(self, **how):
        return self.told


def chunks(**options):
    asked.append(options["max_tokens"])
    for told in json.load(open({chunks!r})):
        deltas = [SimpleNamespace(delta=SimpleNamespace(content=one["delta"].get("content")))
                  for one in told["choices"]]
        yield Chunk(told=told, choices=deltas)


completions = SimpleNamespace(create=chunks)
client = SimpleNamespace(chat=SimpleNamespace(completions=completions))
{block}
budget.init()
budget.set("tenant:acme", limit=5_000, unit="tokens")
text = draft.delay("Write a haiku.", "acme").get()
print(json.dumps([text, asked, budget.balance("tenant:acme").spent]))
"""


def test_a_stream_is_counted_by_what_it_tells(tmp_path: Path) -> None:
    [block] = [one.text for one in blocks_of(HOWTO / "streaming.md") if "def draft" in one.text]
    chunks = ROOT / "tests" / "replies" / "openai_chat_stream.json"
    url = f"sqlite:///{tmp_path}/ledger.db"
    text, asked, spent = run(tmp_path, STREAMING.format(url=url, chunks=str(chunks), block=block))
    assert text.startswith("Hello")
    assert (asked, spent) == ([2_000], 29)


SIGNALS = """
import json
from celery import Celery

app = Celery("shop", broker="memory://")
{block}
result = app.send_task("shop.draft")
with app.connection_for_read() as connection:
    message = connection.SimpleQueue("celery").get(timeout=10)
print(json.dumps(message.headers["id"] == result.id))
"""


def test_celery_publishes_whatever_a_receiver_of_its_signal_raises(tmp_path: Path) -> None:
    blocks = blocks_of(ROOT / "docs" / "explanation" / "why-not-signals.md")
    [block] = [one.text for one in blocks if one.language == "python"]
    assert run(tmp_path, SIGNALS.format(block=block)) is True


@pytest.mark.parametrize("page", sorted(HOWTO.glob("*.md")), ids=lambda page: page.stem)
def test_every_how_to_shows_how(page: Path) -> None:
    assert any(block.language in {"python", "console", "sh", "yaml"} for block in blocks_of(page))
