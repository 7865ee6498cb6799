"""One client's connection: the state machine of MQTT between a socket and a session.

A connection runs in the event loop and never blocks. Requests for the store are added to the next batch
(`topicstore.server.mqtt.store_thread`). PUBLISHes and acknowledgements are added as they arrive. CONNECT, SUBSCRIBE,
UNSUBSCRIBE and DISCONNECT are barriers: the same client's later packets wait until the barrier was answered, so that
its requests are served in order. For back-pressure, reading pauses while many of the client's bytes wait to be served,
or while the client doesn't read.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, cast

import attrs

from topicstore.contract.arguments import KEEP
from topicstore.contract.errors import SessionEndedError, TopicstoreError
from topicstore.server.access.bans import BanIndex
from topicstore.server.codec import encode as encoding
from topicstore.server.codec.decode import decode
from topicstore.server.codec.frames import Frame, FrameReader, FramingError, joined
from topicstore.server.codec.packets import (
    CONNACK,
    DISCONNECT,
    INVALID,
    PINGRESP,
    PUBREL,
    SHORT,
    AckPacket,
    AuthPacket,
    ConnectPacket,
    DisconnectPacket,
    PingPacket,
    SubscribePacket,
    UnsubscribePacket,
)
from topicstore.server.codec.reason import PacketError, ReasonCode, reason_of, reason_of_end, sendable, text_of
from topicstore.server.listeners.peer import Via
from topicstore.server.logs import log_connected
from topicstore.sessions import OVER, DeliveryBatch, Ended, Publish, PubRel, Session, SubscribeResult

from .acknowledgements import ReceivedAcks, answer_publishes, answer_pubrels, complete
from .channel import Channel, UnfinishedPacket
from .connect import Refused, Terms, admit
from .connections import Serving
from .deliver import Outbound, Shared
from .publish import Inbound, Rate, UndecidedError
from .rights import Rights
from .store_thread import Departure, PublishedPart
from .subscribe import Subscriptions

if TYPE_CHECKING:
    from topicstore.replication.site import ShardOwner

    from .upstream import Relays

__all__ = [
    "MqttConnection",
    "State",
]


class State(enum.IntEnum):
    """The state of an MQTT connection. States follow in this order; a connection may skip some."""

    NEW = 0
    """No packet was received."""
    OPENING = 1
    """The CONNECT was received, and the CONNACK not sent yet."""
    OPEN = 2
    LEAVING = 3
    """The DISCONNECT was received, and the session not disconnected yet."""
    OVER = 4
    """The last packet was sent; packets that still arrive are dropped."""


_HOLD = 256 << 10
"""Reading from a client's socket pauses while more than this number of its bytes wait to be served."""
_FILTERS = frozenset((0x82, 0xA2))
"""The first bytes of SUBSCRIBE and UNSUBSCRIBE."""
_BARRIERS = frozenset((0x82, 0xA2, 0xE0))
"""The first bytes of SUBSCRIBE, UNSUBSCRIBE and DISCONNECT; earlier packets are handed on before one of these."""
_OTHERS = 300
"""Most bytes of a CONNACK, besides its reason string and an assigned client id."""
_LONG = 4 << 10
"""A SUBSCRIBE or UNSUBSCRIBE with more bytes takes milliseconds to check, so that it waits for its turn."""

_log = logging.getLogger("topicstore.server")


class MqttConnection(asyncio.Protocol):
    """The server's side of one MQTT connection. Used in the event loop only.

    The event loop calls the methods of `asyncio.Protocol`; the broker calls the others with the store's answers.
    """

    __slots__ = (
        "_acks",
        "_barrier",
        "_busy",
        "_channel",
        "_full",
        "_inbound",
        "_left",
        "_limits",
        "_outbound",
        "_rate",
        "_reader",
        "_rights",
        "_serving",
        "_session",
        "_state",
        "_subscriptions",
        "_terms",
        "_throttled",
        "_unfinished",
        "_unserved",
        "_via",
        "_waiting",
    )

    def __init__(self, serving: Serving, via: Via) -> None:
        self._serving, self._via = serving, via
        self._reader = FrameReader(serving.limits.packet_size)
        self._state = State.NEW
        self._session: Session | None = None
        self._left = False
        """Whether this connection has left its session: by its own request, or because the session has ended."""
        self._barrier: object = None
        """The request that later packets wait for; None if there is none."""
        self._waiting: list[Frame] | None = None
        """Packets that wait for a barrier; None if there are none."""
        self._unserved = 0
        """Bytes received since all requests were last served."""
        self._busy = False
        """Whether requests of the client are being served, or wait for the next batch."""
        self._full = self._throttled = False
        self._inbound: Inbound | None = None
        """Decodes the client's PUBLISHes; None before the first one."""
        self._outbound: Outbound | None = None
        """Encodes the packets of the session; None before the first one."""
        self._acks: ReceivedAcks | None = None
        """Acknowledgements that were received and not handed on yet."""
        self._rights: Rights | None = None
        """The client's rights, once its CONNECT was accepted."""
        self._rate: Rate | None = None

    # --- the socket ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the CONNECT, at most for the connect timeout."""
        self._channel = Channel(self._serving, cast("asyncio.Transport", transport), self._via)
        self._unfinished = UnfinishedPacket(self._serving, self, self._reader, self._channel)
        self._channel.later(self._serving.limits.connect_timeout, self._never_connected)
        self._serving.add(self)

    def _never_connected(self) -> None:
        self._channel.record.reason, self._state = "there was no CONNECT in time", State.OVER
        self._channel.abort()

    def data_received(self, data: bytes) -> None:
        """Split received bytes into packets, and handle them."""
        self._channel.arrived(len(data))
        if self._state >= State.LEAVING:
            return
        try:
            frames = self._reader.feed(data)
        except FramingError as bad:
            self._take(bad.frames)
            self._refuse(bad)
            return
        if frames:
            size = len(data) + self._unfinished.size
            self._unserved += size
            self._serving.arrived += size
            self._take(frames)
        else:  # a part of a packet counts for the keep alive, too
            self._heard()
        self._unfinished.count()
        if self._barrier is not None:  # the rest of an incomplete packet waits for the barrier, too
            self.flow()

    def connection_lost(self, error: Exception | None) -> None:
        """Disconnect the session, after the client's pending requests were served."""
        self._channel.lost(error)
        self._unfinished.drop()
        self._serving.remove(self)
        if self._barrier is None and not self._waiting:
            self._lose()

    def pause_writing(self) -> None:
        """Apply back-pressure to a client that doesn't read: pause deliveries to it, and reading from it."""
        self._full = True
        self._hold_session()
        self.flow()

    def resume_writing(self) -> None:
        """Resume deliveries and reading; waiting messages come with the next batch."""
        self._full = False
        self._hold_session()
        self.flow()

    def _hold_session(self) -> None:
        if self._session is not None and not self._left:
            with contextlib.suppress(*OVER):  # the session has ended: `session_ended` follows
                if self._full:
                    self._session.pause()
                else:
                    self._session.resume()

    def flow(self) -> None:
        """Pause or resume reading from the socket, depending on whether more packets can be served."""
        hold = self._state < State.OVER and (
            self._full
            or self._throttled
            or bool(self._waiting)
            or (self._barrier is not None and self._unfinished.size > 0)
            or self._unserved > _HOLD
            or (self._serving.crowded and self._state == State.OPEN)
        )
        if self._channel.hold(hold):
            self._serving.hold(self, hold)

    def still_there(self, unsent: int) -> int:
        """Reset the keep alive of a client from which reading is paused, unless the client has stopped reading, too.

        ``unsent`` is the number of unsent bytes at the previous call; return the current number.
        """
        now = self._channel.unsent
        if not self._left and (not self._full or now != unsent):
            self._heard()
        return now

    def _heard(self) -> None:
        if self._session is not None:
            try:
                self._session.alive()
            except OVER:
                return  # the session has ended: `session_ended` follows

    # --- packets ---

    def _take(self, frames: Sequence[Frame]) -> None:
        """Handle packets, or queue them if a barrier has to be served first."""
        if self._state >= State.LEAVING:
            return
        if self._barrier is not None or self._waiting:
            self._keep(frames)
        else:
            self._handle(frames)
        if not self._busy and self._barrier is None:
            self._unserved = 0
        self.flow()

    def _keep(self, frames: Sequence[Frame]) -> None:
        if self._waiting is None:
            self._waiting = []
        self._waiting += frames

    def _handle(self, frames: Sequence[Frame]) -> None:
        published = gathered = at = 0
        inbound = self._inbound
        bad: PacketError | None = None
        try:
            for first, body in frames:
                at += 1
                if first & 0xF0 == 0x30 and (inbound := inbound or self._publisher()) is not None:
                    inbound.publish(first, body)
                    published += 1
                else:
                    if first in _BARRIERS:
                        self._pass_on(published - gathered)
                        gathered = published
                    self._packet(first, body)
                    if self._barrier is not None or self._state >= State.LEAVING:
                        break
        except UndecidedError as undecided:
            at -= 1
            self._barrier = undecided
            self._serving.spawn(self, self._decide(undecided.topic))
        except PacketError as error:
            bad = error
        self._channel.taken(at, published)
        self._pass_on(published - gathered)
        if bad is not None:
            self._refuse(bad)
            return
        if published and self._rate is not None:
            self._slow_down(self._rate, published, frames[:at])
        if at < len(frames) and self._state < State.LEAVING:
            self._keep(frames[at:])

    def _publisher(self) -> Inbound | None:
        """Return the decoder of PUBLISHes, created for the first one; None if the client has no session."""
        session, rights = self._session, self._rights
        if self._inbound is not None or session is None:
            return self._inbound
        limits = self._limits
        self._inbound = Inbound(
            self._terms.packet.version,
            session,
            most_aliases=limits.topic_aliases,
            levels=limits.topic_levels,
            quota=limits.in_flight,
            decided=None if rights is None or rights.permissions is None else rights.publishes,
        )
        return self._inbound

    def _pass_on(self, published: int) -> None:
        """Add the handled acknowledgements and ``published`` publishes to the next batch."""
        if self._session is None or self._left:
            return
        acks, self._acks = self._acks, None
        if acks is not None:
            acks.count(self._channel)
            try:
                if acks.pass_on(self, self._session, self._serving.requests):
                    self._busy = True
                    self._serving.schedule()
            except OVER:
                return  # the session has ended: `session_ended` follows
        if published and self._inbound is not None:
            self._busy = True
            self._serving.gather(self, self._inbound, published)
        self._heard()

    def _packet(self, first: int, body: bytes) -> None:
        """Handle a packet of any type but PUBLISH."""
        kind = SHORT.get(first)
        if kind is not None and len(body) == 2 and body != b"\0\0" and self._session is not None:
            self._acks = self._acks or ReceivedAcks()
            self._acks.add(kind, body[0] << 8 | body[1])
            return
        if self._state == State.NEW:
            self._connect(first, body)
            self._channel.came(first >> 4)
            return
        if first in _FILTERS and len(body) > _LONG:
            self._barrier = body
            self._serving.spawn(self, self._resubscribe_in_turn(first, body))
            return
        packet = decode(self._terms.packet.version, first, body)
        if isinstance(packet, AckPacket):
            self._acks = self._acks or ReceivedAcks()
            self._acks.add_packet(packet)
            return
        if isinstance(packet, PingPacket):
            self._channel.write(encoding.PINGRESP, PINGRESP)
        elif isinstance(packet, SubscribePacket | UnsubscribePacket):
            self._barrier = packet
            self._subscriptions.change(packet)
        elif isinstance(packet, DisconnectPacket):
            self._disconnect(packet)
        else:
            self._unexpected(packet)
        self._channel.came(first >> 4, packet.reason if isinstance(packet, DisconnectPacket) else 0)

    def _unexpected(self, packet: ConnectPacket | AuthPacket) -> NoReturn:
        connect = isinstance(packet, ConnectPacket)
        text = "one CONNECT [MQTT-3.1.0-2]" if connect else "AUTH after a CONNECT with a method (MQTT 5, section 4.12)"
        raise PacketError(ReasonCode.PROTOCOL_ERROR, f"a client sends {text}")

    def go_on(self) -> None:
        """Handle queued packets and resume reading, because the client's requests were served."""
        self._unserved, self._busy = 0, False
        while self._waiting and self._barrier is None and self._state < State.LEAVING:
            frames, self._waiting = self._waiting, None
            self._handle(frames)
        if self._channel.gone and self._barrier is None and not self._waiting:
            self._lose()
        self.flow()

    # --- its beginning ---

    def _connect(self, first: int, body: bytes) -> None:
        if first >> 4 != 1:
            self._channel.record.reason = "the first packet was no CONNECT"  # [MQTT-3.1.0-1]
            self._shut()
            return
        packet = decode(0, first, body)
        if not isinstance(packet, ConnectPacket):
            raise PacketError(ReasonCode.PROTOCOL_ERROR, "the first packet is a CONNECT")
        serving, record = self._serving, self._channel.record
        self._reader.version = record.version = packet.version
        self._terms = terms = Terms.of(packet, serving.settings, self._via.zone)
        record.client_id = terms.client_id[: serving.limits.client_id_length]  # longer client ids are refused
        record.user = packet.user_name and packet.user_name[: serving.limits.user_name_length]
        self._state, self._barrier = State.OPENING, packet
        self._channel.never()
        refusal = terms.refusal(serving.limits)
        if refusal is not None:
            self.end(*refusal)
        elif serving.draining:
            self.end(ReasonCode.SERVER_UNAVAILABLE, "the server is shutting down")
        elif serving.full:
            self.end(ReasonCode.QUOTA_EXCEEDED, "as many clients are connected as may be")
        elif (relays := serving.relays) is None:
            serving.admit(self, self._admit(terms))
        else:
            self._connect_in_cluster(relays, body)

    def _connect_in_cluster(self, relays: Relays, body: bytes) -> None:
        """Serve a CONNECT, or pass it on to the site that owns the shard of the client id."""
        if self._terms.assigned:
            self._terms = attrs.evolve(self._terms, client_id=relays.assigned_id())
        client_id, serving = self._terms.client_id, self._serving
        owner = None if relays.is_here(client_id) else relays.owner(client_id)
        if relays.is_here(client_id):
            serving.admit(self, self._admit(self._terms))
        elif owner is None or not owner.address:
            self.end(ReasonCode.SERVER_UNAVAILABLE, "no site serves the client at the moment")
        elif self._via.relayed is not None:  # the relaying site has another version of the document
            self.end(ReasonCode.SERVER_UNAVAILABLE, f"the client's session is moving to site {owner.site}")
        elif self._via.redirect and self._terms.packet.version == 5:
            self.end(ReasonCode.USE_ANOTHER_SERVER, f"site {owner.site} serves the client", elsewhere=owner.address)
        else:
            serving.forward(self, self._pass_to(relays, owner, (0x10, body)))

    async def _pass_to(self, relays: Relays, owner: ShardOwner, connect: Frame) -> None:
        """Connect to the owner of the client's shard, and pass all bytes of the client on to it."""
        try:
            upstream = await relays.connect(owner, self._channel.peer, self._serving.limits.connect_timeout)
        except (OSError, ValueError) as bad:
            self.end(ReasonCode.SERVER_UNAVAILABLE, f"site {owner.site} can't be reached at {owner.address}: {bad}")
            return
        if self._state != State.OPENING:
            upstream.transport.abort()
            return
        from .relay import Relay  # imported only on a site of a cluster

        received = joined((connect, *(self._waiting or ()))) + self._reader.take()
        self._state, self._waiting = State.OVER, None
        self._unfinished.drop()
        relay = Relay(self._serving, self._channel, upstream, owner)
        self._serving.pass_on(self, relay)
        relay.begin(received)
        self._channel.hand_over(relay)

    async def _admit(self, terms: Terms) -> None:
        """Authenticate and authorize the client, and request its session."""
        admission = await admit(self._serving, terms, self._channel.peer)
        most = terms.packet.maximum_packet_size
        if isinstance(admission, Refused):
            self.end(admission.reason, admission.text)
        elif most is not None and len(terms.connack(self._serving.settings, admission.identity.user)) > most:
            self.end(ReasonCode.PACKET_TOO_LARGE, "the CONNACK is too large for the client [MQTT-3.1.2-24]")
        elif self._state == State.OPENING:
            self._rights = rights = Rights(self._serving, self, admission, most)
            self._channel.record.user = rights.user
            how = terms.connect(rights.allow, admission.identity.user)
            self._serving.requests.connects.append((self, how, admission.forbidden))
            self._serving.schedule()

    def opened(self, result: Session | TopicstoreError) -> None:
        """Answer the CONNECT with the opened session, or with the error."""
        self._barrier = None
        if isinstance(result, TopicstoreError):
            self.end(reason_of(result), str(result), text_of(result))
            return
        self._session = result
        if self._state == State.OVER:
            self._lose()
            return
        if self._rights is not None:
            self._begin(result, self._terms, self._rights)
        if result.ended is not None:  # the session was taken over in the same batch
            self.session_ended(result.ended)
            return
        if self._full:
            self._hold_session()
        self.go_on()

    def _begin(self, session: Session, terms: Terms, rights: Rights) -> None:
        serving, limits = self._serving, self._serving.limits
        self._terms = kept = terms.without_secrets()
        serving.begin(session, self)
        self._limits = limits
        if limits.publish_rate is not None or limits.publish_bytes is not None:
            self._rate = Rate(limits.publish_rate, limits.publish_bytes)
        known = session.status().subscriptions if session.present else ()
        self._subscriptions = Subscriptions(serving, session, kept, rights.permissions, self, len(known))
        self._channel.record.session_present = session.present
        reason_string = None
        if missed := [one.topic_filter for one in known if one.dropped]:
            text = f"messages for {', '.join(missed)} may have been removed by retention before they could be sent"
            reason_string = kept.reason_string(text, _OTHERS)
            _log.warning("client %r was away for too long: %s", terms.client_id, text)
        self._channel.write(terms.connack(serving.settings, rights.user, session.present, reason_string), CONNACK)
        self._state = State.OPEN
        log_connected(self._channel.record)
        self._unfinished.admit()
        rights.begin(session)
        self.renew_rights()  # the rules may have changed meanwhile

    # --- its rights ---

    def renew_rights(self) -> None:
        """Apply the current access rules to the client."""
        if self._rights is not None and self._rights.renew():
            if self._inbound is not None:
                self._inbound.judge_by(self._rights.publishes)
            self._subscriptions.permissions = self._rights.permissions

    def end_if_banned(self, bans: BanIndex) -> None:
        """End the connection if the client is banned."""
        record, now = self._channel.record, time.time()
        reason = {State.OPENING: ReasonCode.BANNED, State.OPEN: ReasonCode.ADMINISTRATIVE_ACTION}.get(self._state)
        if reason and bans.find(record.client_id, [record.user], self._channel.peer.host, now):
            self.end(reason, "the client is banned")

    # --- what it publishes ---

    async def _decide(self, topic: str) -> None:
        """Let plugins decide whether the client may publish to a topic, then continue with its packets."""
        if self._rights is not None:
            await self._rights.decide_publish(topic)
        self._barrier = None
        self.go_on()

    def _slow_down(self, rate: Rate, published: int, frames: Sequence[Frame]) -> None:
        """Pause reading from a client that exceeds its publish rate, or end its connection, as settings say."""
        size = sum(len(body) for first, body in frames if first & 0xF0 == 0x30)
        seconds = rate.take(published, size, self._serving.loop.time())
        if not seconds or self._state != State.OPEN:
            return
        if self._serving.limits.over_rate == "disconnect":
            self.end(ReasonCode.MESSAGE_RATE_TOO_HIGH, "it publishes more than it may")
            return
        self._throttled = True
        self._channel.later(seconds, self._go_faster)

    def _go_faster(self) -> None:
        self._throttled = False
        self.flow()

    def published(self, part: PublishedPart) -> None:
        """Answer PUBLISHes."""
        answer = answer_publishes(self._terms.packet.version, part)
        self._serving.traffic.publishes_refused += answer.refused
        if answer.end is not None:
            self.end(answer.reason, answer.end)
            return
        if self._inbound is not None:
            self._inbound.unanswered -= len(part.what.ids1)
            if answer.over:
                self._inbound.released(answer.over)
        self._channel.answer(answer.data, answer.packets)

    def released(self, ids: Sequence[int], known: Sequence[bool]) -> None:
        """Answer PUBRELs."""
        if self._inbound is not None:
            self._inbound.released(ids)
        self._channel.answer(*answer_pubrels(self._terms.packet.version, ids, known))

    # --- what it is sent ---

    def send(self, packets: Sequence[Publish | PubRel | DeliveryBatch], shared: Shared | None) -> None:
        """Send the session's packets; a message that is too large counts as delivered [MQTT-3.1.2-25]."""
        if self._outbound is None:
            packet = self._terms.packet
            self._outbound = Outbound(packet.version, packet.maximum_packet_size, self._terms.aliases)
        pieces, published, too_large = self._outbound.encode(packets, shared)
        if too_large and self._session is not None:
            with contextlib.suppress(*OVER):  # the session has ended: `session_ended` follows
                complete(self._session, too_large)
        pubrels = sum([isinstance(packet, PubRel) for packet in packets])
        self._channel.deliver(b"".join(pieces), published, pubrels)

    def unknown(self, ids: Sequence[int]) -> None:
        """Answer PUBRECs whose packet ids are not in use, with PUBRELs of the reason code 0x92."""
        unknown = ReasonCode.PACKET_IDENTIFIER_NOT_FOUND
        data = encoding.pubacks(self._terms.packet.version, PUBREL, [(one, unknown) for one in ids])
        self._channel.answer(data, ((PUBREL, unknown, len(ids)),))

    # --- its subscriptions ---

    async def _resubscribe_in_turn(self, first: int, body: bytes) -> None:
        """Handle a packet of many filters. In each round of the event loop, only one such packet is handled."""
        async with self._serving.long_packets:
            await asyncio.sleep(0)
        try:
            if self._state == State.OPEN:
                packet = decode(self._terms.packet.version, first, body)
                self._subscriptions.change(cast("SubscribePacket | UnsubscribePacket", packet))
                self._channel.came(first >> 4)
        except PacketError as bad:
            self._refuse(bad)

    def subscribed(self, results: Sequence[SubscribeResult | TopicstoreError]) -> None:
        """Handle the results of a part of a SUBSCRIBE; the SUBACK is sent after the last part."""
        self._subscriptions.subscribed(results)

    def unsubscribed(self, results: Sequence[bool | TopicstoreError]) -> None:
        """Handle the results of a part of an UNSUBSCRIBE; the UNSUBACK is sent after the last part."""
        self._subscriptions.unsubscribed(results)

    def answer(self, data: bytes, kind: int, reason: int, granted: Sequence[str]) -> None:
        """Send a SUBACK or an UNSUBACK, and continue with the client's packets."""
        self._barrier = None
        self._channel.write(data, kind, reason)
        figures = self._serving.figures_for(granted)
        if figures and self._state == State.OPEN and self._rights is not None:
            self._rights.send_figures(figures)
        self.go_on()

    # --- its end ---

    def _disconnect(self, packet: DisconnectPacket) -> None:
        expiry = KEEP if packet.session_expiry is None else self._terms.changed_expiry(packet.session_expiry)
        self._channel.ends(packet.reason_string or "the client disconnected", packet.reason)
        self._state = State.LEAVING
        self._barrier = packet
        self._waiting = None
        if self._session is not None and self._leave():
            how = Departure(self._session, packet.reason != ReasonCode.NORMAL_DISCONNECTION, expiry)
            self._serving.requests.disconnects.append((self, how))
            self._serving.schedule()

    def departed(self, error: TopicstoreError | None) -> None:
        """End the connection after a DISCONNECT."""
        self._barrier = None
        if error is not None and not isinstance(error, OVER):
            _log.warning("the session of %r could not be ended: %s", self._terms.client_id, error)
        self._shut()

    def session_ended(self, why: Ended) -> None:
        """End the connection because its session has ended, such as by a takeover."""
        self._leave()
        relays, owner = self._serving.relays, None
        if why is Ended.MOVED and self._via.redirect and relays is not None:
            owner = relays.owner(self._terms.client_id)
        self.end(reason_of_end(why), why.value, elsewhere=None if owner is None else owner.address or None)

    def failed(self, error: TopicstoreError) -> None:
        """End the connection because a request failed that the protocol can't answer with an error."""
        if not isinstance(error, SessionEndedError):  # for an ended session, `session_ended` follows
            self.end(reason_of(error), str(error), text_of(error))

    def _refuse(self, bad: PacketError) -> None:
        self._channel.came(INVALID, bad.reason)
        if self._state != State.NEW:
            self.end(bad.reason, bad.text)
            return
        self._channel.ends(bad.text, bad.reason)
        self._channel.refused = True
        if bad.version:
            known = bad.reason != ReasonCode.UNSUPPORTED_PROTOCOL_VERSION
            reason_string = sendable(bad.text) if known else None  # an unknown version may have no reason strings
            self._channel.write(
                encoding.connack(bad.version, bad.reason, reason_string=reason_string), CONNACK, bad.reason
            )
        self._shut()

    def end(self, reason: ReasonCode, text: str, shown: str | None = None, *, elsewhere: str | None = None) -> None:
        """Send the client the reason, and end its connection; the session's connection counts as lost.

        text:      the reason for the log.
        shown:     the reason string for the client, if it differs from ``text``.
        elsewhere: the address of a server that the client is referred to.
        """
        if self._state >= State.OVER:
            return
        self._channel.ends(text, reason)
        reason_string = (
            self._terms.reason_string(text if shown is None else shown) if self._state != State.NEW else None
        )
        if self._state == State.OPENING:
            self._channel.refused = True
            if reason == ReasonCode.SERVER_SHUTTING_DOWN:  # not a reason code of CONNACK (MQTT 5, section 3.2.2.2)
                reason = ReasonCode.SERVER_UNAVAILABLE
            version = self._terms.packet.version
            connack = encoding.connack(version, reason, reason_string=reason_string, server_reference=elsewhere)
            self._channel.write(connack, CONNACK, reason)
        elif self._state != State.NEW:
            self._channel.write(
                encoding.disconnect(self._terms.packet.version, reason, reason_string, elsewhere), DISCONNECT, reason
            )
        self._shut()
        self._lose()

    def _shut(self) -> None:
        self._state = State.OVER
        self._waiting = self._acks = None
        self._throttled = False
        self._unfinished.drop()
        self._channel.shut()
        self._serving.shut(self)

    @property
    def address(self) -> str:
        """The client's address and port."""
        return self._channel.peer.address

    @property
    def unsent(self) -> int:
        """Number of written bytes that the kernel has not accepted yet."""
        return self._channel.unsent

    def abort(self) -> None:
        """Close the socket at once."""
        self._channel.abort()

    def _lose(self) -> None:
        """Report the session's connection as lost, unless it was left before."""
        if self._session is not None and self._leave():
            self._serving.requests.lost.append(self._session)
            self._serving.schedule()

    def _leave(self) -> bool:
        """Detach from the session; return False if that was done before."""
        if self._left or self._session is None:
            return False
        self._left = True
        if self._rights is not None:
            self._rights.end()
        self._serving.leave(self._session, self)
        return True
