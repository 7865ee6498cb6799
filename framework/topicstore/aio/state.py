"""`AsyncShardState`: the state of a shard, in asyncio."""

from __future__ import annotations

from topicstore.shard.state import ShardState

from .face import Face, iterated, threaded
from .threads import Threads

__all__ = ["AsyncShardState"]


class AsyncShardState(Face[ShardState]):
    """The state of one shard, as returned by `AsyncDatabase.state`; see `ShardState`."""

    def __init__(self, threads: Threads, state: ShardState) -> None:
        super().__init__(threads, lambda: state, state)
        self.shard = state.shard

    get = threaded(ShardState.get)
    get_many = threaded(ShardState.get_many)
    scan = iterated(ShardState.scan)
    write = threaded(ShardState.write)

    def __repr__(self) -> str:
        return f"<AsyncShardState of shard {self.shard}>"
