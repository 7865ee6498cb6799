"""Tests that databases stored by earlier versions can be read, extended and verified.

``fixtures/LAYOUT-vN.fixture`` is a database in the layout's format N; `fixtures/make.py` documents its
content. A fixture is never changed or replaced, because users have databases in that format. If one of
these tests fails, the layout must be able to read its old format again. A new stored form gets the next
`Layout.format`, and a new fixture beside the old one::

    python layouts/tests/fixtures/make.py LAYOUT
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import msgspec
import pyarrow as pa
import pytest
import topicstore as ts
import zstandard
from topicstore import Message, MessageId
from topicstore.contract.engine import DATA, KEYSPACES, Engine, WriteBatch
from topicstore.contract.options import make_options
from topicstore.plugins import load_target, registry
from topicstore.storage.directory.manifest import MANIFEST, read_manifest, write_manifest
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.clock import START
from topicstore_conformance.oracle.checks import check_publishers, drain, replayed
from topicstore_conformance.oracle.model import match as uncached_match
from topicstore_conformance.oracle.strategies import EDGE_TOPICS
from topicstore_conformance.subjects.pairs import Pair, backends_under, known

FIXTURES = Path(__file__).parent / "fixtures"
LATER = START + 3_600_000_000
"""An hour after a fixture's messages were stored."""
FILTERS = (*EDGE_TOPICS, "#", "+/#", "+/+", "fleet/+/bus-7/+", "fleet/1/#", "s3/+", "+/t5", "v1/#", "$SYS/#", "nothing")
match = functools.cache(uncached_match)
Stored = tuple[int, int, Message]


class Fixture(msgspec.Struct, frozen=True):
    """The content of a fixture file: all stored pairs, the messages in order, and saved cursors."""

    manifest: str
    shards: list[dict[str, list[tuple[Any, bytes]]]]
    messages: list[Stored]
    cursors: list[tuple[bytes, list[int]]] = msgspec.field(name="iterators")
    tables: list[dict[str, bytes]] = []

    @property
    def rows(self) -> list[tuple[MessageId, Message]]:
        """Return the messages with their ids."""
        return [(MessageId(shard, position), message) for shard, position, message in self.messages]


def read(path: Path) -> Fixture:
    """Return the content of a fixture file."""
    data = zstandard.ZstdDecompressor().decompress(path.read_bytes(), max_output_size=1 << 30)
    return msgspec.msgpack.decode(data, type=Fixture)


def put(engine: Engine, content: dict[str, list[tuple[Any, bytes]]], tables: dict[str, bytes]) -> None:
    """Write pairs and tables of rows into an engine."""
    write = WriteBatch()
    for keyspace in KEYSPACES:
        for key, value in content[keyspace.name]:
            write.put(keyspace, key if isinstance(key, bytes) else tuple(key), value)
    for table, stream in tables.items():
        write.put_rows(DATA, table, pa.ipc.open_stream(stream).read_all(), 0)
    engine.write(write)


def restore(fixture: Fixture, pair: Pair, path: Path, patch: pytest.MonkeyPatch) -> None:
    """Create a fixture's database in a directory; a backend that isn't persistent gets open engines instead."""
    path.mkdir()
    (path / MANIFEST).write_text(fixture.manifest)
    manifest = read_manifest(path)
    assert manifest is not None
    write_manifest(path, attrs.evolve(manifest, backend=pair.backend))
    target = load_target(registry().backend(pair.backend))
    backend = target(make_options(pair.backend, target.Options, {}))
    engines: dict[Path, Engine] = {}
    for number, (content, tables) in enumerate(zip_longest(fixture.shards, fixture.tables, fillvalue={})):
        place = path / f"shard-{number:04}"
        engines[place] = backend.open_shard(place, KEYSPACES, create=True)
        put(engines[place], content, tables)
    if "persistent" in pair.capabilities:
        for engine in engines.values():
            engine.close()
    else:
        patch.setattr(target, "open_shard", lambda _, place, *__, **___: engines[place])


found = sorted(FIXTURES.glob("*.fixture"))
quick = known("fast_seek")
seldom = [pair for pair in known() if pair.layout not in {other.layout for other in quick}]
"""The pairs of layouts that run only on engines where each read takes milliseconds."""


def cases(path: Path) -> Iterator[Any]:
    """Yield each fixture with each backend that can read it; all except RocksDB, or else the first, are slow tests."""
    readers = [pair for pair in quick + seldom if path.name.startswith(f"{pair.layout}-v")]
    readers.sort(key=lambda pair: pair.backend != "rocksdb")
    for number, pair in enumerate(readers):
        yield pytest.param((path, pair), marks=[pytest.mark.slow] if number else [])


@pytest.fixture(params=chain(*map(cases, found)), ids=lambda case: f"{case[0].stem}-{case[1].backend}")
def restored(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Fixture, Path]:
    """A checked-in fixture and the path of its restored database, which is not open."""
    file, pair = request.param
    need(pair)
    fixture = read(file)
    restore(fixture, pair, tmp_path / "db", monkeypatch)
    return fixture, tmp_path / "db"


@pytest.fixture
def fixture(restored: tuple[Fixture, Path]) -> Fixture:
    """The content of the restored fixture."""
    return restored[0]


@pytest.fixture
def db(restored: tuple[Fixture, Path]) -> Iterator[ts.Database]:
    """The restored database, opened an hour after its messages were stored."""
    with ts.open(restored[1], auto_compact=False, clock=lambda: LATER) as db:
        yield db


def helping(db: ts.Database, size: int) -> int:
    """Return the number of messages to request at a time: more for engines in which each read takes milliseconds."""
    return size if "fast_seek" in registry().backend(db.manifest.backend).capabilities else 40 * size


def check(
    db: ts.Database, rows: list[tuple[MessageId, Message]], filters: Sequence[str] = ("#", "$SYS/+/#", *FILTERS[::6])
) -> None:
    """Compare replays by several filters and start times with the expected rows, and check that nothing is damaged."""
    times = sorted({id_.position >> 11 for id_, _ in rows})
    for number, topic_filter in enumerate(filters):
        start = times[number * 7 % len(times)] if number % 3 else 0
        expected = [row for row in rows if match(topic_filter, row[1].topic) and row[0].position >> 11 >= start]
        got = replayed(db, topic_filter, start, batch_size=helping(db, 99 + 13 * number))
        assert expected == sorted(got, key=lambda row: (row[0].position, row[0].shard))
        check_publishers(got)
    assert (len(rows), []) == ((report := db.verify()).messages, report.damages)


def test_messages(fixture: Fixture, db: ts.Database) -> None:
    """Every stored message and the state beside the messages are read unchanged, before and after a compaction."""
    check(db, fixture.rows, FILTERS)
    assert [b"0", b"1"] == sorted(b"%d" % (int(db.state(shard).get(b"batches") or b"") % 2) for shard in range(2))
    db.compact()
    check(db, fixture.rows, FILTERS)


def test_cursors(fixture: Fixture, db: ts.Database) -> None:
    """A saved cursor continues at its position, before and after a compaction."""
    rows = fixture.rows
    for _ in range(2):
        for number, (saved, rest) in enumerate(fixture.cursors):
            got, _, _ = drain(db, ts.Cursor.from_bytes(saved), helping(db, 1 + number * 5 % 200))
            assert [rows[row] for row in rest] == got
        db.compact()


@pytest.mark.slow
def test_going_on(fixture: Fixture, restored: tuple[Fixture, Path], db: ts.Database) -> None:
    """A database of an earlier version accepts new messages, deletes, compactions and generations."""
    rows = fixture.rows
    for part in range(2):
        messages = [
            Message(topic, b"later", f"c{number % 7}")
            for number, topic in enumerate([*EDGE_TOPICS, "fleet/1/bus-7/speed", f"new/{part}"])
        ]
        result = db.store(messages)
        assert min(result.ids).position > rows[-1][0].position or part
        rows += zip(result.ids, result.batch.to_messages(), strict=True)
        rows.sort(key=lambda row: (row[0].position, row[0].shard))
        left = [row for row in rows if not match("fleet/+/bus-1/+", row[1].topic) and not match("a/#", row[1].topic)]
        assert len(rows) - len(left) == db.delete("fleet/+/bus-1/+") + db.delete("a/#")
        rows = left
        check(db, rows)
        db.compact()
        check(db, rows)
        db.add_generation()
    if restored[1].joinpath("shard-0000").exists():
        db.close()
        with ts.open(restored[1], clock=lambda: LATER + 60_000_000) as again:
            check(again, rows)


@pytest.mark.slow
def test_learned_structure(fixture: Fixture, db: ts.Database) -> None:
    """Each old message is in exactly one of the streams listed for its topic, and that stream's pattern matches."""
    for id_, message in fixture.rows[::37]:
        holding = [
            stream
            for stream in db.streams(message.topic)
            if stream.shard == id_.shard
            and id_ in {found for found, _ in drain(db, db.cursor(stream, message.topic, id_.position >> 11))[0]}
        ]
        assert 1 == len(holding)
        pattern = holding[0].pattern
        assert match(pattern[1:], message.topic[1:]) if pattern[:2] == "$+" else match(pattern, message.topic)


def test_every_format_has_a_fixture() -> None:
    """Every format number of every layout of this package has a fixture."""
    wanted = {
        f"{name}-v{load_target(spec).format}.fixture"
        for name, spec in registry().layouts().items()
        if spec.target.startswith("topicstore_layouts.")
    }
    missing = wanted - {path.name for path in found}
    assert set() == missing, "see the head of this file: make them by layouts/tests/fixtures/make.py"


def script() -> ModuleType:
    """Return `fixtures/make.py` as a module."""
    spec = importlib.util.spec_from_file_location("make", FIXTURES / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("layout", [layout for layout in sorted(script().OPTIONS) if backends_under(layout)])
def test_script(layout: str, tmp_path: Path) -> None:
    """The script makes a fixture like those checked in, and refuses to replace an existing one."""
    script().main([layout, "--into", str(tmp_path)])
    (made,) = tmp_path.iterdir()
    content = read(made)
    assert len(content.messages) > 1_000 < sum(len(rest) for _, rest in content.cursors)
    before = made.read_bytes()
    with pytest.raises(SystemExit, match="stays as it is"):
        script().main([layout, "--into", str(tmp_path)])
    assert before == made.read_bytes()
