"""SQL over the messages of all shards, for backends with the capability ``sql``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from topicstore.contract.errors import UnsupportedError
from topicstore.plugins import registry
from topicstore.warning import warn_caller

from .storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["sql"]


def sql(storage: Storage, statement: str, parameters: Sequence[Any]) -> pa.Table:
    """Run a read-only SQL statement; see `Database.sql`."""
    storage.check_open()
    if "sql" not in storage.capabilities:
        raise UnsupportedError(
            f"backend {storage.manifest.backend!r} does not speak SQL; those with the capability sql do, such as "
            "duckdb with the layout table"
        )
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
        warn_caller(f"SQL does not see generations that keep no rows here: {named}", UserWarning)
    first, *rest = (shard.engine() for shard in storage.shards)
    return first.sql(statement, parameters, beside=rest)
