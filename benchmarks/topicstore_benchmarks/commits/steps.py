"""``python steps.py DIRECTORY``: run each measurement once with the topicstore on ``PYTHONPATH``; print them as JSON.

The program runs with the packages of either commit. It imports nothing of this package, and uses only calls that every
commit has. Each value is nanoseconds of CPU time of all threads of the process, for one message or one call.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import topicstore as ts

MESSAGES = 100_000
"""Messages of the database that is replayed, merged and opened."""
_DEVICES, _METRICS = 401, 5
_FILTER, _TOPIC = "plant/+/metric-3", "plant/device-7/metric-3"


def messages_of(count: int, *, qos: int = 0) -> list[ts.Message]:
    """Return messages with payloads of 100 bytes, from several devices in turn."""
    return [
        ts.Message(f"plant/device-{n % _DEVICES}/metric-{n % _METRICS}", b"%0100d" % n, f"device-{n % _DEVICES}", qos)
        for n in range(count)
    ]


def cpu(work: Callable[[], object], count: int, repeat: int = 1) -> float:
    """Return the CPU time of one call of ``work``, divided by ``count``: the least of ``repeat`` calls."""
    found = []
    for _ in range(repeat):
        gc.collect()
        started = time.process_time_ns()
        work()
        found.append(time.process_time_ns() - started)
    return min(found) / count


def store(path: Path, messages: Sequence[ts.Message], size: int, writers: int = 1, **options: str) -> float:
    """Return the CPU time of a message that is stored in a batch of ``size``, including the close of the database."""
    batches = [messages[first : first + size] for first in range(0, len(messages), size)]
    db = ts.open(path, **options)  # type: ignore[arg-type]
    db.store(messages[:1])

    def write(number: int) -> None:
        for batch in batches[number::writers]:
            db.store(batch)

    def work() -> None:
        threads = [threading.Thread(target=write, args=(number,)) for number in range(1, writers)]
        for thread in threads:
            thread.start()
        write(0)
        for thread in threads:
            thread.join()
        db.close()

    try:
        return cpu(work, len(messages))
    finally:
        db.close()


def consumed(db: ts.Database, topic_filter: str) -> int:
    """Replay to the end; return the number of messages."""
    return sum(1 for _ in db.replay(topic_filter))


def read(db: ts.Database, suffix: str) -> dict[str, float]:
    """Return the CPU time of a replayed message, for all topics, for a filter with a wildcard, and for one topic."""
    route, topic = consumed(db, _FILTER), consumed(db, _TOPIC)
    return {
        f"replay{suffix}": cpu(lambda: consumed(db, "#"), MESSAGES, 3),
        f"route{suffix}": cpu(lambda: consumed(db, _FILTER), route, 3),
        f"one topic{suffix}": cpu(lambda: consumed(db, _TOPIC), topic, 7),
    }


def deliver(path: Path) -> dict[str, float]:
    """Return the CPU time of a message from its publishing to its acknowledged delivery, for calls of 1 and 100."""
    found = {}
    with ts.open(path) as db:
        sessions = [db.sessions.open(f"client-{n}", expiry_interval=None) for n in range(10)]
        for number, session in enumerate(sessions):
            session.subscribe(f"plant/device-{number}/#", 1)
        for size, calls in ((1, 1_500), (100, 100)):
            batches = [
                [ts.Message(f"plant/device-{(n + one) % 10}/rpm", b"%0100d" % n, "p", 1) for one in range(size)]
                for n in range(calls)
            ]

            def work(batches: Sequence[Sequence[ts.Message]] = batches) -> None:
                for batch in batches:
                    db.publish(batch)
                    for session, packets in db.sessions.deliver():
                        session.puback(*[packet.packet_id for packet in packets])

            work(batches[:20])
            found[f"publish {size} to delivery"] = cpu(work, size * calls)
    return found


def steps(directory: Path) -> dict[str, float]:
    """Return all measurements by name, each made in a database of its own."""
    messages = messages_of(MESSAGES)
    found = {
        "store by 1,000": min(store(directory / name, messages, 1_000) for name in ("a", "a again")),
        "store by 100": store(directory / "b", messages[:50_000], 100),
        "store by 1": store(directory / "c", messages[:4_000], 1),
        "store by 100, 8 writers": store(directory / "d", messages[:50_000], 100, 8),
        "store by 100, sync": store(directory / "e", messages[:20_000], 100, durability="sync"),
        "store by 100, sync, 8 writers": store(directory / "f", messages[:20_000], 100, 8, durability="sync"),
    }
    found |= deliver(directory / "g")
    with ts.open(directory / "a", auto_compact=False) as db:  # so that only `compact` compacts
        found |= read(db, "")
        with ts.open(directory / "a again", auto_compact=False) as again:
            found["merge"] = min(cpu(one.compact, MESSAGES) for one in (db, again))
        found |= read(db, ", merged")
    found["open and close"] = cpu(lambda: ts.open(directory / "a").close(), 1, 7)
    return found


if __name__ == "__main__":
    with suppress(AttributeError):  # other systems than Linux have no affinity
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(json.dumps(steps(Path(sys.argv[1]))))
