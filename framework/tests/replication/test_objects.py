"""Objects of a log store are decoded as encoded, and damage is reported with the object's name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.contract.errors import CorruptionError, NewerFormatError, TopicstoreError
from topicstore.replication import names, objects
from topicstore.replication.heads import Head, Kind, Progress

INT = st.integers(0, 2**63 - 1)
TEXT = st.text(max_size=20)
BYTES = st.binary(max_size=20)
NAMES = st.lists(TEXT, max_size=4).map(tuple)
FENCE = st.none() | st.integers(-1, 2**63 - 1)
PROGRESS = st.builds(Progress, INT, INT, BYTES, INT, FENCE)
PARTS = st.lists(st.builds(objects.Part, TEXT, INT, BYTES), max_size=3).map(tuple)
SHARED = st.builds(objects.SharedParts, generation=INT, changed=INT, parts=PARTS)
RECORDS: dict[str, tuple[objects.ObjectCodec[Any], str, st.SearchStrategy[Any]]] = {
    "cluster document": (
        objects.CLUSTER_DOCUMENTS,
        names.cluster_document(7),
        st.builds(
            objects.ClusterDocument,
            id=BYTES,
            database=BYTES,
            sites=st.dictionaries(TEXT, st.builds(objects.Site, TEXT, BYTES), max_size=3),
            shards=st.lists(st.builds(objects.ShardPlace, TEXT, INT, BYTES, NAMES, NAMES, TEXT), max_size=3).map(tuple),
            policies=st.dictionaries(TEXT, INT | TEXT | st.booleans(), max_size=3),
            settings=st.dictionaries(TEXT, INT | TEXT, max_size=3),
            generations=st.lists(
                st.builds(objects.GenerationPlan, INT, TEXT, st.dictionaries(TEXT, INT, max_size=2), st.booleans()),
                max_size=2,
            ).map(tuple),
        ),
    ),
    "beat": (
        objects.BEATS,
        names.beat("berlin", 12),
        st.builds(
            objects.Beat,
            site=TEXT,
            incarnation=BYTES,
            address=TEXT,
            program=TEXT,
            applied=st.dictionaries(INT, INT, max_size=3),
        ),
    ),
    "base": (
        objects.BASES,
        names.base_head(3, 99),
        st.builds(
            objects.Base,
            progress=PROGRESS,
            site=TEXT,
            parts=PARTS,
            fences=st.none() | st.lists(INT, max_size=3).map(tuple),
            shared=st.lists(SHARED, max_size=2).map(tuple),
        ),
    ),
    "sealed generation": (objects.SHARED_PARTS, names.generation_head(3, 99, 7), SHARED),
    "cut": (objects.CUTS, names.cut(3, 99), st.builds(objects.Cut, site=TEXT)),
}
KINDS = pytest.mark.parametrize("what", sorted(RECORDS))
HEADS = st.builds(
    Head,
    index=INT,
    kind=st.sampled_from(Kind),
    epoch=INT,
    id=BYTES,
    site=TEXT,
    before=BYTES,
    checksum=st.just(b""),
    first_position=INT,
    last_position=INT,
    fence=FENCE,
)
A_HEAD = Head(index=7, kind=Kind.CHANGES, epoch=1, id=b"id", site="berlin", before=b"before", checksum=b"")
CHANGES = st.lists(st.binary(max_size=200), max_size=4).map(tuple)


@KINDS
@given(data=st.data())
def test_every_record_comes_back(what: str, data: st.DataObject) -> None:
    codec, name, records = RECORDS[what]
    record = data.draw(records)
    assert record == codec.decode(name, codec.encode(name, record), "s3://b")


@KINDS
@given(data=st.data())
def test_damage_of_any_kind_names_the_object(what: str, data: st.DataObject) -> None:
    """Damage is reported with the object's name: a flipped bit, truncation, extra bytes, or other contents."""
    codec, name, records = RECORDS[what]
    stored = codec.encode(name, data.draw(records))
    check_damage(data, stored, lambda bad: codec.decode(name, bad, "s3://b"), f"s3://b: {what} {name}: ")
    with pytest.raises(CorruptionError, match="checksum"):
        codec.decode(f"{name}0", stored, "s3://b")


@given(shard=st.integers(0, 1_000), head=HEADS, changes=CHANGES)
def test_every_entry_comes_back(shard: int, head: Head, changes: tuple[bytes, ...]) -> None:
    entry, stored = objects.encode_entry(shard, head, changes)
    assert entry == objects.decode_entry(shard, head.index, stored, "s3://b")
    assert stored[:16] == entry.head.checksum
    assert head == msgspec.structs.replace(entry.head, checksum=b"")


@given(head=HEADS, changes=CHANGES, data=st.data())
def test_damage_of_an_entry_names_the_entry(head: Head, changes: tuple[bytes, ...], data: st.DataObject) -> None:
    _, stored = objects.encode_entry(5, head, changes)
    place = f"s3://b: log entry shards/5/log/{head.index:020}: "
    check_damage(data, stored, lambda bad: objects.decode_entry(5, head.index, bad, "s3://b"), place)
    for shard, index in ((6, head.index), (5, head.index ^ 1)):  # an entry under the name of another entry
        with pytest.raises(CorruptionError, match="checksum"):
            objects.decode_entry(shard, index, stored, "s3://b")


def test_the_largest_change_is_read_back_even_if_it_does_not_compress() -> None:
    """An entry with one change of the largest size is read back, though its bytes are random."""
    changes = (random.Random(0).randbytes(objects.LARGEST_CHANGE - objects.CHANGE_OVERHEAD),)
    entry, stored = objects.encode_entry(5, A_HEAD, changes)
    assert len(stored) <= objects.LARGEST_ENTRY
    assert entry == objects.decode_entry(5, A_HEAD.index, stored, "s3://b")


@pytest.mark.parametrize("sizes", [(200_000,), (40_000,) * 4, (20_000,) * 16])
@pytest.mark.parametrize("shrinks", [True, False])
def test_little_time_is_spent_on_large_entries_that_hardly_shrink(sizes: tuple[int, ...], shrinks: bool) -> None:
    """The payloads of a large entry decide the compression level, though each change begins with other columns."""
    chosen = random.Random(0)
    alphabet = b"0123456789" if shrinks else bytes(range(256))
    changes = tuple(bytes(size // 20) + bytes(chosen.choices(alphabet, k=size - size // 20)) for size in sizes)
    assert shrinks == objects._shrinks(b"".join(changes))
    entry, stored = objects.encode_entry(5, A_HEAD, changes)
    assert shrinks == (len(stored) < 0.6 * sum(sizes))
    assert entry == objects.decode_entry(5, A_HEAD.index, stored, "s3://b")


@pytest.mark.parametrize("changes", [(bytes(1_001),), (b"",) * 1_001, (random.Random(0).randbytes(990),)])
def test_an_entry_that_is_too_large_is_refused_before_it_is_written(
    changes: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes that don't fit in an entry are refused: too many bytes, too many changes, or too large an object."""
    monkeypatch.setattr(objects, "LARGEST_ENTRY", 1_000)
    with pytest.raises(objects.EntryTooLargeError, match="may be at most 1000"):
        objects.encode_entry(5, A_HEAD, changes)


def test_a_larger_entry_of_an_earlier_version_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that an earlier version wrote above today's largest size is read."""
    with monkeypatch.context() as patched:
        patched.setattr(objects, "LARGEST_ENTRY", 1 << 30)
        entry, stored = objects.encode_entry(5, A_HEAD, (bytes(65 << 20),))
    assert entry == objects.decode_entry(5, A_HEAD.index, stored, "s3://b")


def check_damage(data: st.DataObject, stored: bytes, decode: Callable[[bytes], object], place: str) -> None:
    where = data.draw(st.integers(0, len(stored) - 1))
    flipped = bytearray(stored)
    flipped[where] ^= 1 << data.draw(st.integers(0, 7))
    for bad in (bytes(flipped), stored[:where], stored + b"\0"):
        with pytest.raises(CorruptionError, match="checksum of its") as told:
            decode(bad)
        assert str(told.value).startswith(place)


@settings(max_examples=300)
@given(st.binary(max_size=80), st.sampled_from(sorted(RECORDS)))
def test_whatever_has_a_right_checksum_is_read_or_refused(body: bytes, what: str) -> None:
    """Arbitrary bytes with a correct checksum are decoded or refused with an error that names the object."""
    codec, name, _ = RECORDS[what]
    for decode, at in (
        (lambda data: codec.decode(name, data, "s3://b"), name),
        (lambda data: objects.decode_entry(1, 1, data, "s3://b"), names.entry(1, 1)),
    ):
        told = ""
        try:
            decode(objects._digest(at, body) + body)
        except TopicstoreError as error:
            told = str(error)
        assert at in told or told == ""


@pytest.mark.parametrize(
    ("size", "changes", "reason"),
    [
        (0, b"x", "are said to have 0 bytes"),
        (1 << 40, b"x", "are said to have"),
        (-1, b"x", "are said to have"),
        (5, b"x", ""),
        (99, objects.zstandard.compress(b"\x91\xc4\x01a"), "have 4 bytes, not 99"),
        (3, objects.zstandard.compress(b"abc"), ""),
    ],
)
def test_changes_that_do_not_unpack_are_reported(size: int, changes: bytes, reason: str) -> None:
    """Changes that don't unpack to the size in their entry are refused, without unpacking or allocating more."""
    name = names.entry(1, 1)
    stored = objects._StoredEntry(
        kind=Kind.CHANGES,
        epoch=1,
        id=b"",
        site="",
        before=b"",
        first_position=1,
        last_position=1,
        size=size,
        changes=changes,
    )
    data = objects._ENTRIES.encode(name, stored)
    with pytest.raises(CorruptionError, match=f"{name}: .*{reason}"):
        objects.decode_entry(1, 1, data, "s3://b")


def test_entries_and_bases_of_an_earlier_version_are_read() -> None:
    """Entries and bases that were stored without fences are read; their fences are then unknown."""
    name, head = names.entry(5, 7), names.base_head(5, 8)
    body = msgspec.msgpack.encode([1, 1, 3, b"id", "berlin", b"before", 0, 0, 0, b""])
    entry = objects.decode_entry(5, 7, objects._digest(name, body) + body, "s3://b")
    assert (Kind.FENCE, None) == (entry.head.kind, entry.head.fence)
    body = msgspec.msgpack.encode([1, [8, 3, b"before", 10], "berlin", [["part", 4, b"sum"]]])
    base = objects.BASES.decode(head, objects._digest(head, body) + body, "s3://b")
    assert (Progress(8, 3, b"before", 10), None, ()) == (base.progress, base.fences, base.shared)


@KINDS
def test_a_newer_version_is_reported(what: str) -> None:
    """A newer version is reported as such, and not as damage."""
    codec, name, _ = RECORDS[what]
    body = msgspec.msgpack.encode([9, "unknown"])
    with pytest.raises(NewerFormatError, match=f"{what} {name}: it has version 9; this topicstore reads up to 1"):
        codec.decode(name, objects._digest(name, body) + body, "s3://b")


@given(st.integers(0, 10**20 - 1), st.integers(0, 10**20 - 1))
def test_names_sort_as_numbers(one: int, other: int) -> None:
    assert (one < other) == (names.entry(1, one) < names.entry(1, other))
    assert one == names.number_of(names.entry(1, one))


@pytest.mark.parametrize("name", ["", "shards/1/log/1", "shards/1/log/" + "²" * 20, "shards/1/log/x"])
def test_a_foreign_name_is_reported(name: str) -> None:
    with pytest.raises(CorruptionError, match="twenty digits"):
        names.number_of(name)
