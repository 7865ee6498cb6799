"""The click group: loads its commands, including those of other packages, and turns their errors into exit codes."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import click
from click.shell_completion import CompletionItem

from topicstore import __version__
from topicstore.contract.descriptors import take_closed_streams

from .terminal.exits import DONE, EPILOG, USAGE, Failure, failure

__all__ = ["FOREIGN", "ForeignCommand", "cli", "foreign_commands", "main"]

FOREIGN = "topicstore.commands"
"""The entry-point group of other packages' commands."""

_COMMANDS = {
    "create": "Create an empty database in the directory PATH.",
    "import": "Store the messages of FILES, in their order, in the database PATH, which is created if missing.",
    "export": "Write sealed generations of PATH to the directory TARGET as partitioned Parquet.",
    "replay": "Print the messages in PATH whose topics match FILTER (default: #).",
    "explain": "Replay FILTER from PATH, and print the cost of finding the messages instead of the messages.",
    "sql": "Run an SQL STATEMENT that only reads over the messages in PATH, on any backend.",
    "latest": "Print the last message of each topic in PATH that matches FILTER (default: #), in order of topics.",
    "topics": "List the topics in PATH that match FILTER (default: #): messages, bytes, the first and the last.",
    "clients": "List the client ids in PATH with messages that match FILTER (default: #), counted as by `topics`.",
    "streams": "List the streams in PATH that may hold messages whose topics match FILTER (default: #).",
    "learned-topics": "Show what the layouts in PATH learned of the topics: the levels, and which of them vary.",
    "retained": "Print the retained messages in PATH whose topics match FILTER (default: #), in order of topics.",
    "sessions": "List, show or end durable sessions, which wait for clients that are away.",
    "queue": "List, read or drop queues: messages of a database that wait to be forwarded.",
    "info": "Show a summary of PATH: sizes, generations, shards.",
    "cluster": "Share a database among several sites, through a log store such as S3 or a directory.",
    "ds": "Show and change which sites keep the shards of a durable storage.",
    "bans": "Ban client ids, users and addresses from a server, and lift or list bans.",
    "rules": "List and change the access rules of a server, in the file of its settings.",
    "verify": "Read everything in PATH and check it; exit with 1 and list every damaged place if there are any.",
    "generations": "List, add or drop generations: partitions of a database in time.",
    "retention": (
        "Show or change the limits on the age and the bytes of messages, and remove messages that exceed them."
    ),
    "compact": (
        "Merge the messages in PATH: they take fewer bytes on disk, and narrow filters read a small part of them."
    ),
    "delete": "Delete the messages in PATH whose topics match FILTER, for good.",
    "checkpoint": "Copy the database PATH, as it is now, into the new directory TARGET.",
    "plugins": "List every plugin with what it provides and supports, or why it can't be used.",
    "demo": "Fill a database, kill it in the middle, resume, replay, and check that nothing is lost or doubled.",
}
"""The commands of this package in the order of the help, each with the first sentence of its docstring."""
_BESIDE = {
    "bench": "Measure topicstore and other stores of messages.",
    "config": "Make, check and show the settings of a server, with its users and certificates.",
    "conformance": "Test whether an installed backend or layout keeps what it promises.",
    "recommend": (
        "Measure all layouts on SAMPLE, a file of your own messages that `import` takes, and say which is best."
    ),
    "serve": "Serve the database PATH to clients of MQTT 3.1.1 and 5, and over HTTP.",
    "tokens": "Add, revoke and list the tokens by which programs use a server over HTTP.",
    "users": "Add, remove and list the users who may connect to a server with a password.",
}
"""The summaries of this distribution's other commands, which packages outside the framework add as entry points."""
_PLACES = {"import": "commands.import_", "demo": "demo.demo"}
"""The modules of commands whose module is not named like the command; each has a function of the module's name."""


@attrs.frozen(kw_only=True)
class ForeignCommand:
    """A command from another package: ``command``, or the ``reason`` why it can't be loaded."""

    name: str
    distribution: str
    command: click.Command | None
    reason: str = ""


def foreign_commands(name: str | None = None) -> list[ForeignCommand]:
    """Load the commands of other packages, or only those called ``name``; also return those that can't be loaded."""
    entries = importlib.metadata.entry_points(group=FOREIGN)
    return [_load(entry) for entry in entries if name in (None, entry.name)]


def _load(entry: importlib.metadata.EntryPoint) -> ForeignCommand:
    distribution = entry.dist.name if entry.dist is not None else "an unknown distribution"
    command, reason = None, ""
    if entry.name in _COMMANDS:
        reason = "topicstore has a command of that name"
    else:
        try:
            command = entry.load()
        except Exception as error:  # noqa: BLE001 - another package's command must not stop ours; it is shown
            reason = f"{type(error).__name__}: {error}"
        if not reason and not isinstance(command, click.Command):
            command, reason = None, f"{entry.value} is not a click command"
    return ForeignCommand(name=entry.name, distribution=distribution, command=command, reason=reason)


class _Summaries(click.Group):
    """A group that lists its commands in the order of definition, not sorted by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of definition."""
        return list(self.commands)


def _summaries() -> dict[str, click.Command]:
    """Return all loadable commands, by name. Own commands have only summaries, to avoid importing their modules."""
    found = {name: click.Command(name, help=text) for name, text in _COMMANDS.items()}
    for entry in sorted(importlib.metadata.entry_points(group=FOREIGN), key=lambda one: one.name):
        of_ours = entry.name in _BESIDE and entry.dist is not None and entry.dist.name == "topicstore"
        command = click.Command(entry.name, help=_BESIDE[entry.name]) if of_ours else _load(entry).command
        if command is not None:
            found.setdefault(entry.name, command)
    return found


def _show_whole_summaries(commands: Mapping[str, click.Command]) -> None:
    """Have lists of these commands show each first sentence whole; by default click cuts it to the line's width."""
    for command in commands.values():
        command.short_help = command.short_help or command.get_short_help_str(_WHOLE)


_WHOLE = 1_000
"""More characters than a first sentence has."""
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""The characters that make an argument invalid: NUL, and lone surrogates, which stand for bytes that aren't UTF-8."""


def _explained(name: str, command: click.Command) -> click.Command:
    """Return a command whose help has examples and whole summaries."""
    from .examples import show_examples

    _show_whole_summaries(getattr(command, "commands", {}))
    show_examples(name, command)
    return command


class _Program(click.Group):
    """The program's group: imports a command when it is used, and handles the errors of all commands alike."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of this package's commands, then of other packages' commands that can be loaded."""
        return list(_summaries())

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their whole summaries, without importing this package's commands."""
        commands = _summaries()
        _show_whole_summaries(commands)
        _Summaries(commands=commands).format_commands(ctx, formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and options that begin with ``incomplete``, without importing this package's commands."""
        found = [(name, command) for name, command in _summaries().items() if name.startswith(incomplete)]
        items = [CompletionItem(name, help=command.get_short_help_str()) for name, command in found]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, or None. Raises `Failure` if it belongs to another package and can't be loaded."""
        if cmd_name in _COMMANDS:
            place = _PLACES.get(cmd_name, f"commands.{cmd_name.replace('-', '_')}")
            module = importlib.import_module(f"{__package__}.{place}")
            command: click.Command = getattr(module, place.rpartition(".")[2])
            return _explained(cmd_name, command)
        found = foreign_commands(cmd_name)
        for foreign in found:
            if foreign.command is not None:
                return _explained(cmd_name, foreign.command)
        if found:
            reason = f"the command {cmd_name!r} of {found[0].distribution} can't be used: {found[0].reason}"
            raise Failure(reason, USAGE)
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name; the error for an unknown name suggests similar ones."""
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as unknown:
            names = self.list_commands(ctx)
            raise click.NoSuchCommand(unknown.command_name, possibilities=names, ctx=ctx) from unknown

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Refuses those that can't be stored or opened: invalid UTF-8, or with a NUL."""
        for argument in args:
            if _NO_TEXT.search(argument):
                raise Failure(f"the argument {argument[:80]!a} is not UTF-8 text without NUL", USAGE)
        with _ended(ctx):  # --help and --version end the program here
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn an exception into a line on standard error and an exit code."""
        with warnings.catch_warnings(), _ended(ctx):
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            return super().invoke(ctx)


@contextlib.contextmanager
def _ended(ctx: click.Context) -> Iterator[None]:
    """Turn an exception of the block, or of flushing standard output, into the program's exit."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
        ctx.exit(DONE)
    except (click.exceptions.Exit, click.exceptions.NoArgsIsHelpError):
        raise
    except (Exception, KeyboardInterrupt) as error:
        end = failure(error)
        if end is None:
            raise
        try:
            sys.stdout.flush()
        except OSError:  # if the interpreter's own flush at exit failed, the exit code would be 120
            _forget_stdout()
        raise end from error


def _show_warning(message: Warning | str, *_: object) -> None:
    click.echo(f"warning: {' '.join(str(message).split())}", err=True)  # some warnings have several lines


def _forget_stdout() -> None:
    """Redirect standard output to the null device, so that the interpreter's final flush can't fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _prepare_streams() -> None:
    """Make the standard streams accept all text, and replace closed ones with the null device."""
    take_closed_streams()
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            if isinstance(stream.buffer, io.RawIOBase):  # PYTHONUNBUFFERED is set
                # A raw stream loses the rest of a partial write (https://github.com/python/cpython/issues/85393).
                stream = os.fdopen(stream.fileno(), "w", 1, encoding=stream.encoding, closefd=False)
                setattr(sys, name, stream)
            stream.reconfigure(errors="backslashreplace")


@click.group(cls=_Program, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="topicstore")
def cli() -> None:
    """Keep MQTT messages, and replay them by topic filter and time.

    If `topicstore serve` has a database open, the same commands send their requests to that server.

    Try `topicstore demo`; `topicstore COMMAND --help` explains each command.
    """


def main() -> None:
    """Run the program with the process's arguments and exit. `topicstore.cli.main` sets signal handlers before."""
    _prepare_streams()
    cli(prog_name="topicstore")
