"""Compression of the sections of a block.

A section is stored compressed only if that is smaller; its codec number records the choice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa
import zstandard
from topicstore.contract.errors import CorruptionError

__all__ = ["CODECS", "ZSTD", "Compressor", "decompress"]

RAW: Final = 0
ZSTD: Final = 1
LZ4: Final = 2
CODECS: Final = ("lz4", "zstd", "none")

_SMALLEST = 128
"""Smaller sections, in bytes, are not compressed: the codec's frame would outweigh the gain."""

_MOST_LZ4 = 255
"""The highest ratio at which lz4 can compress: a stored byte stands for at most 255 bytes."""

_threads = threading.local()


class Compressor:
    """A compressor of sections with one codec. Not thread-safe."""

    def __init__(self, codec: str, level: int) -> None:
        self._compress: Callable[[bytes], bytes] | None = None
        self._number = RAW
        if codec == "zstd":
            self._compress = zstandard.ZstdCompressor(level=level).compress
            self._number = ZSTD
        elif codec == "lz4":
            lz4 = pa.Codec("lz4_raw")
            self._compress = lambda raw: lz4.compress(raw, asbytes=True)
            self._number = LZ4

    def __call__(self, raw: bytes) -> tuple[int, bytes]:
        """Return the number of the codec used, and the section in its stored form."""
        if self._compress is None or len(raw) < _SMALLEST:
            return RAW, raw
        packed = self._compress(raw)
        return (self._number, packed) if len(packed) < len(raw) else (RAW, raw)


def decompress(codec: int, stored: memoryview, size: int) -> bytes | memoryview:
    """Return the ``size`` bytes of a section, without allocating more. Raises `CorruptionError`."""
    try:
        if codec == RAW:
            raw: bytes | memoryview = stored
        elif codec == ZSTD:
            if zstandard.frame_content_size(stored) != size:  # the decompressor allocates this size
                raise CorruptionError(f"a section's frame is not one of {size} bytes")
            raw = _mine("zstd", zstandard.ZstdDecompressor).decompress(stored, max_output_size=size)
        elif codec == LZ4:
            if size > _MOST_LZ4 * len(stored):
                raise CorruptionError(f"{len(stored)} bytes can't be a section of {size}")
            raw = _mine("lz4", lambda: pa.Codec("lz4_raw")).decompress(stored, size, asbytes=True)
        else:
            raise CorruptionError(f"there is no codec {codec}")
    except (zstandard.ZstdError, OSError, ValueError) as bad:
        raise CorruptionError(f"a section can't be decompressed: {bad}") from bad
    if len(raw) != size:
        raise CorruptionError(f"a section has {len(raw)} bytes instead of {size}")
    return raw


def _mine(name: str, make: Callable[[], Any]) -> Any:
    """Return this thread's decompressor: making one is expensive, and threads can't share one."""
    made = getattr(_threads, name, None)
    if made is None:
        made = make()
        setattr(_threads, name, made)
    return made
