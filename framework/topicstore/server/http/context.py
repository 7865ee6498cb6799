"""What the handlers of requests share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import attrs
from litestar.di import NamedDependency

import topicstore as ts
from topicstore.server.memory_budget import MemoryBudget
from topicstore.server.metrics.metrics import Metrics
from topicstore.server.reloading import Reloaded
from topicstore.server.settings import HttpSettings, ServerSettings
from topicstore.server.sites import Sites
from topicstore.server.sys_topics import Traffic

from .jobs import Jobs
from .threads import FairThreads
from .tokens import Tokens

__all__ = ["Context", "Mqtt", "TheContext"]


class Mqtt(Protocol):
    """The MQTT server beside the HTTP interface, as far as requests ask for it. Called in any thread."""

    @property
    def settings(self) -> ServerSettings:
        """The settings with which it runs."""

    @property
    def restricts(self) -> bool:
        """Whether it has users, plugins or rules, by the settings that hold now."""

    @property
    def storages(self) -> Mapping[str, ts.Database]:
        """The open databases by name; ``messages`` is that of the MQTT clients."""

    def reread_soon(self) -> Future[Reloaded]:
        """Have it read its settings again, and return what changed once it is done."""

    @property
    def traffic(self) -> Traffic:
        """What has gone through it."""

    @property
    def budgets(self) -> Mapping[str, MemoryBudget]:
        """What clients hold of its memory, by what it is."""

    @property
    def addresses(self) -> Sequence[str]:
        """The addresses on which it accepts clients."""


@attrs.frozen(kw_only=True)
class Context:
    """Handed to each handler that has a parameter ``context: TheContext``."""

    db: ts.Database
    mqtt: Mqtt
    settings: HttpSettings
    tokens: Tokens
    jobs: Jobs
    """The long work that requests have asked for."""
    sites: Sites
    metrics: Metrics
    threads: FairThreads
    """The threads in which handlers call the database."""
    memory: MemoryBudget
    """What bodies and responses hold. Used in the event loop of HTTP only."""
    stopping: threading.Event
    """Set when the server ends; who streams without an end looks at it."""
    on_stop: list[Callable[[], object]] = attrs.field(factory=list)
    """Called in any thread when the server begins to end, to wake those who wait."""
    told: dict[str, str] = attrs.field(factory=dict)
    """By kind, the trouble of the server that was logged last."""


TheContext = NamedDependency[Context]
"""How a handler writes the type of its parameter ``context``."""
