"""Keys in a form that LMDB can keep, with 1 to 511 bytes, while topicstore's may be empty, or have 65,550 bytes.

Each gets a byte in front. A key of up to 509 bytes is then an **entry** of its own. Longer ones share
the entry of their first 510 bytes: a **bucket**, whose value is a msgpack array of [the rest of the
key, value], in order of the rest. The order stays the same: a bucket's entry is longer than any
other, so it comes after the keys that it begins with, as its keys do.
"""

import msgspec

HEAD = 510
"""The bytes of a key for which an entry has room. Keys with as many, or more, go into buckets."""
_MARK = b"k"
_decode = msgspec.msgpack.Decoder(list[tuple[bytes, bytes]]).decode
_encode = msgspec.msgpack.Encoder().encode


def entry_of(packed):
    """Return the key of the entry that holds a key."""
    return _MARK + packed[:HEAD]


def is_bucket(entry):
    """Return whether an entry holds the values of several keys."""
    return len(entry) > HEAD


def pairs_of(entry, value):
    """Return the keys of an entry with their values, in order."""
    if is_bucket(entry):
        return [(entry[1:] + rest, each) for rest, each in _decode(value)]
    return [(entry[1:], value)]


def value_of(pairs):
    """Return the value of a bucket with these keys, without those whose value is None; None if it is empty."""
    left = [(packed[HEAD:], value) for packed, value in sorted(pairs.items()) if value is not None]
    return _encode(left) if left else None
