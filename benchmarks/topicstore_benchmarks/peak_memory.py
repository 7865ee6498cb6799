"""The highest memory use of a process, as the operating system reports it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

__all__ = ["peak_of"]


def peak_of(process: int | str = "self") -> int | None:
    """Return the highest resident size of a process, in bytes; None if it has ended, or if only Linux reports it."""
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
        return int(found[1]) << 10 if found else None  # a killed process has none
    return None
