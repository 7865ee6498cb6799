"""Authentication and authorization of a client before its session is opened."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import attrs

from .access.access import Access, Identity, Login, Refusal
from .access.permissions import Permissions
from .connecting import Terms
from .listeners.peer import Peer
from .protocol.reason import ReasonCode
from .replay_topics import SHARE
from .serving import Serving

__all__ = ["Admission", "Refused", "admit"]

_WHY = {
    "credentials": ReasonCode.BAD_USER_NAME_OR_PASSWORD,
    "forbidden": ReasonCode.NOT_AUTHORIZED,
    "client id": ReasonCode.CLIENT_IDENTIFIER_NOT_VALID,
    "unavailable": ReasonCode.SERVER_UNAVAILABLE,
}


@attrs.frozen
class Refused:
    """The refusal of a client's CONNECT."""

    reason: ReasonCode
    text: str


_UNDECIDED = Refused(ReasonCode.SERVER_UNAVAILABLE, "it can't be found out now what the client may do")


@attrs.frozen
class Admission:
    """The identity and the permissions of a client whose CONNECT was accepted."""

    access: Access
    """The access rules that decided."""
    identity: Identity
    permissions: Permissions
    forbidden: list[str]
    """The filters of the client's stored session that the client may no longer subscribe to."""


async def admit(serving: Serving, terms: Terms, peer: Peer) -> Admission | Refused:
    """Authenticate a client and check its permissions, within the connect timeout."""
    try:
        async with asyncio.timeout(serving.limits.connect_timeout):
            return await _find_out(serving, terms, peer)
    except TimeoutError:
        return Refused(ReasonCode.SERVER_UNAVAILABLE, "it takes too long to find out who the client is")


async def _find_out(serving: Serving, terms: Terms, peer: Peer) -> Admission | Refused:
    packet, access = terms.packet, serving.access
    identity = await access.authenticate(
        Login(
            client_id=terms.client_id,
            assigned=terms.assigned,
            user_name=packet.user_name,
            password=packet.password,
            peer=peer,
        )
    )
    if isinstance(identity, Refusal):
        return Refused(_WHY[identity.why], identity.text)
    permissions = access.permissions(identity)
    if permissions.unrestricted:
        return Admission(access, identity, permissions, [])
    if packet.will is not None:
        [allowed] = await permissions.decide("publish", [packet.will.topic])
        if allowed is None:
            return _UNDECIDED
        if not allowed:
            return Refused(ReasonCode.NOT_AUTHORIZED, "the client may not publish its will")
    forbidden: list[str] = []
    if not packet.clean_start:
        filters = await serving.filters_of(terms.client_id)
        if filters is None:
            return _UNDECIDED
        decided = await permissions.decide("subscribe", _plain(filters))
        if None in decided:
            return _UNDECIDED  # removing a filter from the session would also drop its queued messages
        forbidden = [text for text, good in zip(filters, decided, strict=True) if not good]
    return Admission(access, identity, permissions, forbidden)


def _plain(filters: Sequence[str]) -> list[str]:
    """Return topic filters without the ``$share/<group>/`` prefix of shared subscriptions."""
    return [text.split("/", 2)[2] if text.startswith(SHARE) else text for text in filters]
