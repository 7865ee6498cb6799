"""``topicstore export``, and ``import`` of exports."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import topicstore as ts
from click.testing import CliRunner
from topicstore.cli import cli

from .conftest import document, run

FIRST = 1_700_000_000_000_000


def numbered(first: int, count: int) -> list[ts.Message]:
    properties = ts.Properties(content_type="n", user_properties=(("a", "1"), ("a", "2")))
    return [
        ts.Message(
            "$SYS/n" if n % 50 == 0 else f"fleet/bus-{n % 7}",
            bytes([n % 256, n // 256 % 256]),
            f"c{n % 9}",
            n % 3,
            n % 4 == 0,
            FIRST + n * 1_000,
            properties if n % 5 == 0 else None,
        )
        for n in range(first, first + count)
    ]


def everything(path: Path) -> list[list[ts.Message]]:
    with ts.open(path, mode="r+") as db:
        assert db.verify().ok
        return [list(db.replay(text, order="time")) for text in ("#", "$SYS/#")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of three shards, with two sealed generations and ten messages in the current one."""
    path = tmp_path_factory.mktemp("made") / "db"
    with ts.open(path, shards=3, timestamps="message") as db:
        for generation in range(2):
            db.store(numbered(generation * 500, 500))
            db.add_generation()
        db.store(numbered(1_000, 10))
    return path


@pytest.fixture
def path(tmp_path: Path, made: Path) -> Path:
    """A copy of the database that `made` returns."""
    return shutil.copytree(made, tmp_path / "db")


# --- export -----------------------------------------------------------------------------


def test_export_writes_what_is_missing(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "export"
    first = document("export", path, target, "--generation", 2)
    assert (first["generations"], first["messages"], first["slabs"], first["dropped"]) == ([2], 500, 3, False)
    assert "generations 1, 2: 500 messages" in run("export", path, target).stdout
    assert f"already in {target}" in run("export", path, target).stdout
    assert len(everything(path)[0]) == 989


def test_drop_leaves_them_in_the_export_only(path: Path, tmp_path: Path) -> None:
    target, before = tmp_path / "export", everything(path)
    told = run("export", path, target, "--drop", "--generation", 1).stdout
    assert f"{path} reads them from {target} now" in told
    assert everything(path) == before
    listed = document("generations", path)
    assert listed["archived"] == {"1": str(target)}
    assert [one["live_bytes"] == 0 for one in listed["generations"]] == [True, False, False]
    assert f"generation 1 is exported to {target}" in run("generations", path).stdout
    assert "exported to" in run("info", path).stdout
    assert run("replay", path, "fleet/bus-1").stdout.count("\n") == len(
        [m for m in before[0] if m.topic == "fleet/bus-1"]
    )
    assert "nothing is damaged" in run("verify", path).stdout
    assert "(block)" in run("explain", path, "fleet/bus-1").stdout
    run("delete", path, "fleet/bus-1", "--yes", code=2)
    run("learned-topics", path)
    run("streams", path)
    run("compact", path)
    assert everything(path) == before


def test_the_target_is_reported_as_it_was_given(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert document("export", path, "cold")["target"] == "cold"
    assert "already in cold\n" in run("export", path, "cold", "--drop").stdout


def test_a_target_inside_the_database_is_refused(path: Path) -> None:
    for arguments in (("export", path, path / "cold"), ("export", path, path / "cold", "--drop")):
        assert "lies inside the database" in run(*arguments, code=3).stderr
    run("retention", "set", path, "--archive-to", path / "cold", code=3)


def test_nothing_to_export(tmp_path: Path) -> None:
    ts.open(tmp_path / "db").close()
    assert "nothing was to be exported" in run("export", tmp_path / "db", tmp_path / "export").stdout
    run("export", tmp_path / "db", tmp_path / "export", "--generation", 1, code=2)
    run("export", tmp_path / "nothing", tmp_path / "export", code=3)
    run("export", tmp_path / "db", tmp_path, code=3)
    assert "nothing was to be imported" in run("import", tmp_path / "new", tmp_path / "export").stderr


def test_damage_has_its_exit_code(path: Path, tmp_path: Path) -> None:
    run("export", path, tmp_path / "export", "--drop")
    shutil.rmtree(tmp_path / "export")
    run("replay", path, code=5)
    assert "no complete export" in run("verify", path, code=1).stdout


def test_retention_archives(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything(path)
    monkeypatch.chdir(tmp_path)
    shown = run("retention", "set", path.name, "--max-age", "1d", "--archive-to", "cold", "--yes").stdout
    assert "archived to ../cold" in shown
    report = document("retention", "run", path.name)
    assert (report["archived"], report["dropped"]) == ([1, 2], [])
    assert document("generations", path)["archived"] == {"1": str(tmp_path / "cold"), "2": str(tmp_path / "cold")}
    assert everything(path) == before
    assert document("retention", "set", path, "--archive-to", "none", "--yes")["archive_to"] is None


# --- import -----------------------------------------------------------------------------


def test_import_puts_back_every_row(path: Path, tmp_path: Path) -> None:
    """Importing an export restores every row with its shard, and with its position from the message's own time."""
    with ts.open(path, mode="r+") as db:
        db.add_generation()
        positions = [
            one for batch in db.replay_arrow("#", order="time", ids=True) for one in batch["position"].to_pylist()
        ]
    before = everything(path)
    run("export", path, tmp_path / "export", "--drop")
    shutil.rmtree(path)
    told = document("import", tmp_path / "new", tmp_path / "export")
    assert [one["outcome"] for one in told["sources"]] == ["imported"] * 3
    assert told["messages"] == 1_010
    assert everything(tmp_path / "new") == before
    with ts.open(tmp_path / "new", mode="r+") as db:
        assert db.manifest.shards == 3
        assert [
            one for b in db.replay_arrow("#", order="time", ids=True) for one in b["position"].to_pylist()
        ] == positions
    again = document("import", tmp_path / "new", tmp_path / "export")
    assert {one["outcome"] for one in again["sources"]} == {"already imported"}
    assert everything(tmp_path / "new") == before


@pytest.mark.parametrize(
    "options", [("--shards", 1), ("--shards", 5, "--layout", "wildcard_optimized"), ("--timestamps", "commit")]
)
def test_into_databases_of_other_kinds(path: Path, tmp_path: Path, options: tuple[object, ...]) -> None:
    run("export", path, tmp_path / "export")
    run("import", tmp_path / "new", tmp_path / "export", *options)
    expected = [[one for one in messages if one.timestamp < FIRST + 1_000_000] for messages in everything(path)]  # type: ignore[operator]
    by_time = [sorted(messages, key=lambda one: one.timestamp or 0) for messages in everything(tmp_path / "new")]
    assert by_time == expected


def test_times_that_are_not_in_order_are_put_behind(tmp_path: Path) -> None:
    """An import into a new database moves messages that were stored out of order to later positions."""
    with ts.open(tmp_path / "db") as db:
        db.store([ts.Message("a", b"%d" % n, "c", timestamp=FIRST - n) for n in range(100)])
        db.add_generation()
    before = everything(tmp_path / "db")
    run("export", tmp_path / "db", tmp_path / "export")
    told = document("import", tmp_path / "new", tmp_path / "export")
    assert told["sources"][0]["lifted"] == 99
    assert everything(tmp_path / "new") == before


def test_a_dropped_generation_comes_back_behind_what_is_there(tmp_path: Path) -> None:
    with ts.open(tmp_path / "db", shards=2) as db:
        db.store(numbered(0, 100))
        db.add_generation()
        db.store(numbered(100, 50))
    run("export", tmp_path / "db", tmp_path / "export")
    told = CliRunner().invoke(cli, ["import", str(tmp_path / "db"), str(tmp_path / "export")])
    assert (2, True) == (told.exit_code, "has generation 1 itself" in told.stderr)  # the error is printed after a note
    run("generations", "drop", tmp_path / "db", 1, "--yes")
    run("import", tmp_path / "db", tmp_path / "export")
    got = everything(tmp_path / "db")[0]
    assert sorted(one.timestamp or 0 for one in got) == [
        one.timestamp for one in numbered(0, 150) if one.topic[0] != "$"
    ]


def test_only_what_was_dropped_comes_back_to_where_it_was(tmp_path: Path) -> None:
    """An import into the same database restores only dropped generations, and refuses local or archived ones."""
    with ts.open(tmp_path / "db", shards=2) as db:
        for generation in range(3):
            db.store(numbered(generation * 100, 100))
            db.add_generation()
    before = everything(tmp_path / "db")
    run("export", tmp_path / "db", tmp_path / "export")
    run("export", tmp_path / "db", tmp_path / "export", "--drop", "--generation", 1, "--generation", 2)
    run("generations", "drop", tmp_path / "db", 2, "--yes")
    told = document("import", tmp_path / "db", tmp_path / "export")
    assert [(one["name"], one["messages"]) for one in told["sources"]] == [(f"{tmp_path}/export, generation 2", 100)]
    by_time = [sorted(messages, key=lambda one: one.timestamp or 0) for messages in everything(tmp_path / "db")]
    assert by_time == [sorted(messages, key=lambda one: one.timestamp or 0) for messages in before]


def test_an_export_grows_and_so_does_the_copy(path: Path, tmp_path: Path) -> None:
    run("export", path, tmp_path / "export")
    run("import", tmp_path / "new", tmp_path / "export")
    with ts.open(path, mode="r+") as db:
        db.add_generation()
    run("export", path, tmp_path / "export")
    told = document("import", tmp_path / "new", tmp_path / "export")
    assert [one["outcome"] for one in told["sources"]] == ["already imported", "already imported", "imported"]
    assert everything(tmp_path / "new") == everything(path)


def test_limit_and_going_on(path: Path, tmp_path: Path) -> None:
    run("export", path, tmp_path / "export")
    told = document("import", tmp_path / "new", tmp_path / "export", "--limit", 123, "--batch-size", 50)
    assert told["sources"][0]["outcome"] == "limit reached"
    told = document("import", tmp_path / "new", tmp_path / "export")
    assert (told["messages"], told["sources"][0]["resumed"]) == (877, 123)
    assert [len(messages) for messages in everything(tmp_path / "new")] == [980, 20]


def test_a_row_that_is_not_stored_as_exported_is_reported(path: Path, tmp_path: Path) -> None:
    """An import fails if the export is damaged, or if rows of the import that it resumes were deleted since."""
    run("export", path, tmp_path / "export")
    part = tmp_path / "export" / "shard=0001" / "generation=0002" / "part-00000.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[:2_000] + bytes([whole[2_000] ^ 1]) + whole[2_001:])
    run("import", tmp_path / "new", tmp_path / "export", code=5)
    part.write_bytes(whole)
    with ts.open(tmp_path / "new", mode="r+") as db:
        assert db.delete("fleet/bus-3", 0, FIRST + 400_000) > 0
    run("import", tmp_path / "new", tmp_path / "export")
    run("import", tmp_path / "other", tmp_path / "export", "--limit", 600, "--batch-size", 100)
    with ts.open(tmp_path / "other", mode="r+") as db:
        assert db.delete("fleet/bus-3", FIRST + 510_000, FIRST + 540_000) > 0
    told = run("import", tmp_path / "other", tmp_path / "export", code=5).stderr
    assert "is not in the database as it was exported" in told


def test_what_can_not_be_imported(path: Path, tmp_path: Path) -> None:
    run("export", path, tmp_path / "export")
    run("import", tmp_path / "new", tmp_path / "export", "--source", "name", code=2)
    assert "rows of a file" in run("import", tmp_path / "new", tmp_path / "export", "--skip", 5, code=2).stderr
    (tmp_path / "empty").mkdir()
    run("import", tmp_path / "new", tmp_path / "empty", code=2)
    shutil.rmtree(tmp_path / "export" / "shard=0002" / "generation=0001")
    assert "the export was not finished" in run("import", tmp_path / "new", tmp_path / "export", code=5).stderr
    assert not (tmp_path / "new").exists()


def test_a_file_of_it_is_imported_like_any_other(path: Path, tmp_path: Path) -> None:
    run("export", path, tmp_path / "export")
    part = tmp_path / "export" / "shard=0001" / "generation=0002" / "part-00000.parquet"
    with ts.open(path, mode="r+") as db:
        expected = next(one.messages for one in db.storage.shards[1].generations.listed() if one.number == 2)
    assert document("import", tmp_path / "new", part)["messages"] == expected


IMPORTING = """
from topicstore.cli import cli
counts(RocksdbEngine, "write")
cli(["import", *map(str, arguments), "--batch-size", "100", "--json"])
"""


def test_a_killed_import_resumes(tmp_path: Path, run_until: Callable[..., object]) -> None:
    with ts.open(tmp_path / "db", shards=2, timestamps="message") as db:
        db.store(numbered(0, 2_000))
        db.add_generation()
    run("export", tmp_path / "db", tmp_path / "export")
    resumed = []
    for moment in ((3, "before"), (5, "after"), (8, "before"), (4, "after")):
        run_until(moment, IMPORTING, tmp_path / "new", tmp_path / "export")
        with ts.open(tmp_path / "new", mode="r+") as db:
            resumed.append(db.info().messages)
    assert 0 < resumed[1] < resumed[2] < resumed[3] < 2_000
    told = document("import", tmp_path / "new", tmp_path / "export")
    # If only some shards have stored their part of a batch, fewer rows are skipped than are stored.
    assert 0 < sum(one["resumed"] for one in told["sources"]) <= resumed[-1]
    assert everything(tmp_path / "new") == everything(tmp_path / "db")
