"""How much later the times of a shard's positions are than its messages' own, where positions go by those.

Stored form (state keyspace, the key begins with a zero byte; absent as long as it is 0)::

    00 "displacement" -> record (see `topicstore.shard.record_codec`) of version 1, microseconds
"""

from __future__ import annotations

import msgspec
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import Constant, to_integers
from topicstore.contract.engine import STATE, Reader, WriteBatch
from topicstore.contract.positions import COUNTER_BITS

from .record_codec import RecordCodec

__all__ = ["displacement_of", "load_displacement", "put_displacement"]

_VERSION = 1
_KEY = b"\0displacement"


class _Displacement(msgspec.Struct, frozen=True, array_like=True):
    version: int
    microseconds: int


_CODEC = RecordCodec(_Displacement, _VERSION)


def load_displacement(reader: Reader) -> int:
    """Return the stored displacement in microseconds."""
    data = reader.get(STATE, _KEY)
    return 0 if data is None else _CODEC.decode(_KEY, data, "state: displacement").microseconds


def put_displacement(batch: WriteBatch, microseconds: int) -> None:
    """Add the displacement to a write."""
    batch.put(STATE, _KEY, _CODEC.encode(_KEY, _Displacement(_VERSION, microseconds)))


def displacement_of(placed: MessageBatch) -> int:
    """Return the most microseconds by which the time of a position in a batch is later than its message's own."""
    times = (placed.positions >> np.uint64(COUNTER_BITS)).astype(np.int64)
    own = placed.timestamps
    return int((times - (own.value if isinstance(own, Constant) else to_integers(own))).max())
