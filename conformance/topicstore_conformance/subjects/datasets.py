"""Data sets of real messages, for tests that need more than generated messages.

There are two sets, ``bus`` and ``home``, in order of time. Each is a file ``NAME.parquet`` in the folder named by
``TOPICSTORE_DATA`` (default: ``../shared/data`` beside the repository).
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["NAMES", "VARIABLE", "folder", "is_there", "load", "why_absent"]

NAMES = ("bus", "home")
VARIABLE = "TOPICSTORE_DATA"
"""The environment variable that names the folder."""
_REPOSITORY = Path(__file__).resolve().parents[3]


def folder() -> Path:
    """Return the path of the folder, which may not exist."""
    return Path(os.environ.get(VARIABLE) or _REPOSITORY.parent / "shared" / "data")


def is_there(path: Path) -> bool:
    """Return whether a path is a file that this user may read."""
    return os.access(path, os.R_OK) and path.is_file()


def why_absent(name: str) -> str | None:
    """Return why a file in the folder, such as ``bus.parquet``, can't be used, or None if it can."""
    return None if is_there(folder() / name) else f"there is no {name} in {folder()}; {VARIABLE} names the folder"


@cache
def load(name: str) -> pa.Table:
    """Return a whole data set with the columns timestamp, topic, client_id, qos, retain and payload."""
    import pyarrow.parquet as pq  # imported here, because the other functions don't need this package

    return pq.read_table(folder() / f"{name}.parquet").combine_chunks()
