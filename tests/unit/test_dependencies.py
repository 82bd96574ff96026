"""Dependencies: all that is declared is imported, all imports are declared, licences fit."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, requires
from pathlib import Path

import pytest

from celery_budget.core.declarations import tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: What users get by an extra; the others are for developing.
EXTRAS = ("postgres", "redis", "prices", "tiktoken", "dashboard", "prometheus", "otel")
#: Imported by what is imported, or by Celery, and declared for its version.
INDIRECT = {"markupsafe"}
#: Part of Celery's own dependencies, and of its API; and what only an application brings.
OF_CELERY = {"billiard", "vine", "amqp", "click-didyoumean"}
OPTIONAL = {"django", "pytest", "celery-redbeat", "openai", "anthropic", "gevent", "greenlet"}
#: By BSD-3-Clause, the licence of this package, their notices stay; none asks for more.
PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|MPL|Mozilla|ISC|LGPL|HPND|Zope|0BSD"
    r"|Unlicense|Lesser)",
    re.IGNORECASE,
)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def named(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return normal(match[0])


def declared() -> set[str]:
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][one] for one in EXTRAS)]
    return {named(one) for some in lists for one in some} - {"celery-budget"}


def imported() -> Iterator[tuple[frozenset[str], str]]:
    """Yield the packages that each import of ours may be of, and the file."""
    packages = packages_distributions()
    for path in (ROOT / "celery_budget").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            for name in {name.partition(".")[0] for name in names}:
                if name in sys.stdlib_module_names or name in ("celery_budget", "tests"):
                    continue
                of = frozenset(normal(one) for one in packages.get(name, [name]))
                yield of, str(path.relative_to(ROOT))


def test_every_import_is_declared() -> None:
    known = declared() | OF_CELERY | OPTIONAL | {"typing-extensions"}
    assert {pair for pair in imported() if not pair[0] & known} == set()


def test_every_dependency_is_imported() -> None:
    used = {package for of, _ in imported() for package in of}
    # redis is Celery's to import, and tomli an older Python's.
    assert declared() - used - INDIRECT - {"redis", "tomli", "celery"} == set()


def test_what_is_installed_fits_together() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout


def closure() -> set[str]:
    """What is installed by us and by what we depend on."""
    found: set[str] = set()
    left = declared()
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        try:
            wanted = requires(name) or []
        except PackageNotFoundError:
            found.discard(name)
            continue
        left |= {named(one) for one in wanted if "extra ==" not in one}
    return found


@pytest.mark.parametrize("name", sorted(closure()))
def test_a_dependency_has_a_licence_that_goes_with_ours(name: str) -> None:
    told = distribution(name).metadata
    said = [
        *(one for one in told.get_all("Classifier") or () if one.startswith("License")),
        told.get("License-Expression") or "",
        (told.get("License") or "")[:200],
    ]
    text = " ".join(said)
    assert PERMISSIVE.search(text), f"{name}: {text!r}"
    # Of those that ask for the same licence only what leaves the program around it alone.
    assert not re.search(r"(?<!L)\bA?GPL", text) or "Lesser" in text or "LGPL" in text, name
