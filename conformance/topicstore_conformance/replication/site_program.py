"""A program that is a site: it stores batches and replays, and prints each operation as JSON, until it is killed."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import topicstore as ts
from topicstore.contract.log_store import StorageUnavailableError

BATCH = 5
SHARDS = 2
FAR = 1_000_000
"""The numbers of messages of one process begin at a multiple of this."""


def quick_cluster(root: Path, takeover_after: float) -> ts.Cluster:
    """Return the cluster below a directory, with settings for short intervals of polling and of log truncation."""
    return ts.Cluster(
        (root / "log").as_uri(),
        beat_interval=takeover_after / 4,
        takeover_after=takeover_after,
        poll_interval=takeover_after / 4,
        log_retention=0,
        replication_factor=None,
    )


def main(root: Path, site: str, run: int, takeover_after: float) -> None:
    """Store batches of numbered messages, in each shard by turns, and replay after every sixteenth batch."""
    warnings.simplefilter("ignore")
    with ts.open(root / site, cluster=quick_cluster(root, takeover_after), site=site, shards=SHARDS) as db:
        publishers = [
            next(f"{site}{run}-{n}" for n in range(99) if db.shard_of(f"{site}{run}-{n}") == s) for s in (0, 1)
        ]
        number = run * FAR
        print(json.dumps({"ready": True}), flush=True)
        while True:
            publisher = publishers[(number // BATCH) % SHARDS]
            numbers = [*range(number, number + BATCH)]
            number += BATCH
            began, outcome = time.monotonic(), "stored"
            try:
                db.store([ts.Message("t", b"%d" % one, publisher) for one in numbers])
            except ts.ShardElsewhereError:
                outcome = "refused"
            except ts.ShardMovedError as moved:
                outcome = "unknown" if moved.stored is None else "refused"
            except StorageUnavailableError:
                outcome = "unknown"
            say("store", began, numbers, outcome, publisher)
            if outcome != "stored":
                time.sleep(takeover_after / 20)  # a client that pauses before it tries again
            if number % (BATCH * 16) == 0:
                began = time.monotonic()
                try:
                    say("replay", began, [int(message.payload) for message in db.replay("#")], "stored", "")
                except ts.ShardElsewhereError:
                    continue  # this site does not keep a copy of all shards at this time


def say(kind: str, began: float, numbers: list[int], outcome: str, publisher: str) -> None:
    """Print an operation."""
    values = {"kind": kind, "began": began, "ended": time.monotonic(), "numbers": numbers, "outcome": outcome}
    print(json.dumps({**values, "publisher": publisher}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
