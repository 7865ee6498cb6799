"""Fault injection: system calls that fail, to test whether an engine reports the error.

A seccomp filter of the Linux kernel makes chosen system calls of this process, and of all its threads, return an
error. The filter can't be removed, so only child processes install it. Calls on the standard streams still work.

Source: seccomp(2), linux/seccomp.h, linux/filter.h, and the system call tables of both architectures.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import resource
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

__all__ = ["READS", "SYNCS", "WRITES", "Gate", "fail", "full_disk", "why_not"]

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
_FAIL, _ALLOW, _ASK = 0x00050000, 0x7FFF0000, 0x7FC00000
_NO_NEW_PRIVILEGES = 38
_SET_FILTER, _ALL_THREADS, _LISTENER, _NO_THREAD_IDS = 1, 1, 8, 16
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
"""The requests of ioctl that receive a held system call, and answer it."""
_GO_ON = 1
_HELD_AT_MOST = 2.0
"""The seconds after which a held call continues on its own, because an engine may hold the GIL during the call."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def fail(calls: tuple[str, ...], error: int) -> None:
    """Make these system calls fail with this error number until the process ends, except on the standard streams."""
    _filter(calls, _FAIL | error, _ALL_THREADS)


def _filter(calls: tuple[str, ...], action: int, flags: int) -> int:
    """Install a filter that takes an action for these system calls, except on the standard streams."""
    numbers = _NUMBERS[platform.machine()]
    program = [(_LOAD, 0, 0, _CALL)]
    program += [(_IF_EQUAL, len(calls) - place, 0, numbers[call]) for place, call in enumerate(calls)]
    program += [
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_IF_GREATER, 1, 0, 2),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, action),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_ = _Program(len(program), ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    done: int = libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.syscall(
        numbers["seccomp"], _SET_FILTER, flags, ctypes.byref(filter_)
    )
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return done


class Gate:
    """Holds the next fsync of this process until `let`, and makes all later fsyncs fail with EIO.

    The kernel asks a second process about each fsync (seccomp notifications), because an engine may hold the GIL during
    the call. So a gate is made before the process has other threads or an engine. A held call continues after two
    seconds at the latest.
    """

    def __init__(self) -> None:
        self._mine, theirs = socket.socketpair()
        if not os.fork():
            try:
                self._mine.close()
                self._answer(theirs)
            finally:
                os._exit(0)
        theirs.close()

    def close(self) -> None:
        """Hold the next fsync from now on."""
        flags = _ALL_THREADS | _LISTENER | _NO_THREAD_IDS
        listener = _filter(("fsync", "fdatasync"), _ASK, flags)
        socket.send_fds(self._mine, [b"f"], [listener])
        os.close(listener)

    def held(self) -> bool:
        """Wait until an fsync is held; return whether one was, before a timeout of ten seconds."""
        self._mine.settimeout(10)
        try:
            return self._mine.recv(1) == b"h"
        except TimeoutError:
            return False

    def let(self) -> None:
        """Let the held fsync continue."""
        self._mine.send(b"l")

    @staticmethod
    def _answer(theirs: socket.socket) -> None:
        _, (listener, *_), _, _ = socket.recv_fds(theirs, 1, 1)
        for stream in (1, 2):  # otherwise this process would keep the pipes open, whose end the test waits for
            os.close(stream)
        first = True
        while True:
            waited: list[int | socket.socket] = [listener, theirs]
            ready, _, _ = select.select(waited, [], [])
            if theirs in ready and not theirs.recv(1):
                return  # the process has ended
            if listener not in ready:
                continue
            asked = bytearray(80)
            fcntl.ioctl(listener, _RECEIVE, asked)
            call = bytes(asked[:8])
            if first:
                theirs.send(b"h")
                select.select([theirs], [], [], _HELD_AT_MOST)
            answer = struct.pack("qiI", 0, 0, _GO_ON) if first else struct.pack("qiI", 0, -errno.EIO, 0)
            fcntl.ioctl(listener, _SEND, call + answer)
            first = False


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
