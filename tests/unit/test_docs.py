"""The pages say what the code says."""

from __future__ import annotations

import ast
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import celery_budget
from celery_budget import errors
from celery_budget.core.invoices import SHAPES
from celery_budget.events import FIELDS
from celery_budget.integration.context import HEADER
from celery_budget.integration.fallbacks import LANE
from celery_budget.integration.info import COMMAND
from celery_budget.reconcile.kinds import STEPS
from celery_budget.settings import PREFIX, Settings
from celery_budget.store.migrate import VERSION_TABLE
from celery_budget.store.roles import ROLES
from celery_budget.store.schema import metadata
from celery_budget.testing import plugin

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
ROW = re.compile(r"^\| `(budget_\w+)` \| (.+?) \| (.+) \|$", re.MULTILINE)
NAME = re.compile(r"\bbudget_[a-z_]+\b")
#: Stored functions.
FUNCTIONS = {
    "budget_admit",
    "budget_backlog",
    "budget_clock",
    "budget_claim",
    "budget_decide",
    "budget_end",
    "budget_limit",
    "budget_lock",
    "budget_move",
    "budget_pace",
    "budget_record",
    "budget_reserve",
    "budget_start",
    "budget_wake",
}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def settings_keys() -> list[str]:
    return [PREFIX + field.name for field in fields(Settings)]


def test_the_table_of_settings_is_complete_and_in_order() -> None:
    assert [row[0] for row in ROW.findall(read("docs/settings.md"))] == settings_keys()


@pytest.mark.parametrize(("key", "written", "meaning"), ROW.findall(read("docs/settings.md")))
def test_a_setting_has_the_default_that_the_table_gives(
    key: str, written: str, meaning: str
) -> None:
    field = next(field for field in fields(Settings) if PREFIX + field.name == key)
    made = field.default if field.default_factory is MISSING else field.default_factory()
    if made is MISSING:
        assert written == "required"
    else:
        assert ast.literal_eval(written.strip("`")) == made
        assert type(ast.literal_eval(written.strip("`"))) is type(made)
    assert meaning


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_with_our_prefix_exists(page: Path) -> None:
    attributes = {PREFIX + field for field in ("event", *FIELDS)}
    known = {
        *attributes,
        *settings_keys(),
        *metadata.tables,
        *(PREFIX + role for role in ROLES),
        *FUNCTIONS,
        *plugin.__all__,
        HEADER,
        LANE,
        VERSION_TABLE,
        COMMAND,
    }
    assert set(NAME.findall(page.read_text(encoding="utf-8"))) - known == set()


def test_the_architecture_lists_every_table() -> None:
    page = read("docs/architecture.md")
    listed = set(re.findall(r"^\| `(budget_\w+)` \|", page, re.MULTILINE))
    assert listed == {*metadata.tables, VERSION_TABLE}


@pytest.mark.parametrize("folder", ["", "integration"])
def test_the_architecture_lists_every_module(folder: str) -> None:
    page = read("docs/architecture.md")
    package = ROOT / "celery_budget" / folder
    modules = {
        path.stem
        for path in package.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists()) and path.stem != "__init__"
    }
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert modules - listed == set()


def test_errors_named_in_the_readme_exist() -> None:
    named = set(
        re.findall(r"`([A-Z]\w+(?:Error|Budget|Amount|Exceeded|Conflict))`", read("README.md"))
    )
    assert {"BudgetExceeded", "RequestConflict", "UnknownBudget", "InvalidAmount"} <= named
    known = {*errors.__all__, *celery_budget.__all__}
    assert named - known == set()


def test_each_step_that_can_be_lacking_is_in_the_table() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", read("docs/reconcile.md"), re.MULTILINE
    )
    assert {kind: tuple(told) for kind, *told in rows} == STEPS
    assert [kind for kind, *_ in rows] == list(STEPS)


def test_each_known_export_is_in_the_table_with_its_columns() -> None:
    rows = re.findall(
        r"^\| ([A-Z]\w+ \w+) \| (.+) \| `(\w+)` \|$", read("docs/reconcile.md"), re.MULTILINE
    )
    assert [(name, provider) for name, _, provider in rows] == [
        (shape.name, shape.provider) for shape in SHAPES
    ]
    for (_, columns, _), shape in zip(rows, SHAPES, strict=True):
        wanted = [header for headers in shape.columns.values() for header in headers]
        assert re.findall(r"`(\w+)`", columns) == wanted
