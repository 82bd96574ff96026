"""What stands in the pages as code is code, and names what there is."""

from __future__ import annotations

import ast
import configparser
import importlib
import inspect
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import sqlglot
import yaml

from celery_budget import CeleryBudget, usage
from celery_budget.core.declarations import parse as parse_budgets
from celery_budget.core.declarations import parse_lanes_of, tomllib
from celery_budget.integration.lanes import Lanes
from tests.docs.commands import check, lines_of
from tests.docs.pages import BLOCKS, PAGES, ROOT, Block

SHELL = ("console", "sh", "bash")
#: What is none that can be checked here; directives are Sphinx's to check.
UNCHECKED = {
    "", "text", "{toctree}", "{eval-rst}", "{command-line}", "{ledger-schema}", "{error-tree}",
}  # fmt: skip
#: What an unlabelled block of commands begins with.
COMMANDS = ("$ ", "celery ", "make ", "pip ", "python ")
#: A block that ends with a decorator.
ENDS_DECORATED = re.compile(r"^(?:@.*|\))\n\Z", re.MULTILINE)
#: In pages these names stand for these objects.
KNOWN: dict[str, Any] = {"budget": CeleryBudget, "usage": usage}


def of(*languages: str) -> list[Any]:
    return [
        pytest.param(block, id=block.name)
        for block in BLOCKS
        if block.language in languages and not block.marked
    ]


def commands() -> list[Any]:
    return [
        pytest.param(block, id=block.name)
        for block in BLOCKS
        if not block.marked
        and (
            block.language in SHELL
            or (block.language == "" and block.text.startswith(COMMANDS))
        )
    ]  # fmt: skip


def test_the_blocks_of_all_pages_are_found() -> None:
    fences = sum(
        1
        for page in PAGES
        for line in page.read_text("utf-8").splitlines()
        if line.lstrip().startswith("```")
    )
    assert fences == 2 * len(BLOCKS)


@pytest.mark.parametrize("block", of("python"))
def test_python_is_python_and_names_what_there_is(block: Block) -> None:
    tree = syntax_of(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("celery_budget"):
            module = importlib.import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name), name.name
        elif isinstance(node, ast.Call):
            called = find(node.func)
            if called is not None:
                bind(called, node)


def syntax_of(block: Block) -> ast.Module:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    text = block.text.replace("…", "...")  # something that is left out
    if ENDS_DECORATED.search(text):
        text += "def decorated(): ...\n"
    tree = compile(text, f"{block.page}:{block.line}", "exec", flags)
    assert isinstance(tree, ast.Module)
    return tree


def find(node: ast.expr) -> Callable[..., Any] | None:
    """Return what ``budget.name``, ``budget.lanes.name`` or ``usage.name`` stands for."""
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    if not path or not isinstance(node, ast.Name) or node.id not in KNOWN:
        return None
    if path[0] == "lanes" and len(path) == 2:
        return getattr(Lanes, path[1])
    found = inspect.getattr_static(KNOWN[node.id], path[0])
    return found if len(path) == 1 else None


def bind(called: Callable[..., Any], node: ast.Call) -> None:
    """Check that a call gives no argument that there is none of."""
    signature = inspect.signature(called)
    taken = signature.parameters.values()
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken):
        return
    names = {one.name for one in taken}
    assert {one.arg for one in node.keywords if one.arg} <= names


@pytest.mark.parametrize("block", commands())
def test_commands_are_commands_with_options_that_there_are(block: Block) -> None:
    for command in lines_of(block.text):
        check(command)


#: A command inside of a line of text, and one that is set off by four spaces.
INLINE = re.compile(r"`(celery -A \w+ budget[^`]*)`|^    (celery -A [^\n]+)$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_text_are_commands_as_well(page: Any) -> None:
    text = page.read_text("utf-8")
    for block in BLOCKS:
        if block.page == page:
            text = text.replace(block.text, "")
    for inline, set_off in INLINE.findall(text):
        check(" ".join((inline or set_off).split()).partition("…")[0])


def check_toml(text: str) -> None:
    if tomllib.loads(text).keys() & {"budget", "lane"}:
        parse_budgets(text, "default")
        parse_lanes_of(text, "default")


def check_yaml(text: str) -> None:
    assert all(isinstance(one, dict) for one in yaml.safe_load_all(text))


def check_sql(text: str) -> None:
    assert sqlglot.parse(text, read="postgres")


def check_ini(text: str) -> None:
    configparser.ConfigParser().read_string(text)


CHECKS: dict[str, Callable[[str], Any]] = {
    "toml": check_toml,
    "yaml": check_yaml,
    "json": json.loads,
    "sql": check_sql,
    "ini": check_ini,
}


@pytest.mark.parametrize("block", of(*CHECKS))
def test_other_languages_are_what_they_say(block: Block) -> None:
    CHECKS[block.language](block.text)


def test_every_block_has_a_language_that_is_checked_here() -> None:
    checked = {"python", *SHELL, *CHECKS, *UNCHECKED}
    assert {one.name: one.language for one in BLOCKS if one.language not in checked} == {}
