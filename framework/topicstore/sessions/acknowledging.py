"""PUBRECs and PUBRELs of many sessions."""

from __future__ import annotations

from collections.abc import Sequence

from topicstore.contract.errors import InvalidArgumentError

from .batches import Acknowledged
from .context import SessionContext
from .live_rows import Refused, check_sessions
from .live_session import LiveSession
from .qos2_incoming import exchanges_of, pubrel

__all__ = ["free_all", "receive_all"]


def free_all(
    context: SessionContext, lives: Sequence[LiveSession], ids: Sequence[int], *, partial: bool
) -> Acknowledged:
    """Free the packet ids of incoming PUBRELs; see `Sessions.pubrel`."""
    refused = _checked(ids, partial=partial)

    def free() -> Acknowledged:
        check_sessions(context, lives, refused, partial=partial)
        return pubrel(context, lives, ids, refused, partial=partial)

    return context.dispatcher.claims.of((), free, exchanges_of(lives, ids))


def receive_all(
    context: SessionContext, lives: Sequence[LiveSession], ids: Sequence[int], *, accepted: bool, partial: bool
) -> Acknowledged:
    """Record PUBRECs; see `Sessions.pubrec`."""
    refused = _checked(ids, partial=partial)
    check_sessions(context, lives, refused, partial=partial)
    known = [
        row not in refused and live.window.pubrec(packet_id, accepted=accepted)
        for row, (live, packet_id) in enumerate(zip(lives, ids, strict=True))
    ]
    for live in {live for live, due in zip(lives, known, strict=True) if due}:
        live.acknowledged()
    return Acknowledged(known=known, refused=refused)


def _checked(ids: Sequence[int], *, partial: bool) -> Refused:
    """Return the errors, by row, of packet ids that are no integers; without ``partial``, raise the first."""
    refused: Refused = {}
    for row, packet_id in enumerate(ids):
        if type(packet_id) is not int:
            refused[row] = InvalidArgumentError(f"row {row}: a packet id is a number, not {packet_id!r}")
            if not partial:
                raise refused[row]
    return refused
