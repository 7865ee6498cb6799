"""How much memory a process had at most, as its system tells."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

__all__ = ["peak_of"]


def peak_of(process: int | str = "self") -> int | None:
    """Return the highest resident size of a process, in bytes; None where only Linux would tell, or it has ended."""
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
        return int(found[1]) << 10 if found else None  # one that was killed has none
    return None
