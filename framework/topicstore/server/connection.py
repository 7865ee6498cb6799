"""One client's connection: the state machine of MQTT between a socket and a session.

It runs in the event loop and never waits. What needs the store goes over with the next hop
(`topicstore.server.asked`). PUBLISHes and acknowledgements are handed on as they come. CONNECT, SUBSCRIBE, UNSUBSCRIBE
and DISCONNECT are barriers: what the same client sends behind one waits until it was answered, so that a client's
requests are served in their order. Nothing is read from the socket while much of the client's waits to be served, or
while it doesn't read itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import NoReturn, cast

from topicstore.contract.arguments import KEEP
from topicstore.contract.errors import SessionEndedError, TopicstoreError
from topicstore.sessions import DeliveryBatch, Ended, Publish, PubRel, Session, SubscribeResult

from .admission import Refused, admit
from .answering import answer_publishes, answer_pubrels
from .asked import Departure, PublishedPart
from .channel import Channel
from .connecting import Terms
from .connection_state import State
from .inbound import Inbound, Pending, UndecidedError
from .listeners.peer import Via
from .outbound import Outbound, Shared
from .packet_types import CONNACK, DISCONNECT, INVALID, PINGRESP, PUBREL, SHORT
from .protocol import encoding
from .protocol.decoding import decode
from .protocol.frames import Frame, FrameReader, FramingError
from .protocol.packets import (
    AckPacket,
    AuthPacket,
    ConnectPacket,
    DisconnectPacket,
    PingPacket,
    SubscribePacket,
    UnsubscribePacket,
)
from .protocol.reason import PacketError, ReasonCode
from .rates import Rate
from .receipts import Receipts, complete
from .refusals import reason_of, reason_of_end, sendable, text_of
from .rights import Rights
from .serving import Serving
from .subscriptions import Subscriptions
from .unfinished_packet import UnfinishedPacket

__all__ = ["MqttConnection"]

_HOLD = 256 << 10
"""Bytes of a client that wait to be served, from which on nothing more is read from its socket."""
_FILTERS = frozenset((0x82, 0xA2))
"""The first bytes of SUBSCRIBE and UNSUBSCRIBE."""
_BARRIERS = frozenset((0x82, 0xA2, 0xE0))
"""The first bytes of SUBSCRIBE, UNSUBSCRIBE and DISCONNECT, before which what came is handed on."""
_OTHERS = 300
"""Bytes that a CONNACK has at most, besides its reason string and an assigned client id."""
_LONG = 4 << 10
"""Bytes of a SUBSCRIBE or UNSUBSCRIBE from which on it waits for its turn: it takes milliseconds to check."""

_log = logging.getLogger("topicstore.server")


class MqttConnection(asyncio.Protocol):
    """Used in the event loop only. Its public methods are called by the loop, and with the answers of a hop."""

    __slots__ = (
        "_barrier",
        "_busy",
        "_channel",
        "_full",
        "_inbound",
        "_left",
        "_outbound",
        "_rate",
        "_reader",
        "_receipts",
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
        """Whether the end of the session's connection was asked for, or was told."""
        self._barrier: object = None
        """The request that is being served, behind which others wait."""
        self._waiting: list[Frame] | None = None
        """Packets behind a barrier."""
        self._unserved = 0
        """Bytes that came since everything was served."""
        self._busy = False
        """Whether something of it is being served, or waits for the next hop."""
        self._full = self._throttled = False
        self._receipts: Receipts | None = None
        """The acknowledgements of a run of packets."""
        self._rights: Rights | None = None
        """What it may do, once it was let in."""
        self._rate: Rate | None = None

    # --- the socket ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the CONNECT, not for ever."""
        self._channel = Channel(self._serving, cast("asyncio.Transport", transport), self._via)
        self._unfinished = UnfinishedPacket(self._serving, self, self._reader, self._channel)
        self._channel.later(self._serving.limits.connect_timeout, self._never_connected)
        self._serving.add(self)

    def _never_connected(self) -> None:
        self._channel.record.reason, self._state = "there was no CONNECT in time", State.OVER
        self._channel.abort()

    def data_received(self, data: bytes) -> None:
        """Take packets."""
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
        else:  # a client in the middle of a packet isn't silent
            self._heard()
        self._unfinished.count()
        if self._barrier is not None:  # of what it has begun to send, no more is taken before that is served
            self.flow()

    def connection_lost(self, error: Exception | None) -> None:
        """End the session's connection, after all that the client asked for."""
        self._channel.lost(error)
        self._unfinished.drop()
        self._serving.remove(self)
        if self._barrier is None and not self._waiting:
            self._lose()

    def pause_writing(self) -> None:
        """Hold back a client that doesn't read: nothing is handed out for it, and nothing read from it."""
        self._full = True
        self._hold_session()
        self.flow()

    def resume_writing(self) -> None:
        """Go on: what waits in the store comes with the next hop."""
        self._full = False
        self._hold_session()
        self.flow()

    def _hold_session(self) -> None:
        if self._session is not None and not self._left:
            with contextlib.suppress(SessionEndedError):  # the loop will be told
                if self._full:
                    self._session.pause()
                else:
                    self._session.resume()

    def flow(self) -> None:
        """Read from the socket, or don't, as what comes can be served."""
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
        """Note that a client from which nothing is read at the moment doesn't count as silent, unless it reads nothing.

        ``unsent`` is how much of what it is sent it hadn't taken the last time; return how much it is now.
        """
        now = self._channel.unsent
        if not self._left and (not self._full or now != unsent):
            self._heard()
        return now

    def _heard(self) -> None:
        if self._session is not None:
            try:
                self._session.alive()
            except SessionEndedError:
                return  # the loop will be told

    # --- packets ---

    def _take(self, frames: Sequence[Frame]) -> None:
        """Handle packets, or keep them if one before them has to be served first."""
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
        inbound = self._inbound if self._session is not None else None
        bad: PacketError | None = None
        try:
            for first, body in frames:
                at += 1
                if first & 0xF0 == 0x30 and inbound is not None:
                    inbound.publish(first, body)
                    published += 1
                else:
                    if first in _BARRIERS:
                        self._hand_on(published - gathered)
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
        self._hand_on(published - gathered)
        if bad is not None:
            self._refuse(bad)
            return
        if published and self._rate is not None:
            self._slow_down(self._rate, published, frames[:at])
        if at < len(frames) and self._state < State.LEAVING:
            self._keep(frames[at:])

    def _hand_on(self, published: int) -> None:
        """Hand on what a run of packets brought."""
        if self._session is None or self._left:
            return
        receipts, self._receipts = self._receipts, None
        if receipts is not None:
            receipts.count(self._channel)
            try:
                if receipts.hand_on(self, self._session, self._serving.asked):
                    self._busy = True
                    self._serving.kick()
            except SessionEndedError:
                return  # the loop will be told
        if published:
            self._busy = True
            self._serving.gather(self, published)
        self._heard()

    def _packet(self, first: int, body: bytes) -> None:
        """Handle anything but a PUBLISH."""
        kind = SHORT.get(first)
        if kind is not None and len(body) == 2 and body != b"\0\0" and self._session is not None:
            self._receipts = self._receipts or Receipts()
            self._receipts.add(kind, body[0] << 8 | body[1])
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
            self._receipts = self._receipts or Receipts()
            self._receipts.add_packet(packet)
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
        """Handle what waited, and read on: what it had asked for was served."""
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
        record.client_id = terms.client_id[: serving.limits.client_id_length]  # a longer one is refused
        self._state, self._barrier = State.OPENING, packet
        self._channel.never()
        refusal = terms.refusal(serving.limits)
        if refusal is not None:
            self.end(*refusal)
        elif serving.draining:
            self.end(ReasonCode.SERVER_UNAVAILABLE, "the server is shutting down")
        elif serving.full:
            self.end(ReasonCode.QUOTA_EXCEEDED, "as many clients are connected as may be")
        else:
            serving.admit(self, self._admit(terms))

    async def _admit(self, terms: Terms) -> None:
        """Find out who the client is and what it may do, and ask for its session."""
        admission = await admit(self._serving, terms, self._channel.peer)
        most = terms.packet.maximum_packet_size
        if isinstance(admission, Refused):
            self.end(admission.reason, admission.text)
        elif most is not None and len(terms.connack(self._serving.settings, admission.identity.user)) > most:
            self.end(ReasonCode.PACKET_TOO_LARGE, "the CONNACK is too large for the client [MQTT-3.1.2-24]")
        elif self._state == State.OPENING:
            self._rights = rights = Rights(self._serving, self, admission, most)
            how = terms.connect(rights.allow, admission.identity.user)
            self._serving.asked.connects.append((self, how, admission.forbidden))
            self._serving.kick()

    def opened(self, result: Session | TopicstoreError) -> None:
        """Answer the CONNECT."""
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
        if result.ended is not None:  # taken over in the same hop
            self.session_ended(result.ended)
            return
        if self._full:
            self._hold_session()
        self.go_on()

    def _begin(self, session: Session, terms: Terms, rights: Rights) -> None:
        serving, limits = self._serving, self._serving.limits
        version = terms.packet.version
        serving.begin(session, self)
        self._inbound = Inbound(
            version,
            session,
            most_aliases=limits.topic_aliases,
            levels=limits.topic_levels,
            quota=limits.in_flight,
            decided=None if rights.permissions is None else rights.publishes,
        )
        self._outbound = Outbound(version, terms.packet.maximum_packet_size, terms.aliases)
        if limits.publish_rate is not None or limits.publish_bytes is not None:
            self._rate = Rate(limits.publish_rate, limits.publish_bytes)
        known = session.status().subscriptions if session.present else ()
        self._subscriptions = Subscriptions(serving, session, terms, rights.permissions, self, len(known))
        self._channel.record.session_present = session.present
        told = None
        if missed := [one.topic_filter for one in known if one.dropped]:
            text = f"messages for {', '.join(missed)} may have been removed by retention before they could be sent"
            told = self._terms.told(text, _OTHERS)
            _log.warning("client %r was away for too long: %s", terms.client_id, text)
        self._channel.write(terms.connack(serving.settings, rights.user, session.present, told), CONNACK)
        self._terms = terms.settled()
        self._state = State.OPEN
        self._unfinished.admit()
        rights.begin(session)
        self.renew_rights()  # they may have changed since they were found

    # --- its rights ---

    def renew_rights(self) -> None:
        """Do and send from now on only what the client may by the rules of now."""
        if self._rights is not None and self._rights.renew():
            self._inbound.judge_by(self._rights.publishes)
            self._subscriptions.permissions = self._rights.permissions

    # --- what it publishes ---

    async def _decide(self, topic: str) -> None:
        """Have it decided whether the client may publish to a topic, and go on."""
        if self._rights is not None:
            await self._rights.decide_publish(topic)
        self._barrier = None
        self.go_on()

    def _slow_down(self, rate: Rate, published: int, frames: Sequence[Frame]) -> None:
        """Read nothing for a while from a client that publishes more than it may, or end its connection."""
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

    def take_published(self) -> Pending | None:
        """Return what is to be published with the next hop."""
        return self._inbound.take()

    def published(self, part: PublishedPart) -> None:
        """Answer PUBLISHes."""
        verdict = answer_publishes(self._terms.packet.version, part)
        self._serving.traffic.publishes_refused += verdict.refused
        if verdict.end is not None:
            self.end(ReasonCode.QUOTA_EXCEEDED, verdict.end)
            return
        self._inbound.answered(len(part.what.ids1))
        for packet_id in verdict.over:
            self._inbound.released(packet_id)
        self._channel.answer(verdict.data, verdict.packets)

    def released(self, ids: Sequence[int], known: Sequence[bool]) -> None:
        """Answer PUBRELs."""
        for packet_id in ids:
            self._inbound.released(packet_id)
        self._channel.answer(*answer_pubrels(self._terms.packet.version, ids, known))

    # --- what it is sent ---

    def send(self, packets: Sequence[Publish | PubRel | DeliveryBatch], shared: Shared | None) -> None:
        """Send what the session hands out; what is too large counts as delivered [MQTT-3.1.2-25]."""
        pieces, published, too_large = self._outbound.encode(packets, shared)
        if too_large and self._session is not None:
            with contextlib.suppress(SessionEndedError):  # the loop will be told
                complete(self._session, too_large)
        pubrels = sum([isinstance(packet, PubRel) for packet in packets])
        self._channel.deliver(b"".join(pieces), published, pubrels)

    def unknown(self, ids: Sequence[int]) -> None:
        """Answer PUBRECs of packet ids that are in no exchange."""
        unknown = ReasonCode.PACKET_IDENTIFIER_NOT_FOUND
        data = encoding.pubacks(self._terms.packet.version, PUBREL, [(one, unknown) for one in ids])
        self._channel.answer(data, ((PUBREL, unknown, len(ids)),))

    # --- its subscriptions ---

    async def _resubscribe_in_turn(self, first: int, body: bytes) -> None:
        """Handle a packet of many filters: in each round of the event loop one of all clients."""
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
        """Go on with a SUBSCRIBE, or answer it."""
        self._subscriptions.subscribed(results)

    def unsubscribed(self, results: Sequence[bool | TopicstoreError]) -> None:
        """Go on with an UNSUBSCRIBE, or answer it."""
        self._subscriptions.unsubscribed(results)

    def answer(self, data: bytes, kind: int, reason: int, granted: Sequence[str]) -> None:
        """Send a SUBACK or an UNSUBACK, and go on."""
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
            self._serving.asked.disconnects.append((self, how))
            self._serving.kick()

    def departed(self, error: TopicstoreError | None) -> None:
        """End the connection after a DISCONNECT."""
        self._barrier = None
        if error is not None and not isinstance(error, SessionEndedError):
            _log.warning("the session of %r could not be ended: %s", self._terms.client_id, error)
        self._shut()

    def session_ended(self, why: Ended) -> None:
        """End the connection of a session that was ended by somebody else."""
        self._leave()
        self.end(reason_of_end(why), why.value)

    def failed(self, error: TopicstoreError) -> None:
        """End the connection because something failed for which there is no answer."""
        if not isinstance(error, SessionEndedError):
            self.end(reason_of(error), str(error), text_of(error))

    def _refuse(self, bad: PacketError) -> None:
        self._channel.came(INVALID, bad.reason)
        if self._state != State.NEW:
            self.end(bad.reason, bad.text)
            return
        self._channel.ends(bad.text, bad.reason)
        if bad.version:
            known = bad.reason != ReasonCode.UNSUPPORTED_PROTOCOL_VERSION
            told = sendable(bad.text) if known else None  # in whatever form its packets have, there may be no text
            self._channel.write(encoding.connack(bad.version, bad.reason, reason_string=told), CONNACK, bad.reason)
        self._shut()

    def end(self, reason: ReasonCode, text: str, shown: str | None = None) -> None:
        """Tell the client why, and end its connection; its session is lost.

        shown: what the client is told, if that isn't the text for the log.
        """
        if self._state >= State.OVER:
            return
        self._channel.ends(text, reason)
        told = self._terms.told(text if shown is None else shown) if self._state != State.NEW else None
        if self._state == State.OPENING:
            if reason == ReasonCode.SERVER_SHUTTING_DOWN:  # a CONNACK can't say that (MQTT 5, section 3.2.2.2)
                reason = ReasonCode.SERVER_UNAVAILABLE
            connack = encoding.connack(self._terms.packet.version, reason, reason_string=told)
            self._channel.write(connack, CONNACK, reason)
        elif self._state != State.NEW:
            self._channel.write(encoding.disconnect(self._terms.packet.version, reason, told), DISCONNECT, reason)
        self._shut()
        self._lose()

    def _shut(self) -> None:
        self._state = State.OVER
        self._waiting = self._receipts = None
        self._throttled = False
        self._unfinished.drop()
        self._channel.shut()
        self._serving.shut(self)

    @property
    def unsent(self) -> int:
        """How many bytes the client hasn't taken yet."""
        return self._channel.unsent

    def abort(self) -> None:
        """Close the socket at once."""
        self._channel.abort()

    def _lose(self) -> None:
        """Have the session's connection counted as lost, once."""
        if self._session is not None and self._leave():
            self._serving.asked.lost.append(self._session)
            self._serving.kick()

    def _leave(self) -> bool:
        """Give up the session; return whether that wasn't done before."""
        if self._left or self._session is None:
            return False
        self._left = True
        if self._rights is not None:
            self._rights.end()
        self._serving.leave(self._session, self)
        return True
