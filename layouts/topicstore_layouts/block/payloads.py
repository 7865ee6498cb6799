"""The payloads of a block or frame, decoded when they are used: into bytes, or directly into Arrow."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from topicstore.contract.columns import Column, Constant, Indices, LazyColumn
from topicstore.contract.errors import CorruptionError

from .compression import decompress

__all__ = ["PackedPayloads", "Payloads", "Section", "SectionedPayloads", "join_payloads"]

_DECODER = msgspec.msgpack.Decoder(list[bytes])
_SPARSE = 4
"""If fewer than one row in this many is wanted, payloads are cut out one by one instead of decoding all."""


class Payloads(LazyColumn):
    """Payloads of a block or frame."""

    @abstractmethod
    def pick(self, rows: Indices | slice) -> list[bytes]:
        """Return the payloads of rows with ascending indexes. A few payloads are found without decoding the others."""

    @abstractmethod
    def objects(self) -> npt.NDArray[np.object_]:
        """Return all payloads as an array of bytes objects, from which NumPy selects faster than Python does."""


class PackedPayloads(Payloads):
    """A msgpack array of byte strings, with the length of each."""

    def __init__(self, raw: bytes | memoryview, sizes: Constant[int] | npt.NDArray[Any]) -> None:
        rows = len(sizes)
        self._raw = raw
        self._head = 1 if rows < 1 << 4 else 3 if rows < 1 << 16 else 5
        """The number of bytes before the first payload."""
        self._sizes = sizes
        self._list: list[bytes] | None = None

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the payloads of all parts, one part after the other, as one array."""
        if len(parts) == 1:
            return parts[0]
        sizes = [p._sizes for p in parts]  # noqa: SLF001 - of the same class, as below
        arrays = [
            np.full(len(s), s.value, np.min_scalar_type(s.value)) if isinstance(s, Constant) else s for s in sizes
        ]
        joined, rows = cls(b"", np.concatenate(arrays)), sum(map(len, parts))
        marker = bytes((0x90 | rows,)) if rows < 1 << 4 else b"\xdc" if rows < 1 << 16 else b"\xdd"
        head = marker + rows.to_bytes(joined._head - 1, "big") if rows >= 1 << 4 else marker
        joined._raw = b"".join([head, *(memoryview(p._raw)[p._head :] for p in parts)])  # noqa: SLF001
        return joined

    def __len__(self) -> int:
        return len(self._sizes)

    def tolist(self) -> list[bytes]:
        """Return all payloads."""
        if self._list is None:
            try:
                self._list = _DECODER.decode(self._raw)
            except msgspec.DecodeError as bad:
                raise CorruptionError(f"the payloads of a block can't be decoded: {bad}") from bad
            if len(self._list) != len(self):
                raise CorruptionError(f"a block of {len(self)} rows has {len(self._list)} payloads")
        return self._list

    def objects(self) -> npt.NDArray[np.object_]:
        """Return all payloads as an array."""
        return np.array(self.tolist(), dtype=object)

    def pick(self, rows: Indices | slice) -> list[bytes]:
        """Return the payloads of some rows. A few payloads are found by their sizes, without decoding the others."""
        if isinstance(rows, slice):
            rows = np.arange(rows.start, rows.stop)
        if self._list is not None or len(rows) * _SPARSE >= len(self):
            payloads = self.tolist()
            return [payloads[row] for row in rows.tolist()]
        if isinstance(self._sizes, Constant):
            size = self._sizes.value
            self._check(len(self) * (size + _prefix(size)))
            ends = self._head + (rows + 1) * (size + _prefix(size))
            starts = ends - size
        else:
            sizes = self._sizes.astype(np.int64)
            ends = np.cumsum(sizes + _prefixes(self._sizes))
            self._check(int(ends[-1]))
            ends = self._head + ends[rows]
            starts = ends - sizes[rows]
        raw = bytes(self._raw)  # no copy if the value is bytes already
        return [raw[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]

    def toarrow(self) -> pa.Array:
        """Return a binary array: the raw bytes without the prefixes that msgpack puts before each payload."""
        if isinstance(self._sizes, Constant):
            return self._even(self._sizes.value)
        most = int(self._sizes.max())
        prefix = _prefix(most)
        if prefix == _prefix(int(self._sizes.min())) and most < len(self._raw) < 1 << 31:
            import pyarrow.compute as pc  # imported here, because the import is slow

            # Otherwise Arrow could read past the end of the buffer.
            self._check(int(self._sizes.sum()) + prefix * len(self))
            offsets = np.empty(len(self) + 1, dtype=np.int32)
            offsets[0] = self._head
            np.cumsum(self._sizes.astype(np.int32) + prefix, out=offsets[1:])
            offsets[1:] += self._head
            buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self._raw)]
            return pc.binary_replace_slice(pa.Array.from_buffers(pa.binary(), len(self), buffers), 0, prefix, b"")
        return pa.array(self.tolist(), pa.binary())

    def _even(self, size: int) -> pa.Array:
        rows = len(self)
        if size * rows >= 1 << 31:
            return pa.array(self.tolist(), pa.binary())
        self._check(rows * (size + _prefix(size)))
        table = np.frombuffer(self._raw, np.uint8)[self._head :].reshape(rows, -1)
        data = np.ascontiguousarray(table[:, _prefix(size) :])
        offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(size)
        return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(data)])

    def _check(self, size: int) -> None:
        """Compare the sum of the lengths and their prefixes with the actual size. Raises `CorruptionError`."""
        if self._head + size != len(self._raw):
            raise CorruptionError("the lengths of a block don't fit its payloads")


def join_payloads(parts: Sequence[Payloads]) -> Column:
    """Return the payloads of all parts, one part after the other."""
    packed = [part for part in parts if isinstance(part, PackedPayloads)]
    return PackedPayloads.joined(packed) if len(packed) == len(parts) else list(chain.from_iterable(parts))


class Section(NamedTuple):
    """The payloads of some rows of a frame, concatenated and compressed as one unit."""

    rows: int
    codec: int
    stored: memoryview
    size: int
    """The uncompressed bytes."""

    def data(self) -> bytes | memoryview:
        """Decompress the payloads. Raises `CorruptionError`."""
        return decompress(self.codec, self.stored, self.size)


class SectionedPayloads(Payloads):
    """Payloads in sections, of which only those are decompressed that have wanted rows."""

    def __init__(self, sections: Sequence[Section], sizes: Constant[int] | npt.NDArray[Any]) -> None:
        self._sections = sections
        self._sizes = sizes
        self._objects: npt.NDArray[np.object_] | None = None
        self._list: list[bytes] | None = None

    def __len__(self) -> int:
        return len(self._sizes)

    def tolist(self) -> list[bytes]:
        """Return all payloads."""
        if self._list is None:
            self._list = self.objects().tolist()
        return self._list

    def objects(self) -> npt.NDArray[np.object_]:
        """Return all payloads as an array."""
        if self._objects is None:
            self._objects = self.toarrow().to_numpy(zero_copy_only=False)
        return self._objects

    def pick(self, rows: Indices | slice) -> list[bytes]:
        """Return the payloads of some rows; for few rows, only the sections that hold them are decompressed."""
        if isinstance(rows, slice):
            return self._cut(rows.start, rows.stop)
        if self._objects is not None or len(rows) * _SPARSE >= len(self):
            picked: list[bytes] = self.objects()[rows].tolist()
            return picked
        starts, ends = self._edges(rows)
        if len(self._sections) == 1:
            return _cut_out(self._sections[0], starts.tolist(), ends.tolist())
        found, begin, before = list[bytes](), 0, 0
        stops = list(accumulate(section.rows for section in self._sections))
        for section, end in zip(self._sections, rows.searchsorted(stops).tolist(), strict=True):
            if begin < end:
                mine = slice(begin, end)
                found += _cut_out(section, (starts[mine] - before).tolist(), (ends[mine] - before).tolist())
            begin, before = end, before + section.size
        return found

    def _edges(self, rows: Indices) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the offsets at which the payloads of rows begin and end."""
        if isinstance(self._sizes, Constant):
            starts = rows * self._sizes.value
            return starts, starts + self._sizes.value
        offsets = np.cumsum(self._sizes, dtype=np.int64)
        ends = offsets[rows]
        return ends - self._sizes[rows].astype(np.int64), ends

    def _cut(self, start: int, stop: int) -> list[bytes]:
        found, first = list[bytes](), 0
        for section in self._sections:
            begin, end = max(start - first, 0), min(stop - first, section.rows)
            if begin < end:
                if isinstance(self._sizes, Constant):
                    marks = [row * self._sizes.value for row in range(begin, end + 1)]
                else:
                    before = int(self._sizes[first : first + begin].sum())
                    sizes = self._sizes[first + begin : first + end].tolist()
                    marks = list(accumulate(sizes, initial=before))
                found += _cut_out(section, marks[:-1], marks[1:])
            first += section.rows
        return found

    def _offsets(self) -> npt.NDArray[np.int64]:
        """Return the offset of each payload, and the end of the last one."""
        rows = len(self)
        if isinstance(self._sizes, Constant):
            return np.arange(rows + 1, dtype=np.int64) * self._sizes.value
        offsets = np.zeros(rows + 1, dtype=np.int64)
        np.cumsum(self._sizes, out=offsets[1:])
        return offsets

    def toarrow(self) -> pa.Array:
        """Return a binary array of all payloads, without a copy if they are one section."""
        parts = [section.data() for section in self._sections]
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        offsets = self._offsets()
        if len(data) != int(offsets[-1]) or len(data) >= 1 << 31:
            raise CorruptionError("the lengths of a frame don't fit its payloads")
        buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.binary(), len(self), buffers)


def _cut_out(section: Section, starts: list[int], ends: list[int]) -> list[bytes]:
    """Return the payloads of a section between these offsets. Raises `CorruptionError`."""
    raw = bytes(section.data())  # copies only uncompressed data
    if starts and (starts[0] < 0 or ends[-1] > len(raw)):
        raise CorruptionError("the lengths of a frame don't fit its payloads")
    return [raw[start:end] for start, end in zip(starts, ends, strict=True)]


def _prefixes(sizes: npt.NDArray[Any]) -> npt.NDArray[Any] | int:
    """Return the number of bytes that msgpack puts before payloads of these sizes."""
    if sizes.itemsize == 1:
        return 2
    return np.where(sizes < 1 << 8, 2, np.where(sizes < 1 << 16, 3, 5))


def _prefix(size: int) -> int:
    """Return the number of bytes that msgpack puts before a payload of this size."""
    return 2 if size < 1 << 8 else 3 if size < 1 << 16 else 5
