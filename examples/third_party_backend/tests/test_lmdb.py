"""Runs topicstore's conformance suites for LMDB: as an engine alone, and with a layout."""

import struct

import lmdb
import pytest
from topicstore_conformance import BackendSubject, BackendSuite, DatabaseSuite, pair_of
from topicstore_lmdb.engine import LmdbBackend, LmdbOptions
from topicstore_lmdb.plugin import topicstore_backends

(SPEC,) = topicstore_backends()
FORMATS = {4: "I", 8: "Q"}


def make():
    """Return a new backend object."""
    return LmdbBackend(LmdbOptions())


def entry(keyspace, key):
    """Return LMDB's key for a key of at most 509 bytes."""
    if keyspace.shape is not None:
        key = struct.pack(">" + "".join(FORMATS[width] for width in keyspace.shape), *key)
    return b"k" + key


def raw_get(path, keyspace, key):
    """Read a value directly with LMDB."""
    with lmdb.open(str(path), max_dbs=8) as env, env.begin(db=env.open_db(keyspace.name.encode())) as transaction:
        return transaction.get(entry(keyspace, key))


def raw_put(path, keyspace, key, value):
    """Write a value directly with LMDB."""
    with (
        lmdb.open(str(path), max_dbs=8, map_size=1 << 30) as env,
        env.begin(db=env.open_db(keyspace.name.encode()), write=True) as transaction,
    ):
        transaction.put(entry(keyspace, key), value)


class TestEngine(BackendSuite):
    """All tests of an engine."""

    @pytest.fixture
    def subject(self):
        return BackendSubject(make=make, capabilities=SPEC.capabilities, raw_get=raw_get, raw_put=raw_put)


class TestDatabase(DatabaseSuite):
    """All tests of a database, with the layout that requires most of an engine."""

    @pytest.fixture
    def pair(self):
        return pair_of("lmdb", "block")
