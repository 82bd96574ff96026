"""The code blocks of the pages, and those that are files of a project."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
#: Languages of what is typed into a terminal; what a prompt is before is typed, the rest is said.
SHELL = ("console", "sh", "bash")
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>\S*)[^\n`]*$")
#: What stands before a block that cannot be run, with the reason.
MARK = re.compile(r"^<!-- not run: .+ -->$")
#: The first line of a block that is a whole file.
FILE = re.compile(r"^# ([\w/]+\.(?:py|toml))$")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    :ivar number: which one of its page it is, from 1.
    :ivar line: where it begins, from 1.
    :ivar marked: whether it is said that it cannot be run.
    """

    page: Path
    number: int
    line: int
    language: str
    text: str
    marked: bool

    @property
    def name(self) -> str:
        """What tests call it."""
        return f"{self.page.relative_to(ROOT)}-{self.number}"

    @property
    def file(self) -> str | None:
        """The path of the file that it is, if it is one."""
        found = FILE.match(self.text.partition("\n")[0])
        return found[1] if found else None


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield all blocks of a page."""
    number, before, lines = 0, "", iter(enumerate(page.read_text("utf-8").splitlines(), start=1))
    for line, text in lines:
        opened = FENCE.match(text)
        if opened is None:
            before = text.strip() or before
            continue
        indent, inside = len(opened["indent"]), []
        for _, within in lines:
            if within.strip() == opened["fence"]:
                break
            inside.append(within[indent:])
        number += 1
        joined = "".join(f"{one}\n" for one in inside)
        yield Block(page, number, line, opened["language"], joined, bool(MARK.match(before)))
        before = ""


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def write_files(page: Path, folder: Path) -> None:
    """Write each block of a page that is a file to its place in ``folder``."""
    for block in blocks_of(page):
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
