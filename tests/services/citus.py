"""A Citus cluster given by BUDGET_TEST_CITUS_URL, or what stands in for one on a PostgreSQL.

No package that tests can install has Citus. The stand-in refuses what Citus documents that it
refuses when tables and functions are distributed; it moves no rows.
"""

from __future__ import annotations

from pathlib import Path

import psycopg

from tests.services.postgres import plain_url

#: The coordinator of a real cluster: a database that tests may fill, with workers added.
VARIABLE = "BUDGET_TEST_CITUS_URL"


def stand_in(url: str) -> None:
    """Give a database what stands in for Citus."""
    script = Path(__file__).with_name("citus.sql").read_text("utf-8")
    with psycopg.connect(plain_url(url), autocommit=True) as connection:
        for statement in script.split(";\n\n"):
            connection.execute(statement.encode())
