"""Child processes that open the backend under test, to be killed, refused access, or run with failing system calls.

A `Task` names the function that a child runs. The function is called with a factory of backend objects, the
shard's directory and the task's arguments, and reports to the parent in lines of JSON.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import msgspec
from topicstore.contract.engine import Backend

from topicstore_conformance.faults.killing import heard
from topicstore_conformance.faults.threads import PATIENCE

__all__ = ["Child", "Make", "end", "importable", "run", "tell"]

Make = Callable[[], Backend]
"""A function that returns a new backend object."""


class Reference(msgspec.Struct, frozen=True):
    """An importable function with its positional arguments, as another process can load it."""

    module: str
    file: str
    name: str
    arguments: list[Any]


class Task(msgspec.Struct, frozen=True):
    """The work of a child process: a backend factory, a function with arguments, and the shard's path."""

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


def importable(function: Callable[..., Any]) -> bool:
    """Return whether another process can import a function, and its positional arguments can be sent there."""
    try:
        msgspec.json.encode(_reference(function))
    except (AssertionError, TypeError, AttributeError):
        return False
    return True


def _resolve(reference: Reference) -> Callable[..., Any]:
    function: Any = _load(reference)
    for name in reference.name.split("."):
        function = getattr(function, name)
    return partial(function, *reference.arguments)


def _load(reference: Reference) -> ModuleType:
    """Import a module by its name or, like pytest with test modules, by its file."""
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
    """A child process. Leaving the context manager kills the child if it is still running."""

    def __init__(
        self,
        make: Callable[[], Any],
        work: Callable[..., None],
        path: Path,
        *arguments: str | int | bool,
        seed: int | None = None,
        inside: Sequence[str] = (),
    ) -> None:
        task = Task(_reference(make), _reference(partial(work, *arguments)), str(path))
        command = [*inside, sys.executable, "-m", __name__, msgspec.json.encode(task).decode()]
        environment = os.environ if seed is None else {**os.environ, "PYTHONHASHSEED": str(seed)}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        assert self._process.stdout is not None
        self._told = self._process.stdout
        self._errors: list[bytes] = []
        # A thread drains standard error at the same time: otherwise a child that fills the pipe would block.
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
        """Yield the child's reports as they come, until it ends; fail if it is silent so long that it must hang."""
        rest = b""
        for data in heard(self._told):
            *lines, rest = (rest + data).split(b"\n")  # after the last read, ``rest`` is an incomplete line
            yield from map(msgspec.json.decode, lines)

    def wait(self) -> int:
        """Wait until the child ends and return its code, as in `subprocess.Popen.returncode`."""
        return self._process.wait(PATIENCE)

    def complaint(self) -> str:
        """Wait until the child closes its standard error, and return the text that was written there."""
        self._complaints.join(PATIENCE)
        return b"".join(self._errors).decode(errors="replace")


def run(
    make: Callable[[], Any],
    work: Callable[..., None],
    path: Path,
    *arguments: str | int | bool,
    seed: int | None = None,
    inside: Sequence[str] = (),
) -> list[Any]:
    """Run a child to its end and return all its reports; fail unless its return code is 0.

    seed: the child's hash seed (``PYTHONHASHSEED``); by default that of this process.
    inside: the beginning of the command that starts the child, such as `namespaces.mounted`.
    """
    with Child(make, work, path, *arguments, seed=seed, inside=inside) as child:
        told = list(child.told())
        assert child.wait() == 0, f"the child process failed, having told {told[-3:]}: {child.complaint()[-2000:]}"
        return told


def tell(what: Any) -> None:
    """Report a value, which JSON can encode, to the parent."""
    os.write(1, msgspec.json.encode(what) + b"\n")


def end() -> None:
    """End this child immediately with return code 0, without closing anything."""
    os._exit(0)


def main(arguments: list[str]) -> None:
    """Run the task that the arguments describe, as a child process."""
    task = msgspec.json.decode(arguments[0], type=Task)
    arguments_of_work = [_resolve(task.make), Path(task.path), *task.work.arguments]
    _resolve(msgspec.structs.replace(task.work, arguments=arguments_of_work))()


if __name__ == "__main__":
    main(sys.argv[1:])
