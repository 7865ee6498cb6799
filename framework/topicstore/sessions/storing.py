"""Storing a session that was kept in memory until then.

Members of a shared subscription must be stored. When a member ends, also because the process dies, the messages that it
received but did not acknowledge go to another member.
"""

from __future__ import annotations

from topicstore.contract.state import StateWrite

from .context import SessionContext
from .live_session import LiveSession
from .records import VERSION, put_all
from .session_state import encode_session

__all__ = ["store"]


def store(context: SessionContext, session: LiveSession) -> None:
    """Store a session and all its state with one commit, unless it is stored already. Raises the errors of writing.

    The expiry interval stays 0, so that nothing changes for the client.
    """
    if session.stored:
        return
    found = encode_session(session.client_id, session.found.record)
    writes: list[StateWrite] = [*context.states.change(session.client_id, None, found), *session.window.everything()]
    for source in session.sources.values():
        writes += source.everything()
    for sending in session.retained.values():
        writes += sending.everything()
    writes += put_all(list(map(session.keys.incoming, list(session.incoming))), (VERSION,))
    context.states.write_for(session.client_id, writes)
    context.states.counts.add(found.record.user, 1)
    session.found, session.guard = found, found.guard
    session.window.stored = True
