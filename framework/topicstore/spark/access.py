"""How Spark's processes open a database to read it, and read a part of it.

The driver plans pieces as of one moment; tasks read them, each in a view of its own that is of that
moment or a later one. Positions bound a piece, so that a task that is tried again reads the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from itertools import pairwise
from pathlib import Path

import attrs

from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import GenerationDroppedError
from topicstore.contract.replay_plan import Order
from topicstore.contract.topics import TopicFilter
from topicstore.opening import open_lazily
from topicstore.shard.shard import Shard
from topicstore.storage.storage import Storage

from .selection import Selection

__all__ = ["Piece", "open_to_read", "pieces_of", "read"]

_BATCH = 32_768
"""Messages of a record batch at most: enough that neither Python nor Spark's socket is felt."""


_WORTH_CUTTING = 65_536
"""Messages of a part at least, if they come evenly."""


@attrs.frozen
class Piece:
    """Positions from ``first`` to ``last`` of a shard, both inclusive."""

    shard: int
    generation: int | None
    """None: of all that are live; then it is an error if one was dropped that the piece needs."""
    first: int
    last: int


def open_to_read(path: str) -> AbstractContextManager[Storage]:
    """Open a database to read it; each shard only when it is needed."""
    return closing(open_lazily(Path(path)))


def pieces_of(storage: Storage, selection: Selection, least: int = 1) -> list[Piece]:
    """Return what there is to read at this moment: a piece for each shard and generation.

    If that is less than ``least`` pieces, those of many messages are cut into equal spans of positions.
    """
    numbers = [number for number in range(storage.manifest.shards) if selection.of_shard(number)]
    found = [piece for number in numbers for piece in _pieces_of_shard(storage.shards[number], selection)]
    if len(found) >= least:
        return [piece for piece, _ in found]
    messages = sum(count for _, count in found)
    return [
        part
        for piece, count in found
        for part in _cut(storage, piece, min(count // _WORTH_CUTTING, -(-least * count // max(messages, 1))))
    ]


def _pieces_of_shard(shard: Shard, selection: Selection) -> Iterator[tuple[Piece, int]]:
    """Yield pieces, and how many messages their generations have."""
    for record in shard.generations():
        end = shard.watermark if record.last_position is None else record.last_position
        first, last = max(selection.first, record.first_position), min(selection.last, end)
        if first <= last:
            yield Piece(shard.number, record.number, first, last), record.messages


def _cut(storage: Storage, piece: Piece, parts: int) -> Iterator[Piece]:
    """Yield ``parts`` pieces that together are ``piece``, each of as long a span from its oldest message on."""
    if parts < 2:
        yield piece
        return
    oldest = next((int(batch.positions[0]) for batch in read(storage, piece, ("#",), order="time")), piece.last)
    starts = [piece.first, *(oldest + (piece.last - oldest) * part // parts for part in range(1, parts))]
    for start, after in pairwise([*starts, piece.last + 1]):
        if start < after:
            yield attrs.evolve(piece, first=start, last=after - 1)


def read(
    storage: Storage, piece: Piece, filters: tuple[str, ...], *, order: Order | None = None
) -> Iterator[MessageBatch]:
    """Yield the messages of a piece that match one of ``filters``, which overlap nowhere, filter by filter.

    ``order``: as for `Database.replay`.
    Raises `GenerationDroppedError` if some of them were dropped since the piece was planned.
    """
    shard = storage.shards[piece.shard]
    _check_there(shard, piece)
    for text in filters:
        whole = storage.plan_shard(piece.shard, TopicFilter(text), piece.first, piece.last, since=time.monotonic())
        chosen = [part for part in whole.generations if piece.generation in (None, part.iterators[0].generation)]
        yield from storage.run_shards([attrs.evolve(whole, generations=chosen)], _BATCH, order)


def _check_there(shard: Shard, piece: Piece) -> None:
    if piece.generation is not None:
        shard.slab(piece.generation)  # raises if it was dropped
        return
    oldest = shard.generations()[0]
    if oldest.number > 1 and piece.first < oldest.first_position:
        raise GenerationDroppedError(
            f"shard {shard.number}: messages that were not read yet have been dropped with their generation"
        )
