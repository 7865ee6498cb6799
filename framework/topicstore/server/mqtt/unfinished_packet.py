"""The memory that a client's incomplete packet occupies."""

from __future__ import annotations

from topicstore.server.codec.frames import FrameReader
from topicstore.server.codec.reason import ReasonCode

from .channel import Channel
from .connections import Serving
from .requests import Client

__all__ = ["UnfinishedPacket"]


class UnfinishedPacket:
    """The incomplete packet of one connection, as a `topicstore.server.memory_budget.Holder`.

    Used in the event loop only.
    """

    __slots__ = ("_budget", "_channel", "_client", "_reader", "_serving", "size")

    def __init__(self, serving: Serving, client: Client, reader: FrameReader, channel: Channel) -> None:
        self._serving, self._client, self._reader, self._channel = serving, client, reader, channel
        self._budget = serving.unadmitted
        self.size = 0
        """Number of received bytes of the packet."""

    def count(self) -> None:
        """Update the packet's size in the budget; if the budget is exceeded, this may end any connection."""
        size = self._reader.held + self._channel.beneath
        if size != self.size:
            self.size = size
            self._budget.hold(self, size)

    def admit(self) -> None:
        """Move the packet's bytes to the budget of clients whose CONNECT was accepted."""
        self._budget.hold(self, 0)
        self._budget = self._serving.unfinished
        self._budget.hold(self, self.size)

    def drop(self) -> None:
        """Discard the packet, and release its bytes."""
        self._reader.drop()
        self.size = 0
        self._budget.hold(self, 0)

    @property
    def host(self) -> str:
        """The address of the client, without its port."""
        return self._channel.peer.address.rpartition(":")[0]

    @property
    def work(self) -> object:
        """The number of the packet; None while reading from the client is paused."""
        return None if self._channel.held else self._reader.begun

    @property
    def breakable(self) -> bool:
        """Always True: the packet waits for the client."""
        return True

    def break_off(self, why: str) -> None:
        """End the connection."""
        self._client.end(ReasonCode.QUOTA_EXCEEDED, why)
