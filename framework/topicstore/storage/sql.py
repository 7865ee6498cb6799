"""SQL over the messages of all shards, where the backend speaks it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from topicstore.contract.errors import UnsupportedError
from topicstore.plugins import registry

from .storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["sql"]


def sql(storage: Storage, statement: str, parameters: Sequence[Any]) -> pa.Table:
    """Run an SQL statement that only reads; see `Database.sql`."""
    storage.check_open()
    if "sql" not in storage.capabilities:
        raise UnsupportedError(f"backend {storage.manifest.backend!r} does not speak SQL")
    generations = storage.shards[0].generations()
    others = {
        record.number: record.layout
        for record in generations
        if "sql" not in registry().layout(record.layout).requires or record.archive is not None
    }
    if len(others) == len(generations):
        names = ", ".join(sorted(set(others.values())))
        raise UnsupportedError(f"layout {names} keeps no rows that SQL can be run over; layout table does")
    if others:
        named = ", ".join(f"{number} ({layout})" for number, layout in sorted(others.items()))
        warnings.warn(f"SQL does not see generations that keep no rows here: {named}", stacklevel=3)
    first, *rest = (shard.engine() for shard in storage.shards)
    return first.sql(statement, parameters, beside=rest)
