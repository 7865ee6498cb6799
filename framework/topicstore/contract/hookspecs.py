"""The hooks a plugin may implement. Mark implementations with `topicstore.hookimpl`.

A plugin is a module or object behind an entry point of the group ``topicstore``; the entry's
name is the plugin's. Registration hooks are called on every installed plugin. The other hooks are called only on the
plugins that a database was opened with (``open(..., plugins=[...])``), and the hooks for authentication and
authorization only on the plugins that a server's settings name.

Requests are mutable, because a wrapper can't rebind an argument: change ``request`` before
``yield``, the result after it. These hooks are called with batches, never with single messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from .access import AuthenticationRequest, AuthorizationRequest
    from .plugin_specs import BackendSpec, LayoutSpec, LogStoreSpec, WorkloadSpec
    from .replay_plan import ReplayPlan
    from .requests import (
        OpenDatabase,
        ReadRequest,
        ReadResult,
        ReplayRequest,
        StoreRequest,
        StoreResult,
    )

hookspec = pluggy.HookspecMarker("topicstore")

hookimpl = pluggy.HookimplMarker("topicstore")
"""The decorator of a plugin's functions that implement hooks."""


# --- registration -------------------------------------------------------------------


@hookspec
def topicstore_backends() -> Sequence[BackendSpec]:
    """Return the backends that the plugin provides."""
    raise AssertionError("specification only")


@hookspec
def topicstore_layouts() -> Sequence[LayoutSpec]:
    """Return the layouts that the plugin provides."""
    raise AssertionError("specification only")


@hookspec
def topicstore_logs() -> Sequence[LogStoreSpec]:
    """Return the log stores that the plugin provides, one for each scheme of a URL."""
    raise AssertionError("specification only")


@hookspec
def topicstore_workloads() -> Sequence[WorkloadSpec]:
    """Return the benchmark workloads that the plugin provides."""
    raise AssertionError("specification only")


@hookspec
def topicstore_variables() -> Sequence[str]:
    """Return the names of the environment variables that the plugin reads, if they begin with ``TOPICSTORE_``.

    A set variable with that prefix that no plugin names causes a warning, because its name may be misspelt.
    """
    raise AssertionError("specification only")


# --- data path: one implementation does the work, plugins wrap it --------------------


@hookspec(firstresult=True)
def topicstore_store(request: StoreRequest) -> StoreResult:
    """Store ``request.batch`` and, in the same engine writes, ``request.state``.

    With ``request.destinations`` some rows are not stored in the streams; a wrapper must then keep the number and the
    order of the rows. A wrapper that transforms messages must keep their number and order in every batch, because the
    ids in the result are in the order of the rows.
    """
    raise AssertionError("specification only")


@hookspec(firstresult=True)
def topicstore_read(request: ReadRequest) -> ReadResult:
    """Fetch the next batch of ``request.cursor``. Every read passes through this hook exactly once.

    So do reads of messages that are kept outside the streams, such as retained ones; their generation is 0.
    """
    raise AssertionError("specification only")


@hookspec(firstresult=True)
def topicstore_replay(request: ReplayRequest) -> ReplayPlan:
    """Plan a replay: its streams and their order. The replay reads its batches through ``topicstore_read``.

    A replay by timestamp compares the timestamps that were stored. A plugin that changes timestamps when messages are
    read has to implement such replays itself.
    """
    raise AssertionError("specification only")


# --- lifecycle ------------------------------------------------------------------------


@hookspec
def topicstore_opened(db: OpenDatabase) -> None:
    """React to the opening of a database; called after it was opened."""


@hookspec
def topicstore_closed(db: OpenDatabase) -> None:
    """React to the closing of a database; called after the last store, before the files are closed."""


# --- authentication and authorization: called on the plugins that a server's settings name -------------------


@hookspec
def topicstore_authenticate(request: AuthenticationRequest) -> Sequence[str | bool | None]:
    """Authenticate each of ``request.clients``; return the results in their order.

    A str accepts the client under that user name; False refuses the client; None defers to the next plugin, and after
    the last one to the server's own settings. The first result that isn't None counts. The server calls the hook in a
    worker thread, with all clients that have connected during the previous call. If the hook raises, the clients are
    refused with the reason that the server is unavailable.
    """
    raise AssertionError("specification only")


@hookspec
def topicstore_authorize(request: AuthorizationRequest) -> Sequence[bool | None]:
    """Return for each of ``request.questions``, in their order, whether the client is authorized for the action.

    None defers to the next plugin, and after the last one to the server's access list. The server caches answers while
    the client is connected, and calls the hook in a worker thread. If the hook raises, the action is denied and the
    denial isn't cached. A client that is connecting with a will, or to an existing session, is then refused with the
    reason that the server is unavailable. Before the server delivers messages of a topic, it asks for the action
    "subscribe" on just that topic.
    """
    raise AssertionError("specification only")
