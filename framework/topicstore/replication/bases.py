"""Bases: writing snapshots of a shard, from which replicas start, and truncating the log below them.

A base consists of parts and a head, which is created last and names the parts. Every function may be interrupted and
repeated, by any site: objects are never changed once created, and only objects that a higher base replaces are deleted.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import xxhash

from topicstore.contract.errors import CorruptionError
from topicstore.contract.log_store import LogStore, ObjectExistsError, ObjectNotFoundError

from . import names
from .heads import Progress
from .objects import BASES, CUTS, Base, Cut, Part, decode_entry
from .truncating import base_progress, cut_at, may_delete

__all__ = ["cut_log", "highest", "read_part", "sweep", "write_base"]


def write_base(
    store: LogStore,
    shard: int,
    site: str,
    applied: Progress,
    log_end: int,
    parts: Iterable[bytes],
    *,
    identity: Callable[[int], str] = secrets.token_hex,
) -> Base:
    """Create a base of the applied state, whose encoded pieces are ``parts``. Return the base stored at its index.

    If another site has created a base with the same index, with the same content in other parts, that base is returned.
    ``identity`` returns random text, which keeps the parts of two writers apart.
    """
    progress = base_progress(applied, log_end)
    writing = identity(8)
    made: list[Part] = []
    for number, data in enumerate(parts):
        name = names.base_part(shard, progress.next, writing, number)
        store.create(name, data)
        made.append(Part(name, len(data), xxhash.xxh3_128_digest(data)))
    head = names.base_head(shard, progress.next)
    base = Base(progress=progress, site=site, parts=tuple(made))
    try:
        store.create(head, BASES.encode(head, base))
    except ObjectExistsError:
        return BASES.decode(head, store.get(head), store.place)
    return base


def read_part(store: LogStore, part: Part) -> bytes:
    """Return the bytes of a part of a base, with its size and checksum verified.

    Raises `CorruptionError`, and `ObjectNotFoundError` if the base was deleted.
    """
    data = store.get(part.name)
    if len(data) != part.size or xxhash.xxh3_128_digest(data) != part.checksum:
        reason = f"it has {len(data)} bytes, not {part.size}" if len(data) != part.size else "the checksum is wrong"
        raise CorruptionError(reason, f"{store.place}: part {part.name} of a base")
    return data


def cut_log(store: LogStore, shard: int, site: str, oldest_reader: int) -> int:
    """Create a cut at the index that `topicstore.replication.truncating.cut_at` returns, then `sweep`.

    Returns the index of the highest cut.
    """
    before = highest(store, names.cuts(shard)) or 0
    found = [names.number_of(name) for name in _names(store, names.bases(shard))]
    cut = cut_at(found, oldest_reader, before)
    if cut > before:
        name = names.cut(shard, cut)
        with suppress(ObjectExistsError):  # another site has created the same cut
            store.create(name, CUTS.encode(name, Cut(site=site)))
    sweep(store, shard)
    return cut


def sweep(store: LogStore, shard: int) -> None:
    """Delete obsolete objects: entries below the highest cut except fences, lower cuts, and bases below the highest."""
    cut = highest(store, names.cuts(shard)) or 0
    for name in _names(store, names.entries(shard)):
        index = names.number_of(name)
        if index >= cut:
            break
        try:
            entry = decode_entry(shard, index, store.get(name), store.place)
        except ObjectNotFoundError:
            continue
        if may_delete(entry.head, cut):
            store.delete(name)
    _delete_below(store, names.cuts(shard), cut)
    base = highest(store, names.bases(shard)) or 0
    _delete_below(store, names.bases(shard), base)
    for name in _names(store, names.parts(shard)):
        if names.base_of(name) >= base:
            break
        store.delete(name)


def _delete_below(store: LogStore, prefix: str, number: int) -> None:
    for name in _names(store, prefix):
        if names.number_of(name) < number:
            store.delete(name)


def highest(store: LogStore, prefix: str) -> int | None:
    """Return the highest number of the objects with a prefix, None if there are none."""
    return max((names.number_of(name) for name in _names(store, prefix)), default=None)


def _names(store: LogStore, prefix: str) -> Iterator[str]:
    for chunk in store.names(prefix):
        yield from chunk
