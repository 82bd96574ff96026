"""Files that commands write: whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

import click

__all__ = ["write_file"]


def write_file(name: str, content: bytes) -> None:
    """Write a file so that its readers find the old content or the new, and never a part.

    The new one is made beside it and takes its place once it is on disk; what the name links to is
    replaced, not the link. Its mode is kept. What is no file, such as a pipe, is simply written to.

    :raises click.ClickException: where it cannot be written; what was there stays.
    """
    path = Path(os.path.realpath(name))
    if not path.parent.is_dir():
        raise click.ClickException(
            f"{name} cannot be written: there is no folder {path.parent}; make it first"
        )
    try:
        before = path.stat() if path.exists() else None
        if path.is_dir():
            raise click.ClickException(f"{name} is a folder; give the name of a file in it")
        if before is not None and not stat.S_ISREG(before.st_mode):
            path.write_bytes(content)
            return
        _replace(path, content, before)
    except OSError as error:
        raise click.ClickException(
            f"{name} cannot be written: {error.strerror}"
            "; see its folder's rights and space, or give another file"
        ) from error


def _replace(path: Path, content: bytes, before: os.stat_result | None) -> None:
    beside = path.with_name(f".{path.name[:64]}.{secrets.token_hex(8)}.new")
    try:
        with beside.open("xb") as file:
            if before is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
