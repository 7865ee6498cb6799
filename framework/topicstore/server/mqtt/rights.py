"""The rights of one client under the current access rules: its actions, and the messages that it may receive.

The store's thread checks messages, and never blocks. If plugins must decide, the event loop asks them, and deliveries
to the client's session pause until they have answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from topicstore.contract.model import Message
from topicstore.server.access.access import Access
from topicstore.server.access.permissions import Permissions
from topicstore.sessions import OVER, Publish, Session
from topicstore.sessions.delivery_batch import ASKED

from .connect import Admission
from .connections import Serving
from .deliver import allowance

__all__ = ["Rights"]

_FIRST, _LONGEST = 1.0, 30.0
"""The first and the longest pause, in seconds, before a plugin that failed is asked again about messages."""

_log = logging.getLogger("topicstore.server.access")


class Client(Protocol):
    """The interface by which `Rights` uses a client's connection."""

    def send(self, packets: Sequence[Publish], shared: None) -> None:
        """Send packets, unless the connection is over."""


class _Received:
    """Decides which messages a client may receive under its permissions. Called in the store's thread."""

    __slots__ = ("_answered", "_asking", "_client", "_over", "_permissions", "_serving", "_timer")

    def __init__(
        self, serving: Serving, client: Client, permissions: Permissions, answered: Callable[[], object]
    ) -> None:
        """``answered`` is called in the event loop when plugins have answered."""
        self._serving, self._client, self._permissions = serving, client, permissions
        self._answered = answered
        self._asking = False
        """Whether plugins are being asked; deliveries to the session pause meanwhile."""
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def __call__(self, topics: Sequence[str]) -> list[bool | None]:
        """Return for each topic whether the client may receive its messages; None while plugins are being asked."""
        found = self._permissions.received(topics)
        if None in found and not self._asking:
            unknown = dict.fromkeys(topic for topic, answer in zip(topics, found, strict=True) if answer is None)
            self._asking = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, so that there are no deliveries
                self._serving.loop.call_soon_threadsafe(self._ask, list(unknown)[:ASKED], _FIRST)
        return found

    def _ask(self, topics: list[str], pause: float) -> None:
        self._timer = None
        if not self._over:
            self._serving.spawn(self._client, self._decide(topics, pause))

    async def _decide(self, topics: list[str], pause: float) -> None:
        """Ask plugins until they answer; while a plugin fails, messages wait and are not lost."""
        try:
            await self._permissions.ask_received(topics)
        except Exception as failure:  # noqa: BLE001 - a plugin may raise anything; it is logged, and asked again
            if not self._over:
                told = pause == _FIRST
                level = logging.ERROR if told else logging.DEBUG
                _log.log(level, "messages wait because a plugin failed to say who may read them", exc_info=failure)
                later = self._serving.loop.call_later
                self._timer = later(pause, self._ask, topics, min(2 * pause, _LONGEST))
            return
        self._asking = False
        if not self._over:
            self._answered()

    def end(self) -> None:
        """Stop asking plugins."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()


class Rights:
    """The rights of one connection. Used in the event loop only."""

    __slots__ = ("_access", "_client", "_identity", "_largest", "_received", "_serving", "_session", "permissions")

    def __init__(self, serving: Serving, client: Client, admission: Admission, largest: int | None) -> None:
        """``admission`` has the identity and permissions; ``largest`` is the maximum packet size, None: any."""
        self._serving, self._client, self._identity, self._largest = serving, client, admission.identity, largest
        self._session: Session | None = None
        """The client's session, from the CONNACK until the connection leaves the session."""
        self._use(admission.access, admission.permissions)

    def _use(self, access: Access, permissions: Permissions) -> None:
        self._access = access
        self.permissions = None if permissions.unrestricted else permissions
        """The client's permissions; None: it may do everything."""
        restricted = not permissions.reads_everything
        self._received = _Received(self._serving, self._client, permissions, self.ask_again) if restricted else None

    @property
    def user(self) -> str | None:
        """The client's user name; None for an anonymous client."""
        return self._identity.user

    def publishes(self, topic: str) -> bool | None:
        """Return whether the client may publish to a topic; None if plugins must be asked. A denial is logged."""
        if self.permissions is None:
            return True
        allowed = self.permissions.decided("publish", topic)
        if allowed is False:
            self._serving.deny(self.permissions, "publish", [topic])
        return allowed

    @property
    def allow(self) -> Callable[[Sequence[Message]], list[bool | None]] | None:
        """The function that decides which messages the client may receive; None: it may receive all."""
        return allowance(self._largest, self._received)

    async def decide_publish(self, topic: str) -> None:
        """Ask plugins whether the client may publish to a topic."""
        if self.permissions is not None:
            await self.permissions.decide("publish", [topic])

    def send_figures(self, figures: list[Publish]) -> None:
        """Send the client the ``$SYS`` messages that it may receive, once plugins have decided."""
        if self._received is None or self.permissions is None:
            self._client.send(figures, None)
        elif figures:
            self._serving.spawn(self._client, self._send_known(figures, self.permissions))

    async def _send_known(self, figures: list[Publish], permissions: Permissions) -> None:
        topics = [figure.message.topic for figure in figures]
        answers = permissions.received(topics)
        if None in answers:
            try:
                await permissions.ask_received(topics)
            except Exception:  # noqa: BLE001 - a plugin may raise anything; new figures will follow
                _log.exception("figures are not sent because a plugin failed to say who may read them")
                return
            answers = permissions.received(topics)
        known = zip(figures, answers, strict=True)
        self._client.send([figure for figure, answer in known if answer], None)

    def begin(self, session: Session) -> None:
        """Set the client's session, and let it check messages again: plugins may have answered before this call."""
        self._session = session
        self.ask_again()

    def ask_again(self) -> None:
        """Let the session check again which waiting messages may be sent."""
        if self._session is not None:
            with contextlib.suppress(*OVER):  # the session's end is reported to the connection
                self._session.ask_again()

    def renew(self) -> bool:
        """Replace the permissions if the server has new access rules; return whether they may differ."""
        access, before = self._serving.access, self.permissions
        if access is self._access or self._session is None:
            return False
        self._end_asking()
        self._use(access, access.permissions(self._identity))
        if before is None and self.permissions is None:
            return False
        self._serving.requests.restricted.append((self._session, self.allow))
        self._serving.schedule()
        return True

    def end(self) -> None:
        """Stop asking plugins, because the connection has left its session."""
        self._session = None
        self._end_asking()

    def _end_asking(self) -> None:
        if self._received is not None:
            self._received.end()
