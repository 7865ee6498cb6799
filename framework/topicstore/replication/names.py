"""The names of objects in a log store. Numbers are padded to twenty digits, so that names sort numerically."""

from __future__ import annotations

from topicstore.contract.errors import CorruptionError

__all__ = [
    "BEATS",
    "CLAIM",
    "CLUSTER",
    "base_head",
    "base_of",
    "base_part",
    "bases",
    "beat",
    "beats",
    "changed_of",
    "cluster_document",
    "cut",
    "cuts",
    "entries",
    "entry",
    "generation_head",
    "generation_part",
    "generations",
    "number_of",
    "parts",
    "site_of",
]

CLUSTER = "cluster"
"""The prefix of cluster documents."""
BEATS = "beats"
"""The prefix of the heartbeats of all sites."""
CLAIM = "claim"
"""The name of the object that reserves a store for a new cluster's database."""
_DIGITS = 20


def cluster_document(number: int) -> str:
    """Return the name of a cluster document, which lists the sites and the owner of each shard."""
    return f"{CLUSTER}/{number:0{_DIGITS}}"


def beats(site: str) -> str:
    """Return the prefix of a site's heartbeats."""
    return f"{BEATS}/{site}"


def beat(site: str, number: int) -> str:
    """Return the name of a heartbeat. A site creates its heartbeats in order, and deletes the earlier ones."""
    return f"{beats(site)}/{number:0{_DIGITS}}"


def site_of(name: str) -> str:
    """Return the site of a heartbeat with this name. Raises `CorruptionError` for another object's name."""
    parts_of = name.split("/")
    if len(parts_of) != 3:
        raise CorruptionError("it is not the name of a heartbeat", name)
    return parts_of[1]


def entries(shard: int) -> str:
    """Return the prefix of the entries of a shard's log."""
    return f"shards/{shard}/log"


def entry(shard: int, index: int) -> str:
    """Return the name of an entry of a shard's log."""
    return f"{entries(shard)}/{index:0{_DIGITS}}"


def bases(shard: int) -> str:
    """Return the prefix of the manifests of a shard's bases, its snapshots."""
    return f"shards/{shard}/bases"


def base_head(shard: int, index: int) -> str:
    """Return the name of the manifest of a base that holds all entries below an index. The manifest is created last."""
    return f"{bases(shard)}/{index:0{_DIGITS}}"


def parts(shard: int) -> str:
    """Return the prefix of the parts of a shard's bases, the objects that hold a snapshot's records."""
    return f"shards/{shard}/parts"


def base_part(shard: int, index: int, writing: str, number: int) -> str:
    """Return the name of a part of a base; ``writing`` is random, because two sites may write the same base."""
    return f"{parts(shard)}/{index:0{_DIGITS}}/{writing}/{number:0{_DIGITS}}"


def generations(shard: int) -> str:
    """Return the prefix of the sealed generations that a shard's bases share."""
    return f"shards/{shard}/generations"


def generation_head(shard: int, changed: int, generation: int) -> str:
    """Return the name of the manifest of a sealed generation that the entry ``changed`` was the last to change.

    The manifest is created after all parts, so a generation with a manifest is complete.
    """
    return f"{generations(shard)}/{changed:0{_DIGITS}}/{generation:0{_DIGITS}}/head"


def generation_part(shard: int, changed: int, generation: int, writing: str, number: int) -> str:
    """Return the name of a part of a sealed generation; ``writing`` is random, as in `base_part`."""
    head = generation_head(shard, changed, generation)
    return f"{head.rpartition('/')[0]}/parts/{writing}/{number:0{_DIGITS}}"


def changed_of(shard: int, name: str) -> int:
    """Return the entry that last changed the generation of an object. Raises `CorruptionError` as `number_of` does."""
    return number_of(name[len(generations(shard)) + 1 :].partition("/")[0])


def base_of(part: str) -> int:
    """Return the index of the base that a part belongs to. Raises `CorruptionError` as `number_of` does."""
    return number_of(part.rpartition("/")[0].rpartition("/")[0])


def cuts(shard: int) -> str:
    """Return the name prefix of a shard's cuts, the objects that record how far its log was truncated."""
    return f"shards/{shard}/cuts"


def cut(shard: int, index: int) -> str:
    """Return the name of a cut: entries below ``index`` may be deleted, but only after the cut was created."""
    return f"{cuts(shard)}/{index:0{_DIGITS}}"


def number_of(name: str) -> int:
    """Return the number at the end of a name. Raises `CorruptionError` unless the name ends in twenty digits."""
    digits = name.rpartition("/")[2]
    if len(digits) != _DIGITS or not (digits.isascii() and digits.isdigit()):
        raise CorruptionError("its name does not end in a number of twenty digits", name)
    return int(digits)
