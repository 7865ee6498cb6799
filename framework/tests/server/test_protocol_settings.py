"""Settings of the protocol, including those that the README recommends for a public test suite."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import topicstore as ts
import topicstore.server
from topicstore.server.config.load import read_settings
from topicstore.server.config.model import Limits, ProtocolSettings, ServerSettings
from topicstore.server.config.units import Duration
from topicstore_conformance.mqtt.embedded import Embedded

README = Path(topicstore.server.__file__).parent / "README.md"
both = pytest.mark.parametrize("version", [4, 5])


@pytest.fixture
def settings(tmp_path: Path) -> ServerSettings:
    (text,) = re.findall(r"^```toml\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path / "server.toml"
    file.write_text(text)
    return read_settings(file)


@pytest.fixture
def embedded(db: ts.Database, settings: ServerSettings) -> Iterator[Embedded]:
    with Embedded(db, settings) as embedded:
        yield embedded


@both
def test_one_filter_is_refused_with_0x80_and_no_other(embedded: Embedded, version: int) -> None:
    with embedded.client("me", version=version) as client:
        assert client.subscribe("test/nosubscribe", "#", "test/+", "$share/g/a/b", options=2) == (0x80, 2, 2, 2)


def test_a_client_of_mqtt_5_must_send_something_every_minute(embedded: Embedded) -> None:
    for asked, told in ((0, 60), (59, None), (60, None), (61, 60), (120, 60)):
        with embedded.client() as client:
            assert client.connect("me", keep_alive=asked).properties.get("server_keep_alive") == told


@pytest.mark.parametrize(
    ("client_id", "asked", "told"),
    # with its prefix and suffix, the last topic would exceed the limit on strings
    [("a%u", 1, "answers/a%u/%a%u"), ("me", 0, None), ("x" * 65_535, 1, None)],
    ids=["asked", "not asked", "too long"],
)
def test_a_client_that_requests_it_gets_the_topic_of_its_responses(
    db: ts.Database, client_id: str, asked: int, told: str | None
) -> None:
    protocol = ProtocolSettings(response_information="answers/%c/%u%%c")
    settings = ServerSettings(protocol=protocol, limits=Limits(client_id_length=65_535))
    with Embedded(db, settings) as embedded, embedded.client() as client:
        connack = client.connect(client_id, request_response_information=asked)
        assert (connack.reason, connack.properties.get("response_information")) == (0, told)


def test_the_server_may_settle_keep_alive_and_expiry(db: ts.Database) -> None:
    """The server may limit keep alive and session expiry; its CONNACK has every changed value."""
    protocol = ProtocolSettings(max_keep_alive=Duration(30), max_session_expiry=Duration(100))
    with Embedded(db, ServerSettings(protocol=protocol)) as embedded:
        for version, keep_alive, asked, told in (
            (5, 60, {"session_expiry_interval": 3600}, {"server_keep_alive": 30, "session_expiry_interval": 100}),
            (5, 20, {"session_expiry_interval": 10}, {}),
            (5, 20, {}, {"session_expiry_interval": 100}),
            (4, 60, {}, {}),
        ):
            with embedded.client(version=version) as client:
                found = client.connect("me", keep=True, keep_alive=keep_alive, **asked).properties
                settled = {"server_keep_alive", "session_expiry_interval"} & set(found)
                assert {name: found[name] for name in settled} == told
                assert db.sessions["me"].expiry_interval == min(100, asked.get("session_expiry_interval", 100))
