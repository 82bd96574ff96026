"""What stands in the pages as code is code, and names what there is."""

from __future__ import annotations

import ast
import configparser
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlglot
import yaml
from celery.schedules import crontab

from celery_budget import CeleryBudget, usage
from celery_budget.core.declarations import parse as parse_budgets
from celery_budget.core.declarations import parse_lanes_of, tomllib
from celery_budget.integration.lanes import Lanes
from tests.docs.assembling import syntax_of, told_by_mypy
from tests.docs.commands import check, lines_of
from tests.docs.pages import BLOCKS, PAGES, ROOT, SHELL, Block

#: Directives, which are Sphinx's to check: it has warnings as errors.
DIRECTIVE = re.compile(r"^\{[a-z-]+\}$")
#: In pages these names stand for these objects.
KNOWN: dict[str, Any] = {"budget": CeleryBudget, "usage": usage}


def of(*languages: str) -> list[Any]:
    return [pytest.param(one, id=one.name) for one in BLOCKS if one.language in languages]


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


@pytest.mark.parametrize("block", of(*SHELL))
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
    for one in yaml.safe_load_all(text):
        assert isinstance(one, dict)
        for command in _commands_in(one):
            check(shlex.join(command))


def _commands_in(told: Any) -> Iterator[list[str]]:
    """Yield what containers and probes are to run."""
    within = told.values() if isinstance(told, dict) else told if isinstance(told, list) else ()
    for one in within:
        yield from _commands_in(one)
    if isinstance(told, dict) and isinstance(told.get("command"), list):
        yield told["command"]


def check_sql(text: str) -> None:
    assert sqlglot.parse(text, read="postgres")


def check_ini(text: str) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(text if text.startswith("[") else f"[postgresql.conf]\n{text}")
    assert parser.sections()


def check_crontab(text: str) -> None:
    for line in text.splitlines():
        if not line.startswith("#"):
            *times, command = line.split(maxsplit=5)
            crontab_of(*times)
            check(command.partition(" && ")[2].replace("\\%", "%"))


def crontab_of(minute: str, hour: str, day: str, month: str, weekday: str) -> None:
    """Read the times of a line as Celery does, which takes what cron takes."""
    crontab(minute, hour, weekday, day, month)


CHECKS: dict[str, Callable[[str], Any]] = {
    "toml": check_toml,
    "yaml": check_yaml,
    "json": json.loads,
    "sql": check_sql,
    "ini": check_ini,
    "crontab": check_crontab,
}


@pytest.mark.parametrize("block", of(*CHECKS))
def test_other_languages_are_what_they_say(block: Block) -> None:
    CHECKS[block.language](block.text)


@pytest.fixture(scope="module")
def read_by_mypy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return told_by_mypy(tmp_path_factory.mktemp("pages"))


@pytest.mark.timeout(300)
def test_fragments_of_python_are_typed_as_the_api_is(read_by_mypy: dict[str, list[str]]) -> None:
    assert read_by_mypy == {}


@pytest.mark.timeout(300)
def test_mypy_finds_what_is_wrong_in_a_fragment(tmp_path: Path) -> None:
    page = ROOT / "docs" / "jobs.md"
    wrong = Block(page, 99, 7, "python", "budget.jobs(task_id)\nbudget.job(1.5, owner=tenant)\n", marked=False)  # fmt: skip # noqa: E501 - one block
    told = told_by_mypy(tmp_path, [wrong])
    assert [line[:7] for line in told["docs/jobs.md-99"]] == ["line 8:", "line 9:"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", ["running", "shell"])
def test_what_is_not_marked_does_what_it_says(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.docs.{program}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    failed = json.loads(done.stdout.splitlines()[-1])
    assert failed == {}, "\n".join(failed.values())


def test_no_block_is_left_neither_run_nor_checked() -> None:
    left = {
        block.name: block.language
        for block in BLOCKS
        if block.language not in {"python", *SHELL, *CHECKS}
        and not DIRECTIVE.match(block.language)
        # What something prints is compared by the tests of examples, or says why it is not.
        and not (block.language == "text" and (block.marked or block.page.name == "README.md"))
    }
    assert left == {}


def test_a_file_of_a_page_is_run_by_a_test_of_its_own() -> None:
    tests = [path.read_text("utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    for page in {block.page for block in BLOCKS if block.language == "python" and block.file}:
        assert any(f'"{page.name}"' in text for text in tests), page
