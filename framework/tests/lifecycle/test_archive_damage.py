"""Damaged exports: replays of the damaged generation raise an error that says where, and other replays work."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest
import topicstore as ts
from topicstore.contract.layout import Damage
from topicstore.lifecycle.archive_slab import ArchiveSlab, rows_of
from topicstore.lifecycle.export_format import read_contents
from topicstore_conformance.faults.clock import Clock

Fill = Callable[..., None]


@pytest.fixture
def target(db: ts.Database, tmp_path: Path) -> Path:
    """An export to which both sealed generations were archived, and whose files no replay has read."""
    db.archives.archive(tmp_path / "export")
    return tmp_path / "export"


def slab_of(directory: Path) -> ArchiveSlab:
    contents = read_contents(directory)
    assert contents is not None
    return ArchiveSlab(directory, contents.database, contents.shard, contents.generation, contents.messages)


def rows_in(directory: Path) -> list[pa.RecordBatch]:
    return [batch.to_arrow(ids=True) for batch in rows_of([slab_of(directory)])]


def test_every_byte_counts(tmp_path: Path, fill: Fill) -> None:
    """A change of any byte of a file raises an error, or doesn't change the rows that are read."""
    with ts.open(tmp_path / "db", backend="memory") as db:
        fill(db, 20)
        db.add_generation()
        db.archives.export(tmp_path / "export")
    directory = tmp_path / "export" / "shard=0000" / "generation=0001"
    part = directory / "part-00000.parquet"
    whole, expected = part.read_bytes(), rows_in(directory)
    chance, harmless, unseen = random.Random(1), [], []
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << chance.randrange(8)
        part.write_bytes(flipped)
        if place % 16 == 0 and not any(isinstance(one, Damage) for one in slab_of(directory).verify(0)):
            unseen.append(place)
        with suppress(ts.CorruptionError):
            assert rows_in(directory) == expected
            harmless.append(place)
    assert harmless == [0, 1, 2, 3]  # the magic number at the beginning, which only other readers check
    assert unseen == []


def test_a_bit_that_flips_in_any_file_is_reported(db: ts.Database, target: Path) -> None:
    """`verify` reports a flipped bit in any file of an export, even if replays don't need or have read the file."""
    assert list(db.replay("#"))
    assert db.verify().ok
    chance, files = random.Random(13), sorted(file for file in target.rglob("*") if file.is_file())
    assert {file.suffix for file in files} == {".parquet", ".json"}
    for file in files * 10:
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[chance.randrange(len(whole) - 1)] ^= 1 << chance.randrange(8)  # the last byte is a line feed
        file.write_bytes(flipped)
        assert not db.verify().ok, (file, flipped)
        file.write_bytes(whole)
        assert db.verify().ok


def damage(kind: str, slab: Path) -> None:
    """Damage a slab's directory in the way that `kind`, one of `KINDS`, names."""
    part, contents = slab / "part-00000.parquet", slab / "_topicstore_slab.json"
    match kind:
        case "truncated":
            part.write_bytes(part.read_bytes()[:-100])
        case "emptied":
            part.write_bytes(b"")
        case "missing file":
            part.unlink()
        case "missing contents":
            contents.unlink()
        case "garbled contents":
            contents.write_bytes(contents.read_bytes().replace(b'"messages":', b'"messages":1'))
        case "missing directory":
            shutil.rmtree(slab)
        case "another file":
            shutil.copy(slab.parent / "generation=0002" / part.name, part)
        case "another generation's":
            shutil.rmtree(slab)
            shutil.copytree(slab.parent / "generation=0002", slab)


KINDS = [
    "truncated",
    "emptied",
    "missing file",
    "missing contents",
    "garbled contents",
    "missing directory",
    "another file",
    "another generation's",
]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_named_and_the_rest_is_there(db: ts.Database, target: Path, kind: str, start: int) -> None:
    directory = target / "shard=0000" / "generation=0001"
    second = start + 100_000
    rest = list(db.replay("#", second))
    damage(kind, directory)
    with pytest.raises(ts.CorruptionError) as bad:
        list(db.replay("#"))
    assert bad.value.place.startswith(f"shard 0, generation 1, {directory}")
    assert list(db.replay("#", second)) == rest
    report = db.verify()
    assert [one.place.startswith(f"shard 0, generation 1, {directory}") for one in report.damages] == [True]
    assert report.messages < 210
    assert db.info().messages == 210
    db.store([ts.Message("a", b"")])
    assert db.drop_generation(1)
    assert db.verify().ok


def test_a_generation_comes_back_with_its_files(db: ts.Database, tmp_path: Path) -> None:
    """Archived messages are readable again as soon as their files are back, without reopening the database."""
    target, before = tmp_path / "export", list(db.replay("#", order="time"))
    db.archives.archive(target)
    target.rename(tmp_path / "elsewhere")
    with pytest.raises(ts.CorruptionError, match="no complete export"):
        list(db.replay("#"))
    assert "damage" in db.info().shards[0].slabs[1].details
    (tmp_path / "elsewhere").rename(target)
    assert list(db.replay("#", order="time")) == before


@pytest.mark.parametrize("mount_point", ["empty", "used before"])
def test_a_volume_that_is_not_mounted_is_no_archive(
    db: ts.Database, tmp_path: Path, clock: Clock, mount_point: str
) -> None:
    """If the archive's volume isn't mounted, its mount point is left unchanged, and errors say why."""
    cold, volume = tmp_path / "cold", tmp_path / "volume"
    db.archives.archive(cold, generations=[1])
    before = list(db.replay("#", order="time", start=db.generations()[1].created))
    cold.rename(volume)
    if mount_point == "empty":
        cold.mkdir()
    else:
        db.archives.export(tmp_path / "below", generations=[2])
        (tmp_path / "below").rename(cold)
    below = sorted(cold.rglob("*"))
    db.retention.stop()
    db.retention.set(max_age=1, archive_to=str(cold))
    for attempt in (db.archives.archive, db.archives.export):
        with pytest.raises(ts.ManifestMismatchError, match="lacks the archived generations 1"):
            attempt(cold)
    with pytest.warns(RuntimeWarning, match="lacks the archived generations 1"):
        report = db.retention.run(clock.now + 3_600_000_000)
    assert ((), (), True) == (report.archived, report.dropped, "lacks the archived generations 1" in report.why[0])
    clock.now += 3_600_000_000
    with pytest.raises(ts.ManifestMismatchError, match="lacks the archived generations 1"):
        db.retention._work(False)  # the failure of the background thread
    assert below == sorted(cold.rglob("*"))
    assert [1] == [one.generation for one in db.archives]
    assert before == list(db.replay("#", order="time", start=db.generations()[1].created))
    shutil.rmtree(cold)
    volume.rename(cold)
    assert db.archives.archive(cold).generations == tuple(range(2, db.generations()[-1].number))
    assert 210 == len([*db.replay("#"), *db.replay("$SYS/#")])


def test_a_database_opens_without_its_export(tmp_path: Path, fill: Fill) -> None:
    with ts.open(tmp_path / "db") as db:
        fill(db)
        db.add_generation()
        fill(db, 10)
        db.archives.archive(tmp_path / "export")
    shutil.rmtree(tmp_path / "export")
    with ts.open(tmp_path / "db") as db:
        db.store([ts.Message("fleet/new", b"")])
        with pytest.raises(ts.CorruptionError):
            list(db.replay("fleet/new"))
        current = db.generations()[-1].created
        assert len(list(db.replay("fleet/new", current + 1))) == 1


def test_another_databases_export_does_not_pass_for_its_own(db: ts.Database, target: Path, tmp_path: Path) -> None:
    with ts.open(tmp_path / "other", backend="memory", shards=2) as other:
        for _ in range(2):
            other.store([ts.Message("a", b"%d" % number, f"c{number}") for number in range(20)])
            other.add_generation()
        other.archives.export(tmp_path / "others")
    shutil.rmtree(target)
    (tmp_path / "others").rename(target)
    with pytest.raises(ts.CorruptionError, match="it is the export of database"):
        list(db.replay("#"))


def test_a_row_that_differs_keeps_its_generation_local(db: ts.Database, tmp_path: Path) -> None:
    """Before stored messages are removed, an earlier export is compared with them."""
    db.archives.export(tmp_path / "export")
    clock = Clock()
    with ts.open(tmp_path / "twin", backend="memory", shards=2, clock=clock) as twin:
        twin.storage.manifest = db.manifest  # like a copy of the database with other messages at the same positions
        for number in range(200):
            clock.now += 1_000
            twin.store([ts.Message("a", b"", f"c{number % 5}")])
            if number % 100 == 99:
                twin.add_generation()
        with pytest.raises(ts.CorruptionError, match="differs from what is stored"):
            twin.archives.archive(tmp_path / "export")
        assert [] == list(twin.archives)
        assert all(one.live_bytes for one in twin.generations()[:2])
