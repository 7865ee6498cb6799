"""Real message data, for tests that want more than what a generator thinks of.

Two sets, ``bus`` and ``home``, as ``NAME.parquet`` in the folder named by ``TOPICSTORE_DATA``
(default: ``../shared/data`` beside the repository), in time order.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["NAMES", "folder", "load", "why_absent"]

NAMES = ("bus", "home")
VARIABLE = "TOPICSTORE_DATA"
_REPOSITORY = Path(__file__).resolve().parents[2]


def folder() -> Path:
    """Return where the data would be."""
    return Path(os.environ.get(VARIABLE) or _REPOSITORY.parent / "shared" / "data")


def why_absent(name: str) -> str | None:
    """Return why a set can't be used, or None if it can."""
    path = folder() / f"{name}.parquet"
    return None if path.is_file() else f"there is no {path}; {VARIABLE} names the folder of the data"


@cache
def load(name: str) -> pa.Table:
    """Return a whole set: timestamp, topic, client_id, qos, retain and payload of every message."""
    return pq.read_table(folder() / f"{name}.parquet").combine_chunks()
