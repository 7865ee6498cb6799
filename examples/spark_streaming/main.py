"""A streaming query between two stores: each position of a standing bus gets one alert, even if the query is killed.

    python main.py DIRECTORY

starts a publisher of bus positions, and a query that reads them continuously and stores alerts. The program kills the
query (SIGKILL) before it has read all positions, starts it again when the publisher has ended, and compares the alerts
with the positions.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import topicstore as ts

BUSES = 40
ROUNDS = 300
PAUSE = 0.01
BATCHES_BEFORE_KILL = 2
ROUNDS_BEFORE_KILL = 150
"""The rounds, enough for three batches of the query, after which the publisher waits for the kill."""


def publish(directory: Path) -> None:
    """Store positions, one batch in each round; every bus stands still in one round of fifty."""
    with ts.open(directory / "positions", shards=2) as db:
        for number in range(ROUNDS):
            db.store([_position(bus, 0.0 if (number + 7 * bus) % 50 == 0 else 5.5, number) for bus in range(BUSES)])
            if number == 0:
                print("published", flush=True)
            if number == ROUNDS_BEFORE_KILL:
                sys.stdin.readline()
            time.sleep(PAUSE)


def _position(bus: int, speed: float, number: int) -> ts.Message:
    payload = json.dumps({"speed": speed, "round": number}).encode()
    return ts.Message(f"city/vp/{10 * (bus % 5)}/{bus}", payload, f"bus-{bus}", qos=1)


def follow(directory: Path) -> None:
    """Store alerts for positions as they are published, until killed."""
    watch(directory, processingTime="0 seconds")


def finish(directory: Path) -> None:
    """Store alerts for the positions that are stored at the start, and end."""
    watch(directory, availableNow=True)


def watch(directory: Path, **trigger: Any) -> None:
    """Store an alert for each position of a bus that stands still."""
    from topicstore.spark import session

    spark = session()
    positions = (
        spark.readStream.format("topicstore")
        .option("filter", "city/vp/+/+")
        .option("maxMessagesPerTrigger", 2_000)
        .load(str(directory / "positions"))
    )
    alerts = positions.where("double(get_json_object(decode(payload, 'utf-8'), '$.speed')) = 0").selectExpr(
        "timestamp", "concat('alerts/standing/', split_part(topic, '/', 4)) AS topic", "client_id", "qos", "payload"
    )
    query = (
        alerts.writeStream.format("topicstore")
        .option("path", str(directory / "alerts"))
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(**trigger)
        .start()
    )
    told = -1
    ended = False
    while not ended:
        ended = bool(query.awaitTermination(0.1))
        for progress in query.recentProgress:
            if progress.batchId > told and progress.numInputRows:
                told = progress.batchId
                print(f"  batch {told}: {progress.numInputRows} positions", flush=True)
    spark.stop()


def _start(part: str, directory: Path) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, __file__, str(directory), part], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)  # noqa: S603


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    return iter(process.stdout)


def main(directory: Path) -> None:
    """Run the publisher and the query, kill the query, and compare the alerts with the positions."""
    directory.mkdir(parents=True, exist_ok=True)
    with _start("publish", directory) as publisher:
        next(_lines(publisher))  # waits until the database exists
        with _start("follow", directory) as query:
            for number, line in enumerate(_lines(query), 1):  # the output ends when the query's JVM has ended, too
                if number <= BATCHES_BEFORE_KILL:
                    print(line, end="")
                if number == BATCHES_BEFORE_KILL:
                    query.kill()
                    print("  killed")
        publisher.communicate("go on\n")
    with _start("finish", directory) as query:
        print(*_lines(query), sep="", end="")
    with ts.open(directory / "positions") as positions, ts.open(directory / "alerts") as alerts:
        standing = Counter((m.client_id, m.payload) for m in positions.replay("#") if b'"speed": 0.0' in m.payload)
        stored = Counter((m.client_id, m.payload) for m in alerts.replay("alerts/standing/+"))
    print(f"{standing.total()} positions of standing buses, {stored.total()} alerts")
    if standing != stored:
        raise SystemExit("they are not the same")
    print("each once")


if __name__ == "__main__":
    parts = {"publish": publish, "follow": follow, "finish": finish}
    parts.get(sys.argv[2] if len(sys.argv) > 2 else "", main)(Path(sys.argv[1]))
