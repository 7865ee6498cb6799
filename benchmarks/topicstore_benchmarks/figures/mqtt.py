"""The section ``mqtt``: `topicstore serve` and other MQTT servers under the same load, in the same run.

Every server runs on the one core of this process; the load comes from a process on the other cores. A disconnected
session subscribes to all published messages, so that an acknowledged message is stored.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import attrs
import msgspec

from topicstore_benchmarks.timing import Progress

from .figure import Cell, Figure, Section, Sheet
from .mqtt_load import PATIENCE, raise_file_limit
from .mqtt_servers import OURS, SERVERS, MqttServer

__all__ = ["Sizes", "measure_mqtt"]


@attrs.frozen(kw_only=True)
class Sizes:
    """The sizes of the loads."""

    messages: int = 400_000
    """The number of QoS 1 messages that twenty clients publish; with QoS 2 half as many, and a tenth one at a time."""
    backlog: int = 200_000
    followers: int = 500
    """The number of subscribers to one topic."""
    unicast: int = 1_000
    """The number of subscribers with a topic each."""
    delivered: int = 40_000
    """The total number of deliveries, to subscribers with a topic each and to those of one topic."""
    seconds: float = 10.0
    """The duration of the latency measurement in seconds."""
    connects: int = 2_000
    idle: int = 5_000


@attrs.frozen
class _Row:
    name: str
    unit: str
    load: str
    options: Callable[[Sizes], dict[str, object]]
    least: float | None = None
    """The lower bound of topicstore's value."""
    most: float | None = None
    percentiles: Mapping[str, float] = {}
    """The percentiles to report of a load that returns a list, such as ``p99``, with their upper bounds."""
    sync: bool = False


def _publish(qos: int, window: int, part: int = 1) -> Callable[[Sizes], dict[str, object]]:
    return lambda sizes: {"clients": 20, "window": window, "messages": sizes.messages // part, "qos": qos}


def _followers(part: int) -> Callable[[Sizes], dict[str, object]]:
    return lambda s: {"readers": s.followers, "messages": max(20, s.delivered // s.followers // part)}


_PUBLISHES, _DELIVERIES = "publishes/s", "deliveries/s"
_LAST, _FROM_END_TO_END = {"p50": 10, "p99": 25}, {"p50": 0.4, "p99": 1.5}
_ROWS = [
    _Row("QoS 1, 20 clients × 200 under way", _PUBLISHES, "publish", _publish(1, 200), 300_000),
    _Row("the same, synced to disk", _PUBLISHES, "publish", _publish(1, 200), 200_000, sync=True),
    _Row("QoS 2, 20 clients × 100 under way", _PUBLISHES, "publish", _publish(2, 100, 2), 100_000),
    _Row("QoS 2, 20 clients × 1 under way", _PUBLISHES, "publish", _publish(2, 1, 10), 20_000),
    _Row("backlog to one client, QoS 1", _DELIVERIES, "backlog", lambda s: {"messages": s.backlog}, 300_000),
    _Row("fan-out of one topic, QoS 1", _DELIVERIES, "fan_out", _followers(1), 200_000),
    _Row("fan-out, one message, last receiver", "ms", "last_receiver", _followers(2), percentiles=_LAST),
    _Row(
        "unicast, a topic each, QoS 1",
        _DELIVERIES,
        "unicast",
        lambda s: {"readers": s.unicast, "messages": s.delivered},
        60_000,
    ),
    _Row(
        "1,000 messages/s, publish to deliver",
        "ms",
        "latency",
        lambda s: {"rate": 1_000, "seconds": s.seconds},
        percentiles=_FROM_END_TO_END,
    ),
    _Row(
        "connects with a subscription",
        "clients/s",
        "connects",
        lambda s: {"clients": s.connects, "together": 100},
        5_000,
    ),
    _Row("an idle client with session and filter", "bytes", "idle", lambda s: {"clients": s.idle}, most=8_000),
]


def measure_mqtt(sizes: Sizes, rounds: int, progress: Progress) -> Section:
    """Measure all installed servers, row by row; values are medians over ``rounds``.

    A server that fails under a load has no value in that row, and the reason is reported as progress.
    """
    raise_file_limit()
    servers = []
    for server in SERVERS:
        if (reason := server.missing()) is None:
            servers.append(server)
        else:
            progress(f"mqtt: {server.name} is left out: {reason}")
    figures: list[Figure] = []
    for row in _ROWS:
        for server in servers:
            if not row.sync or server.syncs:
                progress(f"mqtt: {row.name}, {server.name}")
                figures += _measured(row, server, sizes, rounds, progress)
    return Section(name="mqtt", figures=figures, sheets=[_sheet(figures, [server.name for server in servers])])


def _measured(row: _Row, server: MqttServer, sizes: Sizes, rounds: int, progress: Progress) -> Sequence[Figure]:
    found: list[dict[str, float]] = []
    try:
        for _ in range(rounds):
            with server.running(sync=row.sync) as (port, pid):
                found.append(_load(row, port, pid, row.options(sizes)))
    except subprocess.SubprocessError as failed:
        progress(f"mqtt: {row.name}, {server.name} has failed: {getattr(failed, 'stderr', '') or failed}")
        return []
    bounds = {"": (row.least, row.most)} | {name: (None, most) for name, most in row.percentiles.items()}
    return [
        Figure(
            data=row.name,
            subject=server.name,
            name=name,
            value=statistics.median(one[name] for one in found),
            unit=row.unit,
            **(dict(zip(("least", "most"), bounds[name], strict=True)) if server.name == OURS else {}),
        )
        for name in found[0]
    ]


def _load(row: _Row, port: int, pid: int, options: dict[str, object]) -> dict[str, float]:
    """Run a load in a child process; return the values that the row reports, by name."""
    if row.load == "idle":
        options = {**options, "server": pid}
    program = ["-m", "topicstore_benchmarks.figures.mqtt_load", row.load, str(port)]
    command = [sys.executable, *program, msgspec.json.encode(options).decode()]
    hang = 5 * PATIENCE
    done = subprocess.run(command, capture_output=True, timeout=hang, check=True)  # noqa: S603 - this program's own code
    result = msgspec.json.decode(done.stdout)
    if not row.percentiles:
        return {"": float(result)}
    cuts = statistics.quantiles(result, n=100)
    return {name: cuts[int(name.removeprefix("p")) - 1] for name in row.percentiles}


def _sheet(figures: Sequence[Figure], servers: Sequence[str]) -> Sheet:
    values = {(figure.data, figure.name, figure.subject): figure for figure in figures}
    rows: list[list[str | Cell]] = []
    for data, name in dict.fromkeys((figure.data, figure.name) for figure in figures):
        cells = [values.get((data, name, server)) for server in servers]
        unit = next(cell.unit for cell in cells if cell is not None)
        label = f"{data}, {name}" if name else data
        rows.append([label, unit, *(Cell("–") if cell is None else cell.cell() for cell in cells)])
    return Sheet(
        title="MQTT servers, each on one core",
        columns=["load", "unit", *servers],
        rows=rows,
        note="100-byte payloads, MQTT 3.1.1; in brackets what a figure should be; – a server can't do it, or failed. "
        "What is acknowledged, topicstore has in files, mosquitto in memory",
    )
