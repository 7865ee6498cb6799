"""Base snapshots and cuts of the log: an interruption loses nothing, and the next truncation completes it."""

from __future__ import annotations

import msgspec
import pytest
from topicstore.contract.errors import CorruptionError
from topicstore.contract.log_store import StorageUnavailableError
from topicstore.replication import names
from topicstore.replication.bases import Sealed, cut_log, read_part, sweep, write_base
from topicstore.replication.heads import Kind, Progress
from topicstore.replication.objects import BASES, Base

from .conftest import Line, Objects
from .test_log import SHARD, Site, entries


class Breaking(Line):
    """A connection to the store that fails permanently after a number of changes."""

    def __init__(self, store: Objects, changes: int) -> None:
        super().__init__(store)
        self.left = changes

    def _change(self) -> None:
        if not self.left:
            raise StorageUnavailableError("the line is broken")
        self.left -= 1

    def create(self, name: str, data: bytes) -> None:
        self._change()
        super().create(name, data)

    def delete(self, name: str) -> None:
        self._change()
        super().delete(name)


def filled(store: Objects) -> Site:
    """Return a site whose log was written, truncated, and written again."""
    site = Site(store, "a")
    assert site.log.take_over(1)
    site.propose(b"1", b"2", b"3")
    site.truncate()
    site.propose(b"4", b"5")
    site.log.release()
    assert site.log.take_over(2)
    site.propose(b"6")
    return site


@pytest.mark.parametrize("changes", range(11))
def test_a_truncation_that_is_broken_off_loses_nothing(changes: int) -> None:
    """A truncation that is interrupted after any step loses nothing, and completes when it is repeated."""
    store = Objects()
    site = filled(store)
    line = Breaking(store, changes)
    data, progress = msgspec.msgpack.encode(site.copy.changes), site.copy.progress
    broken = False
    try:
        write_base(line, SHARD, "a", progress, progress.next, [data])
        cut_log(line, SHARD, "a", progress.next)
    except StorageUnavailableError:
        broken = True
    assert broken == (changes < 10)
    assert site.copy.changes == Site(store, "new").follow()
    site.propose(b"7")  # unused parts stay until there is a newer base
    site.truncate()
    assert site.copy.changes == Site(store, "newer").follow()
    assert [(0, Kind.FENCE), (7, Kind.FENCE)] == [(one.head.index, one.head.kind) for one in entries(store)]
    assert {"log": 2, "bases": 1, "cuts": 1, "parts": 1, "generations": 0} == counts(store)
    site.log.close()


def counts(store: Objects) -> dict[str, int]:
    kinds = [name.split("/")[2] for name in store.objects]
    return {kind: kinds.count(kind) for kind in ("log", "bases", "cuts", "parts", "generations")}


def test_two_sites_that_write_one_base_use_the_first() -> None:
    """If two sites write the same base, the first counts; the parts of the second are deleted with a later base."""
    store = Objects()
    at = Progress(4, 1, b"x", 9)
    first = write_base(store, SHARD, "a", at, 4, [b"a", b"b"])
    assert first == write_base(store, SHARD, "b", at, 4, [b"A", b"B"])
    assert [b"a", b"b"] == [read_part(store, part) for part in first.parts]
    higher = write_base(store, SHARD, "b", Progress(5, 1, b"y", 9), 5, [b"c"])
    sweep(store, SHARD)
    assert [b"c"] == [read_part(store, part) for part in higher.parts]
    assert {"log": 0, "bases": 1, "cuts": 0, "parts": 1, "generations": 0} == counts(store)


def test_truncation_reads_no_entry_but_the_fences_that_no_base_lists() -> None:
    """Truncation reads the newest fence from the log, and finds the others by each fence's link to the one before.

    No other entry is read. The new base lists all fences in its head.
    """
    store = Objects()
    site = filled(store)
    for epoch in (3, 4):
        site.log.release()
        assert site.log.take_over(epoch)
    site.propose(b"7", b"8")
    read: list[str] = []
    get = site.line.get

    def recorded(name: str) -> bytes:
        read.append(name)
        return get(name)

    site.line.get = recorded  # type: ignore[method-assign]
    site.truncate()
    fences = [one.head.index for one in entries(store)]
    assert {Kind.FENCE} == {one.head.kind for one in entries(store)}
    assert [0, 7, 10, 12] == fences
    assert [names.entry(SHARD, index) for index in (12, 10, 7)] == [one for one in read if "/log/" in one]
    (head,) = [name for name in store.objects if name.startswith(names.bases(SHARD))]
    assert tuple(fences) == BASES.decode(head, store.objects[head], "").fences
    site.log.close()


def test_a_base_of_an_earlier_version_keeps_the_fences() -> None:
    """Truncation below a base that lists no fences reads the entries, and keeps the fences."""
    store = Objects()
    site = filled(store)
    at = site.copy.progress
    head = names.base_head(SHARD, at.next)
    store.create(head, BASES.encode(head, Base(progress=at, site="a", parts=())))
    cut_log(store, SHARD, "a", at.next)
    assert [(0, Kind.FENCE), (7, Kind.FENCE)] == [(one.head.index, one.head.kind) for one in entries(store)]
    site.log.close()


def sealed(generation: int, changed: int, written: list[int]) -> Sealed:
    """Return a sealed generation that appends its number to ``written`` each time its parts are encoded."""

    def pieces() -> list[bytes]:
        written.append(generation)
        return [b"%d/%d" % (generation, changed), b"end"]

    return Sealed(generation, changed, pieces)


def test_a_sealed_generation_is_written_once_and_again_when_it_is_changed() -> None:
    """Bases share the parts of a sealed generation; after a change to the generation, its parts are written anew.

    Parts that no base refers to are deleted.
    """
    store = Objects()
    written: list[int] = []

    def base(index: int, *generations: tuple[int, int]) -> list[bytes]:
        at = Progress(index, 1, b"x", 9, -1)
        made = write_base(store, SHARD, "a", at, index, [], [sealed(*one, written) for one in generations])
        sweep(store, SHARD)
        return [read_part(store, part) for shared in made.shared for part in shared.parts]

    assert [b"1/2", b"end"] == base(4, (1, 2))
    assert [b"1/2", b"end", b"2/5", b"end"] == base(6, (1, 2), (2, 5))
    assert [1, 2] == written
    assert [b"1/2", b"end", b"2/7", b"end"] == base(8, (1, 2), (2, 7))
    assert [1, 2, 2] == written
    assert {"generations": 6, "bases": 1} == {what: count for what, count in counts(store).items() if count}
    assert [b"2/7", b"end"] == base(9, (2, 7))
    assert 3 == counts(store)["generations"]


def test_of_two_sites_that_write_one_generation_the_first_counts() -> None:
    """If two sites write the parts of one generation, the first ones count; the second site's parts are deleted.

    Unfinished parts are deleted, too, except those of a later generation.
    """
    store = Objects()
    written: list[int] = []
    other = sealed(1, 2, written)

    def pieces() -> list[bytes]:
        write_base(store, SHARD, "b", Progress(4, 1, b"x", 9, -1), 4, [], [other])
        return [b"late"]

    at = Progress(5, 1, b"x", 9, -1)
    made = write_base(store, SHARD, "a", at, 5, [], [Sealed(1, 2, pieces)])
    store.create(names.generation_part(SHARD, 7, 2, "writing", 0), b"still being written")
    assert 5 == counts(store)["generations"]
    sweep(store, SHARD)
    assert [b"1/2", b"end"] == [read_part(store, part) for shared in made.shared for part in shared.parts]
    assert 4 == counts(store)["generations"]


def test_a_base_that_is_still_being_written_is_left_alone() -> None:
    """Parts of a base that is still being written are not deleted: their index is higher than the newest base's."""
    store = Objects()
    write_base(store, SHARD, "a", Progress(4, 1, b"x", 9), 4, [b"a"])
    store.create(names.base_part(SHARD, 5, "writing", 0), b"b")
    sweep(store, SHARD)
    assert 2 == counts(store)["parts"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [(lambda data: data[:-1], "it has 2 bytes, not 3"), (lambda data: data[:-1] + b"\0", "the checksum is wrong")],
)
def test_a_damaged_part_is_reported(change, reason: str) -> None:  # type: ignore[no-untyped-def]
    store = Objects()
    (part,) = write_base(store, SHARD, "a", Progress(4, 1, b"x", 9), 4, [b"abc"]).parts
    store.objects[part.name] = change(store.objects[part.name])
    with pytest.raises(CorruptionError, match=f"memory:///: part {part.name} of a base: {reason}"):
        read_part(store, part)


@pytest.mark.parametrize("what", ["head", "part"])
def test_a_base_that_is_deleted_while_it_is_taken_gives_way_to_the_next(what: str) -> None:
    """If a base is deleted while it is read, the reader continues with the next one."""
    store = Objects()
    site = filled(store)
    late = Site(store, "late")
    get, done = late.line.get, []

    def truncated_meanwhile(name: str) -> bytes:
        kind = names.bases(SHARD) if what == "head" else names.parts(SHARD)
        if name.startswith(kind) and not done:
            done.append(name)
            site.truncate()
        return get(name)

    late.line.get = truncated_meanwhile  # type: ignore[method-assign]
    assert site.copy.changes == late.follow()
    assert done
    site.log.close()


def test_a_part_that_is_missing_is_reported() -> None:
    """A missing part is an error, unless there is a newer base."""
    store = Objects()
    site = filled(store)
    (base,) = [name for name in store.objects if name.startswith(names.bases(SHARD))]
    (part,) = BASES.decode(base, store.objects[base], "").parts
    store.delete(part.name)
    with pytest.raises(CorruptionError, match=f"memory:///: base {base}: {part.name} is missing"):
        Site(store, "new").follow()
    site.log.close()
