"""The tutorial, done as it says: its files, its commands, and what they print."""

from __future__ import annotations

import doctest

import pytest

from tests.cluster import eventually
from tests.docs.pages import ROOT, Block, blocks_of, write_files
from tests.docs.reader import FLAGS, LOOKS, Reader

PAGE = ROOT / "docs" / "tutorial.md"


def steps() -> list[tuple[str, str]]:
    """Return each command of the page with what it is to print."""
    found: list[tuple[str, str]] = []
    for block in blocks_of(PAGE):
        if block.language == "console" and not block.marked:
            for part in block.text.split("$ ")[1:]:
                command, _, printed = part.partition("\n")
                found.append((command, printed))
    return found


@pytest.mark.timeout(900)
def test_the_tutorial_prints_what_it_says(reader: Reader) -> None:
    write_files(PAGE, reader.folder)
    assert {path.name for path in reader.folder.iterdir()} == {"shop.py", "ask.py", "answers.py"}
    checker = doctest.OutputChecker()
    for command, printed in steps():
        if " worker " in command:
            reader.start(command)
            continue
        if any(look in command for look in LOOKS):
            eventually(
                lambda command=command: reader.do(command),
                until=lambda said, printed=printed: checker.check_output(printed, said, FLAGS),
                what=f"what the page says of {command!r}",
            )
        else:
            said = reader.do(command)
            assert checker.check_output(printed, said, FLAGS), (command, printed, said)


def test_the_tutorial_has_a_refusal_and_a_report() -> None:
    told = dict(steps())
    assert "is refused: budget 'tenant:acme'" in told["python ask.py order-1 order-2 order-3"]
    assert "refused           1" in told["celery -A shop budget report"]
    assert [one for one in told if one.startswith("celery -A shop worker")]


def test_a_block_is_left_out_only_with_a_reason() -> None:
    left: list[Block] = [block for block in blocks_of(PAGE) if block.marked]
    assert [block.text.splitlines()[0] for block in left] == ["$ python -m venv .venv"]
