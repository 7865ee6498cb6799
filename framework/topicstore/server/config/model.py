"""The settings of a server, a class for each section of the settings file (`topicstore.server.config.load`)."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from topicstore.contract.errors import InvalidArgumentError, TopicstoreError
from topicstore.pubsub.persistence_rules import PersistenceRule
from topicstore.storage.directory.manifest import MAX_SHARDS

from .units import Address, Addresses, Duration, Period, Quota, Size

if TYPE_CHECKING:
    from topicstore.replication.settings import Cluster

__all__ = [
    "MESSAGES",
    "AuthenticationSettings",
    "AuthorizationSettings",
    "ClusterSettings",
    "DurableSessionsSettings",
    "FlappingSettings",
    "HttpSettings",
    "HttpTlsSettings",
    "Limits",
    "ListenerSettings",
    "LocalWriteBuffer",
    "LogSettings",
    "PersistenceSettings",
    "ProtocolSettings",
    "Rule",
    "Section",
    "ServerSettings",
    "SettingsError",
    "StorageSettings",
    "TlsSettings",
    "ZoneSessionsSettings",
    "ZoneSettings",
]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the settings file: immutable; unknown keys are errors."""


_LONGEST_WAIT = 3_600.0
"""Most seconds of `flush_interval`, and of the intervals of `DurableSessionsSettings`."""
_LONGEST_PERIOD = 1e9
"""Upper bound of a finite retention period, in seconds."""

BatchSize = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class PersistenceSettings(Section, frozen=True):
    """One of ``[[durable_sessions.persistence]]``: messages that are stored even if no session subscribes to them.

    The rules are added to `Database.persistence`, and their periods to `Database.retention`. Both stay in the database
    when they are removed from the file.
    """

    topic_filter: str = "#"
    """The topics of the messages. ``#`` doesn't match topics that begin with ``$``."""
    client_id: str | None = None
    """The client id of the publisher; by default any."""
    least_qos: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0
    """The lowest QoS of the messages."""
    keep: Period | None = None
    """The time for which stored messages of these topics are kept, from any client, or ``"infinity"``; by default
    ``message_retention_period``. If several rules match a message, the longest time applies."""

    def __post_init__(self) -> None:
        self.rule()
        _check_period("keep", self.keep)

    def rule(self) -> PersistenceRule:
        """Return the database's persistence rule. Raises ValueError if a field is invalid."""
        try:
            return PersistenceRule(self.topic_filter, client_id=self.client_id, least_qos=self.least_qos)
        except TopicstoreError as bad:
            raise ValueError(str(bad)) from bad


def _check_period(name: str, period: Period | None) -> None:
    limit = None if period is None else period.limit
    if limit is not None and not 0 < limit < _LONGEST_PERIOD:
        raise ValueError(f"{name} is less than {_LONGEST_PERIOD:,.0f} seconds, or 'infinity'")


def _check_wait(name: str, wait: float | None) -> None:
    if wait is not None and not 0 < wait <= _LONGEST_WAIT:
        raise ValueError(f"{name} is more than 0 and at most {_LONGEST_WAIT:,.0f} seconds")


class ZoneSessionsSettings(Section, frozen=True):
    """Section ``[zones.NAME.durable_sessions]``: settings for the clients of a zone's listeners.

    Settings that are left out have the values of ``[durable_sessions]``.
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
    delivered_retention_period: Period | None = None
    """The age from which messages are removed that are stored only because sessions wait for them, once no session
    needs them; ``"infinity"`` to keep them as long as all else. A session that is away holds them back until it has
    come, or has expired. Messages that a rule of ``persistence`` names stay. Without it the database's retention
    applies, which ``topicstore retention`` and HTTP change; in a database whose retention was never set it becomes ten
    minutes."""
    persistence: tuple[PersistenceSettings, ...] = ()
    """Messages that are stored even if no session subscribes to them, so that later clients can replay them."""

    def __post_init__(self) -> None:
        for name in ("idle_poll_interval", "heartbeat_interval", "renew_streams_interval", "session_gc_interval"):
            _check_wait(name, getattr(self, name))
        _check_period("message_retention_period", self.message_retention_period)
        _check_period("delivered_retention_period", self.delivered_retention_period)

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

    Settings that are left out have the values of the existing database; in a new database they have their defaults.
    """

    data_dir: Path | None = None
    """The database's directory. A directory on the command line takes precedence."""
    backend: str | None = None
    """The engine, by default ``"rocksdb"``; fixed when the database is created."""
    n_shards: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARDS)] | None = None
    """The number of the database's shards, by default 1; fixed when the database is created."""
    n_sites: Annotated[int, msgspec.Meta(ge=1)] = 1
    """The number of sites of ``[cluster]`` that must have joined before anything is stored."""
    replication_factor: Annotated[int, msgspec.Meta(ge=1)] = 3
    """The number of sites of ``[cluster]`` that keep each shard. With up to three sites, all keep every shard."""
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
        if not isinstance(self.layout.get("type", ""), str):
            raise ValueError("layout.type is the name of a layout")

    @property
    def layout_options(self) -> dict[str, Any]:
        """The layout's own options."""
        return {name: value for name, value in self.layout.items() if name != "type"}


_LARGEST_PACKET = 268_435_460
"""Bytes of the largest packet that MQTT can encode (MQTT 5, section 1.5.5)."""

Count = Annotated[int, msgspec.Meta(ge=1)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section ``[limits]``: the limits of a server, with the reason codes that clients receive."""

    packet_size: Size = Size(16 << 20)
    """Bytes of the largest packet that a client may send, header included; announced in CONNACK. A larger one ends the
    connection with 0x95, packet too large. A CONNECT may never exceed 1 MiB."""
    connections: Count = 100_000
    """Clients that may be connected at the same time. Others are refused with 0x97, quota exceeded; in 3.1.1 with 3,
    server unavailable. A lower limit of open files (``ulimit -n``) allows fewer clients; the log reports the number.
    Connections for which there are no descriptors are closed at once."""
    in_flight: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 1_000
    """Unacknowledged publishes of QoS 1 and 2 that a client may send; announced in CONNACK. One more ends the
    connection of a client of MQTT 5 with 0x93, receive maximum exceeded. MQTT 3.1.1 has no such limit: back-pressure
    delays those clients."""
    in_flight_out: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 1_000
    """Publishes of QoS 1 and 2 that are in flight to a client, unless the client requests fewer; others wait in the
    store."""
    topic_aliases: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 32
    """Topic aliases that a client may set; announced in CONNACK. A higher alias ends the connection with 0x94, topic
    alias invalid. The server uses at most this number of aliases towards a client, if the client allows them."""
    topic_levels: Count = 128
    """Most levels of a topic or a filter. A publish with more is refused with 0x90, topic name invalid, and a
    subscription with 0x8F, topic filter invalid."""
    subscriptions: Count = 10_000
    """Most filters of a client's session. One more is refused with 0x97, quota exceeded; in 3.1.1 with 0x80. A single
    packet may have at most 65,536 filters; one with more ends the connection with 0x97."""
    client_id_length: Annotated[int, msgspec.Meta(ge=23, le=65_535)] = 1_024
    """Most bytes of a client id, in UTF-8; every server accepts 23 [MQTT-3.1.3-5]. A longer client id is refused with
    0x85, client identifier not valid; in 3.1.1 with 2, identifier rejected."""
    user_name_length: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 1_024
    """Most bytes of a user name, in UTF-8. A longer name is refused with 0x86, bad user name or password; in 3.1.1 with
    4."""
    stored_sessions: Count = 1_000_000
    """Most stored sessions, of connected and of absent clients; sessions in memory don't count. The client of one more
    session is refused with 0x97, quota exceeded; in 3.1.1 with 3, server unavailable."""
    stored_sessions_per_user: Count | None = None
    """Most stored sessions of each user; clients without a user name count together. By default there is no limit. The
    client of one more session is refused as for ``stored_sessions``."""
    max_queued: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] | None = None
    """Most messages that wait for a session, besides those in flight; by default there is no limit. Above it the oldest
    are dropped for this session: its place in the stored messages moves forward. They stay stored for others. Sessions
    are checked in turn, so that for some seconds, or with very many sessions for minutes, more may wait. A message that
    matches several filters of a session counts for each. Shared subscriptions have no such limit."""
    max_queued_bytes: Size | None = None
    """Most bytes of the payloads that wait for a session, as ``max_queued``; by default there is no limit."""
    publish_rate: Count | None = None
    """Most messages that a client may publish in a second; by default there is no limit. ``over_rate`` says what
    happens to a client that exceeds it."""
    publish_bytes: Size | None = None
    """Most bytes of a client's publishes in a second; by default there is no limit."""
    over_rate: Literal["slow", "disconnect"] = "slow"
    """The treatment of a client that exceeds its rate: reading pauses until the rate allows more, or the
    connection ends with 0x96, message rate too high."""
    connect_timeout: Duration = Duration(10)
    """The time limit for the CONNECT, and before that for the handshakes of TLS and of WebSocket. A connection that
    exceeds it is closed without a reason code, which MQTT can't send before a CONNECT. The same limit applies to
    authentication and authorization, after which the client is refused with 0x88, server unavailable."""
    stop_timeout: Duration = Duration(5)
    """The time that a stopping server waits for its clients in all. Until then it serves their requests, MQTT clients
    read its DISCONNECT and close their connections, and HTTP clients read their responses. Then all connections are
    closed, and the log reports the number of unsent bytes. Sessions and wills are stored in any case."""
    unfinished_packets: Size = Size(128 << 20)
    """Most bytes of incomplete packets of all clients in memory; one packet of the largest size is always allowed.
    Above it, the connection with the largest packet of the address with most bytes ends with 0x97, quota exceeded.
    Clients whose CONNECT was not accepted yet share an eighth of it."""
    packet_timeout: Duration = Duration(60)
    """The time within which an incomplete packet must be completed, or grow by 16 KiB. Otherwise the connection ends
    with 0x97, quota exceeded; ``"0s"`` for no limit."""

    def __post_init__(self) -> None:
        if self.packet_size > _LARGEST_PACKET:
            raise ValueError(f"packet_size is at most {_LARGEST_PACKET:,} bytes, as MQTT's packets are")
        if not self.connect_timeout:
            raise ValueError("connect_timeout is more than 0 seconds, or nobody could connect")


_LONGEST_KEEP_ALIVE = _LONGEST_TEXT = 65_535
"""Most seconds of a keep alive, and most bytes of a string in MQTT (MQTT 5, sections 3.1.2.10 and 1.5.4)."""
MESSAGES = "messages"
"""The name of the storage that keeps the messages of MQTT clients."""


class SettingsError(InvalidArgumentError):
    """A server's settings can't be used; the text names the file, the key and the expected value."""


class TlsSettings(Section, frozen=True):
    """Section ``[listeners.NAME.tls]``: PEM files, and requirements for clients."""

    certificate: Path
    """The server's certificate, followed by the intermediate certificates."""
    key: Path
    """The certificate's private key, without a passphrase."""
    client_authorities: Path | None = None
    """Certificates of the authorities that sign clients' certificates."""
    client_certificates: Literal["ignored", "optional", "required"] = "ignored"
    """Whether clients may, or must, present a certificate."""
    crl_file: Path | None = None
    """Lists of revoked certificates (CRL, in PEM), one of each authority that signs clients' certificates. A client
    whose certificate is in a list is refused in the handshake, and so is one whose authority has no list, or only an
    outdated one. Read again with the certificates; connections that are open stay."""
    user_from_certificate: bool = False
    """Whether the common name (CN) of a client's certificate is its user name; then the client needs no password."""
    minimum_version: Literal["1.2", "1.3"] = "1.2"
    """The oldest version of TLS that is accepted."""

    def __post_init__(self) -> None:
        if self.client_certificates != "ignored" and self.client_authorities is None:
            raise ValueError(f"client_certificates = {self.client_certificates!r} needs client_authorities")
        if self.user_from_certificate and self.client_certificates == "ignored":
            raise ValueError("user_from_certificate needs client_certificates = 'optional' or 'required'")
        if self.crl_file is not None and self.client_authorities is None:
            raise ValueError("crl_file needs client_authorities")


Anonymous = Literal["loopback", "never", "always"]
"""Clients that may connect without a user name: those on this machine, none, or all."""


class ListenerSettings(Section, frozen=True):
    """Section ``[listeners.NAME]``: an address on which MQTT clients connect. The name appears in logs."""

    listen: Address
    """``"HOST:PORT"``; port 0 binds a free port. ``[::]`` is all addresses of IPv6 only, ``0.0.0.0`` all of IPv4: two
    listeners may have both with the same port."""
    protocol: Literal["mqtt", "websocket"] = "mqtt"
    """Whether clients use MQTT over TCP or over WebSocket."""
    anonymous: Anonymous | None = None
    """Clients of this listener that may connect without a user name; by default as in ``[authentication]``."""
    sources: tuple[Literal["plugins", "passwords"], ...] = ("plugins", "passwords")
    """The sources that authenticate clients of this listener: the plugins of ``[authentication]``, its password file,
    or both. With ``[]`` neither is used. Certificates count where ``user_from_certificate`` says so."""
    zone: str | None = None
    """The name of the ``[zones.NAME]`` whose settings apply to the listener's clients; by default none."""
    path: str = "/mqtt"
    """The path of a WebSocket listener's URL."""
    origins: tuple[str, ...] = ()
    """The origins of web pages that may connect to a WebSocket listener, such as ``"https://dashboard.example"``. Empty
    allows all origins; then clients of pages from other machines don't count as loopback."""
    behind_proxy: bool = False
    """Whether clients connect through a proxy. Then no client counts as loopback, because the proxy may run on this
    machine while its clients don't."""
    proxies: tuple[str, ...] = ()
    """The addresses or networks of proxies that begin each connection with a header of the PROXY protocol, version 1 or
    2, such as ``["10.0.0.7", "10.1.0.0/16"]``. Then the address that the header names is the client's: in rules,
    limits, bans and logs. Connections from elsewhere, or without a valid header within ``connect_timeout``, are closed.
    No client counts as loopback. Empty: there is no header."""
    redirect: bool = False
    """Whether clients of MQTT 5 whose session another site of ``[cluster]`` owns are refused with 0x9C, use another
    server, and that site's address. By default, and for clients of MQTT 3.1.1, the connection is passed on to it."""
    tls: TlsSettings | None = None

    def __post_init__(self) -> None:
        for text in self.proxies:
            try:
                ipaddress.ip_network(text)
            except ValueError as bad:
                raise ValueError(f"proxies has addresses or networks, such as '10.1.0.0/16': {bad}") from bad


class AuthenticationSettings(Section, frozen=True):
    """Section ``[authentication]``: which clients may connect."""

    anonymous: Anonymous = "loopback"
    """Clients that may connect without a user name: those on this machine, none, or all. A listener may say otherwise.
    """
    password_file: Path | None = None
    """The file that ``topicstore users`` writes."""
    client_id: Literal["any", "username"] | Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = "any"
    """The client ids that a client may have: any; only its user name; or ids that match one of a list of patterns, such
    as ``["%u", "%u-*"]``. In a pattern ``%u`` stands for the user name and ``*`` for any text. With ``%u`` no other
    user can take over or end a user's session. A client with another id is refused with 0x85, client identifier not
    valid; in 3.1.1 with 2, identifier rejected. A pattern without ``%u`` applies to all clients. Anonymous clients may
    only use such a pattern, or an empty client id, for which the server assigns an id. A user whose name contains the
    character that follows ``%u`` in a pattern can't use the pattern, because the id could belong to another user."""
    plugins: tuple[str, ...] = ()
    """Plugins whose hook `topicstore_authenticate` is called before certificates and passwords are checked, in this
    order."""

    @property
    def restricts(self) -> bool:
        """Whether there are a password file or plugins, or anonymous clients are refused."""
        return self.password_file is not None or bool(self.plugins) or self.anonymous == "never"


class FlappingSettings(Section, frozen=True):
    """Section ``[flapping_detect]``: bans of clients that connect too often, such as two devices with one client id.

    Accepted CONNECTs are counted by client id. Bans are kept in memory: they end with the server.
    """

    enable: bool = False
    """Whether such clients are banned: then their CONNECT is refused with 0x8A, banned; in 3.1.1 with 5."""
    max_count: Annotated[int, msgspec.Meta(ge=2)] = 15
    """The number of ended connections within ``window_time`` that leads to a ban."""
    window_time: Duration = Duration(60)
    """The time in which connections are counted."""
    ban_time: Duration = Duration(300)
    """The time for which the client id is banned."""


class Rule(Section, frozen=True):
    """One of ``[[authorization.rules]]``: actions that are allowed or denied to some clients."""

    permission: Literal["allow", "deny"]
    """Whether the rule allows or denies."""
    topics: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Topic filters; ``%u`` stands for the user name, ``%c`` for the client id."""
    action: Literal["publish", "subscribe", "both"] = "both"
    """The actions to which the rule applies."""
    users: tuple[str, ...] = ("*",)
    """User names; ``*`` stands for any text, also within a name. An anonymous client has no name, so that only a rule
    for ``*`` applies to it."""
    clients: tuple[str, ...] = ("*",)
    """Client ids; ``*`` as in ``users``, and ``%u`` stands for the user name, as in ``client_id`` of
    ``[authentication]``."""


class AuthorizationSettings(Section, frozen=True):
    """Section ``[authorization]``: the actions that clients may perform."""

    rules: tuple[Rule, ...] = ()
    """The access list: the first rule that matches a request decides."""
    unlisted: Literal["allow", "deny"] | None = None
    """The answer to requests that no rule matches. The default is to deny; but without any rule, clients on this
    machine may do everything."""
    plugins: tuple[str, ...] = ()
    """Plugins whose hook `topicstore_authorize` is called before the rules are checked, in this order."""
    refused_subscription: Literal["not authorized", "unspecified"] = "not authorized"
    """The reason code of a denied subscription in MQTT 5: 0x87, not authorized, or 0x80, unspecified error. The latter
    reveals no reason, and is the only failure code for clients that parse a SUBACK as in MQTT 3.1.1."""

    @property
    def restricts(self) -> bool:
        """Whether there are rules or plugins, or requests without a rule are denied."""
        return bool(self.rules or self.plugins) or self.unlisted == "deny"


class HttpTlsSettings(Section, frozen=True):
    """Section ``[http.tls]``: PEM files."""

    certificate: Path
    """The server's certificate, followed by the intermediate certificates."""
    key: Path
    """The certificate's private key, without a passphrase."""


class HttpSettings(Section, frozen=True):
    """Section ``[http]``: the HTTP interface. Without the section there is none."""

    listen: Addresses = Address("127.0.0.1:18083")
    """``"HOST:PORT"``, or a list of several; port 0 binds a free port. ``[::]`` is all addresses of IPv6 only,
    ``0.0.0.0`` all of IPv4."""
    tls: HttpTlsSettings | None = None
    anonymous: Literal["loopback", "never"] = "loopback"
    """Whether requests from this machine may do everything without a token. A token, a user, an access plugin or an
    access rule makes the value ``never``, and so does ``anonymous = "never"`` in ``[authentication]``."""
    behind_proxy: bool = False
    """Whether requests arrive through a proxy: then none counts as from this machine. A request with a proxy's header,
    such as ``X-Forwarded-For``, never does."""
    token_file: Path | None = None
    """The file that ``topicstore tokens`` writes; by default ``http-tokens`` in the database's directory."""
    body_size: Size = Size(64 << 20)
    """Bytes of the largest body of a request. A larger one is refused with 413."""
    connections: Annotated[int, msgspec.Meta(ge=1)] = 1_000
    """The most connections at the same time, at most a fourth of the files that the process may have open. Further
    connections are refused with 503."""
    memory: Size = Size(256 << 20)
    """Most bytes that all requests together have in memory while they wait for their clients: incomplete bodies, and
    responses that were not read; one body of the largest size is always allowed. Above it, the largest request of the
    address with most bytes is refused with 503, or its connection ends."""
    request_timeout: Duration = Duration(30)
    """The time limit for a request's head, and for each 16 KiB of its body. A client that reads nothing of its response
    for ten times as long is disconnected, too."""
    export_dir: Path | None = None
    """The directory below which requests may write exports, archives and checkpoints; by default none may be
    written."""
    sql: bool = False
    """Whether administrators may run SQL, on a backend that supports it. A statement can read every file that the
    server can read."""
    min_free: Size = Size(512 << 20)
    """Least free bytes of the disk; a server with less is not ready (``/health/ready``)."""

    def __post_init__(self) -> None:
        if self.request_timeout <= 0:
            raise ValueError("request_timeout must be longer than nothing")


class ClusterSettings(Section, frozen=True):
    """Section ``[cluster]``: the sites that share the storage of messages. Without the section there is one site.

    ``n_sites`` and ``replication_factor`` are settings of ``[durable_storage.messages]``. Further storages are this
    site's own.
    """

    url: str
    """The log store through which the sites share the messages: ``"s3://bucket/prefix"``, or ``"file:///path"``. What
    is stored is as durable as the log store, so that ``durability`` of ``[durable_storage.messages]`` is not set."""
    site: str
    """The name of this site. A later process of the same name replaces an earlier one."""
    address: Address | None = None
    """The address at which clients and the other sites reach this site's MQTT listener, ``"HOST:PORT"``. The default is
    that of the first listener for MQTT over TCP without TLS (with ``tls``, of the first one with TLS), with the
    machine's name in place of a wildcard address."""
    http_address: str | None = None
    """The URL at which the other sites reach this site's HTTP interface, ``"http://HOST:PORT"``. The default is that of
    ``[http]``, with the machine's name in place of a wildcard address."""
    forward: bool = True
    """Whether requests over HTTP that change a shard of another site are forwarded to it. If not, the client is
    redirected there with 307."""
    tls: bool = False
    """Whether clients' connections are passed on to other sites over TLS. Then ``address`` is that of a listener with
    TLS, at all sites. Their certificates must name the host of their ``address``."""
    ca_file: Path | None = None
    """Certificates of the authorities that sign the other sites' certificates, in PEM, for ``tls`` and for an
    ``http_address`` with ``https``; by default those of the system. Read again with the listeners' certificates."""
    certificate: Path | None = None
    """This site's certificate for connections to other sites, if their listeners require one; with ``key``."""
    key: Path | None = None
    """The certificate's private key, without a passphrase."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Options of the log store. Credentials rather stand in the environment, or in ``options_file``."""
    options_file: Path | None = None
    """A TOML file with further options of the log store, such as credentials; its values take precedence."""
    beat_interval: Duration = Duration(0.5)
    """The time between two heartbeats of this site."""
    takeover_after: Duration = Duration(2)
    """The time without a heartbeat of a site after which another site takes over its shards; at least three times
    ``beat_interval``."""
    poll_interval: Duration = Duration(1)
    """The time between two requests for the next entry of a shard that another site owns."""
    flush_interval: Duration = Duration(0)
    """The time that a change waits for others, which are written to the log store with it, in one request."""
    store_timeout: Duration = Duration(30)
    """The time that a request waits for the log store; more than ``flush_interval``."""
    log_retention: Duration = Duration(3_600)
    """The time for which the log is kept for an unresponsive site; a later return is copied from a snapshot."""

    def __post_init__(self) -> None:
        from topicstore.replication.settings import check_site

        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key are given together")
        try:
            check_site(self.site)
            self.cluster(self.options)
        except InvalidArgumentError as bad:
            raise ValueError(str(bad)) from bad

    def cluster(self, options: Mapping[str, Any], **more: Any) -> Cluster:
        """Return the settings for `topicstore.open`, with the log store's ``options`` and ``more`` fields.

        Raises `InvalidArgumentError`.
        """
        from topicstore.replication.settings import Cluster

        intervals = (
            *("beat_interval", "takeover_after", "poll_interval"),
            *("flush_interval", "store_timeout", "log_retention"),
        )
        found: dict[str, Any] = {name: float(getattr(self, name)) for name in intervals}
        return Cluster(self.url, options=options, **found, **more)


class ProtocolSettings(Section, frozen=True):
    """Section ``[protocol]``: the server's limits for values that clients request, and protocol options."""

    max_keep_alive: Duration | None = None
    """The longest keep alive. A client that requests a longer one, or none, receives this value (Server Keep Alive). In
    3.1.1, where the server can't change it, the client's value applies. By default there is no limit."""
    max_session_expiry: Duration | None = None
    """The longest session expiry. By default there is no limit."""
    response_information: str | None = None
    """The prefix of response topics, sent to clients that request it (Response Information); ``%c`` is the client id,
    ``%u`` the user name."""
    sys_interval: Duration = Duration(10)
    """The interval of ``$SYS`` messages; ``"0s"`` for never."""
    store_qos0: bool = False
    """Whether messages of QoS 0 are also stored for sessions that outlive their connection."""

    def __post_init__(self) -> None:
        if self.max_keep_alive is not None and not 1 <= self.max_keep_alive <= _LONGEST_KEEP_ALIVE:
            raise ValueError(f"max_keep_alive is 1 to {_LONGEST_KEEP_ALIVE:,} seconds, as MQTT's keep-alives are")
        if self.response_information is not None and len(self.response_information.encode()) > _LONGEST_TEXT:
            raise ValueError(f"response_information has at most {_LONGEST_TEXT:,} bytes, as MQTT's texts have")


class LogSettings(Section, frozen=True):
    """Section ``[log]``: a line for each event."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is logged."""
    format: Literal["auto", "text", "json"] = "auto"
    """The form of the lines: text for people, or JSON for programs. ``"auto"`` is text on a terminal, else JSON."""
    file: Path | None = None
    """The file to which lines are appended; by default standard error."""


class ServerSettings(Section, frozen=True):
    """All settings of a server."""

    durable_sessions: DurableSessionsSettings = DurableSessionsSettings()
    durable_storage: dict[str, StorageSettings] = msgspec.field(default_factory=lambda: {MESSAGES: StorageSettings()})
    """The storages by name: ``messages``, which MQTT clients use, and others, which are open while the server runs."""
    zones: dict[str, ZoneSettings] = msgspec.field(default_factory=dict)
    """Groups of listeners with separate settings for the sessions of their clients."""
    cluster: ClusterSettings | None = None
    """The sites that share the messages; None if the server is alone."""
    listeners: Annotated[dict[str, ListenerSettings], msgspec.Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: {"mqtt": ListenerSettings(listen=Address("127.0.0.1:1883"))}
    )
    """The listeners for MQTT clients, by name."""
    authentication: AuthenticationSettings = AuthenticationSettings()
    authorization: AuthorizationSettings = AuthorizationSettings()
    flapping_detect: FlappingSettings = FlappingSettings()
    protocol: ProtocolSettings = ProtocolSettings()
    limits: Limits = Limits()
    http: HttpSettings | None = None
    """The HTTP interface; None if there is none."""
    log: LogSettings = LogSettings()

    def __post_init__(self) -> None:
        for name, listener in self.listeners.items():
            if listener.zone is not None and listener.zone not in self.zones:
                known = ", ".join(self.zones) or "none"
                raise ValueError(f"listeners.{name}.zone: there is no [zones.{listener.zone}]; zones are: {known}")
        for name, storage in self.durable_storage.items():
            if name != MESSAGES and storage.data_dir is None:
                raise ValueError(
                    f"durable_storage.{name}: a storage beside {MESSAGES!r}, which MQTT clients use, needs a data_dir"
                )
            if storage.n_sites > 1 and (self.cluster is None or name != MESSAGES):
                raise ValueError(
                    f"durable_storage.{name}.n_sites: {storage.n_sites} sites need a section [cluster], which shares "
                    f"the storage {MESSAGES!r}"
                )

    @property
    def messages(self) -> StorageSettings:
        """The storage that keeps the messages of MQTT clients."""
        return self.durable_storage.get(MESSAGES, StorageSettings())

    def sessions_of(self, zone: str | None) -> DurableSessionsSettings:
        """Return the settings for sessions of a zone; without a zone, the general settings."""
        own = None if zone is None else self.zones.get(zone)  # a connection's zone may have been removed
        return self.durable_sessions if own is None else self.durable_sessions.within(own)

    @property
    def longest_pause(self) -> float:
        """The longest pause between two checks of the sessions' timers, in seconds; the minimum of all zones."""
        return min(self.sessions_of(zone).longest_pause for zone in (None, *self.zones))
