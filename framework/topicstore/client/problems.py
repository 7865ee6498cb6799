"""Problem documents (RFC 9457) as the exceptions that the server raised."""

from __future__ import annotations

import msgspec

from topicstore.contract import errors

__all__ = [
    "Problem",
    "ServerFailedError",
    "ServerRefusedError",
    "ServerUnreachableError",
    "error_of",
    "problem_of",
    "stranger",
]

_KINDS: dict[str, type[Exception]] = {
    **{name: getattr(errors, name) for name in errors.__all__},
    **{kind.__name__: kind for kind in (OSError, PermissionError, FileExistsError, NotADirectoryError)},
}
"""The exceptions that keep their class; jobs also tell errors of the operating system."""
_RUNNING = "JobRunningError"
_CONFLICT = "Conflict"
"""The title where another job of the same kind runs."""
_UNAUTHORIZED, _FORBIDDEN, _FAULT, _BUSY = 401, 403, 500, 503


class ServerUnreachableError(errors.DatabaseLockedError):
    """The server that has the database open can't be asked, or went away. What it had acknowledged is stored."""


class ServerRefusedError(errors.DatabaseLockedError):
    """The server that has the database open wants a token, or another one. Nothing was done."""


class ServerFailedError(errors.EngineError):
    """The server could not serve the request; its log says why."""


class Problem(msgspec.Struct):
    """A problem document."""

    status: int = 0
    title: str = ""
    detail: str = ""
    index: int | None = None
    """Of the message that can't be stored, in its batch."""
    reason: str = ""
    """Why that message can't be stored."""


def problem_of(status: int, body: bytes) -> Problem:
    """Return the problem of a response, also of one that is no problem document."""
    try:
        return msgspec.json.decode(body, type=Problem)
    except msgspec.DecodeError:
        return Problem(status=status, detail=f"it answered with status {status}")


def error_of(problem: Problem, url: str) -> Exception:
    """Return the exception that a problem stands for: the library's own, if its title names one."""
    if problem.title in _KINDS:
        kind = _KINDS[problem.title]
        if problem.index is not None and issubclass(kind, errors.InvalidMessageError):
            return kind(problem.reason, problem.index)
        return kind(problem.detail)
    if problem.status in (_UNAUTHORIZED, _FORBIDDEN):
        return ServerRefusedError(f"the server at {url} refuses: {problem.detail}")
    if problem.status == _BUSY or problem.title == _CONFLICT:
        return ServerUnreachableError(f"the server at {url} can't do it now: {problem.detail}")
    if problem.status >= _FAULT or problem.title == "InternalServerError":
        return ServerFailedError(f"the server at {url}: {problem.detail}")
    if not problem.title:
        return stranger(url, problem.detail)
    return errors.InvalidArgumentError(problem.detail)


def stranger(url: str, said: str) -> Exception:
    """Return the error of an answer that no server of this version gives."""
    return errors.InvalidArgumentError(
        f"what answers at {url} is no server of topicstore, or of another version: {said}"
    )
