"""A session that was kept in memory is stored from now on.

Members of a shared subscription have to be stored: what one of them was given and did not acknowledge goes to another
member when it ends, also if it ends because the process dies.
"""

from __future__ import annotations

from topicstore.contract.state import StateWrite

from .context import SessionContext
from .live_session import LiveSession
from .records import VERSION, put_all
from .session_state import encode_session

__all__ = ["store"]


def store(context: SessionContext, session: LiveSession) -> None:
    """Store a session with all that it has, with one commit, unless it is stored already. Raises errors of writing.

    It keeps its expiry interval of 0. So nothing about it changes for its client.
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
