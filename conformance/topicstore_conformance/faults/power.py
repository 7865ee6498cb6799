"""Simulation of power failures: the possible states of a directory at any moment of a program that wrote to it.

The program runs under strace, which records every system call that changes files, with its data. `Recording.image`
then builds the directory as a disk could hold it if the power had failed after a given call:

- Data that was fsynced is complete.
- Of each file's other data, all, none or a prefix is kept. The rest, up to the file's size, is missing, zeros or noise.
- Pages in the middle of a file may be lost while later ones are kept, because file systems write pages back in any
  order.
- New names, renames and removals are kept in order up to a random one, but at least those before an fsync of the
  directory.
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

__all__ = ["Call", "Recording", "record", "why_no_tracing"]

_CALLS = (
    "open,openat,creat,lseek,write,pwrite64,writev,pwritev,pwritev2,ftruncate,truncate,fallocate,"
    "fsync,fdatasync,sync_file_range,msync,rename,renameat,renameat2,unlink,unlinkat,link,linkat,mkdir,mkdirat,rmdir"
)
_PAGE = 4_096
"""The number of bytes in a page, the unit that is written to the disk atomically."""
_LINE = re.compile(r"(\d+) +(.*)")
_WHOLE = re.compile(r"(\w+)\((.*)\) += (-?\d+)")
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>(.*)")
_FILE = re.compile(r"(\d+)<([^>]*)>")
_SYNCHRONOUS = re.compile(r"O_D?SYNC")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


@cache
def why_no_tracing() -> str | None:
    """Return why system calls can't be recorded on this machine, or None if they can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-f", "--seccomp-bpf", "-o", "/dev/null", "true"], capture_output=True)
    return None if tried.returncode == 0 else f"tracing is not permitted: {tried.stderr.decode().strip()[:100]}"


# --- changes of files ---------------------------------------------------------------------


@attrs.frozen
class _Write:
    """A write of bytes to a file or, if ``data`` is None, a truncation or extension to ``offset`` bytes."""

    offset: int
    data: bytes | None
    names: int = 0
    """The number of earlier name changes, which must be on disk before this write: file systems keep their order."""

    def apply(self, content: bytearray) -> None:
        end = self.offset + len(self.data or b"")
        if self.data is None:
            del content[end:]
        content.extend(bytes(max(0, end - len(content))))
        if self.data is not None:
            content[self.offset : end] = self.data


@attrs.define(eq=False)
class _File:
    """A file, independent of its names."""

    content: bytearray = attrs.field(factory=bytearray)
    """The durable contents."""
    pending: list[_Write] = attrs.field(factory=list)
    """The writes since the last fsync."""
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
        """Return random possible contents of the file after a power failure that kept ``names`` name changes."""
        kept = bytearray(self.content)
        late = (number for number, write in enumerate(self.pending) if write.names > names)
        pending = self.pending[: next(late, len(self.pending))]
        kind = draw.choice(("all", "nothing", "short", "zeros", "noise", "holes"))
        size = sum(len(write.data or b"") for write in pending)
        room = {"all": size, "holes": size, "nothing": 0}.get(kind, draw.randint(0, size))
        if kind in ("short", "zeros", "noise") and draw.random() < 0.3:  # often a file ends at the end of a write call
            ends = [0]
            for write in pending:
                ends.append(ends[-1] + len(write.data or b""))
            room = draw.choice(ends)
        for write in pending:
            if write.data is None:
                if room > 0 or kind in ("all", "holes"):
                    write.apply(kept)
                continue
            got = write.data[:room]
            room -= len(got)
            if write.offset < len(self.content) and len(got) < len(write.data):
                got = got[: len(got) // _PAGE * _PAGE]  # existing contents are overwritten page by page
            lost = len(write.data) - len(got)
            if got:
                _Write(write.offset, got).apply(kept)
            start = max(write.offset + len(got), len(self.content))
            new = write.offset + len(write.data) - start
            if lost and new > 0 and kind in ("zeros", "noise"):
                _Write(start, bytes(new) if kind == "zeros" else draw.randbytes(new)).apply(kept)
        if kind == "holes":
            self._lose_pages(kept, pending, draw)
        return bytes(kept)

    def _lose_pages(self, kept: bytearray, pending: Sequence[_Write], draw: random.Random) -> None:
        """Replace the unsynced parts of some pages with zeros, noise, or another page's bytes.

        The last written page is kept, so that written data follows each lost page.
        """
        if any(write.data is None and write.offset < len(self.content) for write in pending):
            return  # durable bytes that a truncation removed can't be restored
        ends = ((write.offset, write.offset + len(write.data)) for write in pending if write.data)
        written = sorted({page for start, end in ends for page in range(start // _PAGE, -(-end // _PAGE))})[:-1]
        fill = draw.choice(("zeros", "noise", "stale"))
        for page in draw.sample(written, min(len(written), draw.choice((1, 1, 2, 5, len(written) // 2)))):
            old = bytes(self.content[page * _PAGE : (page + 1) * _PAGE])
            new = {"zeros": bytes(_PAGE), "noise": draw.randbytes(_PAGE)}.get(fill)
            if new is None:
                other = draw.choice(written) * _PAGE
                new = bytes(kept[other : other + _PAGE])
            kept[page * _PAGE : (page + 1) * _PAGE] = old + new[len(old) :]


@attrs.frozen
class _Named:
    """A change of a name: given to a file, or to a directory if ``file`` is None, or removed."""

    path: str
    file: _File | None = None
    gone: bool = False
    """Whether the name was removed."""
    was: str | None = None
    """The former name of a directory that was renamed."""


# --- the recording ---------------------------------------------------------------------------


@attrs.frozen
class Call:
    """A system call that succeeded. Calls are numbered in the order of their ends."""

    name: str
    text: str
    """The arguments, as strace shows them."""
    result: int
    thread: str
    begun: int
    """The number of calls that had ended when this call began."""
    ended: int
    """The number of calls that had ended when this call ended."""

    @property
    def path(self) -> str:
        """Return the path of the descriptor in the first argument, or an empty string if there is none."""
        matched = _FILE.match(self.text)
        return _decoded(matched[2]) if matched else ""

    @property
    def word(self) -> str:
        """Return the text that the call wrote to standard output, or an empty string."""
        told = self.name == "write" and self.text.startswith("1<")
        return _bytes_of(self.text).decode() if told else ""


@attrs.define
class Recording:
    """A program's system calls on the files below a directory and on its standard output."""

    directory: str
    calls: list[Call]

    def moments(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the numbers of all calls, and those of the calls after which the most files had unsynced ends.

        If several files of an engine have such data, a later write can be on disk without an earlier one.
        """
        disk, unsynced = _Disk(self.directory), [0]
        for call in self.calls:
            disk.apply(call)
            unsynced.append(disk.unsynced())
        most = [number for number, count in enumerate(unsynced) if count == max(unsynced)]
        return range(1, len(unsynced)), most

    def words(self, upto: int | None = None) -> list[str]:
        """Return the lines that the program had written to standard output after call number ``upto``."""
        return "".join(call.word for call in self.calls[:upto]).splitlines()

    def image(self, upto: int, draw: random.Random, target: Path) -> None:
        """Create ``target`` as the directory may look if the power fails after call number ``upto``."""
        disk = _Disk(self.directory)
        for call in self.calls[:upto]:
            disk.apply(call)
        target.mkdir()
        upto_name = disk.upto(draw)
        for path, file in disk.names(upto_name).items():
            place = target / PurePosixPath(path).relative_to(self.directory)
            if not place.parent.is_dir() or place.exists():
                continue  # the name's directory is missing
            if file is None:
                place.mkdir()
            else:
                place.write_bytes(file.left(draw, upto_name))


class _Disk:
    """The files of a directory, with their durable contents and their unsynced writes."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._now: dict[str, _File | None] = {directory: None}
        """The current files by path; None for a directory."""
        self._changes: list[tuple[_Named, str]] = []
        """The name changes in order, each with the directory whose fsync makes it durable."""
        self._certain: set[int] = set()
        """The indices of the durable name changes."""
        self._at: dict[int, int] = {}
        """The offset of the next `write` to each descriptor."""
        self._synchronous: set[int] = set()
        """The descriptors opened with O_SYNC or O_DSYNC, whose writes are durable at once."""
        self._counts: list[dict[_File, int]] = []

    def unsynced(self) -> int:
        """Return the number of files that are longer than their durable contents."""
        return sum(1 for file in self._now.values() if file is not None and file.size > len(file.content))

    def upto(self, draw: random.Random) -> int:
        """Draw the number of name changes, counted from the first, that are on disk besides the durable ones."""
        return draw.choice((0, len(self._changes), draw.randint(0, len(self._changes))))

    def names(self, upto: int) -> dict[str, _File | None]:
        """Return files by path, directories first, after the first ``upto`` changes of names and all durable ones."""
        there: dict[str, _File | None] = {}
        for number, (change, _) in enumerate(self._changes):
            if number < upto or number in self._certain:
                _rename(there, change)
        return dict(sorted(there.items()))

    def apply(self, call: Call) -> None:
        self._counts.append({})
        handle = getattr(self, f"_{call.name}", None)
        if handle is not None:
            handle(call)

    # --- contents ---

    def _openat(self, call: Call) -> None:
        descriptor = call.result
        path = self._below(_paths_of(call.text)[-1])
        self._at[descriptor] = 0
        (self._synchronous.add if _SYNCHRONOUS.search(call.text) else self._synchronous.discard)(descriptor)
        if path is None or "O_DIRECTORY" in call.text:
            return
        file = self._now.get(path)
        if file is None and path not in self._now and "O_CREAT" in call.text:
            file = _File()
            self._name(_Named(path, file))
        elif file is not None and "O_TRUNC" in call.text:
            self._add(call, file, _Write(0, None))
        if file is not None and "O_APPEND" in call.text:
            self._at[descriptor] = file.size

    _open = _creat = _openat

    def _lseek(self, call: Call) -> None:
        self._at[int(call.text.split("<")[0])] = call.result

    def _write(self, call: Call) -> None:
        descriptor = int(call.text.split("<")[0])
        offset = self._at.get(descriptor, 0)
        self._at[descriptor] = offset + call.result
        self._put(call, offset)

    _writev = _write

    def _pwrite64(self, call: Call) -> None:
        self._put(call, int(call.text.rsplit(",", 1)[1]))

    _pwritev = _pwrite64

    def _pwritev2(self, call: Call) -> None:
        self._put(call, int(call.text.rsplit(",", 2)[1]))

    def _put(self, call: Call, offset: int) -> None:
        file = self._file(call)
        if file is None:
            return
        write = _Write(offset, _bytes_of(call.text)[: call.result])
        if int(call.text.split("<")[0]) in self._synchronous:
            write.apply(file.content)
            file.size = max(file.size, len(file.content))
        else:
            self._add(call, file, write)

    def _ftruncate(self, call: Call) -> None:
        file = self._file(call)
        if file is not None:
            self._add(call, file, _Write(int(call.text.rsplit(",", 1)[1]), None))

    def _fallocate(self, call: Call) -> None:
        file = self._file(call)
        if file is not None and "KEEP_SIZE" not in call.text:
            start, length = call.text.rsplit(",", 2)[1:]
            self._add(call, file, _Write(max(file.size, int(start) + int(length)), None))

    def _add(self, call: Call, file: _File, write: _Write) -> None:
        file.add(write, len(self._changes))
        self._counts[-1][file] = 1

    def _fsync(self, call: Call) -> None:
        """Record an fsync: writes before it began are durable; writes that ended while it ran stay pending."""
        path = self._below(call.path)
        if path is None or path not in self._now:
            return
        file = self._now[path]
        if file is None:
            for number, (_, directory) in enumerate(self._changes):
                if directory == path:
                    self._certain.add(number)
        else:
            since = sum(counts.get(file, 0) for counts in self._counts[call.begun :])
            file.sync(len(file.pending) - since)

    _fdatasync = _fsync

    # --- names ---

    def _mkdir(self, call: Call) -> None:
        path = self._below(_paths_of(call.text)[-1])
        if path is not None:
            self._name(_Named(path))

    _mkdirat = _mkdir

    def _rename(self, call: Call) -> None:
        old, new = (self._below(path) for path in _paths_of(call.text)[-2:])
        if old is None or new is None or old not in self._now:
            return
        file = self._now[old]
        self._name(_Named(new, file, was=old))

    _renameat = _renameat2 = _rename

    def _link(self, call: Call) -> None:
        old, new = (self._below(path) for path in _paths_of(call.text)[-2:])
        if old in self._now and new is not None:
            self._name(_Named(new, self._now[old]))

    _linkat = _link

    def _unlink(self, call: Call) -> None:
        path = self._below(_paths_of(call.text)[-1])
        if path in self._now:
            self._name(_Named(path, gone=True))

    _unlinkat = _rmdir = _unlink

    def _name(self, change: _Named) -> None:
        self._changes.append((change, str(PurePosixPath(change.path).parent)))
        _rename(self._now, change)

    # --- finding ---

    def _below(self, path: str) -> str | None:
        return path if path.startswith(self._directory + "/") or path == self._directory else None

    def _file(self, call: Call) -> _File | None:
        path = self._below(call.path)
        return None if path is None else self._now.get(path)


def _rename(names: dict[str, _File | None], change: _Named) -> None:
    """Apply a name change; renaming a directory renames everything below it."""
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
    """Run a single-process program and return its system calls on the files of ``directory``, which must exist.

    Each fsync is delayed by five milliseconds, so that other threads write meanwhile, as with a slow disk.
    """
    trace = scratch / "trace"
    tracer = ["strace", "-f", "--seccomp-bpf", "-y", "-xx", "-s", str(1 << 28), "-e", f"trace={_CALLS}"]
    tracer += ["-e", "inject=fsync,fdatasync:delay_enter=5000", "-e", "signal=none", "-o", str(trace)]
    subprocess.run([*tracer, *command], check=True, stdout=subprocess.DEVNULL)
    with trace.open(errors="replace") as lines:
        return Recording(str(directory), list(_calls(lines, str(directory))))


def _concerns(call: Call, directory: str) -> bool:
    """Return whether a call concerns a file below the directory, or the program's standard output."""
    paths = [call.path] if call.path else _paths_of(call.text)
    return call.text.startswith("1<") or any(path.startswith(directory) for path in paths)


def _calls(lines: Iterator[str], directory: str) -> Iterator[Call]:
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
            call = Call(whole[1], whole[2], int(whole[3]), thread, start, ended + 1)
            if _concerns(call, directory):
                yield call
                ended += 1


def _decoded(escaped: str) -> str:
    """Decode a string that strace printed either plainly or with all bytes as hexadecimal escapes."""
    if "\\x" not in escaped:
        return escaped
    return bytes.fromhex(escaped.replace("\\x", "")).decode(errors="surrogateescape")


def _paths_of(text: str) -> list[str]:
    return [_decoded(found) for found in _TEXT.findall(text)]


def _bytes_of(text: str) -> bytes:
    return b"".join(bytes.fromhex(found.replace("\\x", "")) for found in _TEXT.findall(text))
