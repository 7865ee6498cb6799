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

__all__ = ["NAMES", "VARIABLE", "folder", "is_there", "load", "why_absent"]

NAMES = ("bus", "home")
VARIABLE = "TOPICSTORE_DATA"
"""Environment variable that names the folder."""
_REPOSITORY = Path(__file__).resolve().parents[3]


def folder() -> Path:
    """Return where the data would be."""
    return Path(os.environ.get(VARIABLE) or _REPOSITORY.parent / "shared" / "data")


def is_there(path: Path) -> bool:
    """Say whether there is a file that can be read, and so not one in a folder that is another user's."""
    return os.access(path, os.R_OK) and path.is_file()


def why_absent(name: str) -> str | None:
    """Return why a file of the folder, such as ``bus.parquet``, can't be used, or None if it can."""
    return None if is_there(folder() / name) else f"there is no {name} in {folder()}; {VARIABLE} names the folder"


@cache
def load(name: str) -> pa.Table:
    """Return a whole set: timestamp, topic, client_id, qos, retain and payload of every message."""
    return pq.read_table(folder() / f"{name}.parquet").combine_chunks()
