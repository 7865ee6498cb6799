"""Detection of small tables that RocksDB doesn't merge by itself.

Each run of a program flushes its messages into a table when the database is closed. If its keys follow all stored keys,
RocksDB moves the table to the last level unchanged, and never merges it
(https://github.com/facebook/rocksdb/issues/9540).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import rocksdict

from .families import Family

__all__ = ["REWRITING", "small_runs"]

SMALL_BYTES = 1 << 20
"""The size, in bytes, below which a table is small."""
FEWEST = 16
"""The least number of adjacent small tables that are merged."""
MOST_BYTES = 16 << 20
"""The most bytes of tables that are merged at a time: opening a database must not take long."""
REWRITING = rocksdict.CompactOptions()
"""The options of a compaction that also merges tables of the last level."""
REWRITING.set_bottommost_level_compaction(rocksdict.BottommostLevelCompaction.force_optimized())
_LISTED = re.compile(r"^ (\d+):\d+\[", re.MULTILINE)
"""The number of a table in RocksDB's own list of them: `` 47:1171[1 .. 1]['key' seq:1, type:1 .. ``…"""


def small_runs(database: rocksdict.Rdict, families: Iterable[Family]) -> Iterator[tuple[Family, bytes, bytes]]:
    """Yield the family, the first key and the last key of a run of small tables, at most one for each family."""
    tables = database.live_files()
    if sum(map(_is_small, tables)) < FEWEST:
        return
    for family in families:
        listed = family.data.property_value("rocksdb.sstables") or ""
        names = {f"/{int(number):06}.sst" for number in _LISTED.findall(listed)}
        # The tables of level 0 overlap, and RocksDB merges them by itself.
        own = sorted(
            (table for table in tables if table["name"] in names and table["level"]),
            key=lambda table: (table["level"], table["start_key"]),
        )
        for (_, small), group in groupby(own, lambda table: (table["level"], _is_small(table))):
            run = _beginning(group) if small else []
            if len(run) >= FEWEST:
                yield family, run[0]["start_key"], run[-1]["end_key"]
                break


def _is_small(table: dict[str, Any]) -> bool:
    return bool(table["size"] < SMALL_BYTES)


def _beginning(tables: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first tables of a run, as many as are merged at a time."""
    run: list[dict[str, Any]] = []
    left = MOST_BYTES
    for table in tables:
        left -= table["size"]
        if left < 0:
            break
        run.append(table)
    return run
