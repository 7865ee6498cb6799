"""Child processes with read-only or small file systems, or without the permissions of root.

Such a child runs in new namespaces of the Linux kernel: no other process sees its mounts, and they end with it. Only
`run_as_another_user` uses no namespaces; the caller must be root.

Source: unshare(1), user_namespaces(7), mount_namespaces(7).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from .threads import PATIENCE

__all__ = [
    "READ_ONLY",
    "SMALL",
    "mounted",
    "run",
    "run_as_another_user",
    "run_mounted",
    "run_unprivileged",
    "why_no_other_user",
    "why_not",
]

READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"'
"""The command that makes a directory read-only for `run_mounted`."""
SMALL = 'mount -t tmpfs -o size="$2" tmpfs "$1"'
"""The command that mounts an empty file system of ``size`` bytes for `run_mounted`."""

_ROOT = ("unshare", "--user", "--map-root-user", "--mount")
_NOBODY = ("unshare", "--user")
_ANOTHER = 65534
"""The id of a user, and of a group, that owns no files."""
_PROGRAM = """
import json, sys
arguments = sys.argv[1:]
said = []
def say(*words):
    said.append(list(words))
exec(sys.stdin.read())
print(json.dumps(said))
"""

_REHEARSED = """
import gc, os
code, arguments = {code!r}, arguments[::-1]
exec(code, dict(globals()))
gc.collect()
said.clear()
arguments.reverse()
os.setgroups([])
os.setgid({user})
os.setuid({user})
exec(code)
"""


def run(code: str, *arguments: object) -> list[list[Any]]:
    """Run code in a child without any restriction; return the arguments of its calls of ``say(...)``."""
    return _run((), code, arguments)


def run_mounted(mount: str, where: object, size: int, code: str, *arguments: object) -> list[list[Any]]:
    """Run code in a child, after a mount on the directory ``where``; return the arguments of its calls of ``say(...)``.

    ``mount``: a shell command, such as `SMALL`. The code sees ``arguments`` as a list of strings.
    """
    return _run(mounted(mount, where, size), code, arguments)


def mounted(mount: str, where: object, size: int = 0) -> tuple[str, ...]:
    """Return the beginning of a command whose rest runs as root of a new namespace, after a mount (`run_mounted`)."""
    return (*_ROOT, "sh", "-c", f'{mount} && shift 2 && exec "$@"', "sh", str(where), str(size))


def run_unprivileged(code: str, *arguments: object) -> list[list[Any]]:
    """Run code in a child that is subject to file permissions even if the caller is root.

    Returns the arguments of its calls of ``say(...)``.
    """
    return _run(_NOBODY, code, arguments)


def run_as_another_user(code: str, path: Path, rehearsal: Path) -> list[list[Any]]:
    """Run code in a child as a user that owns no files; return the arguments of its calls of ``say(...)``.

    The code sees ``path`` in ``arguments``. Before that, it runs as root with ``rehearsal`` as the path, so that all
    modules are imported: the other user may not be permitted to read them.
    """
    return _run((), _REHEARSED.format(code=code, user=_ANOTHER), (path, rehearsal))


@cache
def why_no_other_user(directory: Path) -> str | None:
    """Return why no child can run as another user that may enter a directory, or None if one can."""
    if os.geteuid():
        return "needs to run as root, to become another user"
    try:
        run_as_another_user("import os; os.listdir(arguments[0])", directory, directory)
    except AssertionError as bad:
        return f"another user can't be had here, or not enter {directory}: {str(bad)[-200:].strip()}"
    return None


@cache
def why_not() -> str | None:
    """Return why children can't have namespaces on this machine, or None if they can."""
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
