"""The identity of a shard: its database and number, so that directories that were mixed up are detected.

Stored form (state keyspace): ``00 "identity"`` -> checksum (see `topicstore.contract.checksums`) and msgpack array
of the version 1, the database's id and the shard's number; written when the shard is made.
"""

from __future__ import annotations

import msgspec

from topicstore.contract.checksums import add_checksum, strip_checksum
from topicstore.contract.engine import STATE, Engine, WriteBatch
from topicstore.contract.errors import CorruptionError

__all__ = ["check_identity"]

_KEY = b"\0identity"
_VERSION = 1


def check_identity(engine: Engine, database: bytes, shard: int) -> None:
    """Store a new shard's identity. Raises `CorruptionError` if an existing shard has another one."""
    mine = add_checksum(_KEY, msgspec.msgpack.encode((_VERSION, database, shard)))
    found = engine.get(STATE, _KEY)
    if found == mine:
        return
    if found is None and not any(True for _ in engine.scan(STATE, limit=1)):
        batch = WriteBatch()
        batch.put(STATE, _KEY, mine)
        engine.write(batch)
        return
    place = f"shard {shard}"
    if found is None:
        raise CorruptionError("it does not say whose shard it is", place)
    try:
        _, owner, number = msgspec.msgpack.decode(strip_checksum(_KEY, found), type=tuple[int, bytes, int])
    except (CorruptionError, msgspec.DecodeError) as bad:
        raise CorruptionError(f"its identity can't be read: {bad}", place) from bad
    raise CorruptionError(f"its directory holds shard {number} of database {owner.hex()}, put there by mistake", place)
