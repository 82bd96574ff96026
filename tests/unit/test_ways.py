"""Which message a confirm is of: tags in any order, several at once, and what came back before."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from amqp.exceptions import (
    FrameSyntaxError,
    MessageNacked,
    NotFound,
    RecoverableConnectionError,
)
from celery import Celery

from celery_budget.core.messages import WireMessage
from celery_budget.integration import frames, ways
from celery_budget.integration.capture import Envelope
from celery_budget.integration.parcels import Parcel
from celery_budget.integration.ways import UNANSWERED, UNSENT, Confirmed

APP = Celery("ways", set_as_current=False)
#: What is in the first frame of each message, and nowhere else here.
METHOD = frames.method("x", "k", True, False)


class Channel:
    """A channel whose broker says what a test has it say, once something is waited for."""

    def __init__(self) -> None:
        self.events: dict[str, set[Any]] = defaultdict(set)
        self.calls: list[bytes] = []
        self.said: list[tuple[Any, ...]] = []
        self.channel_id = 1
        transport = SimpleNamespace(write=self.calls.append)
        self.connection: Any = SimpleNamespace(transport=transport, frame_max=131_072)

    def confirm_select(self) -> None:
        pass

    @property
    def sent(self) -> int:
        """How many messages were written."""
        return sum(call.count(METHOD) for call in self.calls)

    def drain_events(self, timeout: float) -> None:
        if not self.said:
            raise TimeoutError
        kind, *values = self.said.pop(0)
        [hear] = self.events[f"basic_{kind}"]
        hear(*values)


def parcel(name: str, **headers: Any) -> Parcel:
    headers, properties = {"id": name, **headers}, {"correlation_id": name}
    envelope = Envelope("text", "utf-8", headers, properties, None, "x", "k", False, False, [])
    return Parcel(APP, WireMessage(name, "shop.draft", b"x", "", "q"), envelope)


def confirmed(channel: Channel, blocked: bool = False) -> Confirmed:
    connection: Any = SimpleNamespace(
        connection_errors=(ConnectionError,), drain_events=channel.drain_events
    )
    producer: Any = SimpleNamespace(channel=channel)
    return Confirmed(producer, connection, 5.0, lambda: blocked)


def back(name: str) -> tuple[Any, ...]:
    """What comes back, with its name; the broker tells no tag."""
    properties = {"correlation_id": name, "application_headers": {"id": name}}
    return ("return", NotFound("nobody"), "x", "k", SimpleNamespace(properties=properties))


ABCD = "abcd"


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ([("ack", tag, False) for tag in (1, 2, 3, 4)], "++++"),
        ([("ack", tag, False) for tag in (4, 2, 1, 3)], "++++"),
        ([("ack", 4, True)], "++++"),
        ([("ack", 0, True)], "++++"),
        ([("ack", 2, True), ("nack", 3, False), ("ack", 4, False)], "++-+"),
        ([("nack", 3, False), ("ack", 4, True)], "++-+"),
        ([("ack", 1, False), ("nack", 3, True), ("ack", 4, False)], "+--+"),
        ([back("c"), ("ack", 2, True), back("d"), ("ack", 4, True)], "++<<"),
        ([back("b"), ("ack", 1, False), ("nack", 3, False), ("ack", 4, True)], "+<-+"),
        # The rest is never answered.
        ([("ack", 2, False)], "?+??"),
        ([("ack", 1, False), back("c")], "+?<?"),
    ],
)
def test_each_answer_is_its_message(said: list[tuple[Any, ...]], wanted: str) -> None:
    channel = Channel()
    way = confirmed(channel)
    channel.said = list(said)
    sent = way.send([parcel(name) for name in ABCD])
    signs = {type(None): "+", MessageNacked: "-", NotFound: "<"}
    assert "".join(signs.get(type(one), "?") for one in sent) == wanted
    assert [one is UNANSWERED for one in sent] == [sign == "?" for sign in wanted]
    assert isinstance(way.broken, TimeoutError) is ("?" in wanted)


def test_tags_go_on_from_one_window_to_the_next() -> None:
    channel = Channel()
    way = confirmed(channel)
    channel.said = [("ack", 2, True)]
    assert way.send([parcel("a"), parcel("b")]) == [None, None]
    channel.said = [("ack", 3, False), ("nack", 4, False)]
    first, second = way.send([parcel("c"), parcel("d")])
    assert first is None
    assert isinstance(second, MessageNacked)


def test_what_cannot_be_written_has_no_tag() -> None:
    channel = Channel()
    way = confirmed(channel)
    channel.said = [("ack", 1, False), ("ack", 2, False)]
    sent = way.send([parcel("a"), parcel("b", unwritable=object()), parcel("c")])
    assert (sent[0], sent[2], way.broken) == (None, None, None)
    assert isinstance(sent[1], FrameSyntaxError)
    assert channel.sent == 2


def test_many_are_sent_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Channel()
    way = confirmed(channel)
    channel.said = [("ack", 4, True)]
    assert way.send([parcel(name) for name in ABCD]) == [None] * 4
    assert (len(channel.calls), channel.sent) == (1, 4)


def test_the_broker_is_listened_to_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Channel()
    way = confirmed(channel)
    waiting: list[int] = []

    def write(raw: bytes) -> None:
        waiting.append(len(channel.said))
        channel.calls.append(raw)
        channel.said.append(("ack", 0, True))

    channel.connection.transport.write = write
    monkeypatch.setattr(ways, "TOGETHER", 3)
    assert way.send([parcel(name) for name in ABCD]) == [None] * 4
    assert (channel.sent, waiting) == (4, [0, 0])


def test_of_a_call_that_fails_nothing_is_known() -> None:
    def fail(raw: bytes) -> None:
        raise ConnectionError

    channel = Channel()
    way = confirmed(channel)
    channel.connection.transport.write = fail
    assert way.send([parcel("a"), parcel("b")]) == [UNANSWERED, UNANSWERED]
    assert isinstance(way.broken, ConnectionError)
    # Nor is anything sent on a channel that was closed.
    channel.connection = None
    way = confirmed(channel)
    assert way.send([parcel("a"), parcel("b")]) == [UNSENT, UNSENT]
    assert isinstance(way.broken, RecoverableConnectionError)


def test_what_comes_back_under_another_name_is_nobodys_answer() -> None:
    channel = Channel()
    way = confirmed(channel)
    channel.said = [back("z"), ("ack", 2, True)]
    assert way.send([parcel("a"), parcel("b")]) == [UNANSWERED, UNANSWERED]
    assert isinstance(way.broken, NotFound)
    # Where only one is on its way it is that one.
    way = confirmed(channel := Channel())
    channel.said = [back("z"), ("ack", 1, False)]
    [sent] = way.send([parcel("a")])
    assert isinstance(sent, NotFound)


def test_a_broker_that_takes_no_more_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Channel()
    monkeypatch.setattr(ways, "TOGETHER", 1)
    way = confirmed(channel, blocked=True)
    channel.said = [("ack", 1, False)]
    assert way.send([parcel("a"), parcel("b")]) == [None, UNSENT]
    assert way.broken is None
