"""Bans of client ids, users and addresses, by operators and of flapping clients."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore.server.access import bans as module
from topicstore.server.access.bans import Ban, BanFile, BanFileError, BanIndex, Bans
from topicstore.server.config.model import FlappingSettings, ServerSettings
from topicstore.server.config.units import Duration
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.embedded import Embedded

NETWORKS = st.ip_addresses(v=4).flatmap(
    lambda address: st.integers(0, 32).map(lambda size: ipaddress.ip_network((address, size), strict=False))
) | st.ip_addresses(v=6).flatmap(
    lambda address: st.integers(0, 128).map(lambda size: ipaddress.ip_network((address, size), strict=False))
)


@given(st.lists(NETWORKS, max_size=5), st.ip_addresses(), st.booleans())
def test_addresses_are_found_in_their_networks(networks: list[Any], address: Any, inside: bool) -> None:
    """An address is banned if, and only if, it lies in a banned network of its family."""
    if inside and networks:
        address = networks[0][-1]
    index = BanIndex(Ban(kind="address", value=str(network)).checked() for network in networks)
    mapped = address.ipv4_mapped if address.version == 6 else None
    expected = any((mapped or address) in network for network in networks)
    assert expected == (index.find("one", [None], str(address), 0.0) is not None)


def test_an_ended_ban_counts_no_more(tmp_path: Path) -> None:
    """A ban applies until its end, is not listed after that, and is removed from the file by the next change."""
    now = [1_000.0]
    bans = Bans(BanFile(tmp_path / "bans", lambda: now[0]))
    bans.put("client", "one", seconds=60, reason="noise")
    bans.put("user", "ann", seconds=None, reason="")
    assert ["one", "ann"] == [ban.value for ban in bans.listed()]
    now[0] += 60
    assert ["ann"] == [ban.value for ban in bans.listed()]
    bans.put("address", "192.0.2.0/24", seconds=None, reason="")
    assert ["ann", "192.0.2.0/24"] == [ban.value for ban in BanFile(tmp_path / "bans").read()]
    assert bans.remove("user", "ann") is not None
    assert bans.remove("user", "ann") is None


def test_the_file_is_for_people(tmp_path: Path) -> None:
    """Comments of the file stay, a ban replaces the earlier one, and a mistake is an error that names its line."""
    path = tmp_path / "bans"
    path.write_text('# the plant\n{"kind": "user", "value": "ann"}\n')
    file = BanFile(path)
    file.put(Ban(kind="user", value="ann", reason="again"))
    assert "# the plant" == path.read_text().splitlines()[0]
    assert ["again"] == [ban.reason for ban in file.read()]
    for line in ("{}", '{"kind": "user", "value": "x", "until": "2030-01-01T00:00:00"}', "ann", '{"kind": "x"}'):
        path.write_text(f"# the plant\n{line}\n")
        with pytest.raises(BanFileError, match="line 2"):
            file.read()
    for value in ("", "192.0.2.1/24", "somewhere"):
        with pytest.raises(BanFileError):
            BanFile(tmp_path / "other").put(Ban(kind="address", value=value))
    assert not (tmp_path / "other").exists()


def test_flapping_clients_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that connects too often within a period is banned for a time; the tables have a bound."""
    monkeypatch.setattr(module, "_FLAPPING", 3)
    monkeypatch.setattr(module, "_COUNTED", 3)
    now = [0.0]
    bans = Bans(BanFile(tmp_path / "bans", lambda: now[0]))
    settings = FlappingSettings(enable=True, max_count=3, window_time=Duration(10), ban_time=Duration(100))
    for _ in range(5):  # twice in each period
        assert [None, None] == [bans.counted("slow", settings), bans.counted("slow", settings)]
        now[0] += 10
    assert [None, None] == [bans.counted("fast", settings), bans.counted("fast", settings)]
    ban = bans.counted("fast", settings)
    assert ban is not None
    assert (ban.value, ban.flapping) == ("fast", True)
    assert [ban] == bans.listed()
    assert not (tmp_path / "bans").exists()
    now[0] += 100
    assert [] == bans.listed()
    for number in range(20):
        for _ in range(3):
            bans.counted(f"client-{number}", settings)
        bans.counted(f"other-{number}", settings)
    assert {"client-17", "client-18", "client-19"} == {ban.value for ban in bans.listed()}
    assert len(bans._connections) <= 3
    assert bans.remove("client", "client-19") is not None
    assert 2 == len(bans.listed())


@pytest.fixture
def db(db: ts.Database) -> ts.Database:
    """A database in memory, with a directory for the file of bans."""
    Path(db.path).mkdir(exist_ok=True)
    return db


@pytest.fixture
def flapping(db: ts.Database) -> Iterator[Embedded]:
    """A server that bans a client id at the third connection."""
    settings = ServerSettings(flapping_detect=FlappingSettings(enable=True, max_count=3))
    with Embedded(db, settings) as embedded:
        yield embedded


def answer(embedded: Embedded, client_id: str, version: int, **options: Any) -> int:
    with embedded.client(version=version) as client:
        client.send(wire.connect(client_id, version=version, **options))
        return client.expect("CONNACK").reason


@pytest.mark.parametrize("version", [4, 5])
def test_a_banned_client_is_refused(embedded: Embedded, version: int) -> None:
    """A banned client id, user or address is refused with 0x8A, in 3.1.1 with 5, until the ban is lifted.

    An open connection of a banned client ends with 0x98; others stay.
    """
    bans, banned = embedded.server.bans, 5 if version == 4 else 0x8A
    with embedded.client("one", version=version) as client, embedded.client("other", version=version) as other:
        bans.put("client", "one", seconds=None, reason="why")
        assert client.farewell() == (None if version == 4 else ("DISCONNECT", 0x98))
        other.publish("a", b"x", 1)
        assert [banned, 0] == [answer(embedded, "one", version), answer(embedded, "two", version)]
        bans.remove("client", "one")
        assert 0 == answer(embedded, "one", version)
    for kind, value in (("user", "ann"), ("address", "127.0.0.0/8")):
        bans.put(kind, value, seconds=None, reason="")  # type: ignore[arg-type]
        assert banned == answer(embedded, "one", version, user_name="ann", password=b"")
        assert (kind == "address") == (answer(embedded, "one", version) == banned)
        bans.remove(kind, value)  # type: ignore[arg-type]
    assert 0 == answer(embedded, "one", version, user_name="ann", password=b"")


def test_a_flapping_client_is_banned(flapping: Embedded) -> None:
    """A client that connects too often is banned, and no other client; refused connections don't count."""
    for number in range(3):
        wait_until(lambda: not flapping.server.traffic.connected, "the client to be gone")
        assert 0 == answer(flapping, "one", 5), number
    wait_until(lambda: [ban.value for ban in flapping.server.bans.listed()] == ["one"], "the ban")
    for _ in range(3):
        assert 0x8A == answer(flapping, "one", 5)
    assert 0 == answer(flapping, "two", 5)
    assert ["one"] == [ban.value for ban in flapping.server.bans.listed()]
    settings = msgspec.structs.replace(flapping.server.settings, flapping_detect=FlappingSettings())
    flapping.do(flapping.server.reload(settings))
    flapping.server.bans.remove("client", "one")
    for _ in range(5):
        assert 0 == answer(flapping, "one", 5)


def test_a_bad_file_bans_nobody_new(embedded: Embedded) -> None:
    """If the file becomes invalid, the bans that were read before count on, and a reload is refused."""
    bans = embedded.server.bans
    bans.put("client", "one", seconds=None, reason="")
    assert 0x8A == answer(embedded, "one", 5)
    (Path(embedded.db.path) / "bans").write_text("nonsense\n")
    assert [0x8A, 0] == [answer(embedded, "one", 5), answer(embedded, "two", 5)]
    with pytest.raises(BanFileError):
        embedded.do(embedded.server.reload(embedded.server.settings))
    (Path(embedded.db.path) / "bans").unlink()
    assert 0 == answer(embedded, "one", 5)
