"""The framework's implementations of the data-path hooks, which plugins wrap. Databases without plugins bypass them."""

from __future__ import annotations

from typing import cast

from topicstore.contract.hookspecs import hookimpl
from topicstore.contract.replay_plan import ReplayPlan
from topicstore.contract.requests import ReadRequest, ReadResult, ReplayRequest, StoreRequest, StoreResult

from .replays import plan_replay, read_batch
from .storage import Storage
from .store_path import store_batch

__all__ = ["topicstore_read", "topicstore_replay", "topicstore_store"]


@hookimpl
def topicstore_store(request: StoreRequest) -> StoreResult:
    """Store the batch of the request, as the plugins have left it."""
    storage = cast("Storage", request.db)
    return store_batch(request, storage.shards, storage.shard_map, storage.clock)


@hookimpl
def topicstore_read(request: ReadRequest) -> ReadResult:
    """Return the batch that the request selects.

    Plugins that wrap this hook may have changed the request, and may change the result.
    """
    return read_batch(request, cast("Storage", request.db).shards)


@hookimpl
def topicstore_replay(request: ReplayRequest) -> ReplayPlan:
    """Plan the replay of the request. Plugins that wrap this hook may have changed it, and may change the plan."""
    storage = cast("Storage", request.db)
    return plan_replay(request, storage.shards, storage.id)
