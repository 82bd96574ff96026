"""What the relay writes for Celery's filesystem transport is whole once a reader can find it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kombu import Queue
from kombu.transport import filesystem

from celery_budget import budgeted
from tests.integration.support import Shop


@contextmanager
def looking(*folders: str) -> Iterator[list[str]]:
    """Read all that kombu would find in folders whenever a call in C returns; list what is broken.

    Before its return nothing has come into being, so that every moment is looked at.
    """
    broken: list[str] = []

    def look(frame: object, event: str, argument: object) -> None:
        if event == "c_return":
            for path in (path for folder in folders for path in Path(folder).iterdir()):
                if path.suffix in (".msg", ".exchange"):
                    try:
                        json.loads(path.read_bytes())
                    except ValueError:
                        broken.append(path.name)

    sys.setprofile(look)
    try:
        yield broken
    finally:
        sys.setprofile(None)


@pytest.fixture
def shop(make_shop: Callable[..., Shop], embedded: dict[str, Any]) -> Shop:
    shop = make_shop(**embedded)
    budgeted(budget="tenant:a", estimate=1)(shop.app.task(name="files.draft", shared=False)(draft))
    return shop


def draft(text: str) -> None:
    pass


def folder(shop: Shop, name: str) -> str:
    return str(shop.app.conf.broker_transport_options[name])


def test_no_worker_finds_half_a_message(shop: Shop) -> None:
    control, queue = folder(shop, "control_folder"), folder(shop, "data_folder_out")
    texts = ["a", "b" * 100_000, "ü"]
    for text in texts:
        shop.task("files.draft").delay(text)
    with looking(control, queue) as broken:
        assert shop.relay().published == 3
    assert broken == []
    assert len(os.listdir(queue)) == 3
    assert sorted(message.decode()[0][0] for message in shop.received()) == texts
    assert len(os.listdir(control)) == 1


def test_what_others_have_bound_meanwhile_stays(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds no file and makes one; the second does not overwrite the first."""
    link = os.link
    [own] = shop.app.amqp.queues.values()

    def late(*paths: Any) -> None:
        monkeypatch.undo()
        with shop.app.connection_for_write() as connection:
            Queue("other", own.exchange, "other")(connection).declare()
        link(*paths)

    monkeypatch.setattr(os, "link", late)
    shop.task("files.draft").delay("a")
    assert shop.relay().published == 1
    table = Path(folder(shop, "control_folder"), f"{own.exchange.name}.exchange").read_text()
    assert {row[2] for row in json.loads(table)} == {own.name, "other"}


def test_a_folder_where_a_file_has_one_name_only_will_do(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: Any) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    shop.task("files.draft").delay("a")
    assert shop.relay().published == 1
    assert len(shop.received()) == 1
    assert len(os.listdir(folder(shop, "control_folder"))) == 1


def test_what_cannot_be_written_leaves_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, text: str) -> None:
        self.touch()
        raise OSError(28, "no space left")

    shop.task("files.draft").delay("a")
    monkeypatch.setattr(Path, "write_text", full)
    assert shop.relay().published == 0
    assert os.listdir(folder(shop, "data_folder_out")) == []
    monkeypatch.undo()
    shop.make_due()
    assert shop.relay().published == 1


def test_a_transport_with_channels_of_its_own_keeps_them(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[str] = []

    class Own(filesystem.Channel):
        def _put(self, queue: str, *args: Any, **kwargs: Any) -> None:
            put.append(queue)
            super()._put(queue, *args, **kwargs)

    monkeypatch.setattr(filesystem.Transport, "Channel", Own)
    shop.task("files.draft").delay("a")
    assert shop.relay().published == 1
    assert put == [shop.app.conf.task_default_queue]
