"""Texts of errors in the code: each says what to do, is raised by a test, and has a type."""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_budget import errors
from celery_budget.core.declarations import tomllib
from tests.messages import JARGON, REMEDY, phrases, whole, written

PACKAGE = Path(errors.__file__).resolve().parent
TESTS = Path(__file__).resolve().parents[1]
#: Their own text is written in the class, and judged where they are raised.
MADE_OF_ARGUMENTS = {
    name for name in errors.__all__ if "__init__" in vars(getattr(errors, name))
} - {"StoreError"}
SPOKEN = {*errors.__all__} - MADE_OF_ARGUMENTS | {
    "BadParameter", "ClickException", "UsageError", "WrongUse", "fail",
}  # fmt: skip

#: What ends so ends with what another one says.
OTHERS = (": …", "; …")
#: Told in a log line that says what to do after it (``relay.unwoken``).
GOES_ON = {"no notification arrives over …"}

#: Where Python's own errors are raised: never out of a call that users make, or as Python has it.
PLAIN = {
    "core/": "turned into the package's own by who calls",
    "cli/values.py": "turned into wrong use below",
    "integration/checkup.py": "what cannot be reached",
    "integration/eager.py": "what cannot be reached",
    "integration/gated.py": "what subclasses write",
    "integration/inquiries.py": "logged with the attempt that it is about",
    "integration/ledger.py": "what cannot be reached",
    "integration/task.py": "how Python asks for an attribute",
    "metering/replies.py": "turned into InvalidReply by who calls",
    "metrics/families.py": "a slip in the package itself",
    "spool.py": "an entry that is moved aside",
    "store/clock.py": "a slip in the package itself",
    "store/in_place.py": "what cannot be reached",
    "store/prepared.py": "how Python asks for an attribute",
    "store/requests.py": "what cannot be reached",
    "store/reservations.py": "a slip in the package itself",
    "store/usage.py": "a row that was deleted by hand",
    "testing/": "a test's own slip",
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("store/migrations/"):
            yield name, ast.parse(path.read_text())


def called(node: ast.AST | None) -> str:
    of = node.func if isinstance(node, ast.Call) else node
    return of.id if isinstance(of, ast.Name) else of.attr if isinstance(of, ast.Attribute) else ""


def calls(tree: ast.Module) -> Iterator[tuple[int, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) in SPOKEN and node.args:
            yield node.lineno, node.args[0]


def returned(tree: ast.Module) -> Iterator[tuple[int, ast.expr]]:
    """What classes of errors say by themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__str__":
            for one in ast.walk(node):
                if isinstance(one, ast.Return) and one.value is not None:
                    yield one.lineno, one.value


TEXTS = [
    (f"{name}:{line}", said)
    for name, tree in modules()
    for line, node in calls(tree)
    if (said := written(node)) is not None
]
OWN = [
    (f"errors.py:{line}", said)
    for line, node in returned(ast.parse((PACKAGE / "errors.py").read_text()))
    if (said := written(node)) is not None
]


def test_there_are_texts() -> None:
    assert len(TEXTS) > 250


def test_every_text_says_what_to_do() -> None:
    without = [
        (where, said)
        for where, said in TEXTS
        # What ends with what another error says, or with one of several remedies, has that one's.
        if not REMEDY.search(said) and not said.endswith(OTHERS) and said not in GOES_ON
    ]
    assert without == []


def test_no_text_ends_a_sentence_or_is_for_developers() -> None:
    # The command line ends it; a log line goes on after it.
    wrong = [one for one in TEXTS if one[1][-1] in ".;,:!" or JARGON.search(one[1])]
    assert wrong == []


def literals(tree: ast.Module) -> Iterator[str]:
    """What is written in a module, without its documentation; patterns without their escapes."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docs:
            yield (written(node) or "").replace("\\", "")


def test_every_text_is_raised_by_a_test() -> None:
    """One of the catalogue, whole, or three words of it that no other text has in a test's own."""
    templates = {said: where for where, said in (*OWN, *TEXTS)}
    met = {
        entry["text"]
        for name, table in (("catalogue", "error"), ("texts", "text"))
        for entry in tomllib.loads((TESTS / "integration" / f"{name}.toml").read_text())[table]
    }
    said = {
        one
        for path in TESTS.rglob("*.py")
        if path != Path(__file__)
        for one in literals(ast.parse(path.read_text()))
    }
    everything = "\n".join(said)
    shared = Counter(row for template in templates for row in phrases(template))
    raised = set()
    for text in met:
        fitting = [one for one in templates if whole(one).search(text)]
        # What is put in can be anything: a text is that of the template that says most of it, and
        # of those that end with what another one says.
        raised |= {
            max(fitting, key=len, default=""),
            *(one for one in fitting if one.endswith(OTHERS)),
        }
    left = {
        where: template
        for template, where in templates.items()
        if template not in raised
        and not any(shared[row] == 1 and row in everything for row in phrases(template))
    }
    assert left == {}


def test_what_users_meet_has_a_type() -> None:
    plain = {name for name, kind in vars(builtins).items() if isinstance(kind, type)}
    found = {
        name
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and called(node.exc) in plain
    }
    assert {one for one in found if not one.startswith(tuple(PLAIN))} == set()


@pytest.mark.parametrize("where", PLAIN)
def test_no_reason_is_left_over(where: str) -> None:
    assert (PACKAGE / where).exists()
