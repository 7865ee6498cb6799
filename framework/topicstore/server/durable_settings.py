"""The settings of what lasts: durable sessions, and the storage that keeps their messages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from topicstore.contract.errors import TopicstoreError
from topicstore.pubsub.persistence_rules import PersistenceRule
from topicstore.storage.directory.manifest import MAX_SHARDS

from .quantities import Duration, Period, Quota
from .section import Section

__all__ = [
    "DurableSessionsSettings",
    "LocalWriteBuffer",
    "PersistenceSettings",
    "StorageSettings",
    "ZoneSessionsSettings",
    "ZoneSettings",
]

_LONGEST_WAIT = 3_600.0
"""Seconds that publishes may wait for others, and sessions for the next look at them."""
_LONGEST_PERIOD = 1e9
"""Seconds that messages may be kept, if not for ever."""

BatchSize = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class PersistenceSettings(Section, frozen=True):
    """One of ``[[durable_sessions.persistence]]``: messages that are stored though no session waits for them.

    They become rules of `Database.persistence`, which stay when they are taken out of the file.
    """

    topic_filter: str = "#"
    """The topics of the messages. ``#`` doesn't match topics that begin with ``$``."""
    client_id: str | None = None
    """Who publishes them; by default anybody."""
    least_qos: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0
    """The lowest QoS with which they are published."""

    def __post_init__(self) -> None:
        self.rule()

    def rule(self) -> PersistenceRule:
        """Return the rule of the database. Raises ValueError for what is none."""
        try:
            return PersistenceRule(self.topic_filter, client_id=self.client_id, least_qos=self.least_qos)
        except TopicstoreError as bad:
            raise ValueError(str(bad)) from bad


def _check_wait(name: str, wait: float | None) -> None:
    if wait is not None and not 0 < wait <= _LONGEST_WAIT:
        raise ValueError(f"{name} is more than 0 and at most {_LONGEST_WAIT:,.0f} seconds")


class ZoneSessionsSettings(Section, frozen=True):
    """Section ``[zones.NAME.durable_sessions]``: what differs for the clients of some listeners.

    What is left out is as in ``[durable_sessions]``.
    """

    enable: bool | None = None
    """Whether their sessions outlive their connections."""
    batch_size: BatchSize | None = None
    """The most messages that one of their sessions takes at once."""
    idle_poll_interval: Duration | None = None
    """The longest time between two looks; the shortest one of all zones counts."""
    renew_streams_interval: Duration | None = None
    """The longest time without a look for new streams; the shortest one of all zones counts."""

    def __post_init__(self) -> None:
        _check_wait("idle_poll_interval", self.idle_poll_interval)
        _check_wait("renew_streams_interval", self.renew_streams_interval)


class ZoneSettings(Section, frozen=True):
    """Section ``[zones.NAME]``: a group of listeners, which name it by their ``zone``."""

    durable_sessions: ZoneSessionsSettings = ZoneSessionsSettings()


class DurableSessionsSettings(Section, frozen=True):
    """Section ``[durable_sessions]``: what sessions keep, and how they are served.

    No session polls: it is woken when there is a message for it. What is called an interval is the longest time that
    passes if nothing wakes it.
    """

    enable: bool = True
    """Whether sessions outlive their connections. If not, they are kept in memory and end with the connection, and what
    a client kept before ends when it connects. Counts for clients that connect from now on."""
    batch_size: BatchSize = 1_000
    """The most messages that a session takes from the storage at once, before others have their turn."""
    idle_poll_interval: Duration = Duration(1)
    """The longest time between two looks at what depends on time, if nothing happens: sessions that had to wait after a
    failure, and shared subscriptions whose members don't read. Messages wake sessions at once, and wills and ends of
    sessions have times of their own. The shortest one of all zones counts."""
    heartbeat_interval: Duration = Duration(15)
    """How often what sessions have acknowledged is saved, if nothing else has saved it. What was not is sent again
    after a crash."""
    renew_streams_interval: Duration = Duration(1)
    """The longest time without a look for new streams, if nothing happens. New streams are announced to sessions, so
    that nothing waits for this; it limits the same pause as ``idle_poll_interval``."""
    session_gc_interval: Duration = Duration(1)
    """The longest time without a look for sessions that have expired, if nothing happens. Each is removed at its own
    time, so that this matters only for ends that could not be stored; it limits the same pause as
    ``idle_poll_interval``."""
    message_retention_period: Period | None = None
    """How long messages stay, at least: they go generation by generation. ``"infinity"`` for ever; without it, as
    retention says, which ``topicstore retention`` and HTTP change."""
    persistence: tuple[PersistenceSettings, ...] = ()
    """Which messages are stored though no session waits for them, so that later clients can replay them."""

    def __post_init__(self) -> None:
        for name in ("idle_poll_interval", "heartbeat_interval", "renew_streams_interval", "session_gc_interval"):
            _check_wait(name, getattr(self, name))
        period = None if self.message_retention_period is None else self.message_retention_period.limit
        if period is not None and not 0 < period < _LONGEST_PERIOD:
            raise ValueError(f"message_retention_period is less than {_LONGEST_PERIOD:,.0f} seconds, or 'infinity'")

    def within(self, zone: ZoneSettings) -> DurableSessionsSettings:
        """Return what holds in a zone."""
        own = msgspec.structs.asdict(zone.durable_sessions)
        return msgspec.structs.replace(self, **{name: value for name, value in own.items() if value is not None})

    @property
    def longest_pause(self) -> float:
        """Seconds after which sessions are looked at though nothing happens."""
        return min(self.idle_poll_interval, self.renew_streams_interval, self.session_gc_interval)


class LocalWriteBuffer(Section, frozen=True):
    """Table ``local_write_buffer`` of a storage: how many clients' publishes go into one commit."""

    max_items: Annotated[int, msgspec.Meta(ge=1)] = 20_000
    """The most messages of one commit."""
    flush_interval: Duration = Duration(0)
    """How long a commit waits for more messages while the server is busy; an idle server never waits."""

    def __post_init__(self) -> None:
        if self.flush_interval > _LONGEST_WAIT:
            raise ValueError(f"flush_interval is at most {_LONGEST_WAIT:,.0f} seconds: clients wait for it")


class StorageSettings(Section, frozen=True):
    """Section ``[durable_storage.messages]``: the database. What is left out is what there is, or else the default."""

    data_dir: Path | None = None
    """The database's directory. One that is given on the command line counts before it."""
    backend: str | None = None
    """The engine, by default ``"rocksdb"``; fixed when the database is created."""
    n_shards: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARDS)] | None = None
    """Into how many shards the database is divided, by default 1; fixed when it is created."""
    n_sites: Annotated[int, msgspec.Meta(ge=1)] = 1
    """How many servers have to be there before shards are given to them. There is no replication yet: 1."""
    replication_factor: Annotated[int, msgspec.Meta(ge=1)] = 1
    """How many servers keep each shard. There is no replication yet: 1."""
    local_write_buffer: LocalWriteBuffer = LocalWriteBuffer()
    layout: dict[str, Any] = msgspec.field(default_factory=dict)
    """How messages are arranged: ``type``, by default ``"block"``, and beside it the layout's own options. If it isn't
    as the current generation's, a new one begins with it, and the old ones stay. What is left out stays as it is."""
    durability: Literal["commit", "sync"] | None = None
    """``"commit"``, the default: what is acknowledged survives the death of the process; ``"sync"``: power loss too.
    Fixed when the database is created."""
    quota: Quota | None = None
    """Bytes of the messages' values that the database holds at most, or ``"infinity"``; without it, as retention says.
    """
    when_full: Literal["refuse", "drop"] | None = None
    """At the quota, whether publishes are refused or the oldest generations dropped; by default as retention says,
    which is to refuse."""
    plugins: tuple[str, ...] = ()
    """Plugins that wrap the data path."""
    options: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """Options of the backend and of plugins, by their names."""

    def __post_init__(self) -> None:
        for name in ("n_sites", "replication_factor"):
            if (wanted := getattr(self, name)) != 1:
                raise ValueError(
                    f"{name} can't be {wanted}, only 1: there is no replication yet; back up with "
                    "'topicstore checkpoint'"
                )
        if not isinstance(self.layout.get("type", ""), str):
            raise ValueError("layout.type is the name of a layout")

    @property
    def layout_options(self) -> dict[str, Any]:
        """The layout's own options."""
        return {name: value for name, value in self.layout.items() if name != "type"}
