"""The way from plain Celery, gone as it says: each file and command, in the order of the page."""

from __future__ import annotations

import doctest

import pytest

from tests.cluster import eventually
from tests.docs.pages import ROOT, blocks_of
from tests.docs.reader import FLAGS, LOOKS, Reader

PAGE = ROOT / "docs" / "howto" / "migrate-from-celery.md"


@pytest.mark.timeout(900)
def test_the_guide_does_what_it_says(reader: Reader) -> None:
    checker = doctest.OutputChecker()

    def said(command: str, printed: str) -> bool:
        return checker.check_output(printed, reader.do(command), FLAGS)

    commands = []
    for block in blocks_of(PAGE):
        if block.marked:
            continue
        if block.file:
            (reader.folder / block.file).write_text(block.text, encoding="utf-8")
            continue
        assert block.language == "console"
        for part in block.text.split("$ ")[1:]:
            command, _, printed = part.partition("\n")
            commands.append(command)
            if " worker " in command:
                reader.start(command)
            elif any(look in command for look in LOOKS):
                eventually(
                    lambda command=command, printed=printed: said(command, printed),
                    what=f"what the page says of {command!r}",
                )
            else:
                told = reader.do(command)
                assert checker.check_output(printed, told, FLAGS), (command, printed, told)
    assert commands.count("python refused.py") == 2
