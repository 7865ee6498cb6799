"""The errors of sessions. Nothing stored is harmed by any of them."""

from __future__ import annotations

from topicstore.errors import UnrecoverableError

__all__ = ["SessionEndedError", "SessionNotFoundError", "SessionTakenOverError"]


class SessionEndedError(UnrecoverableError):
    """The session object is of no more use: disconnected, lost, or closed with its database. Open the session anew."""


class SessionTakenOverError(SessionEndedError):
    """The session's client connected anew, so this object's connection is the older one: close it.

    What was acknowledged here and not committed may be delivered again there.
    """


class SessionNotFoundError(UnrecoverableError, LookupError):
    """There is no session of that client id."""
