"""Child processes that open the backend under test, and are killed, refused, or meet failing system calls.

A `Task` says which function a child runs: a function of this package, called with one that makes backend
objects, the directory of the shard and the task's arguments. It reports to the parent in lines of JSON.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import msgspec
from topicstore.contract.engine import Backend

from topicstore_conformance.faults.killing import heard
from topicstore_conformance.faults.threads import PATIENCE

__all__ = ["Child", "Make", "end", "run", "tell"]

Make = Callable[[], Backend]
"""A function that returns a new backend object."""


class Reference(msgspec.Struct, frozen=True):
    """A function that another process can import."""

    module: str
    file: str
    name: str
    arguments: list[Any]


class Task(msgspec.Struct, frozen=True):
    """The work of a child: a function, and its arguments."""

    make: Reference
    work: Reference
    path: str


def _reference(function: Callable[..., Any]) -> Reference:
    arguments: list[Any] = []
    if isinstance(function, partial):
        assert not function.keywords, "a child process can't be given keyword arguments"
        arguments, function = list(function.args), function.func
    name = getattr(function, "__qualname__", "<lambda>")
    assert "<" not in name, f"{name} is not at the top of a module: child processes can't import it"
    file = getattr(sys.modules[function.__module__], "__file__", None)
    return Reference(function.__module__, file or "", name, arguments)


def _resolve(reference: Reference) -> Callable[..., Any]:
    function: Any = _load(reference)
    for name in reference.name.split("."):
        function = getattr(function, name)
    return partial(function, *reference.arguments)


def _load(reference: Reference) -> ModuleType:
    """Import a module by its name or, as pytest does with tests, by its file."""
    try:
        return importlib.import_module(reference.module)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{reference.module}.".startswith(f"{missing.name}."):
            raise
    spec = importlib.util.spec_from_file_location(reference.module, reference.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[reference.module] = module
    spec.loader.exec_module(module)
    return module


class Child:
    """A running child process. As a context manager it kills the child at the end if that still runs."""

    def __init__(self, make: Make, work: Callable[..., None], path: Path, *arguments: str | int | bool) -> None:
        task = Task(_reference(make), _reference(partial(work, *arguments)), str(path))
        command = [sys.executable, "-m", __name__, msgspec.json.encode(task).decode()]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self._process.stdout is not None
        self._told = self._process.stdout
        self._errors: list[bytes] = []
        # Standard error is read at the same time: a child that writes much to it would otherwise wait for a reader.
        self._complaints = threading.Thread(target=self._listen, daemon=True)
        self._complaints.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._complaints.join()
        self._told.close()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            self._errors += stream.readlines()

    def told(self) -> Iterator[Any]:
        """Yield the child's reports as they come, until it ends; fail if it is silent so long that it must be stuck."""
        rest = b""
        for data in heard(self._told):
            *lines, rest = (rest + data).split(b"\n")  # at the end the rest is the line that a kill cut short
            yield from map(msgspec.json.decode, lines)

    def wait(self) -> int:
        """Wait for the child's end and return its return code, as `subprocess.Popen.returncode`."""
        return self._process.wait(PATIENCE)

    def complaint(self) -> str:
        """Return what the child wrote to its standard error, once it has ended."""
        self._complaints.join(PATIENCE)
        return b"".join(self._errors).decode(errors="replace")


def run(make: Make, work: Callable[..., None], path: Path, *arguments: str | int | bool) -> list[Any]:
    """Run a child to its end, which must be a good one, and return all its reports."""
    with Child(make, work, path, *arguments) as child:
        told = list(child.told())
        assert child.wait() == 0, f"the child process failed, having told {told[-3:]}: {child.complaint()[-2000:]}"
        return told


def tell(what: Any) -> None:
    """Report something to the parent."""
    os.write(1, msgspec.json.encode(what) + b"\n")


def end() -> None:
    """End this child at once with success, closing nothing."""
    os._exit(0)


def main(arguments: list[str]) -> None:
    """Run the task that the arguments describe, as a child process."""
    task = msgspec.json.decode(arguments[0], type=Task)
    arguments_of_work = [_resolve(task.make), Path(task.path), *task.work.arguments]
    _resolve(msgspec.structs.replace(task.work, arguments=arguments_of_work))()


if __name__ == "__main__":
    main(sys.argv[1:])
