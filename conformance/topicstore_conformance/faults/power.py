"""What a power failure leaves of a directory, at any moment of a program that wrote to it.

The program runs under strace, which records every system call that changes files, with its data. `Recording.image`
then makes the directory as a disk could hold it had the power failed behind a given call. What was synced is there. Of
what was not, each file may have kept all, nothing, or what came before any byte; and what its size then promises but
the disk never got may be missing, zeros, or anything. New names, renamings and removals are kept in their order up to
any of them, and those of a directory that was synced for certain.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path, PurePosixPath

import attrs

__all__ = ["Recording", "record", "why_no_tracing"]

_CALLS = (
    "open,openat,creat,lseek,write,pwrite64,writev,pwritev,pwritev2,ftruncate,truncate,fallocate,"
    "fsync,fdatasync,sync_file_range,msync,rename,renameat,renameat2,unlink,unlinkat,link,linkat,mkdir,mkdirat,rmdir"
)
_SECTOR = 4_096
"""Bytes that a disk writes all or not at all."""
_LINE = re.compile(r"(\d+) +(.*)")
_WHOLE = re.compile(r"(\w+)\((.*)\) += (-?\d+)")
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>(.*)")
_FILE = re.compile(r"(\d+)<([^>]*)>")
_SYNCHRONOUS = re.compile(r"O_D?SYNC")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


@cache
def why_no_tracing() -> str | None:
    """Return why system calls can't be recorded here, or None."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-f", "--seccomp-bpf", "-o", "/dev/null", "true"], capture_output=True)
    return None if tried.returncode == 0 else f"tracing is not permitted: {tried.stderr.decode().strip()[:100]}"


# --- what happened to files ---------------------------------------------------------------


@attrs.frozen
class _Write:
    """Bytes came to stand in a file; ``data`` None: it was cut or made longer to ``offset`` bytes."""

    offset: int
    data: bytes | None
    names: int = 0
    """Changes of names before it. The system writes names and sizes in their order, so it needs those."""

    def apply(self, content: bytearray) -> None:
        end = self.offset + len(self.data or b"")
        if self.data is None:
            del content[end:]
        content.extend(bytes(max(0, end - len(content))))
        if self.data is not None:
            content[self.offset : end] = self.data


@attrs.define(eq=False)
class _File:
    """A file, whatever its name."""

    content: bytearray = attrs.field(factory=bytearray)
    """What is on disk for certain."""
    pending: list[_Write] = attrs.field(factory=list)
    """What was written since the last sync."""
    size: int = 0

    def add(self, write: _Write, names: int) -> None:
        end = write.offset + len(write.data or b"")
        longer = end > self.size
        self.size = end if longer or write.data is None else self.size
        self.pending.append(attrs.evolve(write, names=names if longer else 0))

    def sync(self, upto: int) -> None:
        for write in self.pending[:upto]:
            write.apply(self.content)
        del self.pending[:upto]

    def left(self, draw: random.Random, names: int) -> bytes:
        """Return what the file may hold after the power failed, when so many changes of names are there."""
        kept = bytearray(self.content)
        late = (number for number, write in enumerate(self.pending) if write.names > names)
        pending = self.pending[: next(late, len(self.pending))]
        kind = draw.choice(("all", "nothing", "short", "zeros", "noise"))
        size = sum(len(write.data or b"") for write in pending)
        room = {"all": size, "nothing": 0}.get(kind, draw.randint(0, size))
        if kind in ("short", "zeros", "noise") and draw.random() < 0.3:  # where a call ended, as files often do
            ends = [0]
            for write in pending:
                ends.append(ends[-1] + len(write.data or b""))
            room = draw.choice(ends)
        for write in pending:
            if write.data is None:
                if room > 0 or kind == "all":
                    write.apply(kept)
                continue
            got = write.data[:room]
            room -= len(got)
            if write.offset < len(self.content) and len(got) < len(write.data):
                got = got[: len(got) // _SECTOR * _SECTOR]  # what was there is overwritten by sectors
            lost = len(write.data) - len(got)
            if got:
                _Write(write.offset, got).apply(kept)
            start = max(write.offset + len(got), len(self.content))
            new = write.offset + len(write.data) - start
            if lost and new > 0 and kind in ("zeros", "noise"):
                _Write(start, bytes(new) if kind == "zeros" else draw.randbytes(new)).apply(kept)
        return bytes(kept)


@attrs.frozen
class _Named:
    """A name was given to a file (None: a directory), or taken (``gone``)."""

    path: str
    file: _File | None = None
    gone: bool = False
    """The name is there no more."""
    was: str | None = None
    """A directory's former name."""


# --- the recording ---------------------------------------------------------------------------


@attrs.frozen
class _Event:
    """A system call that succeeded. ``begun``: the number of events that had ended when it began."""

    call: str
    text: str
    result: int
    begun: int


@attrs.define
class Recording:
    """All that a program did to the files below a directory, and the words that it wrote to its standard output."""

    directory: str
    _events: list[_Event]

    def moments(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the numbers of all calls, and of those behind which the most files had ends that were not synced.

        Where it is several of an engine's, a later write can be on disk and an earlier one not.
        """
        disk, unsynced = _Disk(self.directory), [0]
        for event in self._events:
            disk.apply(event)
            unsynced.append(disk.unsynced())
        most = [number for number, count in enumerate(unsynced) if count == max(unsynced)]
        return range(1, len(unsynced)), most

    def words(self, upto: int | None = None) -> list[str]:
        """Return the lines that the program had written when the power failed behind call number ``upto``."""
        said = b""
        for event in self._events[:upto]:
            if event.call == "write" and event.text.startswith("1<"):
                said += _bytes_of(event.text)
        return said.decode().splitlines()

    def image(self, upto: int, draw: random.Random, target: Path) -> None:
        """Make in ``target`` the directory as the disk may hold it after call number ``upto``."""
        disk = _Disk(self.directory)
        for event in self._events[:upto]:
            disk.apply(event)
        target.mkdir()
        upto_name = disk.upto(draw)
        for path, file in disk.names(upto_name).items():
            place = target / PurePosixPath(path).relative_to(self.directory)
            if not place.parent.is_dir() or place.exists():
                continue  # a name in a directory that is not there itself
            if file is None:
                place.mkdir()
            else:
                place.write_bytes(file.left(draw, upto_name))


class _Disk:
    """The files of a directory, with what is on disk for certain and what may be."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._now: dict[str, _File | None] = {directory: None}
        """What names stand for now; None for a directory."""
        self._changes: list[tuple[_Named, str]] = []
        """Changes of names, in their order, and the directory whose sync makes each certain."""
        self._certain: set[int] = set()
        """Those of them that are on disk."""
        self._at: dict[int, int] = {}
        """Where the next `write` to a descriptor goes."""
        self._synchronous: set[int] = set()
        """Descriptors to which each write is synced."""
        self._counts: list[dict[_File, int]] = []

    def unsynced(self) -> int:
        """Return how many files are longer than what is synced of them."""
        return sum(1 for file in self._now.values() if file is not None and file.size > len(file.content))

    def upto(self, draw: random.Random) -> int:
        """Return how many changes of names may be there, beside those that are on disk for certain."""
        return draw.choice((0, len(self._changes), draw.randint(0, len(self._changes))))

    def names(self, upto: int) -> dict[str, _File | None]:
        """Return the names that are there then, directories before what is in them."""
        there: dict[str, _File | None] = {}
        for number, (change, _) in enumerate(self._changes):
            if number < upto or number in self._certain:
                _rename(there, change)
        return dict(sorted(there.items()))

    def apply(self, event: _Event) -> None:
        self._counts.append({})
        handle = getattr(self, f"_{event.call}", None)
        if handle is not None:
            handle(event)

    # --- contents ---

    def _openat(self, event: _Event) -> None:
        descriptor = event.result
        path = self._below(_paths_of(event.text)[-1])
        self._at[descriptor] = 0
        (self._synchronous.add if _SYNCHRONOUS.search(event.text) else self._synchronous.discard)(descriptor)
        if path is None or "O_DIRECTORY" in event.text:
            return
        file = self._now.get(path)
        if file is None and path not in self._now and "O_CREAT" in event.text:
            file = _File()
            self._name(_Named(path, file))
        elif file is not None and "O_TRUNC" in event.text:
            self._add(event, file, _Write(0, None))
        if file is not None and "O_APPEND" in event.text:
            self._at[descriptor] = file.size

    _open = _creat = _openat

    def _lseek(self, event: _Event) -> None:
        self._at[int(event.text.split("<")[0])] = event.result

    def _write(self, event: _Event) -> None:
        descriptor = int(event.text.split("<")[0])
        offset = self._at.get(descriptor, 0)
        self._at[descriptor] = offset + event.result
        self._put(event, offset)

    _writev = _write

    def _pwrite64(self, event: _Event) -> None:
        self._put(event, int(event.text.rsplit(",", 1)[1]))

    _pwritev = _pwrite64

    def _pwritev2(self, event: _Event) -> None:
        self._put(event, int(event.text.rsplit(",", 2)[1]))

    def _put(self, event: _Event, offset: int) -> None:
        file = self._file(event)
        if file is None:
            return
        write = _Write(offset, _bytes_of(event.text)[: event.result])
        if int(event.text.split("<")[0]) in self._synchronous:
            write.apply(file.content)
            file.size = max(file.size, len(file.content))
        else:
            self._add(event, file, write)

    def _ftruncate(self, event: _Event) -> None:
        file = self._file(event)
        if file is not None:
            self._add(event, file, _Write(int(event.text.rsplit(",", 1)[1]), None))

    def _fallocate(self, event: _Event) -> None:
        file = self._file(event)
        if file is not None and "KEEP_SIZE" not in event.text:
            start, length = event.text.rsplit(",", 2)[1:]
            self._add(event, file, _Write(max(file.size, int(start) + int(length)), None))

    def _add(self, event: _Event, file: _File, write: _Write) -> None:
        file.add(write, len(self._changes))
        self._counts[-1][file] = 1

    def _fsync(self, event: _Event) -> None:
        """What was written before the sync began is on disk; what came while it ran may be."""
        matched = _FILE.match(event.text)
        path = self._below(_decoded(matched[2])) if matched else None
        if path is None or path not in self._now:
            return
        file = self._now[path]
        if file is None:
            for number, (_, directory) in enumerate(self._changes):
                if directory == path:
                    self._certain.add(number)
        else:
            since = sum(counts.get(file, 0) for counts in self._counts[event.begun :])
            file.sync(len(file.pending) - since)

    _fdatasync = _fsync

    # --- names ---

    def _mkdir(self, event: _Event) -> None:
        path = self._below(_paths_of(event.text)[-1])
        if path is not None:
            self._name(_Named(path))

    _mkdirat = _mkdir

    def _rename(self, event: _Event) -> None:
        old, new = (self._below(path) for path in _paths_of(event.text)[-2:])
        if old is None or new is None or old not in self._now:
            return
        file = self._now[old]
        self._name(_Named(new, file, was=old))

    _renameat = _renameat2 = _rename

    def _link(self, event: _Event) -> None:
        old, new = (self._below(path) for path in _paths_of(event.text)[-2:])
        if old in self._now and new is not None:
            self._name(_Named(new, self._now[old]))

    _linkat = _link

    def _unlink(self, event: _Event) -> None:
        path = self._below(_paths_of(event.text)[-1])
        if path in self._now:
            self._name(_Named(path, gone=True))

    _unlinkat = _rmdir = _unlink

    def _name(self, change: _Named) -> None:
        self._changes.append((change, str(PurePosixPath(change.path).parent)))
        _rename(self._now, change)

    # --- finding ---

    def _below(self, path: str) -> str | None:
        return path if path.startswith(self._directory + "/") or path == self._directory else None

    def _file(self, event: _Event) -> _File | None:
        matched = _FILE.match(event.text)
        path = self._below(_decoded(matched[2])) if matched else None
        return None if path is None else self._now.get(path)


def _rename(names: dict[str, _File | None], change: _Named) -> None:
    """Apply a change to names; a directory takes what is below it along."""
    if change.gone:
        names.pop(change.path, None)
        return
    if change.was is not None:
        names.pop(change.was, None)
        for path in [path for path in names if path.startswith(change.was + "/")]:
            names[change.path + path[len(change.was) :]] = names.pop(path)
    names[change.path] = change.file


# --- strace ------------------------------------------------------------------------------


def record(command: Sequence[str], directory: Path, scratch: Path) -> Recording:
    """Run a program of one process and return what it did to the files of ``directory``, which must be there.

    Each sync begins some milliseconds late, so that other threads come to write before it, as they do on a slow disk.
    """
    trace = scratch / "trace"
    tracer = ["strace", "-f", "--seccomp-bpf", "-y", "-xx", "-s", str(1 << 28), "-e", f"trace={_CALLS}"]
    tracer += ["-e", "inject=fsync,fdatasync:delay_enter=5000", "-e", "signal=none", "-o", str(trace)]
    subprocess.run([*tracer, *command], check=True, stdout=subprocess.DEVNULL)
    with trace.open(errors="replace") as lines:
        return Recording(str(directory), list(_events(lines, str(directory))))


def _concerns(event: _Event, directory: str) -> bool:
    """Say whether a call is about a file below the directory, or the program's standard output."""
    found = _FILE.match(event.text)
    paths = [_decoded(found[2])] if found else _paths_of(event.text)
    return event.text.startswith("1<") or any(path.startswith(directory) for path in paths)


def _events(lines: Iterator[str], directory: str) -> Iterator[_Event]:
    """Yield the calls that succeeded and concern the directory, in the order of their ends."""
    begun: dict[str, tuple[int, str]] = {}
    ended = 0
    for line in lines:
        matched = _LINE.match(line)
        if matched is None:
            continue
        thread, text = matched.groups()
        start = ended
        if text.endswith("<unfinished ...>"):
            begun[thread] = ended, text.removesuffix("<unfinished ...>")
            continue
        if (resumed := _RESUMED.match(text)) and thread in begun:
            start, head = begun.pop(thread)
            text = head.rstrip() + resumed[1]
        if (whole := _WHOLE.match(text)) and int(whole[3]) >= 0:
            event = _Event(whole[1], whole[2], int(whole[3]), start)
            if _concerns(event, directory):
                yield event
                ended += 1


def _decoded(escaped: str) -> str:
    """Return a text that strace wrote with all or none of its bytes as hexadecimal digits."""
    if "\\x" not in escaped:
        return escaped
    return bytes.fromhex(escaped.replace("\\x", "")).decode(errors="surrogateescape")


def _paths_of(text: str) -> list[str]:
    return [_decoded(found) for found in _TEXT.findall(text)]


def _bytes_of(text: str) -> bytes:
    return b"".join(bytes.fromhex(found.replace("\\x", "")) for found in _TEXT.findall(text))
