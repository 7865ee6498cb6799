"""The logs of LevelDB and RocksDB, which have one form: how far they can be read, and where writes are missing.

After a power failure a log may end in part of a record, in zeros, or in anything; and when a new log was begun
shortly before, the old one may end early though the new one is there. Engines drop such an end without a word, or
refuse it, and none of them notices a gap between two logs. `cuts` finds the first write that can't be read, or isn't
there; what lies behind it must go, so that what is left is what there was at one moment.

Form of a log, and of a manifest (LevelDB's ``doc/log_format.md``; RocksDB's is the same as long as it reuses no
logs)::

    block of 32 KB: records, and fewer than 7 bytes of padding
    record:         masked crc32c of type and data (u32), length of data (u16), type (u8), data
    type:           1 the whole of a write, 2 its first part, 3 a middle part, 4 its last part
    write in a log: sequence number of its first change (u64), number of changes (u32), changes

Numbers are little-endian. A manifest's writes are edits: tag (varint) and value, of which only the first are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import attrs
import google_crc32c
from topicstore.contract.errors import CorruptionError

from .files import link_files, sync

__all__ = ["Cut", "apply_cuts", "cuts", "link_uncut"]

_BLOCK = 32 << 10
_HEAD = 7
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MASK = 0xA282EAD8
_BATCH_HEAD = 12

_TEXTS = frozenset((0x2001, 1))
"""Tags whose value is a length and so many bytes: the database's id, and the name of its order of keys."""
_LOG_NUMBER, _LAST_SEQUENCE = 2, 4
_NUMBERS = frozenset((_LOG_NUMBER, 3, _LAST_SEQUENCE, 9, 10, 203))
"""Tags, at the head of an edit, whose values are one number."""


@attrs.frozen
class Cut:
    """How much of a file is to be kept so that the shard can be opened."""

    file: Path
    keep: int | None
    """Bytes from its beginning; None if the file is to go."""


@attrs.frozen
class _Records:
    """The writes of a file, up to the first that can't be read."""

    writes: list[bytes]
    """The first bytes of each: all of an edit, the head of a batch."""
    end: int
    """Where the last of them ends."""
    whole: bool
    """Whether the file ends there."""
    goes_on: bool
    """Whether something can be read behind what can't be."""


_HINT = 'Opening with recovery="point_in_time" keeps what is before the damage, "salvage" every write that can be read'
_EMPTY = _Records(writes=[], end=0, whole=True, goes_on=False)


def cuts(directory: Path, *, manifest_counts: bool, within: bool = False) -> list[Cut]:
    """Return what must go so that everything up to the first write that is missing or damaged can be read.

    manifest_counts: only logs count that the manifest isn't done with, as LevelDB's, which may end early. RocksDB syncs
                     a log before it is done with it, so all its logs may be looked at.
    within:          cut logs at damage behind which something can be read, too. A power failure leaves damage at ends
                     only.

    An empty list: all is whole. Raises `CorruptionError` where the manifest is damaged within, because RocksDB may read
    such a one for ever, and, unless ``within``, where a log is, or where that is missing with which LevelDB's goes on.
    """
    found: list[Cut] = []
    manifest = directory / (directory / "CURRENT").read_bytes().decode(errors="replace").strip("\0\n")
    if not manifest.is_file():
        return []  # the engine says so
    edits = _read(manifest, head=None)
    oldest, sequence = _numbers(edits.writes)
    logs = {int(file.stem): file for file in directory.glob("[0-9]*.log")}
    if manifest_counts and oldest not in logs:
        logs[oldest] = directory / f"{oldest:06}.log"
        if not within:
            raise CorruptionError(
                f"{logs[oldest].name} is missing, or {manifest.name} lost its end, which told where it goes on",
                str(directory),
            )
        found.append(Cut(logs[oldest], 0))
    if edits.goes_on:
        raise CorruptionError(f"it can't be read from byte {edits.end} on", str(manifest))
    if not edits.whole:
        found.append(Cut(manifest, edits.end))
    counting = [logs[number] for number in sorted(logs) if number >= oldest or not manifest_counts]
    return found + _cuts_of(counting, sequence, manifest_counts=manifest_counts, within=within)


def _cuts_of(logs: list[Path], sequence: int, *, manifest_counts: bool, within: bool) -> list[Cut]:
    """Return what must go of logs, whose first write comes at most one after a sequence number."""
    found: list[Cut] = []
    expected = range(sequence + 2)
    for place, log in enumerate(logs):
        records = _read(log, head=_BATCH_HEAD) if log.exists() else _EMPTY
        if records.goes_on and not within:
            raise CorruptionError(f"it can't be read from byte {records.end} on, but further on. {_HINT}", str(log))
        for write in records.writes:
            first = int.from_bytes(write[:8], "little")
            if first not in expected:
                return [*found, *(Cut(later, None) for later in logs[place:])]
            behind = first + int.from_bytes(write[8:], "little")
            expected = range(behind, behind + 1)
        if not records.whole:
            found.append(Cut(log, records.end))
        if manifest_counts and not records.writes:
            expected = range(0)  # another is begun only when this one has a write: see `LeveldbEngine.reclaim`
    return found


def link_uncut(directory: Path, links: str, found: list[Cut], *, without: Collection[str]) -> None:
    """Link the files of a directory into another, but copy what is kept of those that are to be cut."""
    link_files(directory, links, without={*without, *(cut.file.name for cut in found)})
    for cut in found:
        if cut.keep is not None:
            kept = cut.file.read_bytes()[: cut.keep] if cut.keep else b""
            Path(links, cut.file.name).write_bytes(kept)


def apply_cuts(found: list[Cut]) -> None:
    """Cut the files, the newest first, so that an interrupted cutting leaves no gap that wasn't there."""
    for cut in reversed(found):
        if cut.keep is None:
            cut.file.unlink()
        else:
            with cut.file.open("ab") as file:  # one that is missing is made
                file.truncate(cut.keep)
            sync(cut.file)
        sync(cut.file.parent)


def _read(file: Path, *, head: int | None) -> _Records:
    """Read the writes of a file, of each no more than the first ``head`` bytes."""
    data = memoryview(file.read_bytes())
    writes: list[bytes] = []
    parts: list[bytes] = []
    end = at = 0
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
            parts = []
            end = at
    rest = data[end:]
    whole = not any(rest[:_HEAD]) and len(rest) < _HEAD
    return _Records(writes, end, whole, not whole and _readable_after(data, at))


def _readable_after(data: memoryview, behind: int) -> bool:
    """Say whether a record can be read behind the one that can't be: then the damage isn't at the end.

    It is looked for where that one would end, by its length, and at the beginnings of later blocks.
    """
    length = int.from_bytes(data[behind + 4 : behind + 6], "little")
    first = -(-(behind + 1) // _BLOCK) * _BLOCK
    places = (behind + _HEAD + length, *range(first, len(data), _BLOCK))
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
        if start > len(data) or _HEAD + length > left or start + length > len(data) or not data[at + 6]:
            return
        stored = int.from_bytes(data[at : at + 4], "little")
        checksum = google_crc32c.value(bytes(data[at + 6 : start + length]))
        if ((checksum >> 15 | checksum << 17) + _MASK) & 0xFFFFFFFF != stored:
            return
        at = start + length
        yield data[start - 1], start, at


def _numbers(edits: list[bytes]) -> tuple[int, int]:
    """Return the number of the oldest log that counts, and the last sequence number, as the last edits say."""
    oldest = sequence = 0
    for edit in edits:
        at = 0
        while at < len(edit):
            tag, at = _varint(edit, at)
            if tag not in _NUMBERS and tag not in _TEXTS:
                break
            value, at = _varint(edit, at)
            if tag in _TEXTS:
                at += value
            elif tag == _LOG_NUMBER:
                oldest = max(oldest, value)
            elif tag == _LAST_SEQUENCE:
                sequence = max(sequence, value)
    return oldest, sequence


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of seven bits a byte, the lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80:
            return value, at
