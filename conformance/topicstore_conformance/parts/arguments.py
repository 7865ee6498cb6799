"""Tests of arguments: those beyond a limit are refused before anything changes, and those at a limit are accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import topicstore as ts
from topicstore import Message, Properties, StateWrite
from topicstore.sessions import Will

from topicstore_conformance.parts.fixtures import Fixtures, delivered, numbered, payloads
from topicstore_conformance.parts.machines import World, stored_keys

__all__ = ["Arguments"]

SURROGATE = "\ud800"
FOUR_BYTES = 0xFFFF_FFFF
Row = tuple[Callable[..., object], dict[str, Any]]
"""A method, and arguments for it."""


def each(
    method: Callable[..., object], required: dict[str, Any] | None = None, /, **values: list[Any]
) -> Iterator[Row]:
    """Yield a call for each value of each named argument, together with the required arguments."""
    for name, wrong in values.items():
        for value in wrong:
            yield method, {**(required or {}), name: value}


def refused(db: ts.Database) -> Iterator[Row]:
    """Yield calls with an argument beyond its limit, or of a wrong type."""
    filters = ["", "a/#/b", "a+", "a/b#", "\0", SURROGATE, "a" * 65_536]
    lengths = [-1, FOUR_BYTES + 1, True, "no duration"]
    counts = [0, -1, 1.0, True, 1 << 64]
    client = {"client_id": "new"}
    yield from each(
        db.sessions.open,
        client,
        client_id=["", "x" * 65_536, "\0", SURROGATE],
        receive_maximum=[0, 65_536, 1.0, True],
        expiry_interval=lengths,
        keep_alive=[-1, 65_536, "no duration"],
        overlapping=["twice"],
        batch_size=counts,
        user=[SURROGATE],
        will=[
            Will(Message("a/#", b"", "new")),
            Will(Message("a", b"", "new"), FOUR_BYTES + 1),
            Will(Message("a", b"", "new"), -1),
            Will(Message("a", bytes(65_536), "new")),
        ],
    )
    yield from each(db.sessions.open, {**client, "in_memory": True, "clean_start": True}, expiry_interval=[1, None])
    yield from each(db.sessions.open, {**client, "in_memory": True}, clean_start=[False])
    session = db.sessions.connected("client")
    assert session is not None
    yield from each(
        session.subscribe,
        {"topic_filter": "new"},
        topic_filter=[*filters, "$share/g", "$share//a", "$share/+/a", "$share/g/"],
        qos=[-1, 3, True],
        retain_handling=[-1, 3, True],
        subscription_identifier=[-1, 268_435_456, True],
        no_local=[1, None],
        retain_as_published=[1, None],
    )
    yield from each(session.subscribe, {"topic_filter": "$share/g/a"}, no_local=[True])
    for number in (-1, 65_536, True):
        yield session.publish, {"messages": [Message("t/0", b"9", "client", 2)], "packet_ids": [number]}
    yield session.publish, {"messages": [Message("t/0", b"9", "other", 1)]}
    yield from each(session.disconnect, expiry_interval=lengths)
    yield from each(db.persistence.add, topic_filter=filters, client_id=["\0", SURROGATE], least_qos=[-1, 3, True])
    yield from each(db.retained, {"topic_filter": "#"}, topic_filter=filters, limit=counts, after=[SURROGATE])
    yield from each(
        db.subscribe,
        {"topic_filter": "#"},
        topic_filter=filters,
        window=counts,
        batch_size=counts,
        on_dropped=["ignore"],
        start=[{2: 0}, {-1: 0}, {0: -1}, {0: 1 << 64}, {0: (1 << 64) - 1}, "no time"],
    )
    yield from each(
        db.retention.set,
        max_age=[0, -1, 1e9, True, "no duration"],
        rotate_every=[0, -1, 1e9, True],
        delivered=[0, -1, 1e9, True],
        max_bytes=[*counts, "no size"],
        when_full=["wait"],
        archive_to=["\0", 1],
        filters=[{"a/#/b": 1}, {"a": 0}, {"a": 1e9}],
    )
    yield from each(db.queues.open, name=["", "\0", SURROGATE])
    queue = db.queues.open("queue")
    yield from each(queue.bound, max_messages=counts, max_bytes=[*counts, "no size"], overflow=["wait"])
    yield from each(queue.read, limit=counts)
    yield from each(queue.peek, limit=counts, after=[-1, 1 << 64])
    yield from each(queue.commit, upto=[-1, 1 << 64])
    yield from each(db.replay, {"topic_filter": "#"}, topic_filter=filters, order=["none"], batch_size=counts)
    yield from each(db.delete, {"topic_filter": "#"}, topic_filter=filters)
    [stream, *_] = db.streams("#")
    cursor = db.cursor(stream, "#")
    yield from each(db.read, {"cursor": cursor}, cursor=[None], limit=counts)
    for shard in (2, -1):
        yield db.store, {"messages": [Message("t/0", b"9")], "state": {shard: [StateWrite(b"key", b"9")]}}
    for wrong in (
        *(Message(topic, b"9") for topic in ("", "a/#", "a/+", "\0", SURROGATE, "a" * 65_536)),
        *(Message("t/0", b"9", client_id) for client_id in ("\0", SURROGATE, "x" * 65_536)),
        *(Message("t/0", b"9", "p", qos) for qos in (-1, 3)),
        Message("t/0", b"9", timestamp=-1),
        Message("t/0", b"9", timestamp=1 << 54),
        Message("t/0", b"9", properties=Properties(message_expiry_interval=FOUR_BYTES + 1)),
        Message("t/0", b"9", properties=Properties(message_expiry_interval=-1)),
        Message("t/0", b"9", properties=Properties(payload_format_indicator=2)),
        Message("t/0", b"9", properties=Properties(response_topic="a/#")),
        Message("t/0", b"9", properties=Properties(correlation_data=bytes(65_536))),
        Message("t/0", b"9", properties=Properties(content_type=SURROGATE)),
        Message("t/0", b"9", properties=Properties(user_properties=(("x" * 65_536, ""),))),
    ):
        for call in (db.store, db.publish, queue.append):
            yield call, {"messages": [*numbered([9]), wrong]}


def accepted(db: ts.Database) -> Iterator[Row]:
    """Yield calls with arguments at a limit."""
    longest = "a" * 65_535
    client = {"client_id": "new", "clean_start": True}
    yield from each(
        db.sessions.open,
        client,
        client_id=["x", "x" * 65_535],
        receive_maximum=[1, 65_535],
        expiry_interval=[0, FOUR_BYTES, None, "infinity", "1h"],
        keep_alive=[0, 65_535],
        batch_size=[1, (1 << 64) - 1, None],
        user=["", "\U0010ffff"],
        in_memory=[True],
        will=[Will(Message("a", bytes(65_535), "new"), delay) for delay in (0, FOUR_BYTES)],
    )
    session = db.sessions.connected("client")
    assert session is not None
    yield from each(
        session.subscribe,
        {"topic_filter": "new"},
        topic_filter=["+", "#", longest, "$share/g/" + "a" * 65_526],
        qos=[0, 1, 2],
        retain_handling=[0, 1, 2],
        subscription_identifier=[0, 1, 268_435_455],
        no_local=[False, True],
        retain_as_published=[False, True],
    )
    for number in (1, 65_535):
        yield session.publish, {"messages": [Message("t/0", b"9", "client", 2)], "packet_ids": [number]}
    yield from each(db.persistence.add, topic_filter=["+", longest], client_id=["", "p"], least_qos=[0, 1, 2])
    yield from each(db.retained, {"topic_filter": "#"}, limit=[1, (1 << 64) - 1], after=["", "\U0010ffff"])
    yield from each(
        db.retention.set,
        max_age=[1e-6, 999_999_999.0, "1h", "infinity", None],
        rotate_every=[1e-6, 999_999_999.0, None],
        delivered=[1e-6, 999_999_999.0, None],
        max_bytes=[(1 << 64) - 1, "8TB", None],
        when_full=["drop", "refuse"],
        filters=[{"#": 1e-6}, {longest: None}, {}],
    )
    for name in ("q" * 65_535, ".", "..", "/", "\U0010ffff"):
        yield db.queues.open, {"name": name}
    queue = db.queues.open("queue")
    yield from each(queue.bound, max_messages=[1, (1 << 64) - 1, None], max_bytes=[1, (1 << 64) - 1, "1kB", None])
    yield from each(queue.read, limit=[1, (1 << 64) - 1])
    yield from each(queue.peek, limit=[1, (1 << 64) - 1], after=[0, (1 << 64) - 1])
    for properties in (
        Properties(message_expiry_interval=FOUR_BYTES),
        Properties(message_expiry_interval=0),
        Properties(payload_format_indicator=1),
        Properties(correlation_data=bytes(65_535)),
        Properties(user_properties=(("x" * 65_535, ""),)),
    ):
        for call in (db.store, db.publish, queue.append):
            yield call, {"messages": [Message(longest, b"", "x" * 65_535, 2, properties=properties)]}


class Arguments(Fixtures):
    """Tests of arguments."""

    def test_wrong_arguments_change_nothing(self, world: World) -> None:
        """A call with an argument beyond its limit or of a wrong type raises InvalidArgumentError, without a change."""
        db = world.db
        session = db.sessions.open("client", expiry_interval=None)
        session.subscribe("t/#", 1)
        db.publish(numbered(range(4)))
        queue = db.queues.open("queue")
        queue.append(numbered(range(4)))
        list(db.replay("#"))  # ends the current epochs, if the layout has epochs
        before = stored_keys(db), db.retention.settings, queue.info(), list(db.persistence)
        for call, arguments in refused(db):
            try:
                call(**arguments)
            except ts.InvalidArgumentError:
                continue
            pytest.fail(f"{call} accepts {str(arguments)[:200]}")
        assert before == (stored_keys(db), db.retention.settings, queue.info(), list(db.persistence))
        assert [0, 1, 2, 3] == sorted(payloads(db.replay("#"))) == payloads(queue.peek().messages)
        assert [0, 1, 2, 3] == sorted(delivered(session, acknowledge=True))

    def test_extreme_arguments_are_accepted(self, world: World) -> None:
        """A call with an argument at its limit raises no error."""
        world.db.sessions.open("client", expiry_interval=None)
        for call, arguments in accepted(world.db):
            try:
                call(**arguments)
            except ts.TopicstoreError as error:
                pytest.fail(f"{call} refuses {str(arguments)[:200]}: {error}")
