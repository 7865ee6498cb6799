"""Fault injection: system calls that fail, to test whether an engine reports the error.

A seccomp filter of the Linux kernel makes chosen system calls of this process, and of all its threads, return an
error. The filter can't be removed, so only child processes install it. Calls on the standard streams still work.

Source: seccomp(2), linux/seccomp.h, linux/filter.h, and the system call tables of both architectures.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

__all__ = ["READS", "SYNCS", "WRITES", "fail", "full_disk", "why_not"]

SYNCS = ("fsync", "fdatasync", "msync", "sync_file_range", "syncfs")
"""The system calls that make written data durable."""
WRITES = ("write", "pwrite64", "writev", "pwritev", "pwritev2", "fallocate")
"""The system calls that write to files."""
READS = ("read", "pread64", "readv", "preadv", "preadv2")
"""The system calls that read files."""

_X86_64 = {
    "read": 0,
    "write": 1,
    "pread64": 17,
    "pwrite64": 18,
    "readv": 19,
    "writev": 20,
    "msync": 26,
    "fsync": 74,
    "fdatasync": 75,
    "sync_file_range": 277,
    "fallocate": 285,
    "preadv": 295,
    "pwritev": 296,
    "syncfs": 306,
    "seccomp": 317,
    "preadv2": 327,
    "pwritev2": 328,
}
_ARM64 = {
    "fallocate": 47,
    "read": 63,
    "write": 64,
    "readv": 65,
    "writev": 66,
    "pread64": 67,
    "pwrite64": 68,
    "preadv": 69,
    "pwritev": 70,
    "fsync": 82,
    "fdatasync": 83,
    "sync_file_range": 84,
    "msync": 227,
    "syncfs": 267,
    "seccomp": 277,
    "preadv2": 286,
    "pwritev2": 287,
}
_NUMBERS = {"x86_64": _X86_64, "aarch64": _ARM64}

_LOAD, _IF_EQUAL, _IF_GREATER, _RETURN = 0x20, 0x15, 0x25, 0x06
_CALL, _FIRST_ARGUMENT = 0, 16
"""The offsets in `struct seccomp_data` of the system call's number and of the lower half of its first argument."""
_FAIL, _ALLOW = 0x00050000, 0x7FFF0000
_NO_NEW_PRIVILEGES = 38
_SET_FILTER, _ALL_THREADS = 1, 1


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def fail(calls: tuple[str, ...], error: int) -> None:
    """Make these system calls fail with this error number for good, except on the standard streams."""
    numbers = _NUMBERS[platform.machine()]
    program = [(_LOAD, 0, 0, _CALL)]
    program += [(_IF_EQUAL, len(calls) - place, 0, numbers[call]) for place, call in enumerate(calls)]
    program += [
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_IF_GREATER, 1, 0, 2),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _FAIL | error),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_ = _Program(len(program), ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.syscall(
        numbers["seccomp"], _SET_FILTER, _ALL_THREADS, ctypes.byref(filter_)
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@cache
def why_not() -> str | None:
    """Return why calls can't be made to fail on this machine, or None if they can."""
    if sys.platform != "linux" or platform.machine() not in _NUMBERS:
        return f"system calls can't be made to fail on {sys.platform} {platform.machine()}"
    program = f"from {__name__} import *; import os; fail(SYNCS, 5); f = open(os.devnull); os.fsync(f.fileno())"
    tried = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return None if "Input/output error" in tried.stderr else f"seccomp is not permitted: {tried.stderr[-200:]}"


@contextmanager
def full_disk() -> Iterator[None]:
    """Prevent any file of this process from growing, as on a full disk, but with EFBIG instead of ENOSPC."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
