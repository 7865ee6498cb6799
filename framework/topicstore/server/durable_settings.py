"""The settings of durable sessions, and of the storage that keeps their messages."""

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
"""Most seconds of `flush_interval`, and of the intervals of `DurableSessionsSettings`."""
_LONGEST_PERIOD = 1e9
"""Upper bound of a finite retention period, in seconds."""

BatchSize = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class PersistenceSettings(Section, frozen=True):
    """One of ``[[durable_sessions.persistence]]``: messages that are stored even if no session subscribes to them.

    The rules are added to `Database.persistence`, and stay in the database when they are removed from the file.
    """

    topic_filter: str = "#"
    """The topics of the messages. ``#`` doesn't match topics that begin with ``$``."""
    client_id: str | None = None
    """The client id of the publisher; by default any."""
    least_qos: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0
    """The lowest QoS of the messages."""

    def __post_init__(self) -> None:
        self.rule()

    def rule(self) -> PersistenceRule:
        """Return the database's persistence rule. Raises ValueError if a field is invalid."""
        try:
            return PersistenceRule(self.topic_filter, client_id=self.client_id, least_qos=self.least_qos)
        except TopicstoreError as bad:
            raise ValueError(str(bad)) from bad


def _check_wait(name: str, wait: float | None) -> None:
    if wait is not None and not 0 < wait <= _LONGEST_WAIT:
        raise ValueError(f"{name} is more than 0 and at most {_LONGEST_WAIT:,.0f} seconds")


class ZoneSessionsSettings(Section, frozen=True):
    """Section ``[zones.NAME.durable_sessions]``: settings for the clients of a zone's listeners.

    A setting that is left out is as in ``[durable_sessions]``.
    """

    enable: bool | None = None
    """Whether the sessions of these clients outlive their connections."""
    batch_size: BatchSize | None = None
    """The most messages that one of these sessions takes from the storage at once."""
    idle_poll_interval: Duration | None = None
    """The longest time between two checks of timers; the shortest interval of all zones applies."""
    renew_streams_interval: Duration | None = None
    """The longest time between two checks for new streams; the shortest interval of all zones applies."""

    def __post_init__(self) -> None:
        _check_wait("idle_poll_interval", self.idle_poll_interval)
        _check_wait("renew_streams_interval", self.renew_streams_interval)


class ZoneSettings(Section, frozen=True):
    """Section ``[zones.NAME]``: a group of listeners; a listener joins with its setting ``zone``."""

    durable_sessions: ZoneSessionsSettings = ZoneSessionsSettings()


class DurableSessionsSettings(Section, frozen=True):
    """Section ``[durable_sessions]``: session durability, batching, and retention of messages.

    Sessions do not poll: a new message wakes its sessions. Each interval is an upper bound for the pause without such
    an event.
    """

    enable: bool = True
    """Whether sessions outlive their connections. If not, sessions are kept in memory and end with the connection, and
    a client's earlier stored session ends when the client connects. A change applies to clients that connect later."""
    batch_size: BatchSize = 1_000
    """The most messages that a session takes from the storage at once, before other sessions have their turn."""
    idle_poll_interval: Duration = Duration(1)
    """The longest time between two checks of timers on an idle server. They matter for sessions that wait after a
    failure, and for shared subscriptions whose members don't read. Messages wake sessions at once; wills and session
    expiry have timers of their own. The shortest interval of all zones applies."""
    heartbeat_interval: Duration = Duration(15)
    """The time between two checkpoints of the sessions' acknowledgements, if no other write has stored them. Messages
    that were acknowledged after the last checkpoint are delivered again after a crash."""
    renew_streams_interval: Duration = Duration(1)
    """The longest time between two checks for new streams on an idle server. Sessions are notified of new streams, so
    no message waits for this check. The setting limits the same pause as ``idle_poll_interval``."""
    session_gc_interval: Duration = Duration(1)
    """The longest time between two checks for expired sessions on an idle server. Each session is removed at its
    expiry, so the check only retries removals that could not be stored. The setting limits the same pause as
    ``idle_poll_interval``."""
    message_retention_period: Period | None = None
    """The shortest time that messages are kept, because whole generations of messages are dropped; ``"infinity"`` for
    ever. Without it the database's retention applies, which ``topicstore retention`` and HTTP change."""
    persistence: tuple[PersistenceSettings, ...] = ()
    """Messages that are stored even if no session subscribes to them, so that later clients can replay them."""

    def __post_init__(self) -> None:
        for name in ("idle_poll_interval", "heartbeat_interval", "renew_streams_interval", "session_gc_interval"):
            _check_wait(name, getattr(self, name))
        period = None if self.message_retention_period is None else self.message_retention_period.limit
        if period is not None and not 0 < period < _LONGEST_PERIOD:
            raise ValueError(f"message_retention_period is less than {_LONGEST_PERIOD:,.0f} seconds, or 'infinity'")

    def within(self, zone: ZoneSettings) -> DurableSessionsSettings:
        """Return the settings that apply in a zone."""
        own = msgspec.structs.asdict(zone.durable_sessions)
        return msgspec.structs.replace(self, **{name: value for name, value in own.items() if value is not None})

    @property
    def longest_pause(self) -> float:
        """The longest pause between two checks of the sessions' timers, in seconds."""
        return min(self.idle_poll_interval, self.renew_streams_interval, self.session_gc_interval)


class LocalWriteBuffer(Section, frozen=True):
    """Table ``local_write_buffer`` of a storage: batching of publishes into commits."""

    max_items: Annotated[int, msgspec.Meta(ge=1)] = 20_000
    """The most messages of one commit."""
    flush_interval: Duration = Duration(0)
    """The time that a commit waits for more messages on a busy server; an idle server never waits."""

    def __post_init__(self) -> None:
        if self.flush_interval > _LONGEST_WAIT:
            raise ValueError(f"flush_interval is at most {_LONGEST_WAIT:,.0f} seconds: clients wait for it")


class StorageSettings(Section, frozen=True):
    """Section ``[durable_storage.messages]``: the database.

    A setting that is left out is as in the existing database; in a new one it has its default.
    """

    data_dir: Path | None = None
    """The database's directory. A directory on the command line takes precedence."""
    backend: str | None = None
    """The engine, by default ``"rocksdb"``; fixed when the database is created."""
    n_shards: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARDS)] | None = None
    """The number of the database's shards, by default 1; fixed when the database is created."""
    n_sites: Annotated[int, msgspec.Meta(ge=1)] = 1
    """The number of servers that must exist before shards are assigned to them. There is no replication yet: 1."""
    replication_factor: Annotated[int, msgspec.Meta(ge=1)] = 1
    """The number of servers that keep each shard. There is no replication yet: 1."""
    local_write_buffer: LocalWriteBuffer = LocalWriteBuffer()
    layout: dict[str, Any] = msgspec.field(default_factory=dict)
    """The storage layout of messages: ``type``, by default ``"block"``, and the layout's own options. If it differs
    from the layout of the current generation, a new generation begins with it; old generations keep theirs. Options
    that are left out stay unchanged."""
    durability: Literal["commit", "sync"] | None = None
    """``"commit"``, the default: acknowledged writes survive the death of the process; ``"sync"``: power loss, too.
    Fixed when the database is created."""
    quota: Quota | None = None
    """The most bytes of the messages' stored values, or ``"infinity"``; without it the database's retention applies."""
    when_full: Literal["refuse", "drop"] | None = None
    """At the quota, whether publishes are refused or the oldest generations dropped. By default the database's
    retention applies, which refuses unless it was changed."""
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
