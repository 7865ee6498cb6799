"""The records of the ranges of messages that are stored only for sessions: see `topicstore.storage.interest`.

Stored form (state keyspace of every shard; keys begin with the byte 1, which is left out here)::

    "pi" position:8 -> a span that begins after the position, which is big-endian: record (see
                       `topicstore.shard.record_codec`) of version 1, last position, or nil while it is open, filters
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from topicstore.contract.engine import STATE, Reader
from topicstore.contract.errors import CorruptionError, NewerFormatError

from .record_codec import RecordCodec
from .rewriter import Decoders
from .state import FrameworkWrite

__all__ = ["DECODERS", "SPANS", "Span", "decode_span", "ended", "ends", "removal", "stored"]

SPANS = b"\1pi"
"""The prefix of the keys of spans."""
_VERSION = 1


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A range of positions of a shard in which every message but those of some filters is stored only for sessions."""

    after: int
    """The position after which the span begins."""
    last: int | None
    """The last position of the span; None while the span is open."""
    spare: tuple[str, ...]
    """The filters of messages that are stored whether or not a session waits for them."""


class _Record(msgspec.Struct, frozen=True, array_like=True):
    version: int
    last: int | None
    spare: tuple[str, ...]


_CODEC = RecordCodec(_Record, _VERSION)


def _key(after: int) -> bytes:
    return SPANS + after.to_bytes(8, "big")


def stored(span: Span) -> FrameworkWrite:
    """Return the write that stores a span."""
    key = _key(span.after)
    return FrameworkWrite(key, _CODEC.encode(key, _Record(_VERSION, span.last, span.spare)))


def removal(after: int) -> FrameworkWrite:
    """Return the write that removes the span which begins after a position."""
    return FrameworkWrite(_key(after), None)


def ended(span: Span, last: int) -> list[Span]:
    """Return a list with the open span, ended at a position; an empty list if the span would cover no position."""
    return [msgspec.structs.replace(span, last=last)] if last > span.after else []


def ends(engine: Reader, last: int) -> Iterator[FrameworkWrite]:
    """Yield the writes that end the open spans of a shard at its last position.

    A span that can't be decoded is left unchanged, so that the shard can still move to another site. Readers of the
    spans raise its error, so no message is removed.
    """
    for key, value in _pairs(engine.scan(STATE, SPANS, SPANS[:-1] + bytes((SPANS[-1] + 1,)))):
        try:
            span = decode_span(key, value)
        except (CorruptionError, NewerFormatError):
            continue
        if span.last is None:
            yield removal(span.after)
            yield from map(stored, ended(span, last))


def _pairs(chunks: Iterable[list[tuple[bytes, bytes]]]) -> Iterator[tuple[bytes, bytes]]:
    for chunk in chunks:
        yield from chunk


def decode_span(key: bytes, value: bytes) -> Span:
    """Return the span that is stored under a key."""
    record = _CODEC.decode(key, value, "state: ranges of messages that are stored only for sessions")
    return Span(int.from_bytes(key[len(SPANS) :], "big"), record.last, record.spare)


DECODERS: Decoders = {SPANS: decode_span}
"""Decoder of the state that holds the spans."""
