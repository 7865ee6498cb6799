"""Run pytest with these arguments; if a few tests fail, run those once more, alone and one after the other.

A test that passes then is printed as ``FLAKY <test>`` and doesn't fail the run. It has to be mended or deleted before
anything else is done. A test that fails twice fails the run, and so do more than `MOST` failures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 5
"""Failures that get a second chance. With more of them, the fault is not in the tests."""
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
PYTEST = (sys.executable, "-m", "pytest")


def failures() -> set[str]:
    """Return the tests that pytest has last seen failing."""
    return set(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else set()


def main(arguments: list[str]) -> int:
    """Return pytest's exit status; 0 if all that failed passes the second time."""
    if not {"--lf", "--last-failed", "--ff", "--failed-first"} & set(arguments):
        LAST_FAILED.unlink(missing_ok=True)  # the list is to have this run's failures only
    status = subprocess.run([*PYTEST, *arguments]).returncode
    failed = failures()
    if status != 1 or not 1 <= len(failed) <= MOST:
        return status
    print(f"\n{len(failed)} failed, and run once more:", *sorted(failed), sep="\n", flush=True)
    again = subprocess.run([*PYTEST, *arguments, "-n0", "--last-failed"], stdout=subprocess.PIPE, text=True)
    *lines, summary = again.stdout.splitlines() or [""]
    print(*lines, *(f"FLAKY {name}" for name in sorted(failed - failures())), summary, sep="\n", flush=True)
    return again.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
