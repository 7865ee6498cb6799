"""Tests of truncating damaged write-ahead logs: which writes of LevelDB and RocksDB remain after each damage."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore import Message
from topicstore.contract.engine import DATA, KEYSPACES, META
from topicstore.contract.errors import CorruptionError, DataLossError, LogDamagedError
from topicstore.plugins import load_target, registry
from topicstore_conformance.backend.damage import flip
from topicstore_conformance.backend.fixtures import pairs, put
from topicstore_conformance.conditions.directories import quick_directory

pytest.importorskip("google_crc32c", reason='needs google-crc32c: pip install "topicstore[rocksdb]"')

import google_crc32c
from topicstore_backends import write_ahead_logs
from topicstore_backends.files import READER, remove_abandoned
from topicstore_backends.write_ahead_logs import Cut, CutNeededError, apply_cuts, check_logs, cuts

BLOCK = 32 << 10


def log_of(writes: list[bytes]) -> tuple[bytes, list[int]]:
    """Return a log of these writes, and the offset of the end of each write."""
    made, ends = bytearray(), []
    for write in writes:
        left, first = write, True
        while left or first:
            room = BLOCK - len(made) % BLOCK
            if room < 7:
                made += bytes(room)
                continue
            part, left = left[: room - 7], left[room - 7 :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[first, not left]
            body = bytes([kind]) + part
            checksum = google_crc32c.value(body)
            masked = ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
            made += masked.to_bytes(4, "little") + len(part).to_bytes(2, "little") + body
            first = False
        ends.append(len(made))
    return bytes(made), ends


def batch(sequence: int, count: int, size: int) -> bytes:
    return sequence.to_bytes(8, "little") + count.to_bytes(4, "little") + os.urandom(size)


def edit(log: int, sequence: int) -> bytes:
    """Return an edit of a manifest whose numbers take one byte each."""
    return bytes([1, 3]) + b"cmp" + bytes([2, log, 9, 0, 3, 99, 4, sequence])


def shard(path: Path, *logs: list[tuple[int, int, int]], oldest: int = 5, sequence: int = 0) -> list[Path]:
    """Write a manifest, and logs from number 5 on of batches as (sequence number, changes, bytes); return the logs."""
    (path / "CURRENT").write_text("MANIFEST-000001\n")
    (path / "MANIFEST-000001").write_bytes(log_of([edit(5, 0), edit(oldest, sequence)])[0])
    files = [path / f"{number:06}.log" for number in range(5, 5 + len(logs))]
    for file, batches in zip(files, logs, strict=True):
        file.write_bytes(log_of([batch(*each) for each in batches])[0])
    return files


FIRST, SECOND = [(1, 2, 100), (3, 1, 70_000)], [(4, 1, 10), (5, 3, 40_000)]


def test_whole_logs_are_left_alone(tmp_path: Path) -> None:
    """Complete logs are not truncated if the second log continues the sequence numbers of the first."""
    shard(tmp_path, FIRST, SECOND)
    assert [] == cuts(tmp_path, manifest_counts=True) == cuts(tmp_path, manifest_counts=False)


@pytest.mark.parametrize("counts", [True, False])
def test_a_log_without_its_last_write_sets_the_next_log_aside(tmp_path: Path, counts: bool) -> None:
    """A log that lacks only its last write is intact, but later logs are set aside because of the gap before them."""
    first, second, third = shard(tmp_path, FIRST, SECOND, [(8, 1, 10)])
    first.write_bytes(log_of([batch(*FIRST[0])])[0])
    assert [Cut(second, None), Cut(third, None)] == cuts(tmp_path, manifest_counts=counts)


def test_logs_that_the_manifest_is_done_with_may_end_early(tmp_path: Path) -> None:
    """A torn log that the manifest no longer needs is ignored, because its writes are in tables."""
    first, second = shard(tmp_path, FIRST, SECOND, oldest=6, sequence=3)
    first.write_bytes(log_of([batch(*FIRST[0])])[0][:-1])
    assert [] == cuts(tmp_path, manifest_counts=True)
    second.write_bytes(second.read_bytes()[:-1])
    assert [second] == [cut.file for cut in cuts(tmp_path, manifest_counts=True, refused=True)]


@pytest.mark.parametrize("counts", [True, False])
def test_an_empty_log_sets_the_next_log_aside(tmp_path: Path, counts: bool) -> None:
    """If a log is empty, the next log is set aside: an engine begins another log only after a write."""
    first, second = shard(tmp_path, FIRST, SECOND)
    first.write_bytes(b"")
    assert [Cut(second, None)] == cuts(tmp_path, manifest_counts=counts)


def test_a_missing_log_is_an_error(tmp_path: Path) -> None:
    """A missing log raises `CorruptionError`, because the manifest may have lost its end.

    With ``refused``, the missing log is treated as empty instead, and the later logs are set aside.
    """
    first, second = shard(tmp_path, FIRST, SECOND)
    first.unlink()
    with pytest.raises(CorruptionError, match=r"000005\.log is missing, or MANIFEST-000001 lost its end"):
        cuts(tmp_path, manifest_counts=True)
    found = cuts(tmp_path, manifest_counts=True, refused=True)
    assert [Cut(first, 0), Cut(second, None)] == found
    content = second.read_bytes()
    apply_cuts(found)
    assert (b"", False) == (first.read_bytes(), second.exists())
    assert content == (tmp_path / "000006.log.cut-at-0").read_bytes()
    assert [] == cuts(tmp_path, manifest_counts=True)


def test_a_hole_discards_all_later_writes(tmp_path: Path) -> None:
    """All writes after a hole in a log are discarded, and the error names the discarded writes that are readable.

    A power failure may leave holes, because pages are written back in any order.
    """
    first, second = shard(tmp_path, [(1, 1, 100), (2, 1, 100), (3, 1, 100)], [(4, 1, 10), (5, 1, 10)])
    flip(first, 150)
    with pytest.raises(CutNeededError) as caught:
        check_logs(tmp_path, manifest_counts=True, refused=True)
    assert [Cut(first, 119), Cut(second, None)] == caught.value.cuts
    assert "what can be read behind byte 119 of 000005.log, 2 writes of 000006.log" == caught.value.discarded


@pytest.mark.parametrize("torn", [lambda data: data[:-1], lambda data: data[:-50] + bytes(50), lambda data: data[:3]])
def test_a_torn_end_discards_no_readable_write(tmp_path: Path, torn: Callable[[bytes], bytes]) -> None:
    """A torn end of the last log is truncated without discarding readable writes.

    A killed process leaves such an end, and engines skip most of them themselves.
    """
    shard(tmp_path, FIRST, SECOND)
    (tmp_path / "000006.log").write_bytes(torn((tmp_path / "000006.log").read_bytes()))
    check_logs(tmp_path, manifest_counts=True)
    with pytest.raises(CutNeededError) as caught:
        check_logs(tmp_path, manifest_counts=True, refused=True)
    assert "" == caught.value.discarded


def test_a_write_that_does_not_follow_leaves_those_before_it(tmp_path: Path) -> None:
    """A readable write with a wrong sequence number is discarded, together with all later writes.

    A page of the file may still hold old content, whose checksums are valid.
    """
    first, second = shard(tmp_path, [(1, 1, 100), (2, 1, 100), (2, 1, 100), (3, 1, 100)], [(4, 1, 10)])
    found = cuts(tmp_path, manifest_counts=True, refused=True)
    assert [(Cut(first, 238), "2 writes of 000005.log"), (Cut(second, None), "1 write of 000006.log")] == [
        (cut, cut.discarded) for cut in found
    ]


def test_a_manifest_keeps_the_edits_that_can_be_read(tmp_path: Path) -> None:
    """A torn edit at the manifest's end is removed only if the log exists that the earlier edits need.

    Otherwise the torn edit was on disk before, so its damage is an error.
    """
    first, _ = shard(tmp_path, FIRST, SECOND)
    manifest = tmp_path / "MANIFEST-000001"
    whole, ends = log_of([edit(5, 0), edit(6, 3)])
    manifest.write_bytes(whole[:-1] + b"\0")
    assert [Cut(manifest, ends[0])] == cuts(tmp_path, manifest_counts=True)
    first.unlink()
    with pytest.raises(CorruptionError, match="is missing"):
        cuts(tmp_path, manifest_counts=True)


@given(
    sizes=st.lists(st.integers(0, 90_000), min_size=1, max_size=6),
    split=st.integers(1, 6),
    place=st.floats(0, 1),
    kind=st.sampled_from(["short", "zeros", "noise"]),
)
def test_what_is_kept_is_all_before_the_first_damage(sizes: list[int], split: int, place: float, kind: str) -> None:
    """Wherever a log is truncated, zeroed or overwritten, exactly the writes before that offset are kept."""
    with quick_directory() as scratch:
        path = Path(scratch)
        firsts = [*accumulate(sizes, lambda first, _: first + 2, initial=1)]
        batches = [(first, 2, size) for first, size in zip(firsts, sizes, strict=False)]
        logs = [batches[:split], batches[split:]]
        files = shard(path, *logs)
        hurt = 0 if logs[0] and place < 0.5 else 1
        content = files[hurt].read_bytes()
        at = int(len(content) * (place * 2 % 1))
        lost = len(content) - at
        harmed = content[:at] + {"short": b"", "zeros": bytes(lost), "noise": os.urandom(lost)}[kind]
        files[hurt].write_bytes(harmed)
        changed = (number for number, (old, new) in enumerate(zip(content, harmed, strict=False)) if old != new)
        same = next(changed, len(harmed))  # bytes that are overwritten with zeros may have been zeros before
        kept = sum(end <= same for end in log_of([batch(*each) for each in logs[hurt]])[1]) + (split if hurt else 0)
        found = cuts(path, manifest_counts=True, refused=True)
        # engines detect some damage themselves, and then the log is not truncated
        assert cuts(path, manifest_counts=True) in ([found] if hurt == 0 else [found, []])
        apply_cuts(found)
        assert [] == cuts(path, manifest_counts=True, refused=True)
        left = [file.stat().st_size if file.exists() else 0 for file in files]
        expected = [log_of([batch(*each) for each in log])[1] for log in (batches[:kept][:split], batches[split:kept])]
        assert [ends[-1] if ends else 0 for ends in expected] == left


# --- whole databases ------------------------------------------------------------------------


@pytest.fixture(params=["rocksdb", "leveldb"])
def killed(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a copy of a database as a killed process leaves it: 20 batches are flushed, 20 more only in its log."""
    pytest.importorskip({"rocksdb": "rocksdict", "leveldb": "plyvel"}[request.param])
    with ts.open(tmp_path / "db", backend=request.param, auto_compact=False) as db:
        for number in range(40):
            db.store([Message("t", b"%2d" % number + random.Random(number).randbytes(2_000))])
            if number == 19:
                db.flush()
        return shutil.copytree(tmp_path / "db", tmp_path / "killed")


def log_and_writes(database: Path) -> tuple[Path, list[bytes], list[int]]:
    """Return the log that holds the batches, its writes, and the offset of the end of each write."""
    log = max((database / "shard-0000").glob("[0-9]*.log"), key=lambda log: log.stat().st_size)
    records = write_ahead_logs._read(log, head=None)
    return log, records.writes, records.ends


def zero(log: Path, at: int) -> None:
    """Overwrite 1,000 bytes of a log with zeros, with readable writes after them."""
    content = bytearray(log.read_bytes())
    content[at : at + 1_000] = bytes(1_000)
    log.write_bytes(content)


def numbers(db: ts.Database) -> list[int]:
    with db:
        return [int(message.payload[:2]) for message in db.replay("t")]


def files(database: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in database.glob("shard-0000/*") if path.suffix in (".log", ".sst")}


def test_a_hole_in_what_was_not_synced_is_cut(killed: Path) -> None:
    """If the unsynced part of a log has a hole, opening truncates the log there, and warns of the discarded writes.

    A reader that opens the database before the truncation sees the same messages, and later openings don't warn.
    """
    log, _, ends = log_and_writes(killed)
    zero(log, ends[-10])
    behind = log.read_bytes()[ends[-10] :]
    left = list(range(31))
    assert left == numbers(ts.open(killed, mode="r"))
    went = (
        rf"shard 0 of .*killed was cut .* what can be read behind byte {ends[-10]:,} of {log.name} went .*; nothing is"
    )
    with pytest.warns(RuntimeWarning, match=went):
        db = ts.open(killed)
    assert left == numbers(db)
    assert left == numbers(ts.open(killed))
    assert behind == (log.with_name(f"{log.name}.cut-at-{ends[-10]}")).read_bytes()


@pytest.mark.parametrize("read_only", [True, False])
def test_a_hole_in_what_was_synced_is_an_error(killed: Path, read_only: bool) -> None:
    """A hole in the synced part of a log raises `DataLossError` and changes no file.

    With ``recovery="point_in_time"`` the database opens with the writes before the hole.
    """
    log, _, ends = log_and_writes(killed)
    zero(log, ends[-30])
    before = files(killed)
    with pytest.raises(DataLossError, match="lacks the last"):
        ts.open(killed, mode="r" if read_only else "a")
    assert before == files(killed)
    with pytest.warns(RuntimeWarning) as warned:
        db = ts.open(killed, recovery="point_in_time")
    assert list(range(11)) == numbers(db)
    cut, lacks = (str(warning.message) for warning in warned)
    assert cut.endswith(f"{log.name} went into files named *.cut-at-*")
    assert "lacks the last" in lacks


def test_a_gap_between_two_logs_is_cut(killed: Path) -> None:
    """If the older log lacks its last write, the newer log is set aside, and no reader shows its writes."""
    log, writes, _ = log_and_writes(killed)
    newer = log.with_name("000099.log")
    log.write_bytes(log_of(writes[:-11])[0])
    newer.write_bytes(log_of(writes[-10:])[0])
    left = list(range(29))
    assert left == numbers(ts.open(killed, mode="r"))
    with pytest.warns(RuntimeWarning, match=r"10 writes of 000099\.log went .*; nothing is missing"):
        db = ts.open(killed)
    assert left == numbers(db)
    assert left == numbers(ts.open(killed))


@pytest.mark.parametrize("harm", [lambda data: data[:-9], lambda data: data[:-99] + bytes(99)])
def test_an_unreadable_end_is_cut_without_a_warning(killed: Path, harm: Callable[[bytes], bytes]) -> None:
    """A torn end of the last log is dropped without a warning, because every kill or power failure may cause one."""
    log, _, _ = log_and_writes(killed)
    log.write_bytes(harm(log.read_bytes()))
    assert list(range(39)) == numbers(ts.open(killed, mode="r"))
    assert list(range(39)) == numbers(ts.open(killed))


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("torn", [False, True])
def test_what_a_kill_leaves_is_not_parsed(
    killed: Path, monkeypatch: pytest.MonkeyPatch, torn: bool, read_only: bool
) -> None:
    """Opening a killed database parses the manifest but no whole log, so opening is as fast as the engine's own."""
    log, _, ends = log_and_writes(killed)
    if torn:
        os.truncate(log, ends[-1] - 9)
    read = write_ahead_logs._read
    searched: list[Path] = []

    def counted(file: Path, *, head: int | None) -> write_ahead_logs._Records:
        searched.append(file)
        return read(file, head=head)

    monkeypatch.setattr(write_ahead_logs, "_read", counted)
    assert list(range(40 - torn)) == numbers(ts.open(killed, mode="r" if read_only else "a"))
    assert {"MANIFEST"} == {file.name.split("-")[0] for file in searched}


def test_a_copy_brought_up_to_date_has_old_logs(killed: Path, tmp_path: Path) -> None:
    """If the directory also has obsolete logs, they are ignored; ``cp -a`` over an older copy leaves such logs."""
    later = shutil.copytree(killed, tmp_path / "later")
    with ts.open(later, auto_compact=False) as db:
        for number in range(40, 60):
            db.store([Message("t", b"%2d" % number)])
        db.flush()
        shutil.copytree(later, killed, dirs_exist_ok=True)
    left = list(range(60))
    assert left == numbers(ts.open(killed, mode="r"))
    assert left == numbers(ts.open(killed))


def test_a_damaged_manifest_is_reported_to_readers(killed: Path) -> None:
    """A damaged manifest raises `CorruptionError` for readers and writers, before RocksDB could loop on it forever."""
    (manifest,) = (killed / "shard-0000").glob("MANIFEST-*")
    flip(manifest, 10)
    for read_only in (True, False):
        with pytest.raises(CorruptionError, match=f"{manifest.name}: it can't be read from byte 0 on"):
            ts.open(killed, mode="r" if read_only else "a")


@pytest.fixture
def flushing(tmp_path: Path) -> tuple[Path, Path, int]:
    """Return a RocksDB database whose second flush has just happened, with its manifest.

    The flushed log is still there. The last returned value is the manifest's size before that flush.
    """
    pytest.importorskip("rocksdict")
    with ts.open(tmp_path / "db", backend="rocksdb", auto_compact=False) as db:
        for number in range(30):
            db.store([Message("t", b"%2d" % number)])
            if number == 19:
                before = shutil.copytree(tmp_path / "db", tmp_path / "before")
            if number in (9, 19):
                db.storage.shards[0].writer.open_engine().reclaim(DATA, (0, 0, 0), (1 << 31, 0, 0))
        after = shutil.copytree(tmp_path / "db", tmp_path / "after")
    for log in before.glob("shard-0000/*.log"):
        assert not (after / "shard-0000" / log.name).exists()
        shutil.copy(log, after / "shard-0000")
    (manifest,) = after.glob("shard-0000/MANIFEST-*")
    return after, manifest, (before / "shard-0000" / manifest.name).stat().st_size


@pytest.mark.parametrize("torn", [b"", bytes(40), bytes(range(1, 41))], ids=["short", "zeros", "noise"])
def test_a_flush_of_which_the_manifest_has_a_part(flushing: tuple[Path, Path, int], torn: bytes) -> None:
    """If the manifest has only some edits of a flush, the flushed log is still read and no message is lost.

    A power failure may leave anything after these edits.
    """
    database, manifest, before = flushing
    content, ends = manifest.read_bytes(), write_ahead_logs._read(manifest, head=None).ends
    new = [end for end in ends if end > before]
    assert 3 <= len(new)
    for end in (before, *new[:-1]):
        for at in (end, end + 9):
            image = shutil.copytree(database, database.with_name("image"))
            (image / "shard-0000" / manifest.name).write_bytes(content[:at] + torn)
            assert list(range(30)) == numbers(ts.open(image, mode="r"))
            assert list(range(30)) == numbers(ts.open(image))
            shutil.rmtree(image)


def test_a_page_of_the_manifest_that_is_missing(flushing: tuple[Path, Path, int]) -> None:
    """A hole at the manifest's end is removed if the log that this end declares obsolete still exists.

    Otherwise, the hole is an error.
    """
    database, manifest, before = flushing
    content = manifest.read_bytes()
    manifest.write_bytes(content[:before] + bytes(20) + content[before + 20 :])
    damaged = shutil.copytree(database, database.with_name("damaged"))
    assert list(range(30)) == numbers(ts.open(database, mode="r"))
    assert list(range(30)) == numbers(ts.open(database))
    min(damaged.glob("shard-0000/*.log")).unlink()
    for mode in ("r", "a"):
        with pytest.raises(CorruptionError, match=f"{manifest.name}: it can't be read from byte {before} on"):
            ts.open(damaged, mode=mode)


@pytest.mark.parametrize("backend", ["leveldb", "rocksdb"])
def test_salvaging_reads_after_the_damage(tmp_path: Path, backend: str) -> None:
    """Salvage reads all writes except those in a 32 KB block of the log with the damage, and changes no file."""
    pytest.importorskip({"leveldb": "plyvel", "rocksdb": "rocksdict"}[backend])
    kind = load_target(registry().backend(backend))
    made = kind(kind.Options())
    engine = made.open_shard(tmp_path / "shard", KEYSPACES, create=True)
    for number in range(100):
        put(engine, META, {b"%03d" % number: bytes(1_000)})
    killed = shutil.copytree(tmp_path / "shard", tmp_path / "killed")
    engine.close()
    log = max(killed.glob("*.log"), key=lambda log: log.stat().st_size)
    flip(log, log.stat().st_size // 2)
    before = {file: file.read_bytes() for file in killed.glob("*.log")}
    with pytest.raises(LogDamagedError, match=log.name) as damaged:
        made.open_shard(killed, KEYSPACES, create=False)
    view = made.open_damaged(killed, KEYSPACES, damaged.value, salvage=True)
    left = {int(key) for key, _ in pairs(view.scan(META))}
    view.close()
    assert {0, 99} <= left
    assert 0 < 100 - len(left) <= 33
    assert before == {file: file.read_bytes() for file in killed.glob("*.log")}


# --- directories of readers -------------------------------------------------------------------


def test_what_is_read_needs_no_room_for_temporary_files(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers and openings with damaged logs work without free space in the temporary directory.

    A log that must be truncated, or that LevelDB flushes into a table, may be larger than that space.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(killed / "none"))
    log, _, ends = log_and_writes(killed)
    zero(log, ends[-10])
    assert list(range(31)) == numbers(ts.open(killed, mode="r"))
    with pytest.warns(RuntimeWarning, match="was cut"):
        assert list(range(31)) == numbers(ts.open(killed))


@pytest.mark.parametrize("backend", ["leveldb", "rocksdb"])
def test_the_directory_of_a_reader_is_removed_at_closing(tmp_path: Path, backend: str) -> None:
    """Closing a reader removes its temporary directory, before the engine is garbage-collected."""
    pytest.importorskip({"leveldb": "plyvel", "rocksdb": "rocksdict"}[backend])
    with ts.open(tmp_path / "db", backend=backend) as db:
        db.store([Message("t", b"1")])
    shard = tmp_path / "db" / "shard-0000"
    kind = load_target(registry().backend(backend))
    reader = kind(kind.Options()).open_reader(shard, KEYSPACES, alone=True)
    assert 1 == len(list(shard.glob(f"{READER}*")))
    reader.close()
    assert [] == list(shard.glob(f"{READER}*"))


def test_the_directory_of_a_killed_reader_is_removed(tmp_path: Path) -> None:
    """The next opening removes the temporary directory of a killed reader, but not that of a live one."""
    pytest.importorskip("plyvel")
    with ts.open(tmp_path / "db", backend="leveldb") as db:
        db.store([Message("t", b"1")])
    program = f"import os, topicstore as ts\ndb = ts.open({str(tmp_path / 'db')!r}, 'r')\nos._exit(0)"
    subprocess.run([sys.executable, "-c", program], check=True)
    shard = tmp_path / "db" / "shard-0000"
    (left,) = shard.glob(f"{READER}*")
    with ts.open(tmp_path / "db", mode="r") as db:
        (live,) = shard.glob(f"{READER}*")
        assert live != left
        remove_abandoned(shard)
        assert 1 == len(list(db.replay("t")))
        assert live.exists()
