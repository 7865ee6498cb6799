"""Tests of publishing and of retained messages."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import msgspec
import topicstore as ts
from topicstore import Message
from topicstore.pubsub.publish import PERSIST
from topicstore.shard.state import ShardState

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.faults.striking import Fault
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.oracle.model import match
from topicstore_conformance.parts.fixtures import SECOND, Fixtures, deaths, drop_first, numbered, payloads
from topicstore_conformance.parts.followers import fetched
from topicstore_conformance.parts.machines import World, stored_keys

__all__ = ["Retained"]


def kept(topic: str, payload: bytes = b"1", client_id: str = "p", seconds: int | None = None) -> Message:
    """Return a message to retain, which expires after some seconds."""
    properties = None if seconds is None else ts.Properties(message_expiry_interval=seconds)
    return Message(topic, payload, client_id, 1, True, properties=properties)


def retained(db: ts.Database, text: str = "#") -> dict[str, bytes]:
    """Return the payloads of retained messages by topic."""
    return {message.topic: message.payload for message in db.retained(text)}


class Retained(Fixtures):
    """Tests of publishing and of retained messages."""

    def test_the_last_retained_message_counts(self, world: World) -> None:
        """A topic's last retained message replaces all earlier ones, and one with an empty payload clears the topic."""
        world.db.publish([kept("a", b"1"), kept("a", b"2", "q"), kept("b", b"1"), kept("c"), Message("a", b"9")])
        assert {"a": b"2", "b": b"1", "c": b"1"} == retained(world.db)
        world.db.publish([kept("a", b"3", "r"), kept("b", b"")])
        assert {"a": b"3", "c": b"1"} == retained(world.db)
        world.db.publish([kept("c", b""), kept("c", b"4"), kept("a", b"5"), kept("a", b"")])
        assert {"c": b"4"} == retained(world.db)

    def test_retained_messages_are_found_by_filter(self, world: World) -> None:
        """A look-up returns the retained messages of the matching topics in order of topics, page by page."""
        topics = [f"{first}/{second}" for first in "ab" for second in ("", "x", "y", "ÿ", "zz")]
        world.db.publish([kept(topic) for topic in [*topics, "a", "$s/a"]])
        assert sorted([*topics, "a"]) == [message.topic for message in world.db.retained("#")]
        assert [f"b/{second}" for second in ("", "x", "y", "zz", "ÿ")] == list(retained(world.db, "b/+"))
        assert ["a/x", "b/x"] == list(retained(world.db, "+/x"))
        assert ["a", *topics[:5]] == sorted(retained(world.db, "a/#"), key=["a", *topics].index)
        found, after = list[str](), None
        while page := world.db.retained("#", after=after, limit=3):
            found += [message.topic for message in page]
            after = found[-1]
        assert sorted([*topics, "a"]) == found

    def test_retained_messages_are_found_among_many(self, world: World) -> None:
        """A look-up returns exactly the retained messages that a filter matches, even if many others lie between."""
        topics = [f"{a}/{b}/{c}" for a in range(10, 20) for b in range(10, 25) for c in "xyz"]
        topics += [f"{a}/{b}" for a in range(10, 20) for b in range(10, 25)] + [f"{a}/12/y/last" for a in range(10, 20)]
        world.db.publish([kept(topic) for topic in topics])
        filters = [
            "+/12/+",
            "+/12/y",
            "+/+/z",
            "14/+/x",
            "14/+/x/#",
            "+/12/#",
            "+/24/#",
            "10/24/+",
            "+/12",
            "+/+/y/last",
        ]
        for text in [*filters, "+/9/x", "+/+/xx", "12/12/#", "1/#"]:
            expected = sorted(topic for topic in topics if match(text, topic))
            assert expected == [message.topic for message in world.db.retained(text)], text
            page = world.db.retained(text, after="13/2", limit=3)
            assert [topic for topic in expected if topic > "13/2"][:3] == [message.topic for message in page], text

    def test_what_is_stored_is_chosen(self, world: World) -> None:
        """A message is stored if a rule, its publisher or a durable subscription requires that, else only routed."""
        world.db.persistence.add("ruled/#")
        world.db.sessions.open("durable", expiry_interval=None).subscribe("wanted", 1)
        asking = ts.Properties(user_properties=((PERSIST, "1"),))
        rows = [Message("ruled/a", b"1", "p", 1), Message("wanted", b"2", "p", 1), Message("other", b"3", "p", 1)]
        rows.append(Message("other", b"4", "p", 1, properties=asking))
        with world.db.subscribe("#") as subscription:
            result = world.db.publish(rows)
            got = fetched(subscription, 4)
        assert (3, 1) == (result.stored, result.routed)
        assert [1, 2, 4] == payloads(world.db.replay("#", order="time"))
        assert [1, 2, 3, 4] == sorted(got)

    @requires("persistent")
    def test_retained_messages_outlast_reopening(self, world: World) -> None:
        """After the database is opened again, retained messages, cleared topics and rules are unchanged."""
        world.db.persistence.add("a/#")
        world.db.publish([kept("a/1", b"1"), kept("a/2", b"2"), kept("b", b"3"), kept("c", b"4")])
        world.db.publish([kept("a/2", b""), kept("b", b"5", "other")])
        for _ in range(2):
            world.reopen()
            assert {"a/1": b"1", "b": b"5", "c": b"4"} == retained(world.db)
            assert ["a/#"] == [rule.topic_filter for rule in world.db.persistence]

    def test_retained_messages_outlive_generations(self, world: World) -> None:
        """A retained message stays when its generation is dropped, and when all messages are deleted."""
        world.db.persistence.add("#")
        world.db.publish([kept(f"t/{number}", b"%d" % number, f"p{number}") for number in range(6)])
        drop_first(world.db)
        assert ([], 6) == (list(world.db.replay("#")), len(retained(world.db)))
        world.db.publish([kept("t/0", b"9")])
        world.db.delete("#")
        world.db.compact()
        assert {f"t/{number}": b"%d" % (number or 9) for number in range(6)} == retained(world.db)

    def test_retained_messages_expire(self, world: World) -> None:
        """A retained message is returned with its remaining expiry interval in seconds, until it expires."""
        world.db.publish([kept("short", seconds=2), kept("long", seconds=100), kept("ever")])
        for passed, expected in ((0, 2), (SECOND - 1, 2), (1, 1), (SECOND - 1, 1)):
            world.clock.now += passed
            [left] = [m.properties for m in world.db.retained("short")]
            assert left is not None
            assert expected == left.message_expiry_interval
        world.clock.now += 1
        assert ["ever", "long"] == sorted(retained(world.db))
        assert 1 == world.db.retention.run().expired
        world.clock.now += 200 * SECOND
        assert ["ever"] == list(retained(world.db))

    def test_state_is_committed_with_a_publish(self, world: World) -> None:
        """A publish writes its state values, whether its messages are stored, retained, routed, or clear a topic."""
        world.db.persistence.add("stored/#")
        topics = [f"{where}/{number}" for where in ("stored", "routed") for number in range(4)]
        rows = [kept(topic, topic.encode(), topic) for topic in topics]
        plain = [msgspec.structs.replace(row, retain=False) for row in rows]
        empty = [kept(topic, b"", topic) for topic in topics]
        for number, batch in enumerate((rows, plain, plain[4:], empty, rows[:1], [])):
            value = b"%d" % number
            world.db.publish(batch, state={shard: [ts.StateWrite(b"key", value)] for shard in (0, 1)})
            assert [value] * 2 == [world.db.state(shard).get(b"key") for shard in (0, 1)]
            expected = {0: topics, 1: topics, 2: topics, 3: [], 4: topics[:1], 5: topics[:1]}[number]
            assert sorted(expected) == sorted(retained(world.db))
        assert 4 + 4 + 4 + 1 == len(list(world.db.replay("#")))

    def test_routed_messages_are_whole(self, world: World) -> None:
        """A message that is only routed reaches its followers with all its fields, and the time of its publish."""
        properties = ts.Properties(content_type="text", user_properties=(("a", "1"), ("a", "2")))
        rows = [Message("t/a", b"1", "p", 1, properties=properties), Message("t/a", b"", "q", 0, True)]
        with world.db.subscribe("#") as subscription:
            assert 2 == world.db.publish(rows).routed
            got = list(subscription.fetch(10, timeout=PATIENCE).messages)
        assert [msgspec.structs.replace(row, timestamp=world.clock.now) for row in rows] == got

    def test_publishers_ask_by_either_value(self, world: World) -> None:
        """A message is stored at its publisher's request if the user property has exactly the value 1 or true."""
        values = ["1", "true", "0", "", "True", "yes", "11"]
        asking = [ts.Properties(user_properties=(("other", "1"), (PERSIST, value))) for value in values]
        for own in asking:
            world.db.publish([Message("t", own.user_properties[1][1].encode(), "p", 1, properties=own)])
        found = [message.payload.decode() for message in world.db.replay("#", order="time")]
        world.db.publish([Message("t", b"x", "p", 1, properties=own) for own in asking])
        assert (["1", "true"], 4) == (found, len(list(world.db.replay("#"))))

    def test_rules_have_publishers_and_levels(self, world: World) -> None:
        """A rule stores the messages of its filter and publisher from its lowest QoS on, until the rule is removed."""
        rules = [
            world.db.persistence.add("a/#", client_id="p"),
            world.db.persistence.add("b/+", least_qos=1),
            world.db.persistence.add("$c/#"),
        ]
        rows = [
            Message(topic, b"", client, qos)
            for topic in ("a", "b/1", "b/1/2", "$c/d", "d")
            for client in "pq"
            for qos in (0, 1)
        ]
        expected = [
            row for row in rows if (row.topic, row.client_id) == ("a", "p") or (row.topic, row.qos) == ("b/1", 1)
        ]
        expected += [row for row in rows if row.topic == "$c/d"]
        for wanted in (expected, [row for row in expected if row.topic != "b/1"]):
            world.db.publish(rows)
            found = [(m.topic, m.client_id, m.qos) for text in ("#", "$c/#") for m in world.db.replay(text)]
            assert sorted((row.topic, row.client_id, row.qos) for row in wanted) == sorted(found)
            for text in ("#", "$c/#"):
                world.db.delete(text)
            world.db.persistence.remove(rules[1])

    def test_stores_cause_the_removal_of_expired_messages(self, world: World) -> None:
        """Without a call of `run`, expired retained messages are removed in the background after others are stored."""
        world.db.publish([kept("ever"), kept("long", seconds=1_000_000)])
        left = stored_keys(world.db)
        world.db.publish([kept("short", seconds=2), kept("other", seconds=3)])
        assert len(left) < len(stored_keys(world.db))

        def removed() -> bool:
            world.clock.now += SECOND
            world.db.store(numbered([0]))
            return left == stored_keys(world.db)

        wait_until(removed, "expired messages to be removed")
        assert ["ever", "long"] == list(retained(world.db))

    def test_replaced_messages_do_not_expire(self, world: World) -> None:
        """A retained message stays if it replaces an expired one during the removal of the expired one."""
        names = [f"t/{number}" for number in range(6)]
        world.db.publish([kept(name, b"old", seconds=1) for name in names])
        world.clock.now += 5 * SECOND
        write, replacements = ShardState.write, [kept(name, b"new") for name in names]

        def late(state: ShardState, *arguments: Any, **named: Any) -> Any:
            """Publish the replacements before the first write of the removal, which has found an expired message."""
            rows, replacements[:] = replacements[:], []
            world.db.publish(rows)
            return write(state, *arguments, **named)

        with patch.object(ShardState, "write", late):
            world.db.retention.run()
        assert dict.fromkeys(names, b"new") == retained(world.db)

    @requires("persistent")
    @deaths
    def test_a_killed_publish(self, world: World, death: Fault) -> None:
        """After a kill during a publish, each shard has all of the call's messages and state, or none of them."""
        world.db.persistence.add("t/#")
        first = [kept(f"t/{number}", b"%d" % number, f"t/{number}") for number in range(8)]
        world.db.publish(first)
        later = [msgspec.structs.replace(message, payload=b"1" + message.payload) for message in first]
        with world.dying(death):
            world.db.publish(later, state={shard: [ts.StateWrite(b"key", b"later")] for shard in (0, 1)})
        there = {message.payload for message in world.db.replay("#")}
        assert {message.payload for message in first} <= there
        for shard in (0, 1):
            mine = [message for message in later if world.db.shard_of(message.topic) == shard]
            done = {message.payload in there for message in mine}
            done |= {retained(world.db)[message.topic] == message.payload for message in mine}
            done.add(world.db.state(shard).get(b"key") == b"later")
            assert 1 == len(done)

    @requires("persistent")
    @deaths
    def test_a_killed_publisher(self, world: World, death: Fault) -> None:
        """After a kill, every message that earlier calls published is stored or retained exactly once."""
        world.db.persistence.add("#")
        for first in range(0, 20, 5):
            world.db.publish(numbered(range(first, first + 5)))
        with world.dying(death):
            world.db.publish(numbered(range(20, 25)))
        found = sorted(payloads(world.db.replay("#")))
        assert [number for number in range(20) if number not in found] == []
        assert sorted(set(found)) == found
