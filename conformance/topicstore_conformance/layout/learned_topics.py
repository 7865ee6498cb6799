"""Tests of the learned structure of topics: it persists, is inherited, and never moves a topic to another stream."""

from __future__ import annotations

from itertools import product

from topicstore import TopicFilter
from topicstore.contract.engine import KEYSPACES, STATE, Engine, WriteBatch

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.subjects.subject import LayoutSubject

from .fixtures import Fixtures, Stored, numbered, span

__all__ = ["Structure"]

FLEET = [f"fleet/{n % 4}/{n}/speed" for n in range(200)]


def homes(stored: Stored) -> dict[str, set[int]]:
    """Return the numbers of the streams that hold each topic's messages, by topic."""
    found: dict[str, set[int]] = {}
    for topic_filter in stored.everything():
        for stream, rows in stored.streams_of(topic_filter).items():
            for _, message in rows:
                found.setdefault(message.topic, set()).add(stream)
    return found


class Structure(Fixtures):
    """Tests of streams and the learned structure."""

    @requires("few_streams")
    def test_few_streams_serve_many_topics(self, stored: Stored) -> None:
        """Two hundred topics that differ in two levels are stored in fewer than thirty streams."""
        stored.put(numbered(FLEET, 400))
        assert len(stored.slab.streams(TopicFilter("#"))) < 30
        stored.check("fleet/+/77/speed")

    def test_no_topic_moves(self, stored: Stored) -> None:
        """A topic's messages are always in one stream, also after the slab learned more and after reopening."""
        before: dict[str, set[int]] = {}
        for count in (2, 4, 50, 50, 200, 200):
            stored.put(numbered([*FLEET[:count], "$SYS/x", "other/a", "other/b"], count + 20))
            if count == 50:
                stored.reopen()
            after = homes(stored)
            assert {1} == set(map(len, after.values()))
            assert before == {topic: streams for topic, streams in after.items() if topic in before}
            before = after

    def test_the_structure_is_there_after_reopening(self, stored: Stored) -> None:
        """A slab that is opened again has the same streams, numbers and patterns, and the same learned structure."""
        for count in (1, 30, 200):
            stored.put(numbered([*FLEET[:count], "$SYS/a", "$SYS/b"], 230))
            asked = [TopicFilter(t) for t in ("#", "$SYS/#", "fleet/1/#", "fleet/+/7/+")]
            before = [sorted((i.stream, i.pattern) for i in stored.slab.streams(t)) for t in asked]
            nodes = sorted((node.path, node.stream or 0) for node in stored.slab.learned())
            stored.reopen()
            assert before == [sorted((i.stream, i.pattern) for i in stored.slab.streams(t)) for t in asked]
            assert nodes == sorted((node.path, node.stream or 0) for node in stored.slab.learned())
            stored.check_all()

    def test_more_structures_than_a_byte_counts(self, stored: Stored) -> None:
        """Topics with 512 different structures are found by filters, also after reopening and compaction."""
        stored.put(numbered(["/".join(levels) for levels in product("ab", repeat=9)], 512))
        filters = "#", "b/#", "+/+/b/#", "b/b/b/b/b/b/b/b/+", "b/b/b/b/b/b/b/b/b", "a/b/a/b/a/b/a/b/a"
        for change in (stored.end_epoch, stored.reopen, stored.compact):
            change()
            for topic_filter in filters:
                stored.check(topic_filter)

    def test_learned_names_the_streams(self, stored: Stored) -> None:
        """Learned nodes are listed with parents before children, and a node's path equals the pattern of its stream."""
        stored.put(numbered([*FLEET, "$SYS/a", "a", "a/b"], 300))
        seen: set[tuple[str, ...]] = set()
        patterns = {i.stream: i.pattern for t in stored.everything() for i in stored.slab.streams(TopicFilter(t))}
        for node in stored.slab.learned():
            assert len(node.path) <= 1 or node.path[:-1] in seen
            seen.add(node.path)
            if node.stream is not None and node.stream in patterns:
                assert patterns[node.stream] in ("/".join(node.path), "#")

    # --- from one generation to the next ---

    def test_a_generation_inherits(self, stored: Stored, subject: LayoutSubject, engine: Engine) -> None:
        """The structure that a new generation inherits is stored, and is complete after reopening."""
        stored.put(numbered([*FLEET, "$SYS/a", "$SYS/b", "$SYS/c", "$SYS/d"], 300))
        heir = Stored(subject, engine, stored.generation + 1, stored.last)
        heir.create(stored.slab)
        learned = sorted(node.path for node in heir.slab.learned())
        heir.reopen()
        assert learned == sorted(node.path for node in heir.slab.learned())
        for again in range(3):
            heir.put(numbered([f"fleet/new/{n}/{again}" for n in range(20)] + FLEET[::9] + ["$SYS/e"], 90))
            heir.reopen()
            heir.check_all()
            heir.check("fleet/+/7/#")
        assert heir.slab.info().streams < 30 or "few_streams" not in subject.capabilities
        stored.check_all()

    def test_an_heir_has_no_messages_of_its_parent(
        self, stored: Stored, subject: LayoutSubject, engine: Engine
    ) -> None:
        """A new generation that inherits structure has no messages, and changes to it don't affect its parent."""
        stored.put(numbered(FLEET, 200))
        heir = Stored(subject, engine, stored.generation + 1, stored.last)
        heir.create(stored.slab)
        heir.check_all()
        heir.put(numbered(FLEET[::3], 30))
        heir.delete("#")
        heir.check_all()
        stored.check_all()

    def test_generations_keep_apart(self, subject: LayoutSubject, engine: Engine) -> None:
        """Slabs of one engine don't see each other's messages, even at the same positions and topics."""
        slabs = []
        for generation in (1, 2, 3, 2**32 - 2):
            slab = Stored(subject, engine, generation)
            slab.create()
            slab.put(numbered(FLEET[generation % 7 :: 9], 40 + generation % 7))
            slabs.append(slab)
        slabs[1].delete("fleet/1/#")
        slabs[2].compact()
        for slab in slabs:
            slab.check_all()
            slab.reopen()
            slab.check_all()

    def test_a_generation_goes_by_range_deletes(self, subject: LayoutSubject, engine: Engine) -> None:
        """Range deletes of a generation's keys, one in each keyspace but ``state``, remove exactly its slab."""
        slabs = [Stored(subject, engine, generation) for generation in (1, 2, 3)]
        for slab in slabs:
            slab.create()
            slab.put(numbered(FLEET, 90))
            slab.compact()
            slab.put(numbered(FLEET[::2], 30))
        write = WriteBatch()
        for keyspace in KEYSPACES:
            if keyspace is not STATE:
                write.delete_range(keyspace, *span(keyspace, 2))
        engine.write(write)
        everything = [(k, key) for k in KEYSPACES for chunk in engine.scan(k) for key, _ in chunk]
        assert {1, 3} >= {key[0] if k.shape else int.from_bytes(key[:4], "big") for k, key in everything}
        assert STATE not in {keyspace for keyspace, _ in everything}
        for slab in (slabs[0], slabs[2]):
            slab.reopen()
            slab.check_all()
        again = Stored(subject, engine, 2)
        again.create()
        again.check_all()
