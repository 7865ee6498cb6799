"""The settings of a server, by section of the settings file (`topicstore.server.settings_file`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from topicstore.contract.errors import InvalidArgumentError

from .addresses import Address, Addresses
from .durable_settings import DurableSessionsSettings, StorageSettings, ZoneSettings
from .limits import Limits
from .quantities import Duration, Size
from .section import Section

__all__ = [
    "MESSAGES",
    "AuthenticationSettings",
    "AuthorizationSettings",
    "HttpSettings",
    "HttpTlsSettings",
    "ListenerSettings",
    "LogSettings",
    "ProtocolSettings",
    "Rule",
    "ServerSettings",
    "SettingsError",
    "TlsSettings",
]


_LONGEST_KEEP_ALIVE = _LONGEST_TEXT = 65_535
"""Most seconds of a keep alive, and most bytes of a string in MQTT (MQTT 5, sections 3.1.2.10 and 1.5.4)."""
MESSAGES = "messages"
"""The name of the storage that keeps the messages of MQTT clients."""


class SettingsError(InvalidArgumentError):
    """A server's settings can't be used; the text names the file, the key and what is expected."""


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
    user_from_certificate: bool = False
    """Whether the common name (CN) of a client's certificate is its user name; then the client needs no password."""
    minimum_version: Literal["1.2", "1.3"] = "1.2"
    """The oldest version of TLS that is accepted."""

    def __post_init__(self) -> None:
        if self.client_certificates != "ignored" and self.client_authorities is None:
            raise ValueError(f"client_certificates = {self.client_certificates!r} needs client_authorities")
        if self.user_from_certificate and self.client_certificates == "ignored":
            raise ValueError("user_from_certificate needs client_certificates = 'optional' or 'required'")


class ListenerSettings(Section, frozen=True):
    """Section ``[listeners.NAME]``: an address on which MQTT clients connect. The name appears in logs."""

    listen: Address
    """``"HOST:PORT"``; port 0 binds a free port. ``[::]`` is all addresses of IPv6 only, ``0.0.0.0`` all of IPv4: two
    listeners may have both with the same port."""
    protocol: Literal["mqtt", "websocket"] = "mqtt"
    """Whether clients use MQTT over TCP or over WebSocket."""
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
    tls: TlsSettings | None = None


class AuthenticationSettings(Section, frozen=True):
    """Section ``[authentication]``: which clients may connect."""

    anonymous: Literal["loopback", "never", "always"] = "loopback"
    """Clients that may connect without a user name: those on this machine, none, or all."""
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
    """Section ``[log]``: a line of JSON for each event."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is logged."""
    file: Path | None = None
    """The file to which lines are appended; by default standard error."""


class ServerSettings(Section, frozen=True):
    """All settings of a server."""

    durable_sessions: DurableSessionsSettings = DurableSessionsSettings()
    durable_storage: dict[str, StorageSettings] = msgspec.field(default_factory=lambda: {MESSAGES: StorageSettings()})
    """The storages by name: ``messages``, which MQTT clients use, and others, which are open while the server runs."""
    zones: dict[str, ZoneSettings] = msgspec.field(default_factory=dict)
    """Groups of listeners with separate settings for the sessions of their clients."""
    listeners: Annotated[dict[str, ListenerSettings], msgspec.Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: {"mqtt": ListenerSettings(listen=Address("127.0.0.1:1883"))}
    )
    """The listeners for MQTT clients, by name."""
    authentication: AuthenticationSettings = AuthenticationSettings()
    authorization: AuthorizationSettings = AuthorizationSettings()
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

    @property
    def messages(self) -> StorageSettings:
        """The storage that keeps the messages of MQTT clients."""
        return self.durable_storage.get(MESSAGES, StorageSettings())

    def sessions_of(self, zone: str | None) -> DurableSessionsSettings:
        """Return the settings for sessions of a zone; of no zone the general settings."""
        own = None if zone is None else self.zones.get(zone)  # a connection's zone may have been removed
        return self.durable_sessions if own is None else self.durable_sessions.within(own)

    @property
    def longest_pause(self) -> float:
        """The longest pause between two checks of the sessions' timers, in seconds; the minimum of all zones."""
        return min(self.sessions_of(zone).longest_pause for zone in (None, *self.zones))
