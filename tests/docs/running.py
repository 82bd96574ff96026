"""Runs the Python fragments of pages, each on an empty ledger: a program of its own.

Applications, tasks and signals of pages are registered for a whole process, so each fragment runs
in a copy of this one. It prints, as JSON, the traceback of each fragment that failed, by block.

A fragment that speaks of a running task is the body of one. What a page leaves to its reader is
here: tables, tasks, a provider's reply, and for what belongs to others an object that takes
everything.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from celery import Celery
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine, event
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session, declarative_base

from celery_budget import BudgetLine, CeleryBudget, budgeted
from celery_budget.settings import Settings
from celery_budget.testing import in_memory
from tests.docs.assembling import code_of
from tests.docs.pages import BLOCKS, ROOT, Block
from tests.docs.preamble import COMMON, OF_PAGES

#: Fragments of these pages that begin like this are the body of a running task.
INSIDE = {
    "README.md": ("usage.", "@usage"),
    "docs/cancelling.md": ("for page",),
    "docs/deadlines.md": ("client.",),
    "docs/effects.md": ("charge",),
    "docs/howto/cancelling.md": ("for page",),
    "docs/howto/streaming.md": ("for number",),
    "docs/usage.md": ("from celery_budget import usage", "for event"),
}
#: Tasks of these pages have run by the time that the next line does.
EAGER = {"docs/jobs.md", "docs/reuse.md"}
#: What these pages have in their configuration.
SETTINGS: dict[str, dict[str, Any]] = {
    "docs/relay.md": {"brokers": {"eu": "amqp://shop:secret@rabbit.eu//"}},
}
#: What belongs to others, and takes everything.
OTHERS = (
    "model", "channel", "handler", "exporter", "provider", "stripe", "pager", "application", "web",
    "transaction", "small_model", "large_model", "send",
)  # fmt: skip
#: What pages import, once for all.
IMPORTED = (
    "django.http", "fastapi", "celery_budget.dashboard", "celery_budget.estimators",
    "celery_budget.http", "celery_budget.metrics", "celery_budget.render.html",
    "opentelemetry.sdk.trace.export", "genai_prices", "tiktoken",
)  # fmt: skip
#: What may have changed the ledger, which has to add up then.
ADMITS = re.compile(r"\b(?:delay|apply_async|publish|enlist|cancel|record|stream)\(")
#: Budgets that there are, with their units.
UNITS = {
    "tenant:*": "tokens", "user:*": "tokens", "org:usd": "micro-usd", "usd:*": "micro-usd",
    "calls:*": "requests",
}  # fmt: skip
#: A provider's replies, as its client has them.
REPLIES = ROOT / "tests" / "replies"


class Reply(dict[str, Any]):
    """A reply that is read as a mapping, and by attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self and name != "content":  # which may be none
            raise AttributeError(name)
        return _read(self.get(name))


def _read(found: Any) -> Any:
    if isinstance(found, list):
        return [_read(one) for one in found]
    return Reply(found) if isinstance(found, dict) else found


def replies(name: str) -> Any:
    """Return a reply, or the chunks of one."""
    return _read(json.loads((REPLIES / f"{name}.json").read_text("utf-8")))


def main() -> None:
    """Run all, or the blocks that are named."""
    wanted = set(sys.argv[1:])
    failed = {}
    for name in IMPORTED:
        import_module(name)
    with tempfile.TemporaryDirectory() as place:
        empty = Path(place) / "empty.db"
        assert not in_a_copy(lambda: prepare(empty, UNITS), Path(place))
        for number, block in enumerate(BLOCKS):
            if runs(block) and (not wanted or block.name in wanted):
                folder = Path(place) / str(number)
                folder.mkdir()
                said = in_a_copy(lambda b=block, f=folder: run(b, f, empty), folder)
                if said:
                    failed[block.name] = said
    sys.stdout.write(f"{json.dumps(failed)}\n")


def prepare(file: Path, units: dict[str, str]) -> None:
    """Make a ledger that has these budgets and nothing else."""
    app = Celery("prepared", broker="memory://")
    app.conf.budget_database_url = f"sqlite:///{file}"
    budget = CeleryBudget(app)
    budget.init()
    for name, unit in units.items():
        budget.set(name, limit=1_000_000, unit=unit)
    budget.store.dispose()


def in_a_copy(work: Callable[[], None], folder: Path) -> str:
    """Do it in a copy of this process, and return the traceback, if there is one."""
    told = folder / "traceback"
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - also an exit is what is told
            told.write_text(traceback.format_exc(), encoding="utf-8")
        finally:
            sys.stdout.flush()
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        return f"its process ended with {status}"
    return told.read_text("utf-8") if told.exists() else ""


def runs(block: Block) -> bool:
    """Tell whether a block is run here: what is a file, others run as what it is."""
    return block.language == "python" and not block.file and not block.marked


def run(block: Block, folder: Path, empty: Path) -> None:
    """Run one, in a folder of its own, on a copy of an empty ledger."""
    os.chdir(folder)
    app = Celery("shop", broker="memory://")
    rows = folder / "rows.db"
    shutil.copyfile(empty, rows)
    app.conf.budget_database_url = f"sqlite:///{rows}"
    budget = CeleryBudget(app)
    page = str(block.page.relative_to(ROOT))
    settings = {"database_url": f"sqlite:///{rows}", **SETTINGS.get(page, {})}
    app.conf.task_store_eager_result = True
    with in_memory(app, eager=page in EAGER or None, **settings):
        names = names_of(block, app, budget, rows)
        inside = block.text.startswith(INSIDE.get(page, ("\0",)))
        _do(block, names, inside=inside)
        Settings.read(app.conf.get)
        if ADMITS.search(block.text):
            proof = budget.reconcile()
            assert proof.ok, proof


def _do(block: Block, names: dict[str, Any], *, inside: bool) -> None:
    lines = code_of(block).splitlines()
    # Its names outlive it, as those of a module do; inside of a task it may return.
    if inside or any(line.lstrip().startswith("return") for line in lines):
        lines = ["async def fragment():", *(f"    {line}" for line in lines)]
    compiled = compile("\n".join(lines), block.name, "exec", 0x2000)  # await at the top

    def whole() -> None:
        made = eval(compiled, names)  # noqa: S307 - the pages are ours
        if inspect.iscoroutine(made):
            asyncio.run(made)
        if "fragment" in names:
            asyncio.run(names["fragment"]())

    if inside:
        app = names["app"]

        @budgeted(
            budget=["tenant:acme", BudgetLine("usd:acme", estimate=100_000)], estimate=100_000
        )
        @app.task(name="running")
        def running() -> None:
            names["usage"].record(0, key="begun")
            whole()

        running.apply(throw=True)
    else:
        whole()


def names_of(block: Block, app: Celery, budget: CeleryBudget, rows: Path) -> dict[str, Any]:
    """Return what a fragment finds."""
    common = COMMON.replace('app = Celery("shop")\nbudget = CeleryBudget(app)\n', "")
    names: dict[str, Any] = {"app": app, "budget": budget, "__name__": "shop"}
    exec(common, names)  # noqa: S102 - a module of the tests
    names |= {name: MagicMock() for name in OTHERS}
    names |= _tasks(app) | _tables(rows, asynchronous="async " in block.text)
    names |= {"prompt": "Write a haiku.", "prompts": ["a", "b"], "tenant": "acme"}
    names |= {"url": "https://example.org", "first": "a", "second": "b", "texts": ["a", "b"]}
    names |= {"pages": ["a", "b"], "args": ("a", "acme"), "asked": {}, "done": None}
    names |= {"reply": replies("openai_responses"), "client": _client(), "rows": str(rows)}
    names["chunks"] = names["stream"] = replies("openai_chat_stream")
    names["model"].ask = lambda page: 5
    names["drafts"] = [names["draft"].s("a", "acme"), names["draft"].s("b", "acme")]
    exec(OF_PAGES.get(str(block.page.relative_to(ROOT)), ""), names)  # noqa: S102
    if "task_id" in block.text or ("result.id" in block.text and "result =" not in block.text):
        names["result"] = names["draft"].delay("before", tenant="acme")
        names["task_id"] = names["result"].id
    _modules(names)
    return names


def _modules(names: dict[str, Any]) -> None:
    """Have what pages import from their reader's own modules."""
    for name in ("shop", "proj", "proj.celery"):
        made = ModuleType(name)
        made.__dict__.update({one: found for one, found in names.items() if one[0] != "_"})
        sys.modules[name] = made
    os.environ["BUDGET_TOKEN"] = "a-token-of-thirty-two-characters"
    django = import_module("django.conf").settings
    django.configure(SECRET_KEY="pages", ROOT_URLCONF="urls")


def _client() -> Any:
    client = MagicMock()

    def respond(*_: Any, stream: bool = False, **asked: Any) -> Any:
        return replies("openai_responses_stream" if stream else "openai_responses")

    async def create(*_: Any, **asked: Any) -> Any:
        async def chunks() -> Any:
            for chunk in replies("openai_chat_stream"):
                yield chunk

        return chunks()

    client.responses.create = respond
    client.chat.completions.create = create
    return client


def _tasks(app: Celery) -> dict[str, Any]:
    def made(name: str) -> Any:
        @budgeted(budget="tenant:acme", estimate=10)
        @app.task(name=f"shop.{name}")
        def task(*args: Any, **kwargs: Any) -> None: ...

        return task

    @budgeted(budget="tenant:{tenant}", estimate=800)
    @app.task(name="shop.draft")
    def draft(prompt: str, tenant: str = "acme") -> str:
        return prompt

    @budgeted(budget="tenant:{tenant}", estimate=800, reuse="24h")
    @app.task(name="shop.summary")
    def summary(document: str, tenant: str) -> str:
        return document

    plain = {name: made(name) for name in ("notify", "invoice", "bonus", "fetch", "check")}
    return {**plain, "draft": draft, "summary": summary}


def _tables(rows: Path, *, asynchronous: bool) -> dict[str, Any]:
    base = declarative_base()

    class Order(base):  # type: ignore[valid-type, misc]
        __tablename__ = "orders"
        id = Column(Integer, primary_key=True)
        prompt = Column(Text)

    orders = Table("numbered", MetaData(), Column("number", Integer))
    engine = create_engine(f"sqlite:///{rows}")
    base.metadata.create_all(engine)
    orders.metadata.create_all(engine)
    used: Any = create_async_engine(f"sqlite+aiosqlite:///{rows}") if asynchronous else engine
    # As docs/transactions.md has it for SQLite.
    beneath = used.sync_engine if asynchronous else engine
    event.listen(beneath, "begin", lambda made: made.exec_driver_sql("BEGIN IMMEDIATE"))
    return {
        "Order": Order,
        "orders": orders,
        "order": Order(id=1, prompt="Write a haiku."),
        "engine": used,
        "session": Session(engine),
    }


if __name__ == "__main__":
    main()
