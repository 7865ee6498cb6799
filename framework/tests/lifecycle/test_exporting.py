"""Exports: their files, which other programs can read, and exports that continue an earlier one."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from functools import partial
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import topicstore as ts
from topicstore.lifecycle import exporting
from topicstore.lifecycle.export_format import COLUMNS, read_contents, read_head
from topicstore.lifecycle.exporting import ExportReport
from topicstore_conformance.faults.threads import together

pytestmark = pytest.mark.usefixtures("small")


def rows(db: ts.Database, topic_filter: str = "#") -> pa.Table:
    return pa.Table.from_batches(db.replay_arrow(topic_filter, order="time", ids=True), ts.SCHEMA_WITH_IDS)


def files(target: Path) -> dict[str, bytes]:
    return {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}


# --- how far it is ---


def test_an_export_reports_its_parts_and_ends_if_the_callback_raises(db: ts.Database, tmp_path: Path) -> None:
    """An export reports progress by part, and ends if the callback raises; the next export writes the missing parts."""
    told: list[tuple[int, int]] = []

    def end(done: int, parts: int) -> None:
        told.append((done, parts))
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        db.archives.export(tmp_path / "export", progress=end)
    parts = told[0][1]
    assert [(0, parts), (1, parts)] == told
    report = db.archives.export(tmp_path / "export", progress=lambda done, _: told.append((done, -1)))
    assert (parts - 1, 1) == (report.slabs, report.slabs_before)
    assert [(done, -1) for done in range(parts + 1)] == told[2:]


def test_archiving_reports_generations(db: ts.Database, tmp_path: Path) -> None:
    """Archiving reports its progress before each generation and at the end."""
    told: list[tuple[int, int]] = []
    db.archives.archive(tmp_path / "export", progress=lambda *done: told.append(done))
    assert [(0, 2), (1, 2), (2, 2)] == told


# --- what is on disk ---


def test_other_programs_read_every_column_of_every_row(db: ts.Database, tmp_path: Path) -> None:
    """Other programs can read all columns of all rows, and take the shard from the path."""
    report = db.archives.export(tmp_path / "export")
    exported = ds.dataset(tmp_path / "export", partitioning="hive").to_table().sort_by("position")
    stored = pa.concat_tables([rows(db), rows(db, "$SYS/#")]).sort_by("position").slice(0, 200)
    assert report.messages == exported.num_rows == 200
    assert exported.select(COLUMNS.names).cast(COLUMNS).equals(stored.select(COLUMNS.names))
    assert exported["shard"].to_pylist() == stored["shard"].to_pylist()
    assert Counter(exported["generation"].to_pylist()) == {1: 100, 2: 100}


def test_sql_prunes_by_shard_and_generation(db: ts.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db.archives.export(tmp_path / "export")
    monkeypatch.chdir(tmp_path)
    glob = "export/shard=*/generation=*/*.parquet"
    types = "hive_partitioning = true, hive_types = {shard: INTEGER, generation: INTEGER}"
    query = f"SELECT shard, count(*) FROM read_parquet('{glob}', {types}) WHERE generation = 2 GROUP BY 1 ORDER BY 1"
    stored = [one for text in ("#", "$SYS/#") for one in db.replay(text) if 100 <= int(one.payload) < 200]
    assert Counter(dict(duckdb.sql(query).fetchall())) == Counter(db.shard_of(one.client_id) for one in stored)


def test_rows_are_in_order_of_positions_in_groups_that_say_which(db: ts.Database, tmp_path: Path) -> None:
    db.archives.export(tmp_path / "export")
    directory = tmp_path / "export" / "shard=0000" / "generation=0001"
    contents = read_contents(directory)
    assert contents is not None
    positions: list[int] = []
    for part in contents.parts:
        metadata = pq.read_metadata(directory / part.name)
        column = metadata.schema.names.index("position")
        for number, group in enumerate(part.groups):
            statistics = metadata.row_group(number).column(column).statistics
            assert (statistics.min, statistics.max) == (group.first, group.last)
        positions += pq.ParquetFile(directory / part.name).read()["position"].to_pylist()
    assert positions == sorted(positions)
    assert len(contents.parts) > 1
    assert max(len(part.groups) for part in contents.parts) > 1


def test_an_export_names_its_database(db: ts.Database, tmp_path: Path) -> None:
    db.archives.export(tmp_path / "export")
    head = read_head(tmp_path / "export")
    contents = read_contents(tmp_path / "export" / "shard=0001" / "generation=0002")
    assert head is not None
    assert contents is not None
    assert (head.database, head.shards) == (db.manifest.id, 2)
    assert (contents.database, contents.shard, contents.generation, contents.layout) == (db.manifest.id, 1, 2, "block")
    assert set(contents.filters) <= {"#", "$SYS/#"}


def test_an_empty_generation_is_complete_without_a_file(db: ts.Database, tmp_path: Path) -> None:
    db.add_generation()
    db.add_generation()
    assert db.archives.export(tmp_path / "export", generations=[4]).slabs == 2
    assert {Path(name).suffix for name in files(tmp_path / "export")} == {".json"}
    db.archives.archive(tmp_path / "export", generations=[4])
    assert db.verify().ok


@pytest.mark.parametrize("layout", ["block", "skipstream", "wildcard_optimized"])
def test_topics_that_begin_with_a_dollar_are_found_where_the_layout_knows_them(tmp_path: Path, layout: str) -> None:
    with ts.open(tmp_path / "db", backend="memory", layout=layout) as db:
        db.store([ts.Message(topic, b"") for topic in ("$aws/x", "$SYS", "a", "$aws/y/z", "$b")])
        db.add_generation()
        assert db.archives.export(tmp_path / "export").messages == 5


@pytest.mark.parametrize(("backend", "layout"), [("memory", "reference"), ("duckdb", "table")])
def test_what_no_filter_finds_is_an_error_not_a_loss(tmp_path: Path, backend: str, layout: str) -> None:
    """A layout that learns no topics can't find unknown topics with $, so that an export of them raises an error."""
    with ts.open(tmp_path / "db", backend=backend, layout=layout) as db:
        db.store([ts.Message("$aws/x", b""), ts.Message("$SYS/x", b""), ts.Message("a", b"")])
        db.add_generation()
        with pytest.raises(ts.UnsupportedError, match="1 messages have topics that begin with"):
            db.archives.archive(tmp_path / "export")
        assert len(list(db.replay("$aws/x"))) == 1


# --- going on ---


def test_only_what_is_missing_is_written(db: ts.Database, tmp_path: Path) -> None:
    target = tmp_path / "export"
    first = db.archives.export(target, generations=[2])
    before = files(target)
    second = db.archives.export(target)
    assert (first.slabs, first.messages) == (2, 100)
    assert (second.slabs, second.slabs_before, second.generations) == (2, 2, (1, 2))
    assert before.items() <= files(target).items()
    db.add_generation()
    assert db.archives.export(target).messages == 10
    assert db.archives.export(target).slabs == 0


def test_what_an_export_did_not_complete_counts_for_nothing(db: ts.Database, tmp_path: Path) -> None:
    """A slab's directory without its description is incomplete, and is written again."""
    target = tmp_path / "export"
    db.archives.export(target)
    whole = files(target)
    slab = target / "shard=0000" / "generation=0001"
    (slab / "_topicstore_slab.json").unlink()
    (slab / "part-00000.parquet").write_bytes(b"half")
    assert db.archives.export(target).slabs == 1
    assert files(target).keys() == whole.keys()
    assert db.archives.archive(target).slabs == 0


def test_leftovers_of_killed_exports_go(db: ts.Database, tmp_path: Path) -> None:
    db.archives.export(tmp_path / "export", generations=[1])
    left = tmp_path / "export" / ".unfinished-0123456789abcdef0123456789abcdef"
    left.mkdir()
    (left / "part-00000.parquet").write_bytes(b"half")
    db.archives.export(tmp_path / "export")
    assert not left.exists()


def test_a_full_disk_leaves_nothing(db: ts.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ts.StorageFullError, match="no space"):
            db.archives.export(tmp_path / "export")
    assert files(tmp_path / "export") == {}
    assert db.archives.export(tmp_path / "export").slabs == 4


@pytest.mark.parametrize("inside", [".", "export", "sub/export", "../db/export"])
def test_a_target_inside_the_database_is_refused(db: ts.Database, inside: str) -> None:
    """A target inside the database is refused: it would be deleted with the database, and missing in checkpoints."""
    target, before = db.path / inside, sorted(db.path.rglob("*"))
    for act in (db.archives.export, db.archives.archive):
        with pytest.raises(ts.ManifestMismatchError, match="inside the database"):
            act(target)
    with pytest.raises(ts.ManifestMismatchError, match="inside the database"):
        db.retention.set(max_age=1, archive_to=inside)
    assert db.retention.settings.archive_to is None
    assert sorted(db.path.rglob("*")) == before


def test_an_export_continues_when_its_generation_is_archived(
    db: ts.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export whose generation is archived meanwhile reads the remaining rows from the archive."""
    compare, archived = exporting._compare, []

    def archive_and_compare(*arguments: object) -> None:
        if not archived:
            archived.append(None)
            db.archives.archive(tmp_path / "archive")
        compare(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(exporting, "_compare", archive_and_compare)
    assert db.archives.export(tmp_path / "export").messages == 200
    tables = [ds.dataset(tmp_path / name, partitioning="hive").to_table() for name in ("export", "archive")]
    assert tables[0].sort_by("position").equals(tables[1].sort_by("position"))


def test_the_export_of_a_copy_that_went_its_own_way_is_distinguished(tmp_path: Path) -> None:
    """A database refuses to continue the export of a copy that has other messages, although both have the same id."""
    with ts.open(tmp_path / "db") as db:
        db.checkpoint(tmp_path / "copy")
        with ts.open(tmp_path / "copy") as copy:
            for one in (copy, db):
                one.store([ts.Message("a", b"1" if one is db else b"2")])
                one.add_generation()
            assert copy.archives.export(tmp_path / "export").messages == 1
        with pytest.raises(ts.ManifestMismatchError, match="of a copy of the database"):
            db.archives.export(tmp_path / "export")


def test_another_databases_export_is_refused(db: ts.Database, tmp_path: Path) -> None:
    target = tmp_path / "export"
    db.archives.export(target)
    before = files(target)
    with ts.open(tmp_path / "other", backend="memory") as other:
        other.store([ts.Message("a", b"")])
        other.add_generation()
        with pytest.raises(ts.ManifestMismatchError, match="an export of database"):
            other.archives.archive(target)
        assert len(list(other.replay("#"))) == 1
        with pytest.raises(ts.ManifestMismatchError, match="is no export"):
            other.archives.export(tmp_path)
    assert files(target) == before


def test_an_export_of_messages_that_were_deleted_since_is_not_replaced(db: ts.Database, tmp_path: Path) -> None:
    target = tmp_path / "export"
    db.archives.export(target)
    before = files(target)
    db.delete("fleet/bus-1/#")
    with pytest.raises(ts.ManifestMismatchError, match="deleted since"):
        db.archives.archive(target)
    assert files(target) == before
    assert [] == list(db.archives)
    assert db.archives.archive(tmp_path / "again").messages == sum(one.messages for one in db.generations()[:2])


def test_several_processes_export_to_one_target(tmp_path: Path) -> None:
    """When several processes export to one target, each slab is written once, and none fails."""
    with ts.open(tmp_path / "db", shards=2) as db:
        for generation in range(6):
            db.store([ts.Message("a", b"%d" % n, f"c{generation + n}") for n in range(300)])
            db.add_generation()
        readers = [ts.open(tmp_path / "db", mode="r") for _ in range(3)]
        reports = together(*(partial(reader.archives.export, tmp_path / "export") for reader in readers))
        assert sum(report.slabs for report in reports) == 12
        assert sum(report.messages for report in reports) == 1_800
        assert {report.slabs + report.slabs_before for report in reports} == {12}
        assert db.archives.archive(tmp_path / "export").slabs == 0
        for reader in readers:
            reader.close()


@pytest.mark.parametrize(
    ("number", "reason"), [(3, r"is open.*generations add"), (4, "no generation"), (0, "no generation")]
)
def test_only_sealed_generations_are_exported(db: ts.Database, tmp_path: Path, number: int, reason: str) -> None:
    for act in (db.archives.export, db.archives.archive):
        with pytest.raises(ts.GenerationError, match=reason):
            act(tmp_path / "export", generations=[1, number])
    assert not (tmp_path / "export").exists()


def test_a_reader_exports_beside_the_writer(tmp_path: Path) -> None:
    with ts.open(tmp_path / "db") as db:
        db.store([ts.Message("a", b"1")])
        db.add_generation()
        with ts.open(tmp_path / "db", mode="r") as reader:
            assert reader.archives.export(tmp_path / "export").messages == 1
            with pytest.raises(ts.ReadOnlyDatabaseError):
                reader.archives.archive(tmp_path / "export")


def test_checksums_of_the_json_are_looked_at(db: ts.Database, tmp_path: Path) -> None:
    db.archives.export(tmp_path / "export")
    path = tmp_path / "export" / "shard=0000" / "generation=0001" / "_topicstore_slab.json"
    written = json.loads(path.read_bytes())
    for change, error in (({"messages": 1}, ts.CorruptionError), ({"format": 9}, ts.NewerFormatError)):
        path.write_text(json.dumps({**written, **change}))
        with pytest.raises(error):
            db.archives.export(tmp_path / "export")


def test_what_it_did(db: ts.Database, tmp_path: Path) -> None:
    report = db.archives.export(tmp_path / "export")
    sizes = sum(path.stat().st_size for path in (tmp_path / "export").rglob("*.parquet"))
    expected = ExportReport(
        target=str(tmp_path / "export"),
        generations=(1, 2),
        messages=200,
        file_bytes=sizes,
        slabs=4,
        slabs_before=0,
        seconds=report.seconds,
    )
    assert report == expected
