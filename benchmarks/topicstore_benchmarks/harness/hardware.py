"""The machine and the software versions of a measurement."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["machine", "peak_memory", "resident", "versions"]

_PACKAGES = ("topicstore", "pyarrow", "msgspec", "numpy", "pyspark")


def machine() -> dict[str, Any]:
    """Return the processor, the number of cores, the memory in bytes, the system, and the Python version."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def versions() -> dict[str, str]:
    """Return the versions of the packages that all workers share, without those that aren't installed."""
    return {name: version(name) for name in _PACKAGES if find_spec(name)}


def resident(process: int) -> int:
    """Return the resident memory of a process in bytes, from Linux's /proc."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_memory() -> int:
    """Return the peak resident memory of this process, in bytes."""
    with contextlib.suppress(OSError):  # only Linux has the file; the fallback's peak may include the parent's
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found:
            return int(found[1]) << 10
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024
