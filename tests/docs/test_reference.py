"""The reference has everything, and the site every page."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

import celery_budget
from celery_budget import errors
from celery_budget.cli import budget
from celery_budget.core.reservations import CLAIMABLE, TERMINAL
from celery_budget.integration import usage
from tests.docs.pages import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(
    page.relative_to(DOCS).with_suffix("").as_posix()
    for page in DOCS.rglob("*.md")
    if page.name != "index.md" and page.parent.name != "decisions"
)


def read(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    """The directives, as Sphinx loads them."""
    spec = importlib.util.spec_from_file_location("generated", DOCS / "_ext" / "generated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_in_the_reference() -> None:
    documented = re.findall(r"^\.\. auto\w+:: celery_budget\.(?:\w+\.)*(\w+)", read("reference/api.md"), re.MULTILINE)  # fmt: skip # noqa: E501 - one pattern
    assert set(celery_budget.__all__) - set(errors.__all__) - {*documented} == set()
    assert "automodule:: celery_budget.integration.usage" in read("reference/api.md")
    assert "automodule:: celery_budget.testing\n   :members:" in read("reference/api.md")
    assert all(getattr(usage, name).__doc__ for name in usage.__all__)


def test_every_error_is_on_its_page_and_in_the_tree() -> None:
    named = set(re.findall(r"`([A-Z]\w+)`", read("errors.md")))
    assert set(errors.__all__) - named == set()
    below = {one.__name__ for one in _below(errors.BudgetError)}
    assert below | {"BudgetError"} == set(errors.__all__)


def test_every_error_says_what_to_do() -> None:
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \| ([^|]+) \|$", read("errors.md"), re.MULTILINE)
    told = {
        name for names, _, to_do in rows if to_do.strip() for name in re.findall(r"`(\w+)`", names)
    }
    assert set(errors.__all__) - told == {"BudgetError"}


def _below(error: type[Exception]) -> list[type[Exception]]:
    ours = [one for one in error.__subclasses__() if one.__module__ == errors.__name__]
    return [*ours, *(deeper for one in ours for deeper in _below(one))]


def test_every_command_is_in_the_reference_with_its_help(generated: ModuleType) -> None:
    found = dict(generated.commands(budget))
    assert "celery -A PROJ budget lane set" in found
    assert len(found) > len(budget.commands)
    for name in budget.commands:
        text = found[f"celery -A PROJ budget {name}"].get_help()
        assert text.startswith(f"Usage: celery -A PROJ budget {name}")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_its_place_and_is_told_of(page: str) -> None:
    index = read("index.md")
    entries = re.findall(r"```\{toctree\}\n(?::.*\n)+\n((?:.+\n)+)```", index)
    assert len(entries) == 4
    placed = [re.sub(r"^.+<(.+)>$", r"\1", line) for one in entries for line in one.splitlines()]
    assert placed.count(page) == 1
    root = {"readme": "README", "changelog": "CHANGELOG", "contributing": "CONTRIBUTING"}
    # Those of the examples are theirs as well.
    root |= {
        f"examples/{path.parent.name}": f"examples/{path.parent.name}/README"
        for path in ROOT.glob("examples/*/README.md")
    }
    root["examples/index"] = "examples/README"
    link = f"../{root[page]}.md" if page in root else f"{page}.md"
    assert f"]({link})" in index


def test_the_diagram_has_every_state() -> None:
    states = {"planned", "running", *CLAIMABLE, *TERMINAL}
    drawn = re.findall(r'class="name"[^>]*>(\w+)<', read("explanation/states.svg"))
    assert sorted(drawn) == sorted(states)


def test_no_page_of_the_site_needs_the_network() -> None:
    configuration = read("conf.py")
    assert "intersphinx" not in configuration
    assert "http" not in configuration
