"""Promises about the learned structure of topics: it persists, it is inherited, and no topic moves because of it."""

from __future__ import annotations

from topicstore import TopicFilter
from topicstore.contract.engine import KEYSPACES, STATE, Engine, WriteBatch

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.subjects.subject import LayoutSubject

from .fixtures import Fixtures, Stored, numbered, span

__all__ = ["Structure"]

FLEET = [f"fleet/{n % 4}/{n}/speed" for n in range(200)]


def homes(stored: Stored) -> dict[str, set[int]]:
    """Return the streams that have each topic's messages."""
    found: dict[str, set[int]] = {}
    for topic_filter in stored.everything():
        for stream, rows in stored.streams_of(topic_filter).items():
            for _, message in rows:
                found.setdefault(message.topic, set()).add(stream)
    return found


class Structure(Fixtures):
    """Promises about streams and their structure."""

    @requires("few_streams")
    def test_few_streams_serve_many_topics(self, stored: Stored) -> None:
        """Two hundred topics that differ in two levels make fewer than thirty streams."""
        stored.put(numbered(FLEET, 400))
        assert len(stored.slab.streams(TopicFilter("#"))) < 30
        stored.check("fleet/+/77/speed")

    def test_no_topic_moves(self, stored: Stored) -> None:
        """A topic's messages are all in one stream, also after the slab learned more, and after it was opened again."""
        before: dict[str, set[int]] = {}
        for count in (2, 4, 50, 50, 200, 200):
            stored.put(numbered([*FLEET[:count], "$SYS/x", "other/a", "other/b"], count + 20))
            if count == 50:
                stored.reopen()
            after = homes(stored)
            assert {1} == set(map(len, after.values()))
            assert before == {topic: streams for topic, streams in after.items() if topic in before}
            before = after

    def test_a_generation_goes_by_range_deletes(self, subject: LayoutSubject, engine: Engine) -> None:
        """All that a slab stores lies under its own generation: four range deletes remove it and leave the others."""
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
