"""The beginning of a packet that has come from a client, as long as the rest hasn't: what it counts for."""

from __future__ import annotations

from .asked import Client
from .channel import Channel
from .protocol.frames import FrameReader
from .protocol.reason import ReasonCode
from .serving import Serving

__all__ = ["UnfinishedPacket"]


class UnfinishedPacket:
    """That of one connection, as a `topicstore.server.memory_budget.Holder`. Used in the event loop only."""

    __slots__ = ("_budget", "_channel", "_client", "_reader", "_serving", "size")

    def __init__(self, serving: Serving, client: Client, reader: FrameReader, channel: Channel) -> None:
        self._serving, self._client, self._reader, self._channel = serving, client, reader, channel
        self._budget = serving.unadmitted
        self.size = 0
        """Bytes that are kept of it."""

    def count(self) -> None:
        """Count what has come now; above the server's bound this may end any connection."""
        size = self._reader.held + self._channel.beneath
        if size != self.size:
            self.size = size
            self._budget.hold(self, size)

    def admit(self) -> None:
        """Count it among those of clients that were let in."""
        self._budget.hold(self, 0)
        self._budget = self._serving.unfinished
        self._budget.hold(self, self.size)

    def drop(self) -> None:
        """Keep nothing of it."""
        self._reader.drop()
        self.size = 0
        self._budget.hold(self, 0)

    @property
    def host(self) -> str:
        """The address of the client, without its port."""
        return self._channel.peer.address.rpartition(":")[0]

    @property
    def work(self) -> object:
        """Which packet it is; None while the server reads nothing from the client."""
        return None if self._channel.held else self._reader.begun

    @property
    def breakable(self) -> bool:
        """True: the rest is the client's to send."""
        return True

    def break_off(self, why: str) -> None:
        """End the connection."""
        self._client.end(ReasonCode.QUOTA_EXCEEDED, why)
