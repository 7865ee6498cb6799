"""The section ``mqtt``, measured with small loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[bench]"')
pytest.importorskip("ohmqtt", reason='needs ohmqtt: pip install "topicstore[server]"')

from topicstore_benchmarks.figures import mqtt
from topicstore_benchmarks.figures.mqtt_load import LOADS
from topicstore_benchmarks.figures.mqtt_servers import OURS, SERVERS, MqttServer

SMALL = [
    ("publish", {"clients": 3, "window": 20, "messages": 300, "qos": 1}),
    ("publish", {"clients": 3, "window": 7, "messages": 300, "qos": 2}),
    ("backlog", {"messages": 700}),
    ("fan_out", {"readers": 5, "messages": 50}),
    ("last_receiver", {"readers": 5, "messages": 10}),
    ("unicast", {"readers": 20, "messages": 500}),
    ("latency", {"rate": 500, "seconds": 0.2}),
    ("connects", {"clients": 50, "together": 20}),
]


@pytest.fixture(scope="module", params=[server.name for server in SERVERS])
def server(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a running MQTT server."""
    chosen: MqttServer = next(one for one in SERVERS if one.name == request.param)
    if (reason := chosen.missing()) is not None:
        pytest.skip(reason)
    with chosen.running() as (port, _pid):
        yield port


@pytest.mark.parametrize(("load", "options"), SMALL)
def test_each_load_comes_to_its_end(server: int, load: str, options: dict[str, float]) -> None:
    """With every server, each load completes: all messages are acknowledged and delivered."""
    found = LOADS[load](server, **options)
    expected = {"last_receiver": 10, "latency": 100}.get(load, 0)
    assert (len(found) == expected and min(found) > 0) if isinstance(found, list) else found > 0
    assert {*dict(SMALL), "idle"} == set(LOADS)


def test_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """The section has a figure for each row and percentile, with bounds for topicstore."""
    monkeypatch.setattr(mqtt, "SERVERS", [one for one in SERVERS if one.name == OURS])
    rows = [row for row in mqtt._ROWS if row.load in ("latency", "idle")]
    monkeypatch.setattr(mqtt, "_ROWS", rows if Path("/proc/self").is_dir() else rows[:1])
    told: list[str] = []
    section = mqtt.measure_mqtt(mqtt.Sizes(seconds=0.2, idle=20), 1, told.append)
    assert len(told) == len(mqtt._ROWS)
    assert all(figure.most is not None for figure in section.figures)
    assert {"p50", "p99"} <= {figure.name for figure in section.figures}
    (sheet,) = section.sheets
    assert sheet.columns == ["load", "unit", OURS]
    assert len(sheet.rows) == len(section.figures) == len(mqtt._ROWS) + 1


def test_a_server_that_fails_has_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that fails under a load has no figure in that row, and the reason is reported."""
    monkeypatch.setattr(mqtt, "SERVERS", [one for one in SERVERS if one.name == OURS])
    (row,) = [row for row in mqtt._ROWS if row.load == "idle"]
    wrong = mqtt.attrs.evolve(row, options=lambda _: {"clients": 1, "server": 0})
    monkeypatch.setattr(mqtt, "_ROWS", [row, mqtt.attrs.evolve(wrong, load="connects")])
    told: list[str] = []
    section = mqtt.measure_mqtt(mqtt.Sizes(idle=5), 1, told.append)
    assert [figure.data for figure in section.figures] == [row.name]
    assert "unexpected keyword argument" in told[-1]
