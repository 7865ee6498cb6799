"""The examples in the help of commands: each command has one, and each is valid."""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from topicstore.cli import cli
from topicstore.cli.examples import EXAMPLES


def paths() -> Iterator[str]:
    """Yield the commands of this distribution, and their subcommands, as they are written."""
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        yield name
        if isinstance(command, click.Group):
            yield from (f"{name} {one}" for one, found in command.commands.items() if not found.hidden)


PATHS = list(paths())


class _Terminal(io.StringIO):
    """Standard input at which somebody can be asked."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("path", PATHS)
def test_every_help_has_an_example(path: str) -> None:
    """The help of every command shows at least one example, which begins with the command's name."""
    shown = CliRunner().invoke(cli, [*path.split(), "--help"], env={"COLUMNS": "200"}).output
    assert re.search(rf"(?m)^ *Examples?:\n +topicstore {path.split()[0]}\b", shown), shown


@pytest.mark.parametrize("path", ["", *PATHS])
def test_every_help_fits_a_terminal(path: str) -> None:
    """The help of the program and of each command has no line of more than 80 characters on a terminal of 80."""
    shown = CliRunner().invoke(cli, [*path.split(), "--help"], env={"COLUMNS": "80"}).output
    assert [] == [line for line in shown.splitlines() if len(line) > 80]


@pytest.mark.parametrize("example", sorted({one for found in EXAMPLES.values() for one in found}))
def test_examples_are_valid(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example has the arguments and options that its command takes."""
    for directory in ("results", "before", "after"):
        (tmp_path / directory).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", _Terminal())
    words, command, context = shlex.split(example.partition(" > ")[0]), cli, click.Context(cli)
    while isinstance(command, click.Group) and words:
        context = command.make_context(command.name, words, parent=None)
        if not context._protected_args:
            return  # a group that is a command by itself
        name, found, words = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None, name
        command = found
    if not isinstance(command, click.Group):
        command.make_context(command.name, words)


def test_there_are_no_examples_of_other_commands() -> None:
    """All examples belong to existing commands."""
    assert set() == set(EXAMPLES) - set(PATHS)
