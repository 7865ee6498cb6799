"""How the cluster's document changes, one document at a time, until every shard is where it is to be.

Any site may create the next document: it is made of the last one by a pure function, so whoever loses the race reads
the winner's and goes on from there. A document does not make anybody an owner: the fence in the log does
(`topicstore.replication.taking_over`). So a wrong or outdated document costs time, and never an entry.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec

from .objects import ClusterDocument, ShardPlace
from .owning import Answer

__all__ = ["Named", "advanced", "after_create", "named"]


class Named(enum.Enum):
    """What the creation of a document came to."""

    COUNTS = enum.auto()
    """It is the document with the highest number."""
    AGAIN = enum.auto()
    """Nobody knows: the same document is created again, under the same number."""
    LOST = enum.auto()
    """Another site's counts: read it, and decide anew."""


def after_create(
    number: int, own: bytes, answer: Answer, found: bytes | None = None, highest: int | None = None
) -> Named:
    """Say what to do after the creation of a document with this number and id.

    ``found`` is the id of the document that has the number, None if none was found there. ``highest`` is the highest
    number that was listed *after* the answer: old documents are deleted, so a site that was paused may create one that
    was gone for long; but a document is deleted only when there is a higher one.
    """
    written = answer is Answer.CREATED or (answer is Answer.EXISTS and found == own)
    if not written:
        return Named.AGAIN if answer is Answer.NONE or found is None else Named.LOST
    return Named.LOST if highest is None or highest > number else Named.COUNTS


def named(document: ClusterDocument, number: int, shard: int, site: str, incarnation: bytes) -> ClusterDocument:
    """Return the document, to be created with this number, in which a site's process owns a shard.

    The number is the epoch: no two processes have one, and the later has the higher. A process that is started again
    takes a new one, since nobody knows whether the one before it has ended or sleeps.
    """
    place = document.shards[shard]
    replicas = place.replicas if site in place.replicas else (*place.replicas, site)
    joining = tuple(one for one in place.joining if one != site)
    owned = ShardPlace(site, number, incarnation, replicas, joining)
    return _with(document, shard, owned)


def advanced(
    document: ClusterDocument,
    replicas: Sequence[Sequence[str]],
    owners: Sequence[str],
    caught_up: Mapping[int, frozenset[str]],
) -> ClusterDocument | None:
    """Return the next document on the way to those replicas and owners, None if there is nothing to do yet.

    A new replica joins, is listed once it has caught up, and only then others are unlisted, so that a shard never has
    fewer replicas than it had or is to have. The owner is unlisted only after its heir has taken over.
    """
    shards = tuple(
        _advanced(place, tuple(wanted), owner, caught_up.get(shard, frozenset()))
        for shard, (place, wanted, owner) in enumerate(zip(document.shards, replicas, owners, strict=True))
    )
    return None if shards == document.shards else msgspec.structs.replace(document, shards=shards)


def _advanced(place: ShardPlace, wanted: tuple[str, ...], owner: str, caught_up: frozenset[str]) -> ShardPlace:
    listed = (*place.replicas, *(site for site in wanted if site not in place.replicas and site in caught_up))
    joining = tuple(site for site in wanted if site not in listed)
    heir = owner if owner != place.owner and owner in listed and owner in caught_up else ""
    if not joining:
        listed = tuple(site for site in listed if site in wanted or site == place.owner)
    return msgspec.structs.replace(place, replicas=listed, joining=joining, heir=heir)


def _with(document: ClusterDocument, shard: int, place: ShardPlace) -> ClusterDocument:
    shards = (*document.shards[:shard], place, *document.shards[shard + 1 :])
    return msgspec.structs.replace(document, shards=shards)
