"""Wrong usage: errors that suggest a similar name, and refused combinations; JSON outputs of several commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import topicstore as ts
from topicstore_conformance.mqtt.serving import serving

from .conftest import document, run


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("cehckpoint data", "checkpoint"),
        ("serv", "serve"),
        ("ds infoo", "info"),
        ("plugins nwe", "new"),
        ("sessions lst", "list"),
        ("retention sett data", "set"),
        ("generations add data --layuot block", "--layout"),
    ],
)
def test_similar_names_are_suggested(words: str, meant: str) -> None:
    """An unknown command, subcommand or option is refused, and the error names a similar one."""
    error = run(*words.split(), code=2).stderr
    assert f"'{meant}'" in error.partition("(see:")[0].replace(words.split()[-1], "", 1)


def test_a_database_may_be_named_like_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that exists is a path, however similar its name is to that of a subcommand."""
    monkeypatch.chdir(tmp_path)
    ts.open("lists").close()
    assert "" == run("sessions", "lists").stderr


@pytest.mark.parametrize("command", [["replay"], ["delete", "#", "--yes"], ["explain", "#"]])
def test_times_in_the_wrong_order_are_refused(db: Path, command: list[str]) -> None:
    """An end at or before the start is an error, instead of an empty result."""
    name, *rest = command
    for until in ("2025-06-01", "2025-06-02"):
        error = run(name, db, *rest, "--start", "2025-06-02", "--until", until, code=2).stderr
        assert "--start 2025-06-02T00:00" in error
        assert f"is not before --until {until}T00:00" in error


@pytest.mark.parametrize("name", ["out.xlsx", "out.txt.gz", "out.arrow"])
def test_an_unknown_ending_of_the_output_is_refused(db: Path, tmp_path: Path, name: str) -> None:
    """A file whose ending names no format is refused unless ``--format`` names one; no file is left."""
    target = tmp_path / name
    assert "names no format: give --format" in run("replay", db, "--output", target, code=2).stderr
    assert not target.exists()
    run("replay", db, "--output", target, "--format", "jsonl")
    assert target.exists()


@pytest.mark.parametrize("name", ["out", "out.gz"])
def test_a_file_without_an_ending_is_in_json_lines(db: Path, tmp_path: Path, name: str) -> None:
    """If the file name has no ending, apart from one of compression, the output is JSON lines."""
    run("replay", db, "--output", tmp_path / name)
    run("import", tmp_path / "copy", tmp_path / name, "--format", "jsonl")
    assert document("info", db)["messages"] == document("info", tmp_path / "copy")["messages"]


def test_ports_that_no_address_has_are_refused() -> None:
    """A port above 65535, of a listener or in a URL, is refused with an error that names the bound."""
    assert "the highest port is 65535" in run("serve", "--listen", "127.0.0.1:70000", code=2).stderr
    for port in ("0", "70000"):
        assert "65535" in run("ds", "forget", "0", "--url", f"http://127.0.0.1:{port}", code=2).stderr


def test_a_checkpoint_as_json(db: Path, tmp_path: Path) -> None:
    """`checkpoint --json` prints the path of the copy and the number of its messages."""
    copy = tmp_path / "copy"
    messages = document("info", db)["messages"]
    assert {"path": str(db), "target": str(copy), "messages": messages} == document("checkpoint", db, copy)


def test_users_and_tokens_as_json(db: Path, tmp_path: Path) -> None:
    """`users` and `tokens` print documents that name the file and its change."""
    users = tmp_path / "users"
    added = document("users", "add", "ann", "--file", users, stdin="a password\n")
    assert {"file": str(users), "name": "ann", "new": True} == added
    assert {"file": str(users), "users": ["ann"]} == document("users", "list", "--file", users)
    assert {"file": str(users), "removed": "ann"} == document("users", "remove", "ann", "--file", users)
    token = document("tokens", "add", "reader", db)
    assert ("reader", "read") == (token["name"], token["scope"])
    assert len(token["token"]) > 40
    listed = document("tokens", "list", db)
    assert {"file": token["file"], "tokens": [{"name": "reader", "scope": "read"}]} == listed
    assert {"file": token["file"], "revoked": "reader"} == document("tokens", "revoke", "reader", db)


def test_a_check_of_settings_as_json(tmp_path: Path) -> None:
    """`config check --json` lists the changes that a start of the server makes, certificates, and who may connect."""
    found = document("config", "check", tmp_path / "data")
    assert "Nobody else can connect." in found.pop("access")
    changes = [f"a start creates the database {tmp_path / 'data'}"]
    assert {"ok": True, "changes": changes, "certificates": []} == found


def test_what_can_be_measured_as_json() -> None:
    """`bench list --json` has the tables of contenders, workloads and kinds."""
    found = document("bench", "list")
    assert {"contenders", "workloads", "kinds"} == set(found)
    assert "rocksdb-block" in [one["name"] for one in found["contenders"]]
    assert {"name", "kind", "messages", "why_missing", "summary"} == set(found["workloads"][0])


def test_sites_as_json_and_replicas_by_both_names(tmp_path: Path) -> None:
    """`ds info --json` has the sites and shards; `set-replicas` also works under its former, undocumented name."""
    with serving(tmp_path / "data", "--http", "127.0.0.1:0"):
        found = document("ds", "info", tmp_path / "data")
        assert [{"id": "messages/0", "replicas": [found["this"]], "transitions": [], "failed": []}] == found["shards"]
        assert [(found["this"], True)] == [(site["id"], site["up"]) for site in found["sites"]]
        for name in ("set-replicas", "set_replicas"):
            done = run("ds", name, "messages", found["this"], "--database", tmp_path / "data")
            assert "ok\n" == done.stdout
    shown = run("ds", "--help").stdout
    assert "set-replicas" in shown
    assert "set_replicas" not in shown


@pytest.mark.parametrize("command", [[], ["ds"], ["sessions"], ["retention"], ["tokens"], ["bench"]])
def test_lists_of_commands_have_whole_sentences(command: list[str]) -> None:
    """The help of the program, and of each of its groups, cuts no summary short."""
    listed = run(*command, "--help").stdout.partition("Commands:\n")[2]
    assert listed
    assert "..." not in listed


def test_json_is_one_document(db: Path) -> None:
    """`tokens list --json` prints one indented JSON document that ends with a newline, as other commands do."""
    printed = run("tokens", "list", db, "--json").stdout
    assert json.dumps(json.loads(printed), indent=2) + "\n" == printed
