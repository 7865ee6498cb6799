"""A program that owns a shard, and prints each acknowledged change on a line, until it is killed or fenced."""

from __future__ import annotations

import sys
from pathlib import Path

from topicstore.contract.errors import ShardMovedError
from topicstore.replication.heads import BEGINNING
from topicstore.replication.log import ShardLog
from topicstore.replication.log_stores import open_log_store
from topicstore.replication.objects import Base, Entry
from topicstore.replication.reading import LocalWrite


class Nowhere:
    """A copy of the shard that discards the changes, and has only its progress, in memory."""

    def __init__(self) -> None:
        self.progress = BEGINNING

    def write(self, entry: Entry, write: LocalWrite) -> None:
        self.progress = write.progress

    def take_base(self, base: Base) -> None:
        self.progress = base.progress


def main(url: str, epoch: int) -> None:
    """Own the shard, and propose one change after another."""
    log = ShardLog(open_log_store(url), 3, Nowhere(), "child")
    assert log.take_over(epoch)
    number = 0
    try:
        while True:
            log.propose(b"%d" % number).wait()
            print(number, flush=True)
            number += 1
    except ShardMovedError as moved:
        print(f"moved: {moved}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).as_uri(), int(sys.argv[2]))
