"""Check that relative links in pages lead to a file and heading: at the root, in docs, in examples.

Exits 1 and names file, line and target of each link that does not; external links are not followed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
INLINE = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'][^)]*)?\s*\)")
REFERENCE = re.compile(r"^\s{0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s|$)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$")
ANCHOR = re.compile(r"<a\s+(?:id|name)=[\"']([^\"']+)[\"']")
SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)
FENCE = re.compile(r"^\s*(```+|~~~+)")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a page outside fenced code."""
    fence = ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        mark = FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence):
            fence = ""
        elif not fence:
            yield number, line


def slug(heading: str) -> str:
    """The anchor that common Markdown hosts give a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[^\w\- ]", "", text.replace("`", "")).strip().lower()
    return text.replace(" ", "-")


@cache
def anchors(path: Path) -> frozenset[str]:
    """All anchors of a page; a repeated heading gets -1, -2 and so on."""
    found: set[str] = set()
    seen: dict[str, int] = {}
    for _, line in prose(path):
        found.update(ANCHOR.findall(line))
        heading = HEADING.match(line)
        if heading:
            name = slug(heading[1])
            count = seen.get(name, 0)
            seen[name] = count + 1
            found.add(f"{name}-{count}" if count else name)
    return frozenset(found)


def problem(page: Path, target: str) -> str | None:
    """Why a link of a page leads nowhere, or None where it is fine or not ours to check."""
    if SCHEME.match(target) or target.startswith("//"):
        return None
    name, _, fragment = unquote(target).partition("#")
    if name.startswith("/"):
        return "is absolute; links inside the repository are relative"
    file = (page.parent / name).resolve() if name else page
    if not file.is_relative_to(ROOT):
        return "leaves the repository"
    if not file.exists():
        return "does not exist"
    if fragment and file.suffix == ".md" and fragment not in anchors(file):
        return f"has no heading #{fragment}"
    return None


def main() -> int:
    """Check all pages, print what is broken, return the exit code."""
    folders = (ROOT / "docs", ROOT / "examples")
    pages = [*ROOT.glob("*.md"), *(page for one in folders for page in one.rglob("*.md"))]
    links = broken = 0
    for page in sorted(pages):
        for number, line in prose(page):
            text = re.sub(r"`[^`]*`", "", line)
            reference = REFERENCE.match(text)
            for target in [*INLINE.findall(text), *([reference[1]] if reference else [])]:
                links += 1
                reason = problem(page, target)
                if reason:
                    broken += 1
                    print(f"{page.relative_to(ROOT)}:{number}: {target} {reason}", file=sys.stderr)
    print(f"{len(pages)} pages, {links} links, {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
