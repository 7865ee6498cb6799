"""A gateway that stores readings, restarts, and replays to a consumer the readings that the consumer missed."""

import sys
import time

import topicstore as ts

directory = sys.argv[1] if len(sys.argv) > 1 else "gateway-data"
ROOMS = ("kitchen", "office", "hall")


def store_readings(db: ts.Database, rounds: range) -> ts.MessageId:
    """Store a temperature and a humidity of every room, round after round, through the buffered writer."""
    with db.writer(max_items=500, flush_interval=0.05) as writer:
        for number in rounds:
            for room in ROOMS:
                writer.put(ts.Message(f"home/{room}/temperature", b"%.1f" % (20 + number / 10), f"{room}-hub", qos=1))
                last = writer.put(ts.Message(f"home/{room}/humidity", b"%d" % (40 + number % 5), f"{room}-hub", qos=1))
    return last.result()  # waits until the last message is stored with the database's durability


# The gateway runs. A consumer of temperatures reads all of them, and leaves.
with ts.open(directory, shards=2) as db:
    store_readings(db, range(5))
    seen = sum(1 for _ in db.replay("home/+/temperature"))
    left_at = time.time_ns() // 1_000
    print(f"the consumer saw {seen} temperatures and left")
    store_readings(db, range(5, 8))

# The gateway restarts; the arguments with which the database was created are read from its manifest.
with ts.open(directory) as db:
    last = store_readings(db, range(8, 10))
    missed = list(db.replay("home/+/temperature", start=left_at, order="time"))
    print(f"the consumer is back and gets the {len(missed)} temperatures it missed:")
    for message in missed:
        print(f"  {message.topic} {message.payload.decode()}")
    print(f"the last message stored was number {last.position} of shard {last.shard}; {db.info().messages} in all")
