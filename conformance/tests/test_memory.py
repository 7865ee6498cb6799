"""Memory does not grow with what is stored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

STATUS = Path("/proc/self/status")

CHILD = """
import json, re, sys
import topicstore as ts
from pathlib import Path

def megabytes():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

sizes = {"write_buffer_bytes": 4 << 20, "cache_bytes": 4 << 20}
batch = [ts.Message(f"fleet/line-{n % 100}/bus-{n}/speed", bytes([n % 251]) * 128, f"gateway-{n % 7}")
         for n in range(1_000)]
found = []
with ts.open(sys.argv[1], options={"rocksdb": sizes, "block": {"compression": "none"}}) as db:
    for _ in range(3):
        for _ in range(250):
            db.store(batch)
        count = sum(1 for _ in db.replay("#"))
        rows = sum(b.num_rows for b in db.replay_arrow("fleet/+/+/speed", order="time"))
        found.append((count, rows, megabytes()))
print(json.dumps(found))
"""


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc to see a process's memory")
def test_storing_and_replaying_more_takes_no_more_memory(tmp_path: Path) -> None:
    """Three times 250,000 messages, 33 MB each time: the process stays as large as after the first."""
    command = [sys.executable, "-c", CHILD, str(tmp_path / "db")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert [(250_000, 250_000), (500_000, 500_000), (750_000, 750_000)] == [tuple(row[:2]) for row in found]
    first, _, third = (row[2] for row in found)
    assert third - first < 25, f"grew from {first:.0f} to {third:.0f} MB"
