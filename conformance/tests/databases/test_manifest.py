"""The manifest, whose format is the same for all databases: damage, loss and newer formats are reported as such."""

from __future__ import annotations

from pathlib import Path

import pytest
import topicstore as ts
from topicstore import Message
from topicstore_conformance.subjects.pairs import pairs

ERRORS = (ts.CorruptionError, ts.NotADatabaseError, ts.NewerFormatError)


def test_flipped_byte(tmp_path: Path) -> None:
    """Opening reports any flipped bit in the manifest, with its path, unless the bit is insignificant white space."""
    with pairs("persistent")[0].open(tmp_path / "db") as db:
        db.store([Message("a", b"1")])
        expected = db.manifest
    manifest = tmp_path / "db" / "topicstore.json"
    data = manifest.read_bytes()
    refused = 0
    for index in range(len(data)):
        manifest.write_bytes(data[:index] + bytes((data[index] ^ 1 << index % 8,)) + data[index + 1 :])
        error = None
        try:
            with ts.open(tmp_path / "db", mode="r+") as db:
                assert expected == db.manifest
        except ERRORS as told:
            error = told
        if error is not None:
            assert str(tmp_path / "db") in str(error)
            refused += 1
    assert refused > len(data) // 2
    manifest.write_bytes(data)
    with ts.open(tmp_path / "db") as db:
        assert [b"1"] == [message.payload for message in db.replay("#")]


@pytest.mark.parametrize(
    "nonsense", [b"", b"{", b"[]", b"null", b"{}", b"\xff", b'{"format": true}', b'{"format": 1}', b"0" * 10_000]
)
def test_nonsense(tmp_path: Path, nonsense: bytes) -> None:
    """Opening rejects a file that is not a manifest, and doesn't change that file."""
    pairs("persistent")[0].open(tmp_path / "db").close()
    manifest = tmp_path / "db" / "topicstore.json"
    manifest.write_bytes(nonsense)
    with pytest.raises(ERRORS, match="db"):
        ts.open(tmp_path / "db")
    assert nonsense == manifest.read_bytes()


def test_newer_version(tmp_path: Path) -> None:
    """Opening a manifest of a newer format raises NewerFormatError, and doesn't change the file."""
    pairs("persistent")[0].open(tmp_path / "db").close()
    manifest = tmp_path / "db" / "topicstore.json"
    newer = manifest.read_bytes().replace(b'"format": 1', b'"format": 3')
    manifest.write_bytes(newer)
    with pytest.raises(ts.NewerFormatError, match="format 3"):
        ts.open(tmp_path / "db")
    assert newer == manifest.read_bytes()
