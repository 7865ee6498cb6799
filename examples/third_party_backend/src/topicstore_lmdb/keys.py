"""The mapping of topicstore's keys, of 0 to 65,550 bytes, to LMDB's keys, of 1 to 511 bytes.

Each key is prefixed with a byte. A key of up to 509 bytes is then an **entry** of its own. Longer keys with the same
first 510 bytes share an entry, a **bucket**. Its value is a msgpack array of [the rest of the key, value], in order of
the rest. The mapping preserves the order: a bucket's entry is longer than any other, so it sorts after all entries that
are prefixes of it, like the keys in it.
"""

import msgspec

HEAD = 510
"""The number of a key's bytes that an entry can hold. Keys with as many or more bytes are in buckets."""
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
    """Return the keys in an entry with their values, in key order."""
    if is_bucket(entry):
        return [(entry[1:] + rest, each) for rest, each in _decode(value)]
    return [(entry[1:], value)]


def value_of(pairs):
    """Return the value of a bucket with key-value pairs, without keys whose value is None; None if no key is left."""
    left = [(packed[HEAD:], value) for packed, value in sorted(pairs.items()) if value is not None]
    return _encode(left) if left else None
