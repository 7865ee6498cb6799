"""The exit codes of the program, and the mapping from errors to them."""

from __future__ import annotations

import contextlib
from typing import IO, Any

import click

from topicstore.contract import errors

__all__ = ["DAMAGED", "DATABASE", "DONE", "EPILOG", "INTERRUPTED", "LOCKED", "STORAGE", "USAGE", "Failure", "failure"]

DONE, DAMAGED, USAGE, DATABASE, LOCKED, STORAGE, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

EPILOG = """\b
Exit codes:
    0  done
    1  damage or a loss was found
    2  wrong usage, or bad input
    3  no such database, not a database, or one that was created differently
    4  the database is open elsewhere, and no server of it does what was asked
    5  storage failed: the engine, a full disk, corruption; or output can't be
       written
  130  interrupted, by Ctrl-C or SIGTERM; a server ends in order, with 0

\b
Errors are one line on standard error that begins with "error:".
"""

_BY_CLASS: dict[type[BaseException], int] = {
    errors.DatabaseLockedError: LOCKED,
    errors.DatabaseNotFoundError: DATABASE,
    errors.NotADatabaseError: DATABASE,
    errors.NewerFormatError: DATABASE,
    errors.ManifestMismatchError: DATABASE,
    errors.EngineError: STORAGE,
    errors.QuotaExceededError: STORAGE,
    errors.ShardReadOnlyError: STORAGE,
    errors.StorageFullError: STORAGE,
    errors.TooManyOpenFilesError: STORAGE,
    PermissionError: DATABASE,
    NotADirectoryError: DATABASE,
    FileExistsError: DATABASE,
    errors.FileSystemError: STORAGE,
    errors.TopicstoreError: USAGE,
    OSError: STORAGE,
    KeyboardInterrupt: INTERRUPTED,
}
"""The exit code of each exception class; the first match counts. Other exceptions are bugs, and show a traceback."""


class Failure(click.ClickException):
    """An error that ends the program with a one-line message and an exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = code  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message on standard error; errors of writing are ignored, since the exit code remains."""
        with contextlib.suppress(OSError):
            click.echo(f"error: {self.format_message()}", file=file, err=file is None)


def failure(error: BaseException) -> Failure | None:
    """Return the message and exit code for an error, or None for an unexpected one."""
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx is not None else "topicstore"
        return Failure(f"{error.format_message()} (see: {path} --help)", USAGE)
    if isinstance(error, click.ClickException):
        return Failure(error.format_message(), error.exit_code)
    if isinstance(error, click.Abort):
        return Failure("interrupted", INTERRUPTED)
    if isinstance(error, ExceptionGroup):  # closing a database raises several errors as a group
        found = failure(error.exceptions[0])
        return found and Failure(f"{found.message} (and {len(error.exceptions) - 1} more)", found.exit_code)
    for kind, code in _BY_CLASS.items():
        if isinstance(error, kind):
            return Failure(str(error) or "interrupted", code)
    return None
