"""The settings that the server's README has for a public suite of tests do what is said of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import topicstore as ts
import topicstore.server
from topicstore.server.settings import ServerSettings
from topicstore.server.settings_file import read_settings
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.mqtt.embedded import Embedded

need("memory")
README = Path(topicstore.server.__file__).parent / "README.md"
both = pytest.mark.parametrize("version", [4, 5])


@pytest.fixture
def settings(tmp_path: Path) -> ServerSettings:
    (text,) = re.findall(r"^```toml\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path / "server.toml"
    file.write_text(text)
    return read_settings(file)


@pytest.fixture
def embedded(tmp_path: Path, settings: ServerSettings) -> Iterator[Embedded]:
    with ts.open(tmp_path / "db", backend="memory") as db, Embedded(db, settings) as embedded:
        yield embedded


@both
def test_one_filter_is_refused_with_0x80_and_no_other(embedded: Embedded, version: int) -> None:
    with embedded.client(version=version) as client:
        client.connect("me")
        assert client.subscribe("test/nosubscribe", "#", "test/+", "$share/g/a/b", options=2) == (0x80, 2, 2, 2)


@both
def test_a_topic_that_begins_with_a_dollar_may_be_published(embedded: Embedded, version: int) -> None:
    """And nobody gets it by a wildcard [MQTT-4.7.2-1]."""
    with embedded.client(version=version) as reader, embedded.client(version=version) as writer:
        reader.connect("reader")
        writer.connect("writer")
        reader.subscribe("#", "+/a")
        assert writer.publish("$any/a", b"").reason in (0, 0x10)
        writer.publish("end", b"end")
        assert reader.expect("PUBLISH").payload == b"end"


@pytest.mark.parametrize("asked", [0, 59, 60, 61, 120])
def test_a_client_of_mqtt_5_is_told_to_speak_every_minute(embedded: Embedded, asked: int) -> None:
    with embedded.client() as client:
        told = client.connect("me", keep_alive=asked).properties.get("server_keep_alive")
        assert told == (None if asked in (59, 60) else 60)
