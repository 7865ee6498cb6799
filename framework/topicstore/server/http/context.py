"""The objects that all request handlers share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import Any, Protocol, TypeVar

import attrs
from litestar import Request
from litestar.di import NamedDependency

import topicstore as ts
from topicstore.contract.errors import ShardElsewhereError
from topicstore.server.access.bans import Bans
from topicstore.server.config.model import HttpSettings, Rule, ServerSettings
from topicstore.server.listeners.listener import Listener
from topicstore.server.metrics.metrics import Metrics
from topicstore.server.mqtt.sys_topics import Traffic
from topicstore.server.reload import Reloaded
from topicstore.server.resource_limits import MemoryBudget
from topicstore.server.sites import Sites
from topicstore.sessions import Session

from .jobs import Jobs
from .parameters import shards_asked
from .threads import RequestThreads
from .tokens import Tokens

__all__ = ["Context", "Mqtt", "TheContext"]

T = TypeVar("T")


class Mqtt(Protocol):
    """The part of the MQTT server that request handlers use. Its methods may be called from any thread."""

    @property
    def settings(self) -> ServerSettings:
        """The settings in force."""

    @property
    def restricts(self) -> bool:
        """Whether the settings in force restrict access by users, plugins or rules."""

    @property
    def storages(self) -> Mapping[str, ts.Database]:
        """The open databases by name; ``messages`` is the database of the MQTT clients."""

    def reread_soon(self) -> Future[Reloaded]:
        """Begin to read the settings again; return a future of the changes."""

    def change_rules_soon(self, rules: Sequence[Rule]) -> Future[Reloaded]:
        """Begin to replace the access rules in the settings file; return a future of the changes."""

    @property
    def certificate_ends(self) -> Mapping[str, datetime]:
        """The end of validity of the certificates in use, by section of the settings."""

    @property
    def bans(self) -> Bans:
        """The bans of clients, users and addresses."""

    @property
    def traffic(self) -> Traffic:
        """Counters of the server's packets and bytes."""

    @property
    def budgets(self) -> Mapping[str, MemoryBudget]:
        """The budgets of memory that clients occupy, by purpose."""

    @property
    def addresses(self) -> Sequence[str]:
        """The addresses on which the server accepts clients."""

    @property
    def listeners(self) -> Sequence[Listener]:
        """The listeners, in the order of the settings."""

    def address_of(self, session: Session) -> str | None:
        """Return the address and port of a session's client; None if it isn't connected to this server."""


class Forwards(Protocol):
    """The part of `topicstore.server.http.forwarding.Forwarder` that handlers use in a cluster."""

    def answer(self, request: Any, error: ShardElsewhereError) -> Any:
        """Return the response to a request that failed with ``error`` before it changed anything."""

    def check(self, request: Any, owners: Collection[Any], *, here: bool) -> None:
        """Raise `HTTPException` unless parts of a request may be forwarded to their owners."""

    def call(self, request: Any, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Any:
        """Return a client's request for another site."""

    async def ask(self, calls: Mapping[Any, Any], kind: type[Any]) -> list[Any]:
        """Send requests to their sites, and return their answers."""

    async def gather(
        self, request: Any, shards: Collection[int], own: Callable[[Collection[int]], T], kind: type[T]
    ) -> tuple[list[T], dict[int, str]]:
        """Send a reading request to the owners of shards; return the answers, and why shards have none."""

    def raise_first(self, answers: Sequence[object], done: str) -> None:
        """Raise the first error among answers; its text also has ``done``, the description of the completed part."""


@attrs.frozen(kw_only=True)
class Context:
    """The shared objects, passed to each handler that has a parameter ``context: TheContext``."""

    db: ts.Database
    mqtt: Mqtt
    settings: HttpSettings
    tokens: Tokens
    jobs: Jobs
    """The long-running jobs that requests have started."""
    sites: Sites
    forwarder: Forwards | None
    """The connections to other sites of the cluster; None without a cluster."""
    metrics: Metrics
    threads: RequestThreads
    """The threads in which handlers call the database."""
    memory: MemoryBudget
    """The memory of bodies and responses. Used in the event loop of HTTP only."""
    stopping: threading.Event
    """Set when the server begins to stop; handlers with endless responses check it."""
    on_stop: list[Callable[[], object]] = attrs.field(factory=list)
    """Functions that are called in any thread when the server begins to stop, to wake waiting handlers."""
    logged: dict[str, str] = attrs.field(factory=dict)
    """By kind of error, the text that was logged last."""

    async def gather(
        self,
        request: Request[Any, Any, Any],
        shards: Collection[int],
        own: Callable[[Collection[int]], T],
        kind: type[T],
    ) -> tuple[list[T], dict[int, str]]:
        """Return the answers to a reading request of the sites that own shards, and by shard why there is none.

        ``own`` answers for the shards of this server, in a thread. Without a cluster it answers for all. A request that
        another site has forwarded is for the shards that it names.
        """
        if self.forwarder is None:
            return [await asyncio.get_running_loop().run_in_executor(self.threads, own, shards)], {}
        named = set(shards_asked(request, self.db.manifest.shards))
        return await self.forwarder.gather(request, sorted(named.intersection(shards)), own, kind)


TheContext = NamedDependency[Context]
"""The type of a handler's parameter ``context``."""
