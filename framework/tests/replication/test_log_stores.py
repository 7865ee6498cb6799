"""Opening a log store by its URL, and refusing a store that ignores conditional writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from topicstore.contract.errors import InvalidArgumentError, UnknownPluginError
from topicstore.contract.log_store import LogStoreRefusedError, NotConditionalError, check_name
from topicstore.replication.log_stores import open_log_store, probe

from .conftest import Objects


class Overwriting(Objects):
    """A store that ignores the condition of a PUT, like the servers of rclone and s3rver."""

    place = "s3://careless"

    def create(self, name: str, data: bytes) -> None:
        self.objects[check_name(name)] = data


def test_a_store_that_ignores_the_condition_is_refused() -> None:
    """A store that ignores the condition is refused with advice, and the probe object is deleted."""
    store = Overwriting()
    with pytest.raises(NotConditionalError, match=r"^s3://careless created an object whose name was taken.*Ceph"):
        probe(store)
    assert {} == store.objects


class Forbidding(Objects):
    """A store whose credentials allow nothing."""

    def create(self, name: str, data: bytes) -> None:
        raise LogStoreRefusedError(f"s3://mine: 403 Forbidden for {name}, {len(data)} bytes")

    def delete(self, name: str) -> None:
        raise AssertionError(f"{name} was not created")


def test_a_store_that_refuses_the_site_is_not_opened() -> None:
    """A store that refuses the site is not opened; the error has the store's own reason."""
    with pytest.raises(LogStoreRefusedError, match="403 Forbidden"):
        probe(Forbidding())


def test_a_store_that_keeps_to_it_is_opened(tmp_path: Path) -> None:
    """A log store that honours conditional writes is opened, and the probe object is deleted."""
    store = open_log_store((tmp_path / "store").as_uri())
    assert [] == list(store.names("probes"))
    store.close()


def test_a_url_without_or_with_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="such as s3://bucket/prefix"):
        open_log_store("/var/lib/log")
    with pytest.raises(UnknownPluginError, match="there is no log store 'ftp'; there are: az, file, gs, memory, s3"):
        open_log_store("ftp://host/x")
