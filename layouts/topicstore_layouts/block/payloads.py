"""The payloads of a block, decoded when they are used: into bytes, or directly into Arrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from topicstore.contract.columns import Constant, Indices, LazyColumn
from topicstore.contract.errors import CorruptionError

__all__ = ["PackedPayloads"]

_DECODER = msgspec.msgpack.Decoder(list[bytes])
_SPARSE = 4
"""If fewer than one row in this many is wanted, payloads are cut out one by one instead of decoding all."""


class PackedPayloads(LazyColumn):
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

    def pick(self, rows: Indices | slice) -> list[bytes]:
        """Return some payloads. If they are few, they are found by their sizes without decoding the others."""
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
            import pyarrow.compute as pc  # slow, so not before it is needed

            self._check(int(self._sizes.sum()) + prefix * len(self))  # otherwise Arrow would read past the end
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


def _prefixes(sizes: npt.NDArray[Any]) -> npt.NDArray[Any] | int:
    """Return the number of bytes that msgpack puts before payloads of these sizes."""
    if sizes.itemsize == 1:
        return 2
    return np.where(sizes < 1 << 8, 2, np.where(sizes < 1 << 16, 3, 5))


def _prefix(size: int) -> int:
    """Return the number of bytes that msgpack puts before a payload of this size."""
    return 2 if size < 1 << 8 else 3 if size < 1 << 16 else 5
