"""The requests of the two hooks by which plugins of a server authenticate and authorize clients."""

from __future__ import annotations

from typing import Literal

import attrs

__all__ = ["Action", "AuthenticationRequest", "AuthorizationRequest", "Credentials", "Question"]

Action = Literal["publish", "subscribe"]


@attrs.frozen(kw_only=True)
class Credentials:
    """What a client that connects says of itself, and what is known of its connection."""

    client_id: str
    """The client id, also where the server has assigned it."""
    user_name: str | None
    password: bytes | None = attrs.field(repr=False)
    """The password as it was sent. It must not be logged or kept."""
    certificate_name: str | None
    """The common name of the client's certificate, which was verified; None without one."""
    address: str
    """The client's address and port."""
    loopback: bool
    """Whether the client is on this machine."""
    listener: str
    """The name of the listener to which it connected."""


@attrs.define(kw_only=True)
class AuthenticationRequest:
    """A request to authenticate some clients."""

    clients: tuple[Credentials, ...]


@attrs.frozen(kw_only=True)
class Question:
    """A client that wants to do something."""

    user: str | None
    """The name by which it was authenticated; None for an anonymous client."""
    client_id: str
    action: Action
    topic: str
    """The topic to publish to, or the filter to subscribe to; of a shared subscription the filter without its group.

    Before a client is sent messages of a topic, it is asked whether the client may subscribe to just that topic."""


@attrs.define(kw_only=True)
class AuthorizationRequest:
    """A request to say what some clients may do."""

    questions: tuple[Question, ...]
