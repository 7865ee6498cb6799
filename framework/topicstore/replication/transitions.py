"""The changes of the cluster document, one step per document, until every shard is at its assigned sites.

Any site may create the next document: a pure function computes it from the last one, so a site that loses the race
reads the winner's document and continues from there. A document alone makes no site the owner; the fence in the log
does (`topicstore.replication.taking_over`). So a wrong or outdated document costs time, but never loses an entry.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec

from .objects import ClusterDocument, ShardPlace
from .owning import Answer

__all__ = ["Named", "advanced", "after_create", "named"]


class Named(enum.Enum):
    """The outcome of creating a document."""

    COUNTS = enum.auto()
    """The document has the highest number, so it counts."""
    AGAIN = enum.auto()
    """Unknown: the same document is created again, under the same number."""
    LOST = enum.auto()
    """Another site's document counts: read it, and decide again."""


def after_create(
    number: int, own: bytes, answer: Answer, found: bytes | None = None, highest: int | None = None
) -> Named:
    """Return the outcome of creating the document ``number`` with the id ``own``.

    ``found`` is the id of the document that has the number; None if no document was found there. ``highest`` is the
    highest number that was listed *after* the answer. Old documents are deleted, so a paused site may create a number
    anew that was deleted long ago; but a document is deleted only when a higher one exists, which the listing shows.
    """
    written = answer is Answer.CREATED or (answer is Answer.EXISTS and found == own)
    if not written:
        return Named.AGAIN if answer is Answer.NONE or found is None else Named.LOST
    return Named.LOST if highest is None or highest > number else Named.COUNTS


def named(document: ClusterDocument, number: int, shard: int, site: str, incarnation: bytes) -> ClusterDocument:
    """Return the document, to be created with this number, that names a site's process the owner of a shard.

    The number is the owner's epoch (its fencing token): no two processes share an epoch, and later processes have
    higher ones. A restarted process takes a new epoch, because its predecessor may be paused rather than dead.
    """
    place = document.shards[shard]
    replicas = place.replicas if site in place.replicas else (*place.replicas, site)
    joining = tuple(one for one in place.joining if one != site)
    owned = ShardPlace(site, number, incarnation, replicas, joining, assigned=place.assigned)
    return _with(document, shard, owned)


def advanced(
    document: ClusterDocument,
    replicas: Sequence[Sequence[str]],
    owners: Sequence[str],
    caught_up: Mapping[int, frozenset[str]],
) -> ClusterDocument | None:
    """Return the next document on the way to the given replicas and owners; None if there is nothing to do yet.

    A new site joins first, and is listed as a replica once it has caught up. Other replicas are removed while all the
    wanted ones have caught up, so that a shard never has too few. The owner is removed only after its successor has
    taken over.
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
    if not joining and caught_up.issuperset(wanted):
        listed = tuple(site for site in listed if site in wanted or site == place.owner)
    return msgspec.structs.replace(place, replicas=listed, joining=joining, heir=heir)


def _with(document: ClusterDocument, shard: int, place: ShardPlace) -> ClusterDocument:
    shards = (*document.shards[:shard], place, *document.shards[shard + 1 :])
    return msgspec.structs.replace(document, shards=shards)
