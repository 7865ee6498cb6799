"""What a server grants each client, and what it tells a client that wants more."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from .quantities import Duration, Size

__all__ = ["Limits"]

_LARGEST_PACKET = 268_435_460
"""Bytes of the largest packet there can be (MQTT 5, section 1.5.5)."""

Count = Annotated[int, msgspec.Meta(ge=1)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section ``[limits]``: the limits of a server, with the reason codes of MQTT 5 that clients get."""

    packet_size: Size = Size(16 << 20)
    """Bytes of the largest packet that a client may send, header included; announced in CONNACK. A larger one ends the
    connection with 0x95, packet too large. A CONNECT has at most 1 MiB in any case."""
    connections: Count = 100_000
    """Clients that may be connected at the same time. More are refused with 0x97, quota exceeded; in 3.1.1 with 3,
    server unavailable. If the process may have fewer files open (``ulimit -n``), fewer may be connected; the log
    says how many. Connections for which there are no descriptors are closed at once."""
    in_flight: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 1_000
    """Publishes of QoS 1 and 2 that a client may send before they are acknowledged; announced in CONNACK. One more ends
    the connection of a client of MQTT 5 with 0x93, receive maximum exceeded; one of 3.1.1 waits in its socket."""
    in_flight_out: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 1_000
    """Publishes of QoS 1 and 2 that are on their way to a client at the same time, if it doesn't want fewer; the others
    wait in the store."""
    topic_aliases: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 32
    """Topic aliases that a client may set; announced in CONNACK. A higher one ends the connection with 0x94, topic
    alias invalid. As many are used towards a client that allows them."""
    topic_levels: Count = 128
    """Levels of a topic or a filter. With more, a publish is refused with 0x90, topic name invalid, and a subscription
    with 0x8F, topic filter invalid."""
    subscriptions: Count = 10_000
    """Filters of a client's session. One more is refused with 0x97, quota exceeded; in 3.1.1 with 0x80. Any number is
    told in packets of at most 65,536 filters; one with more ends the connection with 0x97."""
    client_id_length: Annotated[int, msgspec.Meta(ge=23, le=65_535)] = 1_024
    """Bytes of a client id, in UTF-8; every server takes 23 of them [MQTT-3.1.3-5]. A longer one is refused with 0x85,
    client identifier not valid; in 3.1.1 with 2, identifier rejected."""
    user_name_length: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 1_024
    """Bytes of a user name, in UTF-8. A longer one is refused with 0x86, bad user name or password; in 3.1.1 with 4."""
    stored_sessions: Count = 1_000_000
    """Sessions that may be stored, of connected and of absent clients; those that are kept in memory don't count. The
    client of one more is refused with 0x97, quota exceeded; in 3.1.1 with 3, server unavailable."""
    stored_sessions_per_user: Count | None = None
    """Sessions of them that each user may have; clients without a user name count together. Without it there is no
    limit. The client of one more is refused in the same way."""
    publish_rate: Count | None = None
    """Messages a second that a client may publish; without it there is no limit. What is done about more
    says ``over_rate``."""
    publish_bytes: Size | None = None
    """Bytes a second of all publishes of a client; without it there is no limit."""
    over_rate: Literal["slow", "disconnect"] = "slow"
    """What is done about a client that publishes more: nothing is read from its socket until the second is over, or its
    connection ends with 0x96, message rate too high."""
    connect_timeout: Duration = Duration(10)
    """The time within which a connection has to bring its CONNECT, and before that, the handshakes of TLS and of
    WebSocket. Later the connection is closed; there is no packet yet in which a reason could be sent. As long again may
    it take to find out who the client is and what it may do; then it is refused with 0x88, server unavailable."""
    stop_timeout: Duration = Duration(5)
    """How long the server waits for clients in all when it ends: until their requests are served, those of MQTT have
    read why it ends and closed their connections, and those of HTTP have read their responses. Then all connections are
    broken off, and the log says how much was not sent. Sessions and wills are stored in any case."""
    unfinished_packets: Size = Size(128 << 20)
    """Bytes that packets may have in memory together, of all clients, before they are whole; one packet of the largest
    size always may. Above it the largest of them, of the address that has most, ends its connection with 0x97, quota
    exceeded. Clients that weren't let in yet have an eighth of it."""
    packet_timeout: Duration = Duration(60)
    """The time within which a packet has to be whole once it has begun, or 16 KiB more of it have to come. Else the
    connection ends with 0x97, quota exceeded; ``"0s"`` for no limit."""

    def __post_init__(self) -> None:
        if self.packet_size > _LARGEST_PACKET:
            raise ValueError(f"packet_size is at most {_LARGEST_PACKET:,} bytes, as MQTT's packets are")
        if not self.connect_timeout:
            raise ValueError("connect_timeout is more than 0 seconds, or nobody could connect")
