"""Children that see file systems of their own: read-only, or small, or with the permissions of somebody else.

A child of this kind is in new namespaces of the Linux kernel: what it mounts is seen by nobody else, and goes with it.

Source: unshare(1), user_namespaces(7), mount_namespaces(7).
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

from .threads import PATIENCE

__all__ = ["READ_ONLY", "SMALL", "run_mounted", "run_unprivileged", "why_not"]

READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"'
"""What makes a directory read-only for `run_mounted`."""
SMALL = 'mount -t tmpfs -o size="$2" tmpfs "$1"'
"""What mounts an empty file system of so many bytes."""

_ROOT = ("unshare", "--user", "--map-root-user", "--mount")
_NOBODY = ("unshare", "--user")
_PROGRAM = """
import json, sys
arguments = sys.argv[1:]
said = []
def say(*words):
    said.append(list(words))
exec(sys.stdin.read())
print(json.dumps(said))
"""


def run_mounted(mount: str, where: object, size: int, code: str, *arguments: object) -> list[list[Any]]:
    """Run code where something is mounted on the directory ``where``; return what it hands to ``say(...)``.

    It finds ``arguments``, as texts.
    """
    shell = ("sh", "-c", f'{mount} && shift 2 && exec "$@"', "sh", str(where), str(size))
    return _run((*_ROOT, *shell), code, arguments)


def run_unprivileged(code: str, *arguments: object) -> list[list[Any]]:
    """Run code without what makes root pass over permissions; return what it hands to ``say(...)``."""
    return _run(_NOBODY, code, arguments)


@cache
def why_not() -> str | None:
    """Return why there are no such children here, or None."""
    if sys.platform != "linux":
        return f"there are no namespaces on {sys.platform}"
    try:
        tried = subprocess.run([*_ROOT, "mount", "-t", "tmpfs", "tmpfs", "/tmp"], capture_output=True, text=True)
    except OSError as bad:
        return f"needs unshare(1): {bad}"
    return None if not tried.returncode else f"file systems can't be mounted here: {tried.stderr[-200:].strip()}"


def _run(inside: tuple[str, ...], code: str, arguments: tuple[object, ...]) -> list[list[Any]]:
    command = [*inside, sys.executable, "-c", _PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, input=code, capture_output=True, text=True, timeout=PATIENCE)
    assert not done.returncode, done.stderr
    said: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return said
