"""Tests that each log store of this package fulfils `topicstore.contract.log_store`."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from topicstore.contract.errors import InvalidArgumentError, InvalidOptionError
from topicstore.contract.log_store import (
    LogStoreRefusedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageUnavailableError,
)
from topicstore_backends.log_stores import directory
from topicstore_backends.log_stores.directory import DirectoryLogStore
from topicstore_conformance.log_store import LogStoreSuite, opened

from .conftest import Answering

numbers = itertools.count()


def s3_options(server: str) -> dict[str, Any]:
    return {
        "config": {
            "endpoint": server,
            "region": "us-east-1",
            "access_key_id": "test",
            "secret_access_key": "test",
            "allow_http": "true",
        }
    }


class TestDirectory(LogStoreSuite):
    """The contract's tests for a log store in a directory."""

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return (tmp_path / "log store").as_uri()


class TestMemory(LogStoreSuite):
    """The contract's tests for obstore's log store in memory."""

    shared = False

    @pytest.fixture
    def url(self) -> str:
        pytest.importorskip("obstore", reason='needs obstore: pip install "topicstore[cluster]"')
        return "memory:///"


@pytest.mark.slow
class TestS3(LogStoreSuite):
    """The contract's tests for a log store on an S3-compatible server."""

    examples = 15

    @pytest.fixture
    def options(self, s3_server: str) -> dict[str, Any]:
        return s3_options(s3_server)

    @pytest.fixture
    def url(self, s3_server: str) -> str:
        pytest.importorskip("obstore", reason='needs obstore: pip install "topicstore[cluster]"')
        boto3 = pytest.importorskip("boto3", reason='needs moto: pip install "moto[server]"')
        client = boto3.client(
            "s3",
            endpoint_url=s3_server,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        bucket = f"bucket-{next(numbers)}"
        client.create_bucket(Bucket=bucket)
        client.close()
        return f"s3://{bucket}/a/prefix"

    def test_a_store_that_is_gone_says_where_to_look(self, url: str, options: dict[str, Any]) -> None:
        """A store that doesn't answer in time raises an error that advises to check address, network, credentials."""
        options["config"]["endpoint"] = "http://127.0.0.1:9"
        store = opened(url, {**options, "timeout": 0.2})
        with pytest.raises(StorageUnavailableError, match="look at the address, the network and the credentials"):
            store.create("a", b"")

    def test_an_unknown_setting_is_refused(self, url: str) -> None:
        """An unknown setting raises `InvalidOptionError` with its name when the store is opened."""
        with pytest.raises(InvalidOptionError, match="bukket"):
            opened(url, {"config": {"bukket": "x"}})


def test_a_directory_is_made_while_another_thread_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If two threads create a store's directory at the same time, neither raises an error about a missing mount."""
    store, look = DirectoryLogStore(tmp_path / "log store"), directory._identity

    def look_too_early(path: Path) -> tuple[int, int]:
        monkeypatch.setattr(directory, "_identity", look)
        try:
            return look(path)
        finally:
            store.create("a/1", b"1")

    monkeypatch.setattr(directory, "_identity", look_too_early)
    with pytest.raises(ObjectNotFoundError):
        store.get("a/2")
    assert b"1" == store.get("a/1")


def calls(server: Answering) -> list[Callable[[], object]]:
    """Return calls, one of each method of a store, to a store on this server."""
    pytest.importorskip("obstore", reason='needs obstore: pip install "topicstore[cluster]"')
    options = s3_options(f"http://127.0.0.1:{server.server_port}")
    store = opened("s3://bucket/prefix", {**options, "timeout": 0.2})
    return [
        lambda: store.create("a/1", b"1"),
        lambda: store.get("a/1"),
        lambda: list(store.names("a")),
        lambda: store.delete("a/1"),
    ]


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (403, "AccessDenied", "403 Forbidden.*AccessDenied.*the reason"),
        (403, "SignatureDoesNotMatch", "SignatureDoesNotMatch"),
        (401, "Unauthorized", "401 Unauthorized"),
        (400, "ExpiredToken", "ExpiredToken"),
        (404, "NoSuchBucket", "NoSuchBucket"),
        (301, "PermanentRedirect", "incorrectly configured region"),
    ],
)
def test_a_refusal_is_distinguished_from_silence(answering: Answering, status: int, code: str, reason: str) -> None:
    """A permanent error of the store raises `LogStoreRefusedError` from every method, with the store's own reason."""
    answering.status, answering.code = status, code
    for call in calls(answering):
        with pytest.raises(LogStoreRefusedError, match=reason):
            call()


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (429, "SlowDown"), (400, "RequestTimeout")])
def test_a_store_that_is_busy_does_not_refuse(answering: Answering, status: int, code: str) -> None:
    """A temporary error of the store raises `StorageUnavailableError`, and not `LogStoreRefusedError`."""
    answering.status, answering.code = status, code
    for call in calls(answering):
        with pytest.raises(StorageUnavailableError, match=str(status)) as told:
            call()
        assert type(told.value) is StorageUnavailableError


def test_an_object_that_is_missing_is_no_refusal(answering: Answering) -> None:
    """A missing object is reported as such, though the answer has the status of a missing bucket."""
    answering.status, answering.code = 404, "NoSuchKey"
    _, get, _, delete = calls(answering)
    with pytest.raises(ObjectNotFoundError):
        get()
    delete()


def test_a_directory_that_cannot_be_used_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the directory's place, or missing permission, is a refusal, with the reason of the file system."""
    (tmp_path / "file").touch()
    with pytest.raises(LogStoreRefusedError, match=r"file.*: Not a directory; look at"):
        opened((tmp_path / "file" / "store").as_uri(), {}).create("log/1", b"1")
    store = DirectoryLogStore(tmp_path / "store")

    def forbidden(_handle: int) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(os, "fsync", forbidden)
    with pytest.raises(LogStoreRefusedError, match="Permission denied; look at the disk and its permissions"):
        store.create("log/1", b"1")


@pytest.mark.parametrize("url", ["file://host/x", "file:x"])
def test_a_directory_is_named_by_three_slashes(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="three slashes"):
        DirectoryLogStore.open(url, {})


def test_a_taken_name_is_reported_after_a_sync_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store fsyncs the directory before it reports that a name is taken, or lists names.

    The process that created the file may not have fsynced the directory yet, and a power failure could remove the name.
    """
    store = DirectoryLogStore(tmp_path)
    store.create("log/1", b"1")
    synced: list[Path] = []
    monkeypatch.setattr(directory, "sync", synced.append)
    with pytest.raises(ObjectExistsError):
        store.create("log/1", b"2")
    assert [tmp_path / "log"] == synced
    assert [["log/1"]] == list(store.names("log"))
    assert [tmp_path / "log"] * 2 == synced


def test_a_file_is_synced_before_it_has_its_name_and_its_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryLogStore(tmp_path)
    store.create("log/0", b"")
    done: list[str] = []
    fsync, link = os.fsync, os.link
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append(kind(handle)), fsync(handle)))
    monkeypatch.setattr(os, "link", lambda source, path: (done.append("link"), link(source, path)))
    store.create("log/1", b"1")
    assert ["file", "link", "folder"] == done


def kind(handle: int) -> str:
    return "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"


def test_staging_directories_of_killed_processes_are_removed_and_of_living_ones_kept(tmp_path: Path) -> None:
    """A store's first creation removes staged files that no process has locked, and keeps locked ones."""
    import fcntl

    DirectoryLogStore(tmp_path).create("log/1", b"1")
    dead, living = tmp_path / ".drafts" / "1-dead", tmp_path / ".drafts" / "1-living"
    dead.touch()
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        DirectoryLogStore(tmp_path).create("log/2", b"2")
        assert [living] == list((tmp_path / ".drafts").iterdir())


def test_a_staging_directory_that_an_opening_removed_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store writes a staged file again if another process removed it before it was locked."""
    store = DirectoryLogStore(tmp_path)
    flock = directory.fcntl.flock
    opened_meanwhile: list[DirectoryLogStore] = []

    def late(handle: int, how: int) -> None:
        if not opened_meanwhile:
            opened_meanwhile.append(store)
            DirectoryLogStore(tmp_path).create("log/2", b"2")
        flock(handle, how)

    monkeypatch.setattr(directory.fcntl, "flock", late)
    store.create("log/1", b"1")
    assert b"1" == store.get("log/1")


def test_a_directory_that_is_only_read_is_not_changed(tmp_path: Path) -> None:
    """A store that is only read makes no directory, so reading needs no permission to write."""
    store = opened((tmp_path / "store").as_uri(), {})
    with pytest.raises(ObjectNotFoundError):
        store.get("log/1")
    assert [] == list(store.names("log"))
    assert [] == list(tmp_path.iterdir())


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk raises `StorageUnavailableError`, and leaves neither the object nor its staged file."""
    store = DirectoryLogStore(tmp_path)
    store.create("log/0", b"0")

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageUnavailableError, match="No space left on device"):
        store.create("log/1", b"1")
    monkeypatch.undo()
    assert [["log/0"]] == list(store.names("log"))
    assert [] == list((tmp_path / ".drafts").iterdir())


@pytest.mark.parametrize("another", [False, True])
def test_a_directory_that_is_moved_or_replaced_is_unavailable_until_it_is_back(tmp_path: Path, another: bool) -> None:
    """A store whose directory was moved or replaced raises `StorageUnavailableError`, and works once it is back.

    An unmounted file system has this effect. The store creates nothing in a directory that has replaced its own.
    """
    root, moved = tmp_path / "log", tmp_path / "moved"
    with closing(DirectoryLogStore(root)) as store:
        store.create("log/1", b"1")
        root.rename(moved)
        if another:
            with closing(DirectoryLogStore(root)) as other:
                other.create("beats/1", b"")
        tries: list[Callable[[], object]] = [
            lambda: store.create("log/2", b"2"),
            lambda: store.get("log/1"),
            lambda: list(store.names("log")),
        ]
        for attempt in tries:
            with pytest.raises(StorageUnavailableError, match=r"No such file|another directory"):
                attempt()
        assert ([] if not another else [root / ".drafts", root / "beats"]) == sorted(root.glob("*"))
        if another:
            shutil.rmtree(root)
        moved.rename(root)
        store.create("log/2", b"2")
        assert [b"1", b"2"] == [store.get(name) for names in store.names("log") for name in names]
