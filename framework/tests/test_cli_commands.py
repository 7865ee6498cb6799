"""Every other command: what it does, what it says, and with which exit code it ends."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import topicstore as ts
from click.testing import CliRunner, Result
from topicstore.cli import cli
from topicstore.cli.files.formats import encode_lines
from topicstore.cli.terminal.exits import failure
from topicstore.contract import errors
from topicstore.contract.engine import DATA, WriteBatch
from topicstore_conformance.faults.threads import PATIENCE
from topicstore_conformance.subjects.pairs import layouts_on

ROWS = [ts.Message(f"fleet/{n % 3}/speed", b"%d" % n, f"bus-{n % 5}", timestamp=1_000_000 * n) for n in range(60)]


def run(*arguments: object, stdin: str | None = None, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, list(map(str, arguments)), input=stdin)
    assert result.exit_code == code, result.output
    if code:
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
    return result


def document(*arguments: object, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def db(tmp_path: Path) -> Path:
    with ts.create(tmp_path / "db", shards=2, timestamps="message") as opened:
        opened.store(ROWS)
    return tmp_path / "db"


def damage(path: Path) -> None:
    """Flip a byte in the middle of a stored value."""
    with ts.open_existing(path) as db:
        engine = db.storage.shards[0].engine()
        key, value = next(iter(engine.scan(DATA, (0, 0, 0), (2**32 - 1, 0, 0))))[0]
        write = WriteBatch()
        middle = len(value) // 2
        write.put(DATA, key, value[:middle] + bytes((value[middle] ^ 255,)) + value[middle + 1 :])
        engine.write(write)


def test_create(tmp_path: Path) -> None:
    made = document("create", tmp_path / "db", "--shards", 3, "--layout", "reference", "--durability", "sync")
    assert made.keys() == {
        "path",
        "id",
        "backend",
        "layout",
        "shards",
        "durability",
        "timestamps",
        "late",
        "max_skew",
        "plugins",
        "options",
        "created",
        "created_by",
        "complete",
    }
    assert (made["shards"], made["layout"], made["durability"], made["complete"]) == (3, "reference", "sync", True)
    run("create", tmp_path / "db", code=3)
    assert "created" in run("create", tmp_path / "other").stdout


def test_creation_options(tmp_path: Path) -> None:
    options = (
        "--option",
        "block.thresholds=[5,3]",
        "--option",
        "rocksdb.compression=zstd",
        "--option",
        "block.level=2",
    )
    made = document("create", tmp_path / "db", *options)
    assert made["options"] == {"block": {"thresholds": [5, 3], "level": 2}, "rocksdb": {"compression": "zstd"}}
    for bad in ("level=2", "block.level", "block.colour=1", "rocksdb.compression=rar", "other.x=1"):
        run("create", tmp_path / "bad", "--option", bad, code=2)
    assert not (tmp_path / "bad").exists()


def test_info(db: Path) -> None:
    found = document("info", db)
    assert list(found) == [
        "path",
        "id",
        "backend",
        "layout",
        "durability",
        "timestamps",
        "plugins",
        "streams",
        "messages",
        "live_bytes",
        "disk_bytes",
        "compaction_failure",
        "retention",
        "retention_failure",
        "generations",
        "shards",
        "created_with",
    ]
    assert (found["messages"], len(found["shards"]), found["generations"][0]["messages"]) == (60, 2, 60)
    assert found["shards"][0].keys() >= {
        "watermark",
        "last_position",
        "ahead",
        "lifted",
        "failure",
        "counters",
        "reads",
    }
    shown = run("info", db).stdout
    for words in ("messages", "60", "rocksdb", "block", "Generations", "Shards"):
        assert words in shown


@pytest.mark.filterwarnings("default:shard 0")  # the program shows warnings; elsewhere in tests they are errors
def test_info_warns_of_a_shard_ahead_of_the_clock(tmp_path: Path) -> None:
    ahead = 4_000_000_000_000_000
    with ts.create(tmp_path / "db", timestamps="message", clock=lambda: ahead) as opened:
        opened.store([ts.Message("a", b"", timestamp=ahead)])
    shown = run("info", tmp_path / "db")
    assert shown.stderr.startswith("warning: shard 0: its last position lies ")
    assert "in the future" in shown.stdout


def test_streams(db: Path) -> None:
    found = document("streams", db, "fleet/+/speed")["streams"]
    assert {stream["pattern"] for stream in found} == {f"fleet/{n}/speed" for n in range(3)}
    assert found[0].keys() == {"shard", "generation", "number", "pattern", "sealed"}
    shown = run("streams", db).stdout
    assert "fleet/1/speed" in shown
    assert sorted(shown.splitlines()[2:-1]) == shown.splitlines()[2:-1]
    assert document("streams", db, "other/#")["streams"] == []


def test_streams_are_in_the_order_of_people(tmp_path: Path) -> None:
    """By topic, and by number where topics have some."""
    topics = ["b", "a/10/x", "a/9/x", "a/010/x", "a", "/", "a/9", "a/" + "9" * 5_000]
    with ts.create(tmp_path / "db") as opened:
        opened.store([ts.Message(topic, b"") for topic in topics])
    ordered = ["/", "a", "a/9", "a/9/x", "a/010/x", "a/10/x", "a/" + "9" * 5_000, "b"]
    assert ordered == [stream["pattern"] for stream in document("streams", tmp_path / "db")["streams"]]


def test_generations(db: Path) -> None:
    assert document("generations", "add", db) == {"path": str(db), "generation": 2, "layout": "block"}
    run("generations", "add", db, "--layout", "reference")
    run("generations", "add", db, "--layout", "block", "--option", "level=5")
    listed = document("generations", db)["generations"]
    assert [one["layout"] for one in listed] == ["block", "block", "reference", "block"]
    assert listed[0].keys() == {"number", "layout", "options", "created", "sealed", "messages", "live_bytes"}
    assert listed[3]["options"]["level"] == 5
    assert document("generations", "drop", db, 1, "--yes") == {"path": str(db), "generation": 1, "dropped": True}
    assert document("generations", "drop", db, 1, "--yes")["dropped"] is False
    assert document("generations", "list", db)["generations"][0]["number"] == 2
    assert "reference" in run("generations", db).stdout
    assert run("replay", db).stdout == ""
    run("generations", "drop", db, 4, "--yes", code=2)
    run("generations", "drop", db, 1, code=2)  # nobody can be asked here
    run("generations", "drop", db, 9, "--yes", code=2)
    run("generations", "add", db, "--layout", "nonsense", code=2)


def test_replays_cross_generations_of_other_layouts(db: Path, tmp_path: Path) -> None:
    """A change of layout is a new generation: what comes before and behind it is read in one order."""
    layouts = ["reference", *sorted(set(layouts_on("rocksdb")) - {"reference"})]
    for number, layout in enumerate(layouts, 1):
        run("generations", "add", db, "--layout", layout)
        later = 60_000_000 * number
        more = [msgspec.structs.replace(row, timestamp=(row.timestamp or 0) + later) for row in ROWS]
        (tmp_path / "more.jsonl").write_bytes(encode_lines(more))
        run("import", db, tmp_path / "more.jsonl")
    times = [row["timestamp"] for row in map(json.loads, run("replay", db).stdout.splitlines())]
    assert [1_000_000 * second for second in range(60 * (len(layouts) + 1))] == times
    read = document("explain", db, "fleet/1/speed", "--start", "1970-01-01T00:01:00Z")
    assert set(layouts) == {slab["layout"] for slab in read["slabs"]}
    assert 20 * len(layouts) == read["messages"]
    assert {"it ended before the start"} == {slab["reason"] for slab in read["unread"]}


def test_options_of_generations(db: Path) -> None:
    """Defaults are shown too; without any given, those that the layout had last stay."""
    run("generations", "add", db, "--option", "level=5", "--option", "compression=zstd")
    run("generations", "add", db)
    run("generations", "add", db, "--layout", "reference")
    run("generations", "add", db, "--layout", "block")
    first, *changed, other, last = (one["options"] for one in document("generations", db)["generations"])
    assert [{**first, "level": 5, "compression": "zstd"}] * 2 == changed
    assert ({}, changed[-1]) == (other, last)
    assert first.keys() >= {"level", "compression", "thresholds"}
    for command in ("generations", "info"):
        shown = run(command, db).stdout
        assert 3 == shown.count("level=5")
        assert 4 == shown.count("thresholds=[100,20]")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--layout", "block", "--option", "block.level=5", "--option", "block.thresholds=[7]"),
        ("block", "--option", "level=5", "--option", "thresholds=[7]"),
        ("block", "--layout", "block", "--option", "block.level=5", "--option", "thresholds=[7]"),
        ("--option", "block.level=5", "--option", "block.thresholds=[7]"),
    ],
)
def test_how_a_generation_may_be_asked_for(db: Path, arguments: tuple[str, ...]) -> None:
    """As with `create`, and as people write it."""
    run("generations", "add", db, *arguments)
    added = document("generations", db)["generations"][-1]
    assert ("block", 5, [7]) == (added["layout"], added["options"]["level"], added["options"]["thresholds"])


def test_a_generation_that_contradicts_itself(db: Path) -> None:
    assert "two layouts" in run("generations", "add", db, "block", "--layout", "reference", code=2).stderr
    other = run("generations", "add", db, "block", "--option", "rocksdb.compression=zstd", code=2)
    assert "'rocksdb.compression=zstd' is no option of the layout 'block'" in other.stderr
    assert 1 == len(document("generations", db)["generations"])


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("colour=1", "'block' has no option 'colour'; it has: thresholds"),
        ("level=high", "level"),
        ("level=99", "'level' must be <= 19: 99"),
        ("level=2.5", "level"),
        ("thresholds=5", "thresholds"),
        ("thresholds=[-1]", "thresholds is one number or more"),
        ("thresholds=[]", "thresholds is one number or more"),
        ("compression=rar", "compression"),
        ("level", "is not NAME=VALUE"),
        ("block.level", "is not NAME=VALUE"),
    ],
)
def test_bad_options_of_generations(db: Path, option: str, says: str) -> None:
    """One line that names the option; no generation was added."""
    assert says in run("generations", "add", db, "--layout", "block", "--option", option, code=2).stderr
    assert 1 == len(document("generations", db)["generations"])


def test_what_reading_counts_is_for_scripts(db: Path) -> None:
    """It is always nothing here: the command has just opened the database."""
    counted = {"seeks": 0, "visited": 0, "skipped": 0, "rows": 0}
    assert [{"1": counted}] * 2 == [shard["reads"] for shard in document("info", db)["shards"]]
    shown = run("info", db).stdout
    assert not any(name in shown for name in counted)


def test_columns_that_say_nothing_are_left_out(db: Path, tmp_path: Path) -> None:
    """Shards and generations, where there is one; late messages, where there are none."""
    with ts.create(tmp_path / "one", timestamps="message", late="lift") as opened:
        opened.store(ROWS)
    for command in ("info", "streams"):
        assert "shard  " in run(command, db).stdout
        assert "shard  " not in run(command, tmp_path / "one").stdout
    assert ["topics", "stream", "state"] == run("streams", tmp_path / "one").stdout.splitlines()[0].split()
    assert "lifted" not in run("info", tmp_path / "one").stdout
    with ts.open_existing(tmp_path / "one") as opened:
        opened.store(ROWS[:1])
    assert "lifted" in run("info", tmp_path / "one").stdout
    run("generations", "add", tmp_path / "one")
    headings = run("streams", tmp_path / "one").stdout.splitlines()[0].split()
    assert ["topics", "generation", "stream", "state"] == headings


@pytest.mark.parametrize("command", ["info", "streams", "generations", "plugins"])
@pytest.mark.parametrize("columns", [None, "80", "100"])
def test_widths(db: Path, command: str, columns: str | None) -> None:
    """COLUMNS holds where there is no terminal, too; no line is padded, no number or heading is broken."""
    arguments = [command, *([] if command == "plugins" else [str(db)])]
    result = CliRunner(env={"COLUMNS": columns}).invoke(cli, arguments)
    assert 0 == result.exit_code
    lines = result.stdout.splitlines()
    assert [line.rstrip() for line in lines] == lines
    assert max(len(line) for line in lines if str(db) not in line) <= int(columns or 1_000)
    assert "…" not in result.stdout
    headings = {"info": "readable up to", "streams": "generation", "generations": "messages", "plugins": "capabilities"}
    assert command == "streams" or headings[command] in result.stdout


def test_plugins() -> None:
    found = document("plugins")
    assert found.keys() == {"plugins", "backends", "layouts", "workloads", "commands", "failed"}
    backends = {one["name"]: one for one in found["backends"]}
    assert "persistent" in backends["rocksdb"]["capabilities"]
    assert backends["rocksdb"].keys() == {
        "name",
        "plugin",
        "summary",
        "available",
        "why",
        "capabilities",
        "durability",
    }
    assert {"reference", "block"} <= {one["name"] for one in found["layouts"]}
    assert "rocksdb" in run("plugins").stdout


def test_a_plugin_that_is_disabled() -> None:
    environment = {**os.environ, "TOPICSTORE_DISABLE_PLUGINS": "layouts"}
    program = [sys.executable, "-m", "topicstore.cli", "plugins"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert "warning: plugin 'layouts' of topicstore is disabled by TOPICSTORE_DISABLE_PLUGINS\n" == done.stderr


def test_a_warning_is_one_line(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(_: Path) -> None:
        warnings.warn("first,\n  second\nthird", stacklevel=1)

    monkeypatch.setattr("topicstore.cli.commands.info.info.callback", lambda path, **_: warn(path))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert "warning: first, second third\n" == run("info", db).stderr


def test_verify(db: Path) -> None:
    assert document("verify", db) == {"path": str(db), "ok": True, "messages": 60, "damages": []}
    assert "nothing is damaged" in run("verify", db).stdout
    damage(db)
    found = document("verify", db, code=1)
    assert found["ok"] is False
    assert found["damages"][0].keys() == {"place", "reason"}
    result = CliRunner().invoke(cli, ["verify", str(db)])
    assert (result.exit_code, result.stderr) == (1, "")
    assert found["damages"][0]["place"] in result.stdout
    run("replay", db, code=5)


def test_a_database_too_damaged_to_open(db: Path) -> None:
    manifest = db / "topicstore.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"shards": 2', b'"shards": 3'))
    assert document("verify", db, code=1)["damages"][0]["place"] == str(manifest)
    run("info", db, code=5)


def test_delete(db: Path) -> None:
    span = ("--start", "1970-01-01T00:00:10Z", "--until", "1970-01-01T00:00:20Z")
    assert "--yes" in run("delete", db, "#", code=2).stderr
    gone = sum(m.topic == "fleet/1/speed" and 10 <= (m.timestamp or 0) / 1e6 < 20 for m in ROWS)
    assert document("delete", db, "fleet/1/speed", *span, "--yes") == {
        "path": str(db),
        "filter": "fleet/1/speed",
        "deleted": gone,
    }
    assert f"{60 - gone} messages" in run("delete", db, "#", "--yes").stdout


def on_a_terminal(*arguments: object) -> str:
    """Run the program where standard error is a terminal; return what it says there."""
    ours, theirs = pty.openpty()
    program = [sys.executable, "-m", "topicstore.cli", *map(str, arguments)]
    done = subprocess.run(program, stdout=subprocess.PIPE, stderr=theirs, timeout=PATIENCE, check=True)
    os.close(theirs)
    assert b"" == done.stdout
    try:
        return os.read(ours, 65_536).decode()
    except OSError:  # on Linux, nothing was written
        return ""
    finally:
        os.close(ours)


def test_a_replay_of_nothing(db: Path, tmp_path: Path) -> None:
    """A person is told so, and where the messages are; a script gets nothing."""
    newest = "no messages match; the newest of the database is of 1970-01-01T00:00:59Z\r\n"
    assert newest == on_a_terminal("replay", db, "nosuch")
    assert newest == on_a_terminal("replay", db, "--start", "-2h", "--format", "jsonl")
    assert "" == on_a_terminal("replay", db, "--limit", 0)
    run("create", tmp_path / "empty")
    assert "no messages: the database holds none\r\n" == on_a_terminal("replay", tmp_path / "empty")
    assert ("", "") == (run("replay", db, "nosuch").stdout, run("replay", db, "nosuch").stderr)


def test_checkpoint(db: Path, tmp_path: Path) -> None:
    assert "60 messages" in run("checkpoint", db, tmp_path / "copy").stdout
    assert run("replay", tmp_path / "copy").stdout == run("replay", db).stdout
    run("checkpoint", db, tmp_path / "copy", code=3)


@pytest.mark.parametrize("command", ["replay", "streams", "info", "generations", "verify", "checkpoint", "delete"])
def test_no_command_makes_a_database_by_looking(tmp_path: Path, command: str) -> None:
    more = {"checkpoint": [tmp_path / "copy"], "delete": ["#", "--yes"]}.get(command, [])
    assert "there is no database" in run(command, tmp_path / "none", *more, code=3).stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_database(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for arguments in (("info", tmp_path), ("create", tmp_path), ("import", tmp_path, tmp_path / "notes.txt")):
        run(*arguments, code=3)
    run("info", tmp_path / "notes.txt", code=3)
    assert (tmp_path / "notes.txt").read_text() == "hello"


def test_a_database_that_is_open_elsewhere(db: Path) -> None:
    with ts.open_existing(db):
        assert "is open elsewhere" in run("info", db, code=4).stderr
        run("import", db, "-", code=4)


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["replay"], ["replay", "x", "--start", "soon"], ["create", "x", "--shards", "many"]]
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert "--help" in run(*arguments, code=2).stderr


def test_every_error_has_its_exit_code() -> None:
    """An error that nobody thought of would end as wrong usage: so this list names them all."""
    codes = {3: set[str](), 4: set[str](), 5: set[str]()}
    for name in errors.__all__:
        kind = getattr(errors, name)
        end = failure(kind("why"))
        assert end is not None
        if end.exit_code != 2:
            codes[end.exit_code].add(name)
    assert codes == {
        3: {"DatabaseNotFoundError", "NotADatabaseError", "NewerFormatError", "ManifestMismatchError"},
        4: {"DatabaseLockedError"},
        5: {"EngineError", "QuotaExceededError", "StorageFullError", "CorruptionError", "ShardReadOnlyError"},
    }
    assert failure(ZeroDivisionError()) is None
    assert [failure(e).exit_code for e in (KeyboardInterrupt(), OSError(28, "full"))] == [130, 5]  # type: ignore[union-attr]


def test_commands_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run like ours; one that fails is left out of the help, and is explained where somebody asks."""
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
        "def greet(path):\n    '''Greet.'''\n    click.echo(f'hello {path}')\n    topicstore.open_existing(path)\n"
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
