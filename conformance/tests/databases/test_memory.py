"""Memory use does not grow with the number of stored messages, for each persistent backend and each layout.

Only anonymous memory is measured, because the kernel decides which pages of mapped files are resident.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.conditions.tries import MODE
from topicstore_conformance.subjects.pairs import Pair, covering, quick_options

pytestmark = pytest.mark.slow

STATUS = Path("/proc/self/status")

CHILD = """
import json, re, sys
import topicstore as ts
from pathlib import Path

def megabytes():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

path, backend, layout, options = sys.argv[1:]
batch = [ts.Message(f"fleet/line-{n % 100}/bus-{n}/speed", bytes([n % 251]) * 128, f"gateway-{n % 7}")
         for n in range(1_000)]
found = []
with ts.open(path, backend=backend, layout=layout, options=json.loads(options), auto_compact=False) as db:
    db.store(batch)
    # What merges has its full size only when there are enough messages for the largest merge.
    batches = 100 if any(shard.rewriter.backlog() for shard in db.storage.shards) else 40
    db.delete("#")
    for _ in range(4):
        for _ in range(batches):
            db.store(batch)
        count = sum(1 for _ in db.replay("#"))
        db.compact()
        rows = sum(b.num_rows for b in db.replay_arrow("fleet/+/+/speed", order="time"))
        found.append((count, rows, megabytes()))
print(json.dumps(found))
"""
TINY = """
import re, sys
import topicstore as ts
from pathlib import Path

def kilobytes():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

path, backend, batches = sys.argv[1], sys.argv[2], int(sys.argv[3])
buffers = {"write_buffer_bytes": 1 << 20, "cache_bytes": 1 << 20}  # full when the first fifth is stored
messages = [ts.Message(f"t/{n}", b"%d" % n, f"c{n % 7}") for n in range(100)]
with ts.open(path, backend=backend, options={backend: buffers}) as db:
    for number in range(batches):
        db.store([messages[number % 100]])
        if number == batches // 5:
            warm = kilobytes()
    print(kilobytes() - warm)
"""
SMALL_CACHES = {
    "rocksdb": {"write_buffer_bytes": 4 << 20, "cache_bytes": 4 << 20},
    "duckdb": {"memory_bytes": 128 << 20, "log_bytes": 4 << 20},
}
"""Options that limit the buffers of backends, which would otherwise hide growth."""


PERSISTENT = [pair for pair in covering() if "persistent" in pair.capabilities]


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc to see a process's memory")
@pytest.mark.parametrize("pair", PERSISTENT, ids=str)
def test_storing_and_replaying_more_takes_no_more_memory(pair: Pair, tmp_path: Path) -> None:
    """A process uses no more memory after four rounds of storing and replaying messages than after two rounds."""
    options = {name: values for name, values in SMALL_CACHES.items() if name == pair.backend}
    options[pair.layout] = quick_options(pair.layout)
    command = [sys.executable, "-c", CHILD, str(tmp_path / "db"), pair.backend, pair.layout, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    first = found[0][0]
    assert [[times * first] * 2 for times in (1, 2, 3, 4)] == [row[:2] for row in found]
    _, second, _, fourth = (row[2] for row in found)
    assert fourth - second < 20, f"grew from {second:.0f} to {fourth:.0f} MB"


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc to see a process's memory")
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("backend", ["rocksdb", "leveldb"])
def test_tiny_batches_leave_nothing_in_memory(tmp_path: Path, backend: str) -> None:
    """Each of many batches of one message leaves less than 80 bytes in memory, about the size of a Python object."""
    need(backend)
    batches = 100_000 if MODE == "quick" else 1_000_000
    command = [sys.executable, "-c", TINY, str(tmp_path / "db"), backend, str(batches)]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown * 1024 / (batches * 4 // 5) < 80, f"grew by {grown:,} kB"
