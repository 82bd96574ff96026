"""How texts that people read are found in the code, and by what they are judged."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

#: The fields of each time that an event was logged.
Told = Callable[[str], list[dict[str, Any]]]

_VERBS = (
    "add|ask|begin|bring|call|change|check|choose|close|connect|correct|create|declare|do|drop|end|"
    "enclose|enlist|give|grant|have|import|install|keep|leave|let|list|look|lower|make|mend|move|"
    "name|normalize|open|pass|pip|publish|put|raise|read|record|register|reinstall|repeat|reserve|"
    "restore|return|run|save|say|see|set|spell|start|stop|store|take|try|turn|upgrade|use|wait|"
    "wrap|write"
)
#: An imperative at the head of a clause.
REMEDY = re.compile(
    rf"(^|[;:,.] |\(|, or |, and |, so | and | or | then | first )(or |and |so )?({_VERBS})\b",
    re.IGNORECASE,
)
#: What is for those who wrote the library.
JARGON = re.compile(
    r"Traceback|line \d+, in |psycopg\.errors|sqlalchemy\.|sqlite3\.|\(Background on|NoneType"
)


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


def whole(template: str) -> re.Pattern[str]:
    """What a text with ``…`` in it stands for."""
    return re.compile(".*".join(map(re.escape, template.split("…"))), re.DOTALL)


def phrases(template: str) -> set[str]:
    """Return each three words in a row of a text, between what is put in (``…``)."""
    parts = [part.split() for part in template.split("…")]
    return {" ".join(part[at : at + 3]) for part in parts for at in range(len(part) - 2)}
