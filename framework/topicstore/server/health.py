"""The reasons why a server can't store messages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import topicstore as ts
from topicstore.contract.errors import DatabaseClosedError
from topicstore.contract.positions import span_text

__all__ = ["obstacles"]

_TOLERATED = 1_000_000
"""Microseconds by which the clock may be behind the last position; corrections by time servers are smaller."""


def obstacles(db: ts.Database, *, min_free: int) -> list[str]:
    """Return a sentence for each reason why nothing can be stored now or soon; an empty list if there is none.

    The check is cheap. The sentences contain no stored data and no paths. ``min_free`` is the least number of free
    bytes on the disk.
    """
    try:
        db.storage.check_open()
        return [*_disk(db, min_free), *_shards(db)]
    except DatabaseClosedError:
        return ["the database is closed"]


def _disk(db: ts.Database, min_free: int) -> Iterator[str]:
    if "persistent" not in db.storage.capabilities:
        return
    try:
        free = shutil.disk_usage(db.path).free
    except OSError as bad:
        yield f"the disk can't be looked at: {bad.strerror}"
        return
    if free < min_free:
        yield f"the disk is nearly full: {free:,} bytes are free, fewer than {min_free:,}"


def _shards(db: ts.Database) -> Iterator[str]:
    skew = int(db.manifest.max_skew * 1_000_000) if db.manifest.timestamps == "message" else 0
    for shard in db.storage.shards:
        if shard.writer.failure is not None:
            yield f"shard {shard.number} takes no writes; the log and /api/v5/info say why"
        ahead = shard.writer.ahead()
        if ahead > _TOLERATED + skew:
            yield f"the clock is {span_text(ahead)} behind the last position of shard {shard.number}"
