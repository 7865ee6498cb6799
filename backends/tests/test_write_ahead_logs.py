"""Logs in the form of LevelDB and RocksDB, made here: what of them is kept after each kind of damage."""

from __future__ import annotations

import os
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.errors import CorruptionError
from topicstore_conformance.conditions.directories import quick_directory

pytest.importorskip("google_crc32c", reason='needs google-crc32c: pip install "topicstore[rocksdb]"')

import google_crc32c
from topicstore_backends.write_ahead_logs import Cut, apply_cuts, cuts

BLOCK = 32 << 10


def log_of(writes: list[bytes]) -> tuple[bytes, list[int]]:
    """Return a log of these writes, and where each ends."""
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
    """Make a manifest and logs, numbered from 5, of batches of (sequence number, changes, bytes)."""
    (path / "CURRENT").write_text("MANIFEST-000001\n")
    (path / "MANIFEST-000001").write_bytes(log_of([edit(5, 0), edit(oldest, sequence)])[0])
    files = [path / f"{number:06}.log" for number in range(5, 5 + len(logs))]
    for file, batches in zip(files, logs, strict=True):
        file.write_bytes(log_of([batch(*each) for each in batches])[0])
    return files


FIRST, SECOND = [(1, 2, 100), (3, 1, 70_000)], [(4, 1, 10), (5, 3, 40_000)]


def test_whole_logs_are_left_alone(tmp_path: Path) -> None:
    """Also when the second goes on where the first ended."""
    shard(tmp_path, FIRST, SECOND)
    assert [] == cuts(tmp_path, manifest_counts=True) == cuts(tmp_path, manifest_counts=False)


@pytest.mark.parametrize("counts", [True, False])
def test_a_log_that_lacks_its_last_write_takes_the_next_log_with_it(tmp_path: Path, counts: bool) -> None:
    """It ends where a write does, so nothing about it alone is wrong."""
    first, second, third = shard(tmp_path, FIRST, SECOND, [(8, 1, 10)])
    first.write_bytes(log_of([batch(*FIRST[0])])[0])
    assert [Cut(second, None), Cut(third, None)] == cuts(tmp_path, manifest_counts=counts)


def test_logs_that_the_manifest_is_done_with_may_end_early(tmp_path: Path) -> None:
    """What they held is in tables."""
    first, second = shard(tmp_path, FIRST, SECOND, oldest=6, sequence=3)
    first.write_bytes(log_of([batch(*FIRST[0])])[0][:-1])
    assert [] == cuts(tmp_path, manifest_counts=True)
    second.write_bytes(second.read_bytes()[:-1])
    assert [second] == [cut.file for cut in cuts(tmp_path, manifest_counts=True)]


@pytest.mark.parametrize("counts", [True, False])
def test_a_log_without_any_write_takes_the_next_with_it(tmp_path: Path, counts: bool) -> None:
    """Another is begun only when there is something in it."""
    first, second = shard(tmp_path, FIRST, SECOND)
    first.write_bytes(b"")
    assert [Cut(second, None)] == cuts(tmp_path, manifest_counts=counts)


def test_a_missing_log_is_an_error(tmp_path: Path) -> None:
    """It may be the manifest that lost its end, and with it tables; who accepts that goes on with an empty log."""
    first, second = shard(tmp_path, FIRST, SECOND)
    first.unlink()
    with pytest.raises(CorruptionError, match=r"000005\.log is missing, or MANIFEST-000001 lost its end"):
        cuts(tmp_path, manifest_counts=True)
    found = cuts(tmp_path, manifest_counts=True, within=True)
    assert [Cut(first, 0), Cut(second, None)] == found
    apply_cuts(found)
    assert (b"", False) == (first.read_bytes(), second.exists())
    assert [] == cuts(tmp_path, manifest_counts=True)


def test_damage_within_is_an_error_unless_told_otherwise(tmp_path: Path) -> None:
    """A power failure leaves damage at ends only."""
    (file,) = shard(tmp_path, [(1, 1, 100), (2, 1, 100), (3, 1, 100)])
    content = bytearray(file.read_bytes())
    content[150] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptionError, match=r"000005.log: it can't be read from byte 119 on"):
        cuts(tmp_path, manifest_counts=True)
    assert [Cut(file, 119)] == cuts(tmp_path, manifest_counts=True, within=True)


def test_a_manifest_keeps_the_edits_that_can_be_read(tmp_path: Path) -> None:
    """Unless the log is gone that these need: then the edit behind them was on disk, and is damaged."""
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
    """Wherever one of two logs ends, in zeros or in anything: the writes before that are kept, and no other."""
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
        same = next(changed, len(harmed))  # what is made zero may have been zero
        kept = sum(end <= same for end in log_of([batch(*each) for each in logs[hurt]])[1]) + (split if hurt else 0)
        apply_cuts(cuts(path, manifest_counts=True))
        assert [] == cuts(path, manifest_counts=True)
        left = [file.stat().st_size if file.exists() else 0 for file in files]
        expected = [log_of([batch(*each) for each in log])[1] for log in (batches[:kept][:split], batches[split:kept])]
        assert [ends[-1] if ends else 0 for ends in expected] == left
