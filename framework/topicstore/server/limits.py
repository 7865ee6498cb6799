"""The limits of a server, with the reason codes for clients that exceed them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from .quantities import Duration, Size

__all__ = ["Limits"]

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
