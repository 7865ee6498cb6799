"""Checks of the logs of LevelDB and RocksDB, which share one format, for unreadable and missing writes.

After a power failure a log may end in part of a record, in zeros, or in garbage
(https://github.com/google/leveldb/issues/251). Pages in its middle may be missing, because file systems write pages
back in any order. And if a new log was begun shortly before, the old log may end early although the new one exists
(https://github.com/google/leveldb/issues/193). Engines drop such an end silently, or refuse it, and none of them
notices a gap between two logs, or zeros where a write should begin. `cuts` finds the first write that can't be read or
is missing. `apply_cuts` moves everything after it into a file named ``000012.log.cut-at-4096``, so that the rest is a
prefix of the write history. Nothing is cut where an engine's own recovery does the same.

Format of a log, and of a manifest (LevelDB's https://github.com/google/leveldb/blob/main/doc/log_format.md; RocksDB's
https://github.com/facebook/rocksdb/wiki/Write-Ahead-Log-File-Format is the same as long as it recycles no logs)::

    block of 32 KB: records, and fewer than 7 bytes of padding
    record:         masked crc32c of type and data (u32), length of data (u16), type (u8), data
    type:           1 the whole of a write, 2 its first part, 3 a middle part, 4 its last part
    write in a log: sequence number of its first change (u64), number of changes (u32), changes

Numbers are little-endian. A manifest's writes are edits: tag (varint) and value, of which only the first ones are read.
RocksDB writes what belongs together, such as a flush of all column families, as a group of edits: each ends with a tag
and the number of those that follow. A group without its last edit is ignored, and RocksDB still needs the logs that
were flushed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from io import FileIO
from pathlib import Path

import attrs
import google_crc32c
import numpy as np
from topicstore.contract.errors import CorruptionError, DataLossError, LogDamagedError

from .files import link_files, place_aside, set_aside, sync

__all__ = [
    "Cut",
    "CutNeededError",
    "apply_cuts",
    "check_logs",
    "cuts",
    "cuts_of",
    "isolated",
    "least_sequence",
    "link_uncut",
]

_BLOCK = 32 << 10
_HEAD = 7
_TYPES = _WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MASK = 0xA282EAD8
_BATCH_HEAD = 12
_SECTOR = 512
"""The bytes of a disk's sector, the smallest unit that a disk writes atomically."""
_READ_AT_ONCE = 1 << 18

_NAMED = re.compile(rb"(MANIFEST-\d+)\n")
"""Matches the contents of ``CURRENT``."""
_LOG = re.compile(r"\d+\.log")
_TEXTS = frozenset((0x2001, 1))
"""Tags whose value is a length and that many bytes: the database's id, and the name of its key order."""
_LOG_NUMBER, _LAST_SEQUENCE, _OLDEST_LOG = 2, 4, 10
_NUMBERS = frozenset((_LOG_NUMBER, 3, _LAST_SEQUENCE, 9, _OLDEST_LOG, 203))
"""Tags, at the head of an edit, whose values are one number."""
_GROUPED = re.compile(rb"\xac\x02([\x00-\x7f])\Z")
"""Matches the end of an edit in a group: the tag 300, and the number of edits that follow."""


@attrs.frozen
class Cut:
    """A truncation of a file that is needed before its shard can be opened."""

    file: Path
    keep: int | None
    """The number of bytes to keep from the beginning; None to set the whole file aside."""
    discarded: str = attrs.field(default="", eq=False)
    """A description of readable writes that are cut off because earlier ones are missing; empty if there are none."""
    spoiled: Sequence[int] = attrs.field(default=(), eq=False)
    """Offsets of bytes that are changed in a copy, so that the records they belong to can't be read either."""


class CutNeededError(LogDamagedError):
    """The error that files must be truncated, as ``cuts`` lists, before the engine may read the database."""

    def __init__(self, path: Path, found: Sequence[Cut]) -> None:
        named = ", ".join(cut.file.name for cut in found)
        discarded = ", ".join(cut.discarded for cut in found if cut.discarded)
        super().__init__(
            f"the log can't be read to its end, or writes are missing in it: {named}", str(path), discarded
        )
        self.cuts = found

    def __reduce__(self) -> tuple[type[CutNeededError], tuple[Path, Sequence[Cut]]]:
        return type(self), (Path(self.place), self.cuts)


@attrs.frozen
class _Records:
    """The writes of a file up to the first that can't be read."""

    writes: list[bytes]
    """The first bytes of each write: all of an edit, the head of a batch."""
    ends: list[int]
    """The offset of the end of each write."""
    whole: bool
    """Whether the file ends with the last of these writes."""
    goes_on: bool
    """Whether a record can be read after the unreadable part."""

    @property
    def end(self) -> int:
        """The offset of the end of the last write, 0 if there is none."""
        return self.ends[-1] if self.ends else 0


_EMPTY = _Records(writes=[], ends=[], whole=True, goes_on=False)


def check_logs(directory: Path, *, manifest_counts: bool, refused: bool = False) -> None:
    """Raise `CutNeededError` if a file must be truncated. Also raises the errors of `cuts`."""
    found = cuts(directory, manifest_counts=manifest_counts, refused=refused)
    if found:
        raise CutNeededError(directory, found)


def cuts(directory: Path, *, manifest_counts: bool, refused: bool = False) -> list[Cut]:
    """Return the truncations that leave exactly the writes before the first missing or damaged one.

    manifest_counts: treat a missing or empty log as one that lost its writes, because the engine begins another log
                     only after a write (`LeveldbEngine.reclaim`).
    refused:         also find damage that the engine itself detects and refuses, and treat the log that LevelDB's
                     manifest needs next as empty if it is missing.

    Logs that the manifest no longer needs are ignored, as the engines ignore them. The list is empty if nothing is
    damaged or there is no database. Raises `CorruptionError` if the manifest is damaged inside, and, unless
    ``refused``, if that log is missing; `DataLossError` if the manifest is missing.

    A manifest whose end was not synced may also be damaged inside: its pages are written back in any order. That end
    records tables made from logs or other tables, which the engine removes only after the end is synced. So the end is
    cut off if the oldest log that is needed without it exists; the engine itself detects a missing table. RocksDB
    begins a manifest with many edits, so there a flush must precede the damage as well.
    """
    found: list[Cut] = []
    manifest = _manifest_of(directory)
    if manifest is None:
        return []
    edits = _read(manifest, head=None)
    count = len(edits.writes) if manifest_counts else _grouped(edits.writes)
    oldest, sequence = _numbers(edits.writes[:count])
    logs = {int(name[:-4]): directory / name for name in os.listdir(directory) if _LOG.fullmatch(name)}  # noqa: PTH208 - texts
    if edits.goes_on and (oldest not in logs or not (manifest_counts or _flushed(edits.writes[:count]))):
        raise CorruptionError(f"it can't be read from byte {edits.end} on", str(manifest))
    if manifest_counts and oldest not in logs:
        logs[oldest] = directory / f"{oldest:06}.log"
        if not refused:
            raise CorruptionError(
                f"{logs[oldest].name} is missing, or {manifest.name} lost its end, which named the next log",
                str(directory),
            )
        found.append(Cut(logs[oldest], 0))
    if not edits.whole:
        found.append(Cut(manifest, edits.ends[count - 1] if count else 0))
    counting = [logs[number] for number in sorted(logs) if number >= oldest]
    if not refused and not found and _follow_each_other(counting, sequence):
        return []
    return found + _cuts_of(counting, sequence, manifest_counts=manifest_counts)


def least_sequence(directory: Path) -> int:
    """Return the lowest sequence number that LevelDB must reach when it opens a database and reads all of its logs.

    That is the manifest's last sequence number, or a higher one: the number of the last change in the first write of a
    later log, if that write is complete. The number is 0 if there is no database. Only the first write of each log is
    read.
    """
    manifest = _manifest_of(directory)
    if manifest is None:
        return 0
    oldest, sequence = _numbers(_read(manifest, head=None).writes)
    for name in os.listdir(directory):  # noqa: PTH208 - texts
        if _LOG.fullmatch(name) and int(name[:-4]) >= oldest:
            with (directory / name).open("rb", buffering=0) as log:
                first = _first_whole_write(log)
            if first:
                sequence = max(sequence, _changes(first).stop - 1)
    return sequence


def _manifest_of(directory: Path) -> Path | None:
    """Return the manifest in use, None if there is no database."""
    current = directory / "CURRENT"
    try:
        named = _NAMED.fullmatch(current.read_bytes())
    except FileNotFoundError:
        return None
    if named is None:
        raise CorruptionError("it names no manifest", str(current))
    manifest = directory / named[1].decode()
    try:
        manifest.lstat()
    except FileNotFoundError as gone:
        raise DataLossError("it is gone, and CURRENT names it", str(manifest)) from gone
    return manifest


def _follow_each_other(logs: list[Path], sequence: int) -> bool:
    """Return True only if no write can be missing between logs, or where an engine would skip zeros.

    Only a small part of the logs is parsed, in a tenth of the time that an engine takes to read them. The engine's
    checksums detect all other damage, except at the end of the newest log, which may lack a part of a write.
    """
    expected = range(sequence + 2)
    for log in logs:
        with log.open("rb", buffering=0) as file:
            first = _first_write(file.read(2 * _BLOCK))
            if (first and _changes(first).start not in expected) or _has_zero_sector(file):
                return False
        if log is not logs[-1]:
            last = _last_write(log.read_bytes()) if first else b""
            if not last:
                return False
            expected = range(_changes(last).stop, _changes(last).stop + 1)
    return True


def _has_zero_sector(file: FileIO) -> bool:
    file.seek(0)
    buffer = bytearray(_READ_AT_ONCE)
    while got := file.readinto(buffer):
        sectors = np.frombuffer(buffer, np.uint64, got // _SECTOR * _SECTOR // 8).reshape(-1, _SECTOR // 8)
        found = sectors[sectors[:, 0] == 0]
        if len(found) and not found.any(axis=1).all():
            return True
    return False


def _first_write(data: bytes) -> bytes:
    """Return the head of the first write; empty if it can't be read."""
    head = b""
    for _, start, stop in _records(memoryview(data), 0):
        head += data[start : min(stop, start + _BATCH_HEAD)]
        if len(head) >= _BATCH_HEAD:
            return head[:_BATCH_HEAD]
    return b""


def _first_whole_write(log: FileIO) -> bytes:
    """Return the head of the first write; empty if a part of the write is missing, so that engines skip it."""
    head, expected = b"", {_WHOLE, _FIRST}
    while blocks := log.read(2 * _BLOCK):
        for kind, start, stop in _records(memoryview(blocks), 0):
            if kind not in expected:
                return b""
            head = (head + blocks[start : min(stop, start + _BATCH_HEAD)])[:_BATCH_HEAD]
            if kind in (_WHOLE, _LAST):
                return head
            expected = {_MIDDLE, _LAST}
    return b""


def _last_write(data: bytes) -> bytes:
    """Return the head of the last write; empty if the file doesn't end with a complete write."""
    head, end, expected = b"", len(data), {_WHOLE, _LAST}
    for block in range((end - 1) // _BLOCK * _BLOCK, -1, -_BLOCK):
        records = list(_records(memoryview(data)[:end], block))
        if not records or any(data[records[-1][2] : end]) or end - records[-1][2] >= _HEAD:
            return b""
        for kind, start, stop in reversed(records):
            if kind not in expected:
                return b""
            head = (data[start : min(stop, start + _BATCH_HEAD)] + head)[:_BATCH_HEAD]
            if kind in (_WHOLE, _FIRST):
                return head
            expected = {_MIDDLE, _FIRST}
        end = block
    return b""


def _cuts_of(logs: list[Path], sequence: int, *, manifest_counts: bool) -> list[Cut]:
    """Return the cuts of logs whose first write must begin at most one after the number ``sequence``."""
    found: list[Cut] = []
    expected = range(sequence + 2)
    for log in logs:
        records = _read(log, head=_BATCH_HEAD) if log.exists() else _EMPTY
        following, expected = _following(records.writes, expected)
        if following < len(records.writes):
            keep = records.ends[following - 1] if following else None
            left = len(records.writes) - following
            found.append(Cut(log, keep, f"{left:,} write{'s' if left > 1 else ''} of {log.name}"))
        elif not records.whole:
            behind = f"what can be read behind byte {records.end:,} of {log.name}" if records.goes_on else ""
            found.append(Cut(log, records.end, behind))
        if manifest_counts and not records.writes:
            # The log has lost its writes: the engine begins the next log only after a write (`LeveldbEngine.reclaim`).
            expected = range(0)
    return found


def _following(writes: list[bytes], expected: range) -> tuple[int, range]:
    """Return the number of consecutive writes, and the range where the next may begin, which is empty after a gap."""
    for number, write in enumerate(writes):
        changes = _changes(write)
        if changes.start not in expected:
            return number, range(0)
        expected = range(changes.stop, changes.stop + 1)
    return len(writes), expected


def _changes(write: bytes) -> range:
    """Return the sequence numbers of a write's changes."""
    first = int.from_bytes(write[:8], "little")
    return range(first, first + int.from_bytes(write[8:_BATCH_HEAD], "little"))


def cuts_of(damaged: CorruptionError, directory: Path, *, manifest_counts: bool) -> Sequence[Cut]:
    """Return the cuts that an error carries; if it carries none, the cuts that `cuts` finds with ``refused``."""
    if isinstance(damaged, CutNeededError):
        return damaged.cuts
    return cuts(directory, manifest_counts=manifest_counts, refused=True)


def link_uncut(
    directory: Path, links: str, found: Sequence[Cut], *, without: Collection[str], lasting: str | None = None
) -> None:
    """Link the files of a directory into another, as `link_files` does; copy those that must be cut."""
    link_files(directory, links, without={*without, *(cut.file.name for cut in found)}, lasting=lasting)
    for cut in found:
        if cut.keep is not None:
            kept = bytearray()
            if cut.keep:
                with cut.file.open("rb") as file:
                    kept += file.read(cut.keep)
            for at in cut.spoiled:
                kept[at] ^= 1
            Path(links, cut.file.name).write_bytes(kept)


def isolated(directory: Path) -> list[Cut]:
    """Return a cut for each log that holds incomplete writes; the cut damages the first part of each of them.

    When RocksDB skips damage, it keeps the checksum of the parts before the damage. So it refuses the next write that
    has several parts, and therefore the database.
    """
    found = []
    for log in sorted(path for path in directory.iterdir() if _LOG.fullmatch(path.name)):
        data, at, begun, spoiled = memoryview(log.read_bytes()), 0, -1, list[int]()
        while at < len(data):
            for kind, start, stop in _records(data, at):
                if begun >= 0 and kind in (_WHOLE, _FIRST):
                    spoiled.append(begun)
                begun = {_FIRST: start - _HEAD, _MIDDLE: begun}.get(kind, -1)
                at = stop
            if begun >= 0:
                spoiled.append(begun)
            at, begun = (at // _BLOCK + 1) * _BLOCK, -1
        if spoiled:
            found.append(Cut(log, len(data), spoiled=spoiled))
    return found


def apply_cuts(found: Sequence[Cut]) -> None:
    """Truncate files, newest first, so that an interruption leaves no new gap; keep the removed bytes beside them."""
    for cut in reversed(found):
        if cut.keep is None:
            cut.file.rename(place_aside(cut.file, 0))
            sync(cut.file.parent)
        else:
            set_aside(cut.file, cut.keep)


def _read(file: Path, *, head: int | None) -> _Records:
    """Read the writes of a file, at most the first ``head`` bytes of each."""
    data = memoryview(file.read_bytes())
    writes: list[bytes] = []
    ends: list[int] = []
    parts: list[bytes] = []
    at = 0
    for kind, start, stop in _records(data, 0):
        if kind in (_WHOLE, _FIRST) and not parts:
            parts = [bytes(data[start:stop] if head is None else data[start : min(stop, start + head)])]
        elif kind in (_MIDDLE, _LAST) and parts:
            parts.append(bytes(data[start:stop]) if head is None or len(parts[0]) < head else b"")
        else:
            break
        at = stop
        if kind in (_WHOLE, _LAST):
            writes.append(b"".join(parts)[:head])
            ends.append(at)
            parts = []
    rest = data[ends[-1] if ends else 0 :]
    whole = not any(rest[:_HEAD]) and len(rest) < _HEAD
    return _Records(writes, ends, whole, not whole and _readable_after(data, at))


def _readable_after(data: memoryview, behind: int) -> bool:
    """Return whether a record can be read after an unreadable one: then the damage isn't at the end.

    The record's length may be damaged, too, so each byte of the same block is tried, and then each later block.
    """
    block = min(-(-(behind + 1) // _BLOCK) * _BLOCK, len(data))
    places = (*range(behind + 1, block), *range(block, len(data), _BLOCK))
    return any(next(_records(data, place), None) is not None for place in places)


def _records(data: memoryview, at: int) -> Iterator[tuple[int, int, int]]:
    """Yield type, beginning and end of data of each record, up to the first that can't be read."""
    while True:
        left = _BLOCK - at % _BLOCK
        if left < _HEAD:
            at += left
            continue
        start = at + _HEAD
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        if start > len(data) or data[start - 1] not in _TYPES or _HEAD + length > left or start + length > len(data):
            return
        stored = int.from_bytes(data[at : at + 4], "little")
        checksum = google_crc32c.value(bytes(data[at + 6 : start + length]))
        if ((checksum >> 15 | checksum << 17) + _MASK) & 0xFFFFFFFF != stored:
            return
        at = start + length
        yield data[start - 1], start, at


def _grouped(edits: list[bytes]) -> int:
    """Return the number of edits that take effect: all except those of an incomplete group at the end."""
    for number in range(len(edits), 0, -1):
        grouped = _GROUPED.search(edits[number - 1])
        if grouped is None or grouped[1] == b"\0":
            return number
    return 0


def _flushed(edits: list[bytes]) -> bool:
    """Return whether a group is among the edits."""
    return any(map(_GROUPED.search, edits))


def _numbers(edits: list[bytes]) -> tuple[int, int]:
    """Return the number of the oldest log that is still needed, and the last sequence number, from the latest edits.

    LevelDB's manifest names that log as the one being written. RocksDB's has such a number for each column family, and
    names separately the oldest log that any of them needs.
    """
    highest = {_LOG_NUMBER: 0, _LAST_SEQUENCE: 0, _OLDEST_LOG: 0}
    for edit in edits:
        at = 0
        while at < len(edit):
            tag, at = _varint(edit, at)
            if tag not in _NUMBERS and tag not in _TEXTS:
                break
            value, at = _varint(edit, at)
            if tag in _TEXTS:
                at += value
            elif tag in highest:
                highest[tag] = max(highest[tag], value)
    return highest[_OLDEST_LOG] or highest[_LOG_NUMBER], highest[_LAST_SEQUENCE]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number stored in seven bits per byte, the lowest first, and the offset after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80:
            return value, at
