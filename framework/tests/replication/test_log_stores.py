"""Opening a log store by its URL, and refusing one that breaks the condition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from topicstore.contract.errors import InvalidArgumentError, UnknownPluginError
from topicstore.contract.log_store import LogStore, NotConditionalError, ObjectNotFoundError, check_name
from topicstore.replication.log_stores import open_log_store, probe


class Overwriting(LogStore):
    """A store that ignores the condition, as rclone's and s3rver's do."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> LogStore:  # noqa: ARG003 - it keeps everything in itself
        return cls()

    @property
    def place(self) -> str:
        return "s3://careless"

    def create(self, name: str, data: bytes) -> None:
        self.objects[check_name(name)] = data

    def get(self, name: str) -> bytes:
        if name not in self.objects:
            raise ObjectNotFoundError(name, self.place)
        return self.objects[name]

    def names(self, prefix: str, after: str = "") -> Iterator[list[str]]:
        yield sorted(self.objects)

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)


def test_a_store_that_ignores_the_condition_is_refused() -> None:
    """With its name and what to use instead; the probe is removed."""
    store = Overwriting()
    with pytest.raises(NotConditionalError, match=r"^s3://careless created an object whose name was taken.*Ceph"):
        probe(store)
    assert {} == store.objects


def test_a_store_that_keeps_to_it_is_opened(tmp_path: Path) -> None:
    """The probe leaves nothing behind."""
    store = open_log_store((tmp_path / "store").as_uri())
    assert [] == list(store.names("probes"))
    store.close()


def test_a_url_without_or_with_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="such as s3://bucket/prefix"):
        open_log_store("/var/lib/log")
    with pytest.raises(UnknownPluginError, match="there is no log store 'ftp'; there are: az, file, gs, memory, s3"):
        open_log_store("ftp://host/x")
