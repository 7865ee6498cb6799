"""The store's thread: serves many clients' requests together, with few commits.

The event loop gathers requests while a batch is being served, and passes them on as the next batch. So batches and
commits grow with the load, and an idle server answers at once.

Session changes (connections and subscriptions) are expensive. A turn has a bounded number of them, so that publishes,
acknowledgements and deliveries, which are part of every turn, wait only for a bounded time. The bound is shared evenly
among waiting requests. A SUBSCRIBE of many filters continues in the following turns, behind requests that had no share
in this one.

A batch of requests, and its responses, are columns: for each kind of request, a list with the requests of all clients.
The store's thread treats a client as an opaque handle, by which the event loop finds the connection.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import attrs

import topicstore as ts
from topicstore.contract.arguments import Keep
from topicstore.contract.errors import TopicstoreError
from topicstore.contract.model import Message
from topicstore.sessions import (
    OVER,
    Connect,
    DeliveryBatch,
    Ended,
    Publish,
    PubRel,
    Session,
    Start,
    SubscribeOptions,
    SubscribeResult,
)
from topicstore.sessions.delivery_batch import Allow

__all__ = [
    "ENDED",
    "LAST_ROWS",
    "ROWS",
    "SESSION",
    "Client",
    "Departure",
    "PublishedPart",
    "RequestBatch",
    "Responses",
    "Row",
    "StoreThread",
    "Wanted",
    "keep_turn",
    "put_first",
]

ROWS = 100
"""Number of filters, or of equally expensive changes, in one turn: about 10 ms."""
LAST_ROWS = 2_000
"""As `ROWS`, for a server that is shutting down."""
SESSION = 4
"""The cost of a connection's beginning or end, in filters."""

ENDED = 8
"""Number of a session's filters whose removal at the end of its connection costs as much as one changed filter."""

T = TypeVar("T")
Client = Any
"""A connection, as the event loop knows it."""
Row = tuple[Session, Message, int]
"""A message that a client publishes: its session, the message and the packet id, 0 at QoS 0."""


@attrs.frozen
class Wanted:
    """A requested subscription."""

    topic_filter: str
    options: SubscribeOptions
    start: Start


@attrs.frozen
class Departure:
    """The terms of a client's DISCONNECT: whether its will is sent, and its session's expiry."""

    session: Session
    send_will: bool
    expiry_interval: float | Keep | None
    """Seconds that the session lasts after the DISCONNECT; None: for ever; `KEEP`: as the CONNECT said."""


@attrs.define
class RequestBatch:
    """The requests of all clients since the last batch; the kinds stand in the order in which they are served."""

    lookups: list[tuple[Any, str]] = attrs.field(factory=list)
    """Futures that receive the filters of a client's stored session, each with the client id."""
    restricted: list[tuple[Session, Allow | None]] = attrs.field(factory=list)
    """Sessions whose clients' rights have changed, with the function that decides which messages they may receive."""
    connects: list[tuple[Client, Connect, list[str]]] = attrs.field(factory=list)
    """The last field: the filters of the stored session that the client may no longer subscribe to."""
    published: list[tuple[Client, Any, list[Row]]] = attrs.field(factory=list)
    """The second field: the data that the event loop needs for the acknowledgements."""
    subscribes: list[tuple[Client, Session, list[Wanted]]] = attrs.field(factory=list)
    unsubscribes: list[tuple[Client, Session, list[str]]] = attrs.field(factory=list)
    published_later: list[tuple[Client, Any, list[Row]]] = attrs.field(factory=list)
    """As `published`, for messages that arrived after the first change of subscriptions, which applies to them."""
    pubrels: list[tuple[Client, Session, list[int]]] = attrs.field(factory=list)
    pubrecs: list[tuple[Client, Session, list[int], bool]] = attrs.field(factory=list)
    """The last field: whether the client accepted the messages."""
    disconnects: list[tuple[Client, Departure]] = attrs.field(factory=list)
    lost: list[Session] = attrs.field(factory=list)
    figures: list[Message] = attrs.field(factory=list)
    """Messages of the server itself (``$SYS``), which are not stored."""

    @property
    def resubscribing(self) -> bool:
        """Whether a request changes subscriptions."""
        return bool(self.subscribes or self.unsubscribes)

    @property
    def changing(self) -> bool:
        """Whether a request begins or ends a connection, or changes subscriptions."""
        return bool(self.subscribes or self.unsubscribes or self.connects or self.disconnects or self.lost)

    def clients(self) -> set[Client]:
        """Return all clients that wait for a response."""
        columns: tuple[Sequence[tuple[Any, ...]], ...] = (
            self.connects,
            self.published,
            self.subscribes,
            self.unsubscribes,
            self.published_later,
            self.pubrels,
            self.pubrecs,
            self.disconnects,
        )
        return {row[0] for column in columns for row in column}


@attrs.frozen
class PublishedPart:
    """The results of one client's publishes."""

    client: Client
    what: Any
    rows: list[Row]
    matched: Sequence[bool]
    """For each row, whether a subscription matches."""
    refused: Mapping[int, TopicstoreError]
    """The errors of refused messages, by row number."""


@attrs.define
class Responses:
    """The results of a batch of requests, and the packets to be sent."""

    found: list[tuple[Any, list[str] | None]] = attrs.field(factory=list)
    """The futures of `RequestBatch.lookups`, with the filters of the stored session; None if it can't be read."""
    opened: list[tuple[Client, Session | TopicstoreError]] = attrs.field(factory=list)
    published: list[PublishedPart] = attrs.field(factory=list)
    released: list[tuple[Client, list[int], Sequence[bool]]] = attrs.field(factory=list)
    """PUBRELs: packet ids that are free, and for each whether it was in use."""
    unknown: list[tuple[Client, list[int]]] = attrs.field(factory=list)
    """PUBRECs whose packet ids are not in use."""
    subscribed: list[tuple[Client, list[SubscribeResult | TopicstoreError]]] = attrs.field(factory=list)
    unsubscribed: list[tuple[Client, Sequence[bool | TopicstoreError]]] = attrs.field(factory=list)
    departed: list[tuple[Client, TopicstoreError | None]] = attrs.field(factory=list)
    failed: list[tuple[Client, TopicstoreError]] = attrs.field(factory=list)
    """Clients for which a request failed that the protocol can't answer; their connections end."""
    delivered: list[tuple[Session, list[Publish | PubRel | DeliveryBatch]]] = attrs.field(factory=list)
    more: bool = False
    """Whether more messages are ready for delivery."""
    pause: float = 1.0
    """Seconds until the sessions' next timer is due."""


def keep_turn(requests: RequestBatch, rows: int) -> RequestBatch:
    """Keep in ``requests`` the session changes of one turn, and return the other changes, in their order.

    Each kind of request gets a part of ``rows`` in proportion to its waiting requests, and at least one request of each
    kind is served.
    """
    left = RequestBatch()
    waiting = len(requests.connects) + len(requests.disconnects) + len(requests.lost)
    waiting += len(requests.subscribes) + len(requests.unsubscribes)
    requests.connects, left.connects = _first(requests.connects, rows, waiting, lambda _: 0)
    requests.disconnects, left.disconnects = _first(
        requests.disconnects, rows, waiting, lambda row: row[1].session.filters
    )
    requests.lost, left.lost = _first(requests.lost, rows, waiting, lambda session: session.filters)
    requests.subscribes, left.subscribes = _shared_out(requests.subscribes, rows, waiting)
    requests.unsubscribes, left.unsubscribes = _shared_out(requests.unsubscribes, rows, waiting)
    return left


def _first(requests: list[T], rows: int, waiting: int, filters: Callable[[T], int]) -> tuple[list[T], list[T]]:
    """Split requests into those of this turn and the others; ``filters`` returns the filters that a request ends."""
    room = rows * len(requests) // waiting if requests else 0
    for at, request in enumerate(requests):
        room -= SESSION + filters(request) // ENDED
        if room <= 0:
            return requests[: at + 1], requests[at + 1 :]
    return requests, []


def _shared_out(
    requests: list[tuple[Any, Any, list[T]]], rows: int, waiting: int
) -> tuple[list[tuple[Any, Any, list[T]]], list[tuple[Any, Any, list[T]]]]:
    """Split requests into the portions of this turn and the rest; the next request to be served comes first."""
    room = max(rows * len(requests) // waiting, 1) if requests else 0
    share = max(room // max(len(requests), 1), 1)
    portions, begun = [], []
    for client, session, filters in requests[:room]:
        portions.append((client, session, filters[:share]))
        if len(filters) > share:
            begun.append((client, session, filters[share:]))
    return portions, requests[room:] + begun


def put_first(requests: RequestBatch, left: RequestBatch) -> None:
    """Insert the requests that a turn did not serve before newer requests."""
    for kind in ("connects", "subscribes", "unsubscribes", "disconnects", "lost"):
        rest: Sequence[Any] = getattr(left, kind)
        if rest:
            setattr(requests, kind, [*rest, *getattr(requests, kind)])


_LIMIT = 20_000
"""Most packets that are delivered with one batch, to all clients together."""
_BUDGET = 256 << 20
"""Most bytes of payloads in socket buffers, if all clients stopped reading at the same time."""
_LEAST, _MOST = 16 << 10, 256 << 10
"""Bounds of the bytes of payloads that are delivered to one client with one batch."""

_MOVES = ts.ShardElsewhereError, ts.ShardMovedError
_OF_CLIENTS = ts.InvalidMessageError, ts.SessionEndedError
"""Errors of rows that are the fault of clients, or the end of their connection."""

_log = logging.getLogger("topicstore.server")


class StoreThread:
    """Serves batches of requests in the store's thread; the batches share commits.

    ``on_end`` is called in the thread in which a session ends, with the reason.
    """

    def __init__(self, db: ts.Database, on_end: Callable[[Session, Ended], None]) -> None:
        self._db, self._sessions, self._on_end = db, db.sessions, on_end
        self._due = 0.0
        """The time at which the sessions' next timer is due (`time.monotonic`)."""
        self._ticked = 0.0
        """The time at which timers were last served (`time.monotonic`)."""
        self._failures: dict[str, tuple[str, int]] = {}
        """The text of the last failure by kind of work, so that the log has a lasting failure only once, and its level
        in the log."""
        self.thread = 0
        """The identifier (`threading.get_ident`) of the thread that is serving a batch; 0 if there is none."""
        self.connected = 0
        """Number of connected clients; set by the event loop."""
        self._resuming: list[tuple[Client, Session, list[str]]] = []
        """Opened sessions whose subscriptions are not resumed yet, with the filters that must be removed from them."""

    def serve(self, requests: RequestBatch) -> Responses:
        """Serve a batch of requests, and return their responses.

        A message is acknowledged after its commit, and delivered after its packet id was committed.
        """
        self.thread = threading.get_ident()
        try:
            responses = Responses()
            for waiting, client_id in requests.lookups:
                responses.found.append((waiting, self._filters(client_id)))
            for session, allow in requests.restricted:
                with contextlib.suppress(*OVER):
                    session.restrict(allow)
            if requests.figures:
                self._attempt("the server's own figures", lambda: self._db.publish(requests.figures))
            for column, serve in (
                (requests.connects, self._connect),
                (requests.published, partial(self._publish, requests.published)),
                (requests.subscribes, self._subscribe),
                (requests.unsubscribes, self._unsubscribe),
                (requests.published_later, partial(self._publish, requests.published_later)),
                (requests.pubrels, self._pubrel),
                (requests.pubrecs, self._pubrec),
                (requests.disconnects, self._disconnect),
            ):
                if column:
                    serve(requests, responses)
            if requests.lost:
                self._lost(requests.lost)
            if self._resuming:
                self._resume(responses)
            self._deliver(responses)
            responses.more |= bool(self._resuming)
            return responses
        finally:
            self.thread = 0

    def _deliver(self, responses: Responses) -> None:
        """Serve timers that are due, and collect the packets to be sent."""
        now = time.monotonic()
        if self._next() <= now:
            self._ticked, self._due = now, now + self._tick()
        share = min(max(_BUDGET // max(self.connected, 1), _LEAST), _MOST)

        def deliver() -> None:
            responses.delivered = self._sessions.deliver_batches(_LIMIT, limit=_LIMIT, max_bytes=share)
            responses.more = self._sessions.wait(0)

        self._attempt("delivering", deliver)
        responses.pause = max(self._next() - time.monotonic(), 0.0)

    def _next(self) -> float:
        """Return the time at which timers must be checked again; a longest pause that was shortened applies at once."""
        return min(self._due, self._ticked + self._sessions.pace.longest_pause)

    # --- connections ---

    def _filters(self, client_id: str) -> list[str] | None:
        """Return the filters of a stored session; None if it can't be read."""
        try:
            return [text for text, _ in self._sessions[client_id].subscriptions]
        except ts.SessionNotFoundError:
            return []
        except ts.DatabaseClosedError:
            raise
        except TopicstoreError as failed:
            self._log_failure("reading a session", failed)
            return None

    def _connect(self, requests: RequestBatch, responses: Responses) -> None:
        connects = [connect for _, connect, _ in requests.connects]
        try:
            results = self._sessions.open_many(connects, on_end=self._on_end, partial=True, resume=False)
        except TopicstoreError as failed:
            results = [failed] * len(connects)
        for (client, _, forbidden), result in zip(requests.connects, results, strict=True):
            if isinstance(result, Session) and result.present and result.ended is None:
                self._resuming.append((client, result, forbidden))
            else:
                responses.opened.append((client, result))
        keep_alives = [connect.keep_alive for connect in connects if connect.keep_alive]
        if keep_alives:
            self._due = min(self._due, time.monotonic() + 1.5 * min(map(float, keep_alives)))  # type: ignore[arg-type]

    def _resume(self, responses: Responses) -> None:
        """Resume a limited number of stored subscriptions; answer the clients whose sessions are complete."""
        turn = self._resuming[: ROWS // SESSION]
        results = self._sessions.resume([session for _, session, _ in turn], ROWS)
        left = []
        for one, result in zip(turn, results, strict=True):
            client, session, forbidden = one
            if result is False:
                left.append(one)
            elif isinstance(result, TopicstoreError) and session.ended is None:
                self._lost([session])
                responses.opened.append((client, result))
            else:
                responses.opened.append((client, self._without(session, forbidden) if forbidden else session))
        self._resuming[: len(turn)] = []
        self._resuming += left  # behind the sessions that have had no part of a turn

    def _without(self, session: Session, filters: list[str]) -> Session | TopicstoreError:
        """Remove subscriptions from a session before its first delivery; if that fails, return the error."""
        try:
            self._sessions.unsubscribe([(session, topic_filter) for topic_filter in filters])
        except TopicstoreError as failed:
            self._lost([session])
            return failed
        return session

    def _disconnect(self, requests: RequestBatch, responses: Responses) -> None:
        alike: defaultdict[tuple[bool, float | Keep | None], list[int]] = defaultdict(list)
        for row, (_, how) in enumerate(requests.disconnects):
            alike[how.send_will, how.expiry_interval].append(row)
        for rows in alike.values():
            how = requests.disconnects[rows[0]][1]
            sessions = [requests.disconnects[row][1].session for row in rows]
            errors = self._departed(how, sessions)
            for row, error in zip(rows, errors, strict=True):
                responses.departed.append((requests.disconnects[row][0], error))
        self._due = 0.0  # tick in this batch: a new will or session expiry may be the first timer

    def _departed(self, how: Departure, sessions: list[Session]) -> Sequence[TopicstoreError | None]:
        try:
            return self._sessions.disconnect(
                sessions, send_will=how.send_will, expiry_interval=how.expiry_interval, partial=True
            )
        except TopicstoreError as failed:
            self._log_failure("ending connections", failed)
            return [failed] * len(sessions)

    def _lost(self, sessions: list[Session]) -> None:
        """End the connections of sessions. If that fails, the client's next CONNECT takes the session over."""

        def lost() -> None:
            for error in self._sessions.lost(sessions, partial=True):
                if error is not None and not isinstance(error, OVER):
                    raise error

        self._attempt("ending broken connections", lost)
        self._due = 0.0

    def abandon(self, sessions: list[Session]) -> None:
        """End the remaining connections when the server stops; a closed database has ended them already."""
        left = [*sessions, *(session for _, session, _ in self._resuming)]
        if left:
            with contextlib.suppress(ts.DatabaseClosedError):
                self._lost(left)

    # --- what clients publish ---

    def _publish(
        self, published: Sequence[tuple[Client, Any, list[Row]]], _requests: RequestBatch, responses: Responses
    ) -> None:
        """Publish all clients' messages with one commit; messages of QoS 2 with their packet ids."""
        rows: list[Row] = list(chain.from_iterable(part for _, _, part in published))
        matched, refused = self._published(rows) if rows else ([], {})
        at = 0
        for client, what, part in published:
            start, at = at, at + len(part)
            mine: Mapping[int, TopicstoreError] = (
                {row - start: refused[row] for row in range(start, at) if row in refused} if refused else {}
            )
            responses.published.append(PublishedPart(client, what, part, matched[start:at], mine))

    def _published(self, rows: list[Row]) -> tuple[Sequence[bool], Mapping[int, TopicstoreError]]:
        try:
            outcome = self._sessions.publish(rows, partial=True)
        except TopicstoreError as bad:  # a full disk or a quota, for example: nothing was stored
            self._log_failure("storing", bad)
            return self._unstored(rows, bad)
        failed = next((one for one in outcome.refused.values() if not isinstance(one, _OF_CLIENTS)), None)
        if failed is not None:  # some shards of a cluster have failed
            self._log_failure("storing", failed)
        elif self._failures and any(row[1].qos for row in rows):
            self._log_recovery("storing")
        return outcome.matched, outcome.refused

    def _unstored(
        self, rows: list[Row], failed: TopicstoreError
    ) -> tuple[Sequence[bool], Mapping[int, TopicstoreError]]:
        """Refuse messages of QoS 1 and 2 that can't be stored; try to deliver those of QoS 0, which need no storage."""
        light = [row for row in rows if not row[1].qos]
        if light and len(light) < len(rows):
            try:
                self._sessions.publish(light, partial=True)
            except TopicstoreError as again:
                self._log_failure("passing on messages of QoS 0", again)
        return [False] * len(rows), {number: failed for number, row in enumerate(rows) if row[1].qos}

    def _pubrel(self, requests: RequestBatch, responses: Responses) -> None:
        rows = [(session, packet_id) for _, session, ids in requests.pubrels for packet_id in ids]
        try:
            freed = self._sessions.pubrel(rows, partial=True)
        except TopicstoreError as failed:
            self._log_failure("freeing packet ids", failed)
            responses.failed += [(client, failed) for client, _, _ in requests.pubrels]
            return
        at = 0
        for client, _, ids in requests.pubrels:
            start, at = at, at + len(ids)
            failures = [freed.refused[row] for row in range(start, at) if row in freed.refused] if freed.refused else ()
            if failures:
                responses.failed.append((client, failures[0]))
            else:
                responses.released.append((client, ids, freed.known[start:at]))

    # --- what clients receive ---

    def _pubrec(self, requests: RequestBatch, responses: Responses) -> None:
        for accepted in (True, False):
            given = [(client, session, ids) for client, session, ids, taken in requests.pubrecs if taken is accepted]
            rows = [(session, packet_id) for _, session, ids in given for packet_id in ids]
            if not rows:
                continue
            known = self._sessions.pubrec(rows, accepted=accepted, partial=True).known
            if accepted and not all(known):  # a refusal is the last packet of its exchange (MQTT 5, section 4.3.3)
                at = 0
                for client, _, ids in given:
                    start, at = at, at + len(ids)
                    responses.unknown.append(
                        (client, [one for one, due in zip(ids, known[start:at], strict=True) if not due])
                    )

    def _subscribe(self, requests: RequestBatch, responses: Responses) -> None:
        """Make all clients' subscriptions; consecutive ones with the same start share a commit."""
        outcome: list[list[SubscribeResult | TopicstoreError]] = [
            [] for _ in requests.subscribes
        ]  # filled below, in the order of each client's filters
        left: list[tuple[int, Session, Wanted]] = [
            (number, session, wanted)
            for number, (_, session, wants) in enumerate(requests.subscribes)
            for wanted in wants
        ]
        while left:  # a run of rows with the same start is one call, so that a client's filters keep their order
            start = left[0][2].start
            run = next((at for at, one in enumerate(left) if one[2].start != start), len(left))
            results = self._subscribed([(session, wanted) for _, session, wanted in left[:run]], start)
            for (number, _, _), result in zip(left[:run], results, strict=True):
                outcome[number].append(result)
            left = left[run:]
        responses.subscribed = [
            (client, results) for (client, _, _), results in zip(requests.subscribes, outcome, strict=True)
        ]

    def _subscribed(
        self, wants: list[tuple[Session, Wanted]], start: Start
    ) -> Sequence[SubscribeResult | TopicstoreError]:
        rows = [(session, wanted.topic_filter, wanted.options) for session, wanted in wants]
        try:
            return self._sessions.subscribe(rows, start=start, partial=True)
        except TopicstoreError as failed:
            self._log_failure("subscribing", failed)
            return [failed] * len(rows)

    def _unsubscribe(self, requests: RequestBatch, responses: Responses) -> None:
        rows = [(session, topic_filter) for _, session, filters in requests.unsubscribes for topic_filter in filters]
        results: Sequence[bool | TopicstoreError]
        try:
            results = self._sessions.unsubscribe(rows, partial=True)
        except TopicstoreError as failed:
            self._log_failure("unsubscribing", failed)
            results = [failed] * len(rows)
        at = 0
        for client, _, filters in requests.unsubscribes:
            responses.unsubscribed.append((client, results[at : at + len(filters)]))
            at += len(filters)

    # --- timers and failures ---

    def _tick(self) -> float:
        pause = min(1.0, self._sessions.pace.longest_pause)

        def tick() -> None:
            nonlocal pause
            pause = self._sessions.tick()

        self._attempt("what is due", tick)
        return pause

    def _attempt(self, what: str, work: Callable[[], object]) -> None:
        """Do work that a later batch repeats if it fails: a full disk must not end the server."""
        try:
            work()
        except ts.DatabaseClosedError:
            raise
        except TopicstoreError as failed:
            self._log_failure(what, failed)
        except ExceptionGroup as failed:  # a tick raises a group if several steps failed
            if (closed := failed.subgroup(ts.DatabaseClosedError)) is not None:
                raise ts.DatabaseClosedError("the database is closed") from closed
            if failed.split(TopicstoreError)[1] is not None:
                raise
            self._log_failure(what, failed)
        else:
            if self._failures:
                self._log_recovery(what)

    def _log_failure(self, what: str, failed: BaseException) -> None:
        """Log a failure, unless the previous failure of the same work had the same text.

        A shard of a cluster that moves, as when a site joins or ends in order, needs no operator.
        """
        text = str(failed)
        known = self._failures.get(what)
        if known is None or known[0] != text:
            level = logging.INFO if _has_only(failed, _MOVES) else logging.WARNING
            self._failures[what] = text, level
            _log.log(level, "%s failed: %s", what, text)

    def _log_recovery(self, what: str) -> None:
        """Log that work succeeds again, if it had failed, at the level at which the failure was logged."""
        if (known := self._failures.pop(what, None)) is not None:
            _log.log(known[1], "%s works again", what)


def _has_only(error: BaseException, kinds: tuple[type[BaseException], ...]) -> bool:
    """Return whether an error, or each one of a group, is one of some kinds."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(kinds)[1] is None
    return isinstance(error, kinds)
