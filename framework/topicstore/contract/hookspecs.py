"""The hooks a plugin may implement. Mark implementations with `topicstore.hookimpl`.

A plugin is a module or object behind an entry point of the group ``topicstore``; the entry's
name is the plugin's. Registration hooks are called on every installed plugin. The others are
called only on the plugins that a database was opened with (``open(..., plugins=[...])``).

Requests are mutable, because a wrapper can't rebind an argument: change ``request`` before
``yield``, the result after it. Batches go through these hooks, never single messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from .plugin_specs import BackendSpec, LayoutSpec, WorkloadSpec
    from .replay_plan import ReplayPlan
    from .requests import (
        IterateRequest,
        NextResult,
        OpenDatabase,
        ReplayRequest,
        StoreRequest,
        StoreResult,
        Stream,
        StreamsRequest,
    )

hookspec = pluggy.HookspecMarker("topicstore")

hookimpl = pluggy.HookimplMarker("topicstore")
"""Marks the functions of a plugin that implement a hook."""


# --- registration -------------------------------------------------------------------


@hookspec
def topicstore_backends() -> Sequence[BackendSpec]:
    """Return the backends that the plugin brings."""
    raise AssertionError("specification only")


@hookspec
def topicstore_layouts() -> Sequence[LayoutSpec]:
    """Return the layouts that the plugin brings."""
    raise AssertionError("specification only")


@hookspec
def topicstore_workloads() -> Sequence[WorkloadSpec]:
    """Return the benchmark workloads that the plugin brings."""
    raise AssertionError("specification only")


# --- data path: one implementation does the work, wrappers stand around it -----------


@hookspec(firstresult=True)
def topicstore_store(request: StoreRequest) -> StoreResult:
    """Store ``request.batch`` and, in the same engine writes, ``request.state``.

    With ``request.destinations`` some rows go elsewhere than to the streams: a wrapper then returns as many
    rows as it was given, each in its place.
    """
    raise AssertionError("specification only")


@hookspec(firstresult=True)
def topicstore_streams(request: StreamsRequest) -> list[Stream]:
    """Return the streams that may hold matching messages at or after ``request.start``."""
    raise AssertionError("specification only")


@hookspec(firstresult=True)
def topicstore_iterate(request: IterateRequest) -> NextResult:
    """Fetch the next batch of ``request.iterator``. Every read passes here exactly once.

    Also those of messages kept beside the streams, such as retained ones: they are of generation 0.
    """
    raise AssertionError("specification only")


@hookspec(firstresult=True)
def topicstore_replay(request: ReplayRequest) -> ReplayPlan:
    """Plan a replay: which streams, in which order. Its batches come through ``topicstore_iterate``."""
    raise AssertionError("specification only")


# --- lifecycle ------------------------------------------------------------------------


@hookspec
def topicstore_opened(db: OpenDatabase) -> None:
    """The database is open."""


@hookspec
def topicstore_generation_added(db: OpenDatabase, generation: int) -> None:
    """A generation was added over all shards and is the current one."""


@hookspec
def topicstore_generation_dropped(db: OpenDatabase, generation: int) -> None:
    """A generation was dropped over all shards; its messages are invisible."""


@hookspec
def topicstore_closed(db: OpenDatabase) -> None:
    """The database is about to give back its files; nothing more will be stored."""
