"""Pages as modules that a type checker reads: each fragment the body of a function of its own."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import BLOCKS, PAGES, ROOT, Block
from tests.docs.preamble import COMMON, OF_PAGES

#: A block that ends with a decorator.
ENDS_DECORATED = re.compile(r"^(?:@.*|\))\n\Z", re.MULTILINE)
#: In pages an ellipsis stands for what is left out.
LEFT_OUT = "…"


def code_of(block: Block) -> str:
    """Return a block as Python that can be compiled."""
    text = block.text.replace(LEFT_OUT, "...") if not block.file else block.text
    if ENDS_DECORATED.search(text):
        text += "def decorated(prompt, tenant): ...\n"
    return text


def syntax_of(block: Block) -> ast.Module:
    """Return its syntax tree.

    :raises SyntaxError: where it is no Python.
    """
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    # ``return`` is allowed as well: it is the body of a function that the page leaves out.
    body = _body(code_of(block))
    tree = compile(f"async def fragment():\n{body}", f"{block.page}:{block.line}", "exec", flags)
    assert isinstance(tree, ast.Module)
    return tree


def module_of(page: Path, blocks: list[Block]) -> tuple[str, list[tuple[int, Block]]]:
    """Return a page as a module, and at which line of it each block begins."""
    text = COMMON + OF_PAGES.get(str(page.relative_to(ROOT)), "") + "\n"
    begins: list[tuple[int, Block]] = []
    for block in blocks:
        if block.page == page and block.language == "python":
            text += f"async def block_{block.number}():\n"
            begins.append((text.count("\n") + 1, block))
            text += _body(code_of(block)) + "\n"
    return text, begins


def _body(code: str) -> str:
    # Strings over several lines would not survive indentation; no page has any but docstrings.
    code = code.replace("from __future__ import annotations\n", "\n")
    lines = [f"    {line}" if line else "" for line in code.splitlines()]
    return "\n".join(lines) + "\n    pass"


def told_by_mypy(folder: Path, blocks: list[Block] = BLOCKS) -> dict[str, list[str]]:
    """Return what mypy says of the fragments of all pages, by block.

    One run for all: most of its time goes into what they import.
    """
    begins: dict[str, list[tuple[int, Block]]] = {}
    for page in PAGES:
        text, of_page = module_of(page, blocks)
        if of_page:
            name = re.sub(r"\W", "_", str(page.relative_to(ROOT)))
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
            begins[name] = of_page
    options = [
        "--check-untyped-defs", "--ignore-missing-imports", "--no-error-summary",
        "--follow-imports=silent", "--show-error-codes", "--config-file=",
        "--disable-error-code=empty-body", "--disable-error-code=no-redef",
        f"--cache-dir={ROOT / '.mypy_cache' / 'pages'}",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *(f"{name}.py" for name in begins)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    told: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        found = re.match(r"^(\w+)\.py:(\d+): (?:error|note): (.*)$", line)
        assert found is not None, line
        number = int(found[2])
        where = [(first, block) for first, block in begins[found[1]] if first <= number]
        if not where:
            told.setdefault(found[1], []).append(f"preamble, line {number}: {found[3]}")
            continue
        first, block = where[-1]
        text = f"line {block.line + 1 + number - first}: {found[3]}"
        told.setdefault(block.name, []).append(text)
    return told
