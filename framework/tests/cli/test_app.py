"""Behaviour of all commands: width of output, warnings, errors and exit codes, commands of other packages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import click
import pytest
import topicstore as ts
from click.testing import CliRunner
from topicstore.cli import app, cli
from topicstore.cli.terminal.exits import failure
from topicstore.contract import errors
from topicstore_conformance.faults.threads import PATIENCE

from .conftest import run


@pytest.mark.parametrize("command", ["info", "streams", "generations", "plugins"])
@pytest.mark.parametrize("columns", [None, "80"])
def test_widths(db: Path, command: str, columns: str | None) -> None:
    """COLUMNS sets the width even without a terminal; no line is padded, and no number or heading is broken."""
    arguments = [command, *([] if command == "plugins" else [str(db)])]
    result = CliRunner(env={"COLUMNS": columns}).invoke(cli, arguments)
    assert 0 == result.exit_code
    lines = result.stdout.splitlines()
    assert [line.rstrip() for line in lines] == lines
    assert max(len(line) for line in lines if str(db) not in line) <= int(columns or 1_000)
    assert "…" not in result.stdout
    headings = {"info": "readable up to", "streams": "generation", "generations": "messages", "plugins": "capabilities"}
    assert command == "streams" or headings[command] in result.stdout


def test_summaries_are_those_of_the_commands() -> None:
    """Help and completion show each command's own summary, for built-in commands and those of optional packages."""
    context = click.Context(cli)
    shown = {item.value: item.help for item in cli.shell_complete(context, "")}
    described = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    assert {name: one and one.get_short_help_str() for name, one in described.items()} == {
        name: text for name, text in shown.items() if not name.startswith("-")
    }
    assert {name: one and one.get_short_help_str(1_000) for name, one in described.items()} == {
        name: app._COMMANDS.get(name) or app._BESIDE[name] for name in described
    }


@pytest.mark.parametrize("words", ["", "--help", "import --help", "demo --help", "topicstore e"])
def test_help_and_completion_load_little(words: str) -> None:
    """Help and completion import neither Arrow, an engine nor rich, and a command only if its name is given."""
    program = "import sys\nfrom topicstore.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    completing = words.startswith("topicstore")
    completion = {"_TOPICSTORE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "1"}
    environment = {**os.environ, **(completion if completing else {})}
    command = [sys.executable, "-c", program, *words.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ("plain,explain" if completing else "Options:") in done.stdout + done.stderr
    loaded = done.stderr.split()
    assert "topicstore.cli.app" in loaded
    commands = ("topicstore.cli.commands", "topicstore.cli.demo", "topicstore.server", "topicstore_benchmarks")
    heavy = ("pyarrow", "rocksdict", "rich", *(() if " --help" in words else commands))
    assert not [name for name in loaded if name.startswith(heavy)]


def test_a_warning_is_one_line(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(_: Path) -> None:
        warnings.warn("first,\n  second\nthird", stacklevel=1)

    monkeypatch.setattr("topicstore.cli.commands.info.info.callback", lambda path, **_: warn(path))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert "warning: first, second third\n" == run("info", db).stderr


@pytest.mark.parametrize(
    "command", sorted({*app._COMMANDS} - {"cluster", "create", "import", "demo", "ds", "plugins", "bans", "rules"})
)
def test_no_command_makes_a_database_by_looking(tmp_path: Path, command: str) -> None:
    more = {
        "checkpoint": [tmp_path / "copy"],
        "delete": ["#", "--yes"],
        "explain": ["#"],
        "export": [tmp_path / "exported"],
        "sql": ["select 1"],
    }
    assert "there is no database" in run(command, tmp_path / "none", *more.get(command, []), code=3).stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_database(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for arguments in (("info", tmp_path), ("create", tmp_path), ("import", tmp_path, tmp_path / "notes.txt")):
        run(*arguments, code=3)
    run("info", tmp_path / "notes.txt", code=3)
    assert (tmp_path / "notes.txt").read_text() == "hello"


def test_a_database_that_is_open_elsewhere(db: Path) -> None:
    with ts.open(db, mode="r+"):
        assert "is open elsewhere" in run("compact", db, code=4).stderr
        run("import", db, "-", code=4)


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["replay"], ["replay", "x", "--start", "soon"], ["create", "x", "--shards", "many"]]
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert "--help" in run(*arguments, code=2).stderr


def test_every_error_has_its_exit_code() -> None:
    """Each error class has the expected exit code; a class without one would count as wrong usage (2)."""
    codes = {3: set[str](), 4: set[str](), 5: set[str]()}
    for name in errors.__all__:
        kind = getattr(errors, name)
        end = failure(kind("why"))
        assert end is not None
        if end.exit_code != 2:
            codes[end.exit_code].add(name)
    assert codes == {
        3: {
            *("DatabaseNotFoundError", "NotADatabaseError", "NewerFormatError", "ManifestMismatchError"),
            *("FileAccessError", "PathExistsError", "PathNotDirectoryError"),
        },
        4: {"DatabaseLockedError"},
        5: {
            "EngineError",
            "FileSystemError",
            "DataLossError",
            "LogDamagedError",
            "QuotaExceededError",
            "StorageFullError",
            "CorruptionError",
            "ShardReadOnlyError",
            "TooManyOpenFilesError",
        },
    }
    assert failure(ZeroDivisionError()) is None
    assert [failure(e).exit_code for e in (KeyboardInterrupt(), OSError(28, "full"))] == [130, 5]  # type: ignore[union-attr]


def test_commands_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of other packages run like built-in ones; the help omits a broken one, and calling it says why."""
    info = tmp_path / "extra-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[topicstore.commands]\ngreet=extra_commands:greet\nbroken=extra_commands_broken:x\n"
        "odd=extra_commands:odd\ninfo=extra_commands:greet\n"
    )
    (tmp_path / "extra_commands.py").write_text(
        "import click\nimport topicstore\nodd = 1\n"
        "@click.command()\n@click.argument('path')\n"
        "def greet(path):\n    '''Greet.'''\n    click.echo(f'hello {path}')\n    topicstore.open(path, 'r+')\n"
    )
    (tmp_path / "extra_commands_broken.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run("greet", tmp_path / "none", code=3).stdout == f"hello {tmp_path / 'none'}\n"
    shown = run("--help")
    assert "greet" in shown.stdout
    assert "broken" not in shown.stdout
    assert shown.stderr == ""
    assert "no_such_module_anywhere" in run("broken", code=2).stderr
    assert "not a click command" in run("odd", code=2).stderr
    listed = CliRunner().invoke(cli, ["plugins"])
    assert listed.exit_code == 0
    for words in ("'broken' of extra: ModuleNotFoundError", "'odd' of extra", "topicstore has a command of that name"):
        assert words in listed.stderr


@pytest.mark.parametrize("wrong", ["a\0b", "\udcff\udcfe"])
def test_arguments_are_text(db: Path, tmp_path: Path, wrong: str) -> None:
    """Arguments with NUL, or with bytes that aren't UTF-8 (lone surrogates in Python), are refused."""
    for arguments in (
        ["create", tmp_path / wrong],
        ["replay", db, wrong],
        ["replay", db, "--output", tmp_path / wrong],
        ["import", db, tmp_path / wrong],
        ["import", db, "-", "--source", wrong],
        ["retention", "set", db, "--archive-to", wrong],
        ["sessions", "show", db, wrong],
        ["create", tmp_path / "new", "--option", f"block.level={wrong}"],
        [wrong],
    ):
        assert "is not UTF-8 text without NUL" in run(*arguments, code=2).stderr


def test_names_that_are_too_long(tmp_path: Path) -> None:
    for path in (tmp_path / ("x" * 300), tmp_path.joinpath(*["d" * 200] * 25)):
        assert "File name too long" in run("create", path, code=5).stderr


def test_a_size_that_no_disk_has(db: Path) -> None:
    assert "has no unit" in run("retention", "set", db, "--max-bytes", "9" * 400, code=2).stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_end_a_command(db: Path, number: int) -> None:
    """SIGTERM ends a command like Ctrl-C: one line on standard error, and exit code 130."""
    command = [sys.executable, "-m", "topicstore.cli", "replay", str(db), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(number)
        _, error = process.communicate(timeout=PATIENCE)
    assert (130, "error: interrupted\n") == (process.returncode, error)


OUTPUTS = {
    "closed": ('"$@" >&-', 0),
    "all closed": ('"$@" <&- >&- 2>&-', 0),
    "full": ('"$@" >/dev/full', 5),
    "full, and not buffered": ('PYTHONUNBUFFERED=1 "$@" >/dev/full', 5),
    "read by nobody": ('"$@" | true', 0),
    "Latin-1": ('PYTHONIOENCODING=latin-1 "$@"', 0),
    "ASCII": ('PYTHONIOENCODING=ascii "$@"', 0),
}


@pytest.mark.parametrize(
    ("output", "words"),
    [  # the help is written by click, replays as bytes, tables by rich, and other text by click
        *(("full", words) for words in ("--help", "replay", "topics", "info --json")),
        *(("full, and not buffered", words) for words in ("--help", "replay")),
        ("closed", "replay"),
        ("all closed", "info --json"),
        ("read by nobody", "replay"),
        ("Latin-1", "topics"),
        ("ASCII", "--help"),
    ],
)
def test_output_that_cannot_be_written_is_no_damage(tmp_path: Path, output: str, words: str) -> None:
    """Exit code 1 is only for damage: a full disk gives 5, a closed pipe no error, and unprintable text is escaped."""
    with ts.open(tmp_path / "db", shards=1) as db:
        db.store([ts.Message("straße/→", b"1")])
    form, code = OUTPUTS[output]
    program = ["-m", "topicstore.cli", *words.split(), *([] if words == "--help" else [str(tmp_path / "db")])]
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", form, "bash", sys.executable, *program],
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        capture_output=True,
        check=False,
    )
    expected = "error: [Errno 28] No space left on device\n" if code else ""
    assert (code, expected) == (done.returncode, done.stderr.decode())


@pytest.mark.parametrize(("arguments", "unbuffered"), [(["replay"], ""), (["replay"], 1), (["topics", "--json"], 1)])
def test_output_that_is_written_in_part_is_an_error(tmp_path: Path, arguments: list[str], unbuffered: object) -> None:
    """Output that is only partly written is an error, even with PYTHONUNBUFFERED, which many containers set."""
    with ts.open(tmp_path / "db") as db:
        db.store([ts.Message(f"{'a' * 60_000}/{n}", bytes(100_000)) for n in range(3)])
    program = [sys.executable, "-m", "topicstore.cli", *arguments, str(tmp_path / "db")]
    form = f'ulimit -f 100; PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED={unbuffered} "$@" >{tmp_path / "output"}'
    done = subprocess.run(["bash", "-c", form, "bash", *program], capture_output=True, text=True)
    assert (5, "error: [Errno 27] File too large\n") == (done.returncode, done.stderr)
    assert 100 * 1024 == (tmp_path / "output").stat().st_size


def test_a_database_becomes_the_first_of_a_cluster(tmp_path: Path, db: Path) -> None:
    """`cluster begin` copies a database to a log store, says so, and is idempotent; another database is refused."""
    url = (tmp_path / "log").as_uri()
    with ts.open(db) as one:
        count = one.info().messages
    for _ in range(2):
        assert f"{url} has {count} message" in run("cluster", "begin", db, url).stdout
    assert count == json.loads(run("cluster", "begin", db, url, "--json").stdout)["messages"]
    with ts.open(tmp_path / "second", cluster=url, site="second") as second:
        assert count == second.info().messages
    run("create", tmp_path / "other")
    assert "holds a cluster already" in run("cluster", "begin", tmp_path / "other", url, code=2).stderr
    assert "named by a URL" in run("cluster", "begin", tmp_path / "other", "somewhere", code=2).stderr
