"""Tests of archived generations, which are read from exports."""

from __future__ import annotations

from pathlib import Path

import topicstore as ts
from topicstore import Message

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.faults.striking import Fault
from topicstore_conformance.parts.fixtures import DAY, SECOND, Fixtures, deaths, numbered, payloads
from topicstore_conformance.parts.followers import fetched
from topicstore_conformance.parts.machines import World

__all__ = ["Archiving"]


def fill(world: World) -> None:
    """Store twenty messages in each of three generations."""
    for first in (0, 20, 40):
        for part in range(first, first + 20, 5):
            world.clock.now += SECOND
            world.db.store(numbered(range(part, part + 5)))
        if first < 40:
            world.db.add_generation()


def export(world: World) -> Path:
    """Return the directory of the archive, which lies next to the database."""
    return world.path.with_name("export")


def everything(db: ts.Database) -> tuple[list[ts.Message], ...]:
    """Return the messages of several replays, sorted if the replay defines no order."""
    ways = (
        sorted(db.replay("#"), key=lambda message: message.payload),
        list(db.replay("t/1", order="time")),
        list(db.replay("+/2", reverse=True)),
    )
    return tuple(ways)


class Archiving(Fixtures):
    """Tests of archived generations."""

    def test_archived_messages_read_as_before(self, world: World) -> None:
        """Every replay of an archived generation returns the same messages in the same order as before archiving."""
        fill(world)
        before = everything(world.db)
        times = sorted(message.timestamp or 0 for message in before[0])
        ranges = [(times[10], times[30]), (times[25], None), (times[0], times[0] + 1)]
        between = [sorted(payloads(world.db.replay("#", *one))) for one in ranges]
        world.db.archives.archive(export(world))
        assert [1, 2] == [archive.generation for archive in world.db.archives]
        assert before == everything(world.db)
        assert between == [sorted(payloads(world.db.replay("#", *one))) for one in ranges]

    def test_any_messages_of_an_archive_can_be_selected(self, world: World) -> None:
        """A filter selects its messages from an archive, however they are interleaved with messages of other topics."""
        places = range(6)
        for chosen in range(1 << 5):
            rows = [Message(f"{chosen}/{(2 * chosen + 1) >> n & 1}", b"%d" % (10 * chosen + n), "p") for n in places]
            world.db.store(rows)
        world.db.add_generation()
        world.db.archives.archive(export(world))
        for chosen in range(1 << 5):
            for side in (0, 1):
                expected = [10 * chosen + n for n in places if (2 * chosen + 1) >> n & 1 == side]
                assert expected == payloads(world.db.replay(f"{chosen}/{side}", order="time"))

    def test_archived_messages_are_counted(self, world: World) -> None:
        """Counts and the report of `verify` are the same before and after a generation is archived."""
        fill(world)
        before = [(tally.topic, tally.messages) for tally in world.db.topics()], world.db.info().messages
        world.db.archives.archive(export(world))
        assert before == ([(tally.topic, tally.messages) for tally in world.db.topics()], world.db.info().messages)
        assert (60, []) == ((report := world.db.verify()).messages, report.damages)

    def test_reports_of_exports(self, world: World) -> None:
        """An export reports its progress, the messages, bytes and parts that it writes, and the parts that existed."""
        fill(world)
        steps: list[tuple[int, int]] = []
        first = world.db.archives.export(export(world), progress=lambda done, of: steps.append((done, of)))
        files = [path.stat().st_size for path in export(world).rglob("*.parquet")]
        assert ((1, 2), 40, sum(files), 0) == (first.generations, first.messages, first.file_bytes, first.slabs_before)
        assert [(done, first.slabs) for done in range(first.slabs + 1)] == steps
        assert sorted(range(60)) == sorted(payloads(world.db.replay("#")))
        for call in (world.db.archives.export, world.db.archives.archive):
            again = call(export(world))
            assert ((1, 2), 0, 0) == (again.generations, again.messages, again.file_bytes)
            assert (0, first.slabs) == (again.slabs, again.slabs_before)

    def test_streams_of_archives(self, world: World) -> None:
        """An archived generation has a stream in each shard that has messages of it, and none in the others."""
        world.db.store(numbered(range(20), client_id="p"))
        holder = world.db.shard_of("p")
        world.db.add_generation()
        world.db.archives.archive(export(world))
        assert {0: 0, 1: 0} | {holder: 1} == {one.number: one.slabs[1].streams for one in world.db.info().shards}
        assert {holder} == {stream.shard for stream in world.db.streams("#") if stream.generation == 1}

    @requires("persistent")
    def test_archives_outlast_reopening(self, world: World) -> None:
        """After the database is opened again, archived messages are still read."""
        fill(world)
        before = everything(world.db)
        world.db.archives.archive(export(world))
        world.reopen()
        assert before == everything(world.db)
        assert [1, 2] == [archive.generation for archive in world.db.archives]

    def test_a_dropped_archive_is_gone(self, world: World) -> None:
        """A dropped archived generation is in no replay and no count, and all other messages stay."""
        fill(world)
        world.db.archives.archive(export(world))
        assert world.db.drop_generation(1)
        assert list(range(20, 60)) == sorted(payloads(world.db.replay("#")))
        assert [2] == [archive.generation for archive in world.db.archives]
        assert 40 == world.db.info().messages

    def test_followers_read_archives(self, world: World) -> None:
        """Followers and sessions that have not read a generation when it is archived get each message once."""
        session = world.db.sessions.open("client", expiry_interval=None)
        session.subscribe("t/#", 1)
        with world.db.subscribe("t/#", 0) as subscription:
            fill(world)
            found = fetched(subscription, 7)
            world.db.archives.archive(export(world))
            found += fetched(subscription, 60 - len(found))
        assert list(range(60)) == sorted(found)
        list(world.db.replay("#"))  # ends the current epochs, if the layout has epochs
        got = [int(item.message.payload) for item in session.deliver()]  # type: ignore[union-attr]
        assert list(range(60)) == sorted(got)

    def test_expired_generations_are_archived(self, world: World) -> None:
        """If an archive directory is set, retention archives old generations, and every message is still read once."""
        world.db.retention.set(max_age=86_400.0, rotate_every=3_600.0, archive_to=str(export(world)))
        fill(world)
        world.clock.now += 3 * DAY
        world.db.retention.run()
        world.clock.now += DAY
        world.db.retention.run()
        assert 2 <= len(world.db.archives)
        assert list(range(60)) == sorted(payloads(world.db.replay("#")))

    @requires("persistent")
    @deaths
    def test_a_killed_archiving(self, world: World, death: Fault) -> None:
        """After a kill during an archiving, every message is read once, and the archiving can be repeated."""
        fill(world)
        before = everything(world.db)
        with world.dying(death):  # the fault is at an engine's write, so the files of the export are kept
            world.db.archives.archive(export(world))
        assert before == everything(world.db)
        world.db.archives.archive(export(world))
        assert before == everything(world.db)
        assert [1, 2] == [archive.generation for archive in world.db.archives]
