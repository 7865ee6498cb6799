"""Writing bases, the snapshots of a shard from which replicas start, and truncating the log below them.

A base consists of parts and a manifest, which is created last and names the parts. A sealed generation has a manifest
of its own, and its parts belong to all bases that name it. Every function may be interrupted and repeated, by any
site: objects are never changed once created, and only objects that a later base supersedes are deleted.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import attrs
import xxhash

from topicstore.contract.errors import CorruptionError
from topicstore.contract.log_store import LogStore, ObjectExistsError, ObjectNotFoundError

from . import names
from .heads import Kind, Progress
from .objects import BASES, CUTS, SHARED_PARTS, Base, Cut, Part, SharedParts, decode_entry
from .truncating import base_progress, cut_at, may_delete

__all__ = ["Sealed", "cut_log", "highest", "newest_base", "read_part", "sweep", "write_base"]


@attrs.frozen
class Sealed:
    """A sealed generation, to be written to the log store unless the store already has it."""

    generation: int
    changed: int
    """The index of the last entry that changed the generation."""
    pieces: Callable[[], Iterable[bytes]]
    """Encodes the generation; called only if it is to be written."""


def write_base(
    store: LogStore,
    shard: int,
    site: str,
    applied: Progress,
    log_end: int,
    parts: Iterable[bytes],
    sealed: Iterable[Sealed] = (),
    *,
    identity: Callable[[int], str] = secrets.token_hex,
) -> Base:
    """Create a base of the applied state, whose encoded pieces are ``parts``. Return the base stored at its index.

    ``sealed`` are all generations that are sealed at this index; each is written once, and shared by later bases until
    an entry changes it. If another site has created a base with the same index, with the same content in other parts,
    that base is returned. ``identity`` returns random text, which keeps the parts of two writers apart.
    """
    progress = base_progress(applied, log_end)
    fences = _fences(store, shard, progress)
    shared = tuple(_share(store, shard, one, identity) for one in sealed)
    writing = identity(8)
    made = _write_parts(store, lambda number: names.base_part(shard, progress.next, writing, number), parts)
    head = names.base_head(shard, progress.next)
    base = Base(progress=progress, site=site, parts=made, fences=fences, shared=shared)
    try:
        store.create(head, BASES.encode(head, base))
    except ObjectExistsError:
        return BASES.decode(head, store.get(head), store.place)
    return base


def _share(store: LogStore, shard: int, sealed: Sealed, identity: Callable[[int], str]) -> SharedParts:
    """Return the parts of a sealed generation; write them unless a site has done so."""
    key = sealed.changed, sealed.generation
    head = names.generation_head(shard, *key)
    with suppress(ObjectNotFoundError):
        return SHARED_PARTS.decode(head, store.get(head), store.place)
    writing = identity(8)
    parts = _write_parts(store, lambda number: names.generation_part(shard, *key, writing, number), sealed.pieces())
    shared = SharedParts(generation=sealed.generation, changed=sealed.changed, parts=parts)
    try:
        store.create(head, SHARED_PARTS.encode(head, shared))
    except ObjectExistsError:
        return SHARED_PARTS.decode(head, store.get(head), store.place)
    return shared


def _write_parts(store: LogStore, name: Callable[[int], str], pieces: Iterable[bytes]) -> tuple[Part, ...]:
    made: list[Part] = []
    for number, data in enumerate(pieces):
        store.create(name(number), data)
        made.append(Part(name(number), len(data), xxhash.xxh3_128_digest(data)))
    return tuple(made)


def _fences(store: LogStore, shard: int, progress: Progress) -> tuple[int, ...] | None:
    """Return the indexes of the fences below a progress; None if an entry of an earlier version doesn't say.

    Each entry names the last fence before it. Fences are small and are never deleted, so this follows them back to the
    last one that the newest base lists.
    """
    base = newest_base(store, shard)
    known = base.fences if base is not None and base.fences is not None and base.progress.next <= progress.next else ()
    behind: list[int] = []
    fence = progress.fence
    while fence is not None and fence >= 0 and fence not in known:
        behind.append(fence)
        fence = decode_entry(shard, fence, store.get(names.entry(shard, fence)), store.place).head.fence
    if fence is None:
        return None
    return (*(one for one in known if one <= fence), *reversed(behind))


def newest_base(store: LogStore, shard: int) -> Base | None:
    """Return the manifest of the newest base; None if there is none."""
    gone = -1
    while (index := highest(store, names.bases(shard))) is not None:
        head = names.base_head(shard, index)
        try:
            return BASES.decode(head, store.get(head), store.place)
        except ObjectNotFoundError as missing:  # the base was deleted meanwhile, unless it is still the highest
            if index == gone:
                raise CorruptionError("it is listed, and can't be read", f"{store.place}: base {head}") from missing
            gone = index
    return None


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
    """Delete obsolete objects: entries below the highest cut except fences, lower cuts, and lower bases.

    Sealed generations that the highest base lacks are deleted too, unless a later base may be about to have them.
    """
    cut = highest(store, names.cuts(shard)) or 0
    base = newest_base(store, shard)
    if base is None:
        return
    _delete_entries(store, shard, cut, base)
    _delete_below(store, names.cuts(shard), cut)
    _delete_below(store, names.bases(shard), base.progress.next)
    for name in _names(store, names.parts(shard)):
        if names.base_of(name) >= base.progress.next:
            break
        store.delete(name)
    _delete_generations(store, shard, base)


def _delete_entries(store: LogStore, shard: int, cut: int, base: Base) -> None:
    for name in _names(store, names.entries(shard)):
        index = names.number_of(name)
        if index >= cut:
            break
        fences = base.fences if base.fences is not None else _fence_at(store, shard, index)
        if may_delete(index, cut, fences):
            store.delete(name)


def _fence_at(store: LogStore, shard: int, index: int) -> tuple[int, ...]:
    """Return the index if its entry is a fence; for a base of an earlier version, which does not list them."""
    try:
        entry = decode_entry(shard, index, store.get(names.entry(shard, index)), store.place)
    except ObjectNotFoundError:
        return ()
    return (index,) if entry.head.kind is Kind.FENCE else ()


def _delete_generations(store: LogStore, shard: int, base: Base) -> None:
    """Delete sealed generations that the base doesn't have, and parts whose writer lost a race.

    Generations that an entry of a later base has changed may be in the middle of being written.
    """
    kept = {part.name for shared in base.shared for part in shared.parts}
    kept |= {names.generation_head(shard, shared.changed, shared.generation) for shared in base.shared}
    for name in _names(store, names.generations(shard)):
        if names.changed_of(shard, name) >= base.progress.next:
            break
        if name not in kept:
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
