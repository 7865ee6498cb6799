"""The server's errors: problem documents (RFC 9457), and the exceptions that they represent."""

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
"""The exception classes that are raised again as themselves. Jobs also report errors of the operating system."""
_RUNNING = "JobRunningError"
_CONFLICT = "Conflict"
"""The title of the problem that another job of the same kind is running."""
_UNAUTHORIZED, _FORBIDDEN, _FAULT, _BUSY = 401, 403, 500, 503


class ServerUnreachableError(errors.DatabaseLockedError):
    """The server that has the database open can't be reached, or has ended. Acknowledged writes are stored."""


class ServerRefusedError(errors.DatabaseLockedError):
    """The server that has the database open requires a token, or rejects the given one. Nothing was done."""


class ServerFailedError(errors.EngineError):
    """The server failed to process the request; its log has the reason."""


class Problem(msgspec.Struct):
    """A problem document."""

    status: int = 0
    title: str = ""
    detail: str = ""
    index: int | None = None
    """The index, within its batch, of the message that can't be stored."""
    reason: str = ""
    """The reason why that message can't be stored."""


def problem_of(status: int, body: bytes) -> Problem:
    """Return the problem of an error response, even if its body is not a problem document."""
    try:
        return msgspec.json.decode(body, type=Problem)
    except msgspec.DecodeError:
        return Problem(status=status, detail=f"it answered with status {status}")


def error_of(problem: Problem, url: str) -> Exception:
    """Return the exception that a problem represents: the library's own, if the title names its class."""
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
    """Return the error for a response that no server of this version sends; ``said`` describes the response."""
    return errors.InvalidArgumentError(
        f"what answers at {url} is no server of topicstore, or of another version: {said}"
    )
