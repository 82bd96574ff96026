"""By what the texts that people read are judged."""

from __future__ import annotations

import re

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
