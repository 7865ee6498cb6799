"""The settings of a server, section by section as their file has them (`topicstore.server.settings_file`)."""

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
"""Seconds of a keep-alive and bytes of a text that MQTT can carry (MQTT 5, sections 3.1.2.10 and 1.5.4)."""
MESSAGES = "messages"
"""The name of the storage that keeps the messages of MQTT clients."""


class SettingsError(InvalidArgumentError):
    """A server's settings can't be used; the text names the file, the key and what is expected."""


class TlsSettings(Section, frozen=True):
    """Section ``[listeners.NAME.tls]``: PEM files, and what is wanted of clients."""

    certificate: Path
    """The server's certificate, followed by those between it and the authority."""
    key: Path
    """Its private key, without a passphrase."""
    client_authorities: Path | None = None
    """Certificates of the authorities that clients' certificates must come from."""
    client_certificates: Literal["ignored", "optional", "required"] = "ignored"
    """Whether clients may, or must, show a certificate."""
    user_from_certificate: bool = False
    """Whether the common name (CN) of a client's certificate is its user name; then it needs no password."""
    minimum_version: Literal["1.2", "1.3"] = "1.2"
    """The oldest version of TLS that is spoken."""

    def __post_init__(self) -> None:
        if self.client_certificates != "ignored" and self.client_authorities is None:
            raise ValueError(f"client_certificates = {self.client_certificates!r} needs client_authorities")
        if self.user_from_certificate and self.client_certificates == "ignored":
            raise ValueError("user_from_certificate needs client_certificates = 'optional' or 'required'")


class ListenerSettings(Section, frozen=True):
    """Section ``[listeners.NAME]``: where clients of MQTT connect. The name stands in logs."""

    listen: Address
    """``"HOST:PORT"``; port 0 takes a free one. ``[::]`` is all addresses of IPv6 only, ``0.0.0.0`` all of IPv4: two
    listeners may have them at the same port."""
    protocol: Literal["mqtt", "websocket"] = "mqtt"
    """Whether clients speak MQTT at once, or within a WebSocket."""
    zone: str | None = None
    """The name of the ``[zones.NAME]`` whose settings its clients have; by default they have the general ones."""
    path: str = "/mqtt"
    """Of a WebSocket listener: the path of its URL."""
    origins: tuple[str, ...] = ()
    """Of a WebSocket listener: the origins from which pages in browsers may connect, such as
    ``"https://dashboard.example"``; empty for all, of which those that are not on this machine don't count as
    loopback."""
    behind_proxy: bool = False
    """Whether clients come by way of a proxy, which may be on this machine while they are not: then none counts as on
    this machine."""
    tls: TlsSettings | None = None


class AuthenticationSettings(Section, frozen=True):
    """Section ``[authentication]``: which clients may connect."""

    anonymous: Literal["loopback", "never", "always"] = "loopback"
    """From where clients may connect without a user name: from this machine, from nowhere, from everywhere."""
    password_file: Path | None = None
    """The file that ``topicstore users`` writes."""
    client_id: Literal["any", "username"] | Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = "any"
    """The client ids that a client may have: any; its user name and no other; or those that match one of a list of
    patterns, such as ``["%u", "%u-*"]``. There ``%u`` stands for the user name and ``*`` for any text. Nobody else can
    then connect with them, and end or take over the user's session. A client with another id is refused with 0x85,
    client identifier not valid; in 3.1.1 with 2, identifier rejected. A pattern without ``%u`` is for everybody, and
    the only one for anonymous clients, besides an empty client id, for which the server chooses one. A user whose name
    contains the character that follows ``%u`` in a pattern may have none by ``%u``, because it could be another
    user's."""
    plugins: tuple[str, ...] = ()
    """Plugins whose hook `topicstore_authenticate` is asked first, in this order."""

    @property
    def restricts(self) -> bool:
        """Whether there are users, or has to be one."""
        return self.password_file is not None or bool(self.plugins) or self.anonymous == "never"


class Rule(Section, frozen=True):
    """One of ``[[authorization.rules]]``: what some clients may do, or may not."""

    permission: Literal["allow", "deny"]
    """Whether it is allowed or denied."""
    topics: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Topic filters; ``%u`` stands for the user name, ``%c`` for the client id."""
    action: Literal["publish", "subscribe", "both"] = "both"
    """Of what the rule speaks."""
    users: tuple[str, ...] = ("*",)
    """User names; ``*`` stands for any text, also within a name. An anonymous client has no name, and only a rule for
    ``*`` speaks of it."""
    clients: tuple[str, ...] = ("*",)
    """Client ids; ``*`` as in ``users``, and ``%u`` stands for the user name, as in ``client_id`` of
    ``[authentication]``."""


class AuthorizationSettings(Section, frozen=True):
    """Section ``[authorization]``: which users may do what."""

    rules: tuple[Rule, ...] = ()
    """The access list: the first rule that speaks of something counts."""
    unlisted: Literal["allow", "deny"] | None = None
    """What is said of things of which no rule speaks. By default deny, but without any rule clients from this machine
    may do everything."""
    plugins: tuple[str, ...] = ()
    """Plugins whose hook `topicstore_authorize` is asked before the list, in this order."""
    refused_subscription: Literal["not authorized", "unspecified"] = "not authorized"
    """How a client of MQTT 5 is told that it may not have a subscription: with 0x87, or with 0x80, which reveals no
    reason and is all that clients know which take a SUBACK for that of MQTT 3.1.1."""

    @property
    def restricts(self) -> bool:
        """Whether there is a rule."""
        return bool(self.rules or self.plugins) or self.unlisted == "deny"


class HttpTlsSettings(Section, frozen=True):
    """Section ``[http.tls]``: PEM files."""

    certificate: Path
    """The server's certificate, followed by those between it and the authority."""
    key: Path
    """Its private key, without a passphrase."""


class HttpSettings(Section, frozen=True):
    """Section ``[http]``: the HTTP interface. Without the section there is none."""

    listen: Addresses = Address("127.0.0.1:18083")
    """``"HOST:PORT"``, or a list of several; port 0 takes a free one. ``[::]`` is all addresses of IPv6 only,
    ``0.0.0.0`` all of IPv4."""
    tls: HttpTlsSettings | None = None
    anonymous: Literal["loopback", "never"] = "loopback"
    """From where requests without a token are allowed everything: from this machine, from nowhere. The first token,
    user, plugin for access or rule makes it nowhere, and so does ``anonymous = "never"`` in ``[authentication]``."""
    behind_proxy: bool = False
    """Whether requests come by way of a proxy: then none counts as from this machine. One that names its client by a
    header, as ``X-Forwarded-For``, never does."""
    token_file: Path | None = None
    """The file that ``topicstore tokens`` writes; by default ``http-tokens`` in the database's directory."""
    body_size: Size = Size(64 << 20)
    """Bytes of the largest body of a request. A larger one is refused with 413."""
    connections: Annotated[int, msgspec.Meta(ge=1)] = 1_000
    """The most connections at the same time, at most a fourth of the files that the process may have open. Further ones
    are refused with 503."""
    memory: Size = Size(256 << 20)
    """Bytes that all requests together may have in memory while they wait for their clients: bodies that aren't whole,
    and what was read for responses that aren't taken; one body of the largest size always may. Above it the largest of
    them, of the address that has most, is refused with 503, or its connection ends."""
    request_timeout: Duration = Duration(30)
    """How long a client may take for a request's head, and for each 16 KiB of its body. One that takes nothing of a
    response for ten times as long is disconnected too."""
    export_dir: Path | None = None
    """The directory below which requests may have exports, archives and checkpoints written; by default nowhere."""
    sql: bool = False
    """Whether administrators may run SQL, on a backend that has it: a statement can read every file that the server
    can."""
    min_free: Size = Size(512 << 20)
    """Bytes of the disk; a server with less free space is not ready (``/health/ready``)."""

    def __post_init__(self) -> None:
        if self.request_timeout <= 0:
            raise ValueError("request_timeout must be longer than nothing")


class ProtocolSettings(Section, frozen=True):
    """Section ``[protocol]``: what the server settles for its clients."""

    max_keep_alive: Duration | None = None
    """The longest silence; a client that wants a longer one, or none, is told this one (Server Keep Alive). In 3.1.1,
    where it can't be told, its own counts. Without it there is no limit."""
    max_session_expiry: Duration | None = None
    """How long a session is kept at most after its client has gone. Without it there is no limit."""
    response_information: str | None = None
    """The beginning of the topics for answers, told to clients that ask for it; ``%c`` is the client id, ``%u`` the
    user name."""
    sys_interval: Duration = Duration(10)
    """How often the figures below ``$SYS`` are sent; ``"0s"`` for never."""
    store_qos0: bool = False
    """Whether messages of QoS 0 are stored too for sessions that outlive their connection."""

    def __post_init__(self) -> None:
        if self.max_keep_alive is not None and not 1 <= self.max_keep_alive <= _LONGEST_KEEP_ALIVE:
            raise ValueError(f"max_keep_alive is 1 to {_LONGEST_KEEP_ALIVE:,} seconds, as MQTT's keep-alives are")
        if self.response_information is not None and len(self.response_information.encode()) > _LONGEST_TEXT:
            raise ValueError(f"response_information has at most {_LONGEST_TEXT:,} bytes, as MQTT's texts have")


class LogSettings(Section, frozen=True):
    """Section ``[log]``: a line of JSON for each event."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level of what is written."""
    file: Path | None = None
    """The file to which lines are added; by default standard error."""


class ServerSettings(Section, frozen=True):
    """All settings of a server."""

    durable_sessions: DurableSessionsSettings = DurableSessionsSettings()
    durable_storage: dict[str, StorageSettings] = msgspec.field(default_factory=lambda: {MESSAGES: StorageSettings()})
    """The storages by name: ``messages``, which MQTT clients use, and others, which are open while the server runs."""
    zones: dict[str, ZoneSettings] = msgspec.field(default_factory=dict)
    """Groups of listeners whose clients' sessions have settings of their own."""
    listeners: Annotated[dict[str, ListenerSettings], msgspec.Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: {"mqtt": ListenerSettings(listen=Address("127.0.0.1:1883"))}
    )
    """Where clients of MQTT connect, by name."""
    authentication: AuthenticationSettings = AuthenticationSettings()
    authorization: AuthorizationSettings = AuthorizationSettings()
    protocol: ProtocolSettings = ProtocolSettings()
    limits: Limits = Limits()
    http: HttpSettings | None = None
    """None for no HTTP interface."""
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
        """Return what holds for the sessions of a zone; of none: what holds in general."""
        own = None if zone is None else self.zones.get(zone)  # a connection may be of a zone that has gone since
        return self.durable_sessions if own is None else self.durable_sessions.within(own)

    @property
    def longest_pause(self) -> float:
        """Seconds after which sessions are looked at though nothing happens: the least of all zones."""
        return min(self.sessions_of(zone).longest_pause for zone in (None, *self.zones))
