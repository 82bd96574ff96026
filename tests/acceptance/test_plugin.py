"""The plugin in a project of a user's, in a pytest of its own: what docs/testing.md has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
BLOCK = re.compile(r"^```(ini|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with the page's application, ini file and tests."""
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    ini, shop, *tests, without, enlisted = (text for _, text in blocks)
    pytester.path.joinpath("pytest.ini").write_text(ini)
    pytester.path.joinpath("shop.py").write_text(shop)
    pytester.path.joinpath("test_shop.py").write_text("\n".join(tests))
    pytester.path.joinpath("test_without.py").write_text(
        "from shop import app, draft\n\n"
        f"def test_without_a_fixture():\n{indent(without, '    ')}\n"
        f"def test_enlisted(tmp_path):\n    rows = tmp_path / 'rows.db'\n{indent(enlisted, '    ')}"
    )
    return pytester


def test_the_page_s_own_tests_pass(project: pytest.Pytester) -> None:
    wanted = project.path.joinpath("test_shop.py").read_text().count("\ndef test_") + 2
    assert wanted > 7
    done = project.runpytest_subprocess(
        "-q", "--strict-markers", "-W", "error::pytest.PytestWarning"
    )
    done.assert_outcomes(passed=wanted)


def test_each_block_of_the_page_is_a_file_of_its_own(project: pytest.Pytester) -> None:
    _, _, *tests, _, _ = (text for _, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")))
    project.makepyfile(**{f"test_block_{place}": text for place, text in enumerate(tests)})
    files = [f"test_block_{place}.py" for place in range(len(tests))]
    done = project.runpytest_subprocess("-q", *files)
    done.assert_outcomes(passed="".join(tests).count("def test_"))


def test_what_fails_says_what_there_is(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_wrong="""
        from celery_budget.testing import assert_reserved
        from shop import order

        def test_wrong(budget_ledger):
            budget_ledger.set("tenant:acme", limit=1200, unit="tokens")
            order("a prompt", "acme")
            assert_reserved("tenant:acme", 400)
        """
    )
    done = project.runpytest_subprocess("-q", "test_wrong.py")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [
            "*requests reserved on 'tenant:acme': expected at least one with 400 in all, found 1 *",
            "*shop.draft on 'tenant:acme': reserved 500, holds 500, settled 0 tokens (reserved)",
        ]
    )
    # What the assertion is made of is left out.
    assert "assertions.py" not in done.stdout.str()


def test_what_tests_with_imports_no_pytest() -> None:
    probe = "import sys, celery_budget.testing; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", probe], check=True)
