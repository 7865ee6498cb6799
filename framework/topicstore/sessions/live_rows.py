"""The check of calls for many sessions: rows of sessions that have ended are refused."""

from __future__ import annotations

from collections.abc import Iterable

from topicstore.contract.errors import TopicstoreError

from .context import SessionContext
from .live_session import LiveSession

__all__ = ["Refused", "check_sessions"]

Refused = dict[int, TopicstoreError]
"""The errors of the rows that were refused."""


def check_sessions(context: SessionContext, lives: Iterable[LiveSession], refused: Refused, *, partial: bool) -> None:
    """Refuse the rows of sessions that have ended, and record for keep alive that the other clients sent a packet.

    Refused rows are added to ``refused``; without ``partial``, the first error is raised.
    """
    context.dispatcher.check_open()
    now = context.dispatcher.steady()
    ended: dict[LiveSession, TopicstoreError] = {}
    for live in set(lives):
        if live.keep_alive:
            live.seen = now
        if live.ended is not None:
            try:
                live.check()
            except TopicstoreError as error:
                if not partial:
                    raise
                ended[live] = error
    if ended:
        for row, live in enumerate(lives):
            if live in ended:
                refused.setdefault(row, ended[live])
