"""Texts of errors in the code: each says what to do, and what users meet has a type."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_budget import errors
from tests.messages import JARGON, REMEDY

PACKAGE = Path(errors.__file__).resolve().parent
#: Their own text is written in the class, and judged where they are raised.
MADE_OF_ARGUMENTS = {
    name for name in errors.__all__ if "__init__" in vars(getattr(errors, name))
} - {"StoreError"}
SPOKEN = {*errors.__all__} - MADE_OF_ARGUMENTS | {
    "BadParameter", "ClickException", "UsageError", "WrongUse", "fail",
}  # fmt: skip

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


def written(node: ast.expr) -> str | None:
    """What a literal says, with ``…`` for what is put in; none for what is no literal."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (one.value if isinstance(one, ast.Constant) else "…" for one in node.values)
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp):
        left, right = written(node.left), written(node.right)
        return f"{left or '…'}{right or '…'}" if left or right else None
    return None


TEXTS = [
    (f"{name}:{node.lineno}", said)
    for name, tree in modules()
    for node in ast.walk(tree)
    if isinstance(node, ast.Call) and called(node) in SPOKEN and node.args
    if (said := written(node.args[0])) is not None
]


def test_there_are_texts() -> None:
    assert len(TEXTS) > 250


def test_every_text_says_what_to_do() -> None:
    without = [
        (where, said)
        for where, said in TEXTS
        # What ends with what another error says, or with one of several remedies, has that one's.
        if not REMEDY.search(said) and not said.endswith((": …", "; …")) and said not in GOES_ON
    ]
    assert without == []


def test_no_text_ends_a_sentence_or_is_for_developers() -> None:
    # The command line ends it; a log line goes on after it.
    wrong = [one for one in TEXTS if one[1][-1] in ".;,:!" or JARGON.search(one[1])]
    assert wrong == []


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
