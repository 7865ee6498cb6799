"""The requests of the two hooks by which plugins of a server authenticate and authorize clients."""

from __future__ import annotations

from typing import Literal

import attrs

__all__ = ["Action", "AuthenticationRequest", "AuthorizationRequest", "Credentials", "Question"]

Action = Literal["publish", "subscribe"]


@attrs.frozen(kw_only=True)
class Credentials:
    """The credentials of a connecting client, and properties of its connection."""

    client_id: str
    """The client id, chosen by the client or assigned by the server."""
    user_name: str | None
    password: bytes | None = attrs.field(repr=False)
    """The password in the form in which it was sent. Hooks must not log or store it."""
    certificate_name: str | None
    """The common name of the client's verified certificate; None without a certificate."""
    address: str
    """The client's address and port."""
    loopback: bool
    """Whether the client connects from the server's machine."""
    listener: str
    """The name of the listener to which it connected."""


@attrs.define(kw_only=True)
class AuthenticationRequest:
    """A request to authenticate some clients."""

    clients: tuple[Credentials, ...]


@attrs.frozen(kw_only=True)
class Question:
    """A client, and the action for which it needs authorization."""

    user: str | None
    """The user name under which the client was authenticated; None for an anonymous client."""
    client_id: str
    action: Action
    topic: str
    """The topic to publish to, or the filter to subscribe to; for a shared subscription, the filter without its group.

    Before the server delivers messages of a topic to a client, it asks for "subscribe" with just that topic."""


@attrs.define(kw_only=True)
class AuthorizationRequest:
    """A request to authorize some actions of clients."""

    questions: tuple[Question, ...]
