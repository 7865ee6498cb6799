"""Deterministic messages of a simulated vehicle fleet, for `topicstore demo` without an input file."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from topicstore import Message

__all__ = ["DEVICES", "fleet"]

DEVICES = 2_000

_START = 1_748_757_600_000_000
"""The time of the first message, 2025-06-01T06:00:00Z, in microseconds."""
_STEP = 288_000
"""The microseconds between two messages: 300,000 of them make a day."""
_CHUNK = 10_000
_REGIONS = (("eu", 52.0, 10.0), ("us", 39.0, -98.0), ("br", -15.0, -50.0), ("in", 22.0, 79.0))
_KINDS = ("bus", "truck", "van")
_METRICS = ("position", "battery", "door", "alarm")
_SHARES = (0.80, 0.15, 0.04, 0.01)
_ALARMS = ("harsh braking", "low tyre pressure", "cargo too warm", "left the route")


def fleet(messages: int) -> Iterator[list[Message]]:
    """Yield lists with, in all, ``messages`` messages of `DEVICES` vehicles in order of time."""
    random = np.random.default_rng(2025)
    names = [f"{_KINDS[n % 3]}-{n:04}" for n in range(DEVICES)]
    prefixes = [f"fleet/{_REGIONS[n % 4][0]}/{name}/" for n, name in enumerate(names)]
    places = np.array([_REGIONS[n % 4][1:] for n in range(DEVICES)]) + random.normal(0, 3, (DEVICES, 2))
    charge = random.uniform(40, 100, DEVICES).tolist()
    for first in range(0, messages, _CHUNK):
        rows = min(_CHUNK, messages - first)
        devices = random.integers(0, DEVICES, rows).tolist()
        metrics = random.choice(len(_METRICS), rows, p=_SHARES).tolist()
        moves = random.normal(0, 0.002, (rows, 2))
        levels = random.uniform(0, 1, rows).tolist()
        chunk = []
        reading: dict[str, float | bool | str]
        for row, (device, metric, level) in enumerate(zip(devices, metrics, levels, strict=True)):
            if metric == 0:
                places[device] += moves[row]
                reading = _position(places[device].tolist(), level)
            elif metric == 1:
                charge[device] = max(5.0, charge[device] - level)
                reading = {"percent": round(charge[device], 1), "volts": round(44 + charge[device] / 10, 2)}
            elif metric == 2:
                reading = {"door": 1 + int(level * 3), "open": level < 0.5}
            else:
                reading = {"alarm": _ALARMS[int(level * 4)], "severity": 1 + int(level * 3)}
            chunk.append(
                Message(
                    prefixes[device] + _METRICS[metric],
                    msgspec.json.encode(reading),
                    names[device],
                    qos=0 if metric == 0 else 1,
                    retain=metric == 1,
                    timestamp=_START + (first + row) * _STEP,
                )
            )
        yield chunk


def _position(place: list[float], level: float) -> dict[str, float | bool | str]:
    speed = round(level * 96, 1)
    return {"lat": round(place[0], 5), "lon": round(place[1], 5), "speed": speed, "heading": int(level * 7919) % 360}
