"""`topicstore config`: checking, showing and creating a settings file."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import topicstore as ts
from click.testing import CliRunner, Result
from topicstore.cli import cli
from topicstore.server.config.load import read_settings, unknown_keys
from topicstore.server.config.show import default_file, json_schema
from topicstore_conformance.conditions.skipping import need

need("rocksdb")

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 0, **environ: str) -> Result:
        result = CliRunner().invoke(cli, ["config", *arguments], env=environ)
        assert result.exit_code == code, result.output
        return result

    return run


def test_the_default_file_is_what_the_code_has(run: Run, tmp_path: Path) -> None:
    """The default file is read as exactly the settings of a server without a file."""
    (tmp_path / "server.toml").write_text(run("init").stdout)
    assert read_settings(None, {}) == read_settings(tmp_path / "server.toml", {})


def test_the_default_file_names_every_setting() -> None:
    """The default file names every setting; commented lines are valid settings with examples."""
    text = "\n".join(line.removeprefix("#") for line in default_file().splitlines() if not line.startswith("# "))
    document = tomllib.loads(text)
    assert [] == list(unknown_keys(document))
    named = {key for table in _tables(document) for key in table}
    tables = json_schema()["$defs"].values()
    assert set() == {name for table in tables for name in table["properties"]} - named


def _tables(value: object) -> list[dict[str, object]]:
    if isinstance(value, list):
        return [table for one in value for table in _tables(one)]
    if not isinstance(value, dict):
        return []
    return [value, *(table for one in value.values() for table in _tables(one))]


def test_the_examples_of_the_default_file_can_be_used(tmp_path: Path) -> None:
    """The commented examples of the default file are valid all together."""
    text = "\n".join(line if line.startswith("# ") else line.removeprefix("#") for line in default_file().splitlines())
    (tmp_path / "server.toml").write_text(text)
    found = read_settings(tmp_path / "server.toml", {})
    assert "NAME" == found.listeners["mqtt"].zone
    assert (500, 1.0) == (found.sessions_of("NAME").batch_size, found.sessions_of("NAME").longest_pause)
    assert "TEXT" not in text


def test_the_default_file_explains_every_setting() -> None:
    """The default file has a comment above each setting."""
    lines = default_file().splitlines()
    bare = [line for above, line in pairwise(lines) if re.match(r"#?\w+ = ", line) and above[:2] != "# "]
    assert [] == bare


def test_check_says_what_a_start_does(run: Run, tmp_path: Path) -> None:
    """`check` lists the changes of a start: create the database, begin a generation, add rules, set limits.

    Its last line says who may connect.
    """
    (tmp_path / "server.toml").write_text(
        '[durable_storage.messages]\nlayout = { type = "skipstream" }\nquota = "1GB"\n'
        '[durable_sessions]\nmessage_retention_period = "2d"\n'
        '[[durable_sessions.persistence]]\ntopic_filter = "a/#"\nkeep = "1h"\n'
    )
    alone = "Clients on this machine need no password; they may do everything. Nobody else can connect."
    made = run("check", "--config", "server.toml").stdout.splitlines()
    assert ["ok", "a start creates the database topicstore-data", alone] == made
    with ts.open(tmp_path / "topicstore-data"):
        pass
    assert ["ok", "a start sets delivered of retention to 10m", alone] == run("check").stdout.splitlines()
    assert run("check", "--config", "server.toml").stdout.splitlines() == [
        "ok",
        "a start begins generation 2 with the layout 'skipstream' in topicstore-data",
        "a start adds the rule of persistence 'a/#'",
        "a start sets delivered of retention to 10m",
        "a start sets max_age of retention to 2d",
        "a start sets max_bytes of retention to 1GB",
        "a start sets filters of retention to a/#=1h",
        alone,
    ]


def test_check_looks_at_further_storages(run: Run, tmp_path: Path) -> None:
    """`check` reports on additional storages, too: creations, changed layouts, conflicts, and shared directories."""
    file = tmp_path / "server.toml"
    file.write_text('[durable_storage.extra]\ndata_dir = "extra"\nlayout = { type = "skipstream" }\n')
    made = ["a start creates the database topicstore-data", "a start creates the database extra"]
    assert ["ok", *made] == run("check", "--config", "server.toml").stdout.splitlines()[:-1]
    with ts.open(tmp_path / "extra", shards=2):
        pass
    begun = "a start begins generation 2 with the layout 'skipstream' in extra"
    assert ["ok", made[0], begun] == run("check", "--config", "server.toml").stdout.splitlines()[:-1]
    file.write_text('[durable_storage.extra]\ndata_dir = "extra"\nn_shards = 3\n')
    told = run("check", "--config", "server.toml", code=2).stderr
    assert "durable_storage.extra.n_shards: the database was created with 2" in told
    file.write_text('[durable_storage.extra]\ndata_dir = "topicstore-data"\n')
    told = run("check", "--config", "server.toml", code=2).stderr
    assert "durable_storage.extra.data_dir: topicstore-data is the directory of 'messages'; each storage needs" in told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[durable_storage.messages]\nn_shards = 3",
            "was created with 1, which can't be changed to 3; take its messages over",
        ),
        ('[durable_storage.messages]\nbackend = "x"', "messages.backend: the database was created with 'rocksdb'"),
        (
            '[durable_storage.messages]\nlayout = {type="bloc"}',
            "durable_storage.messages.layout: there is no layout 'bloc'; there are: block, ",
        ),
        ("[durable_storage.messages]\nlayout = {levl=1}", "durable_storage.messages.layout: 'block' has no option"),
        (
            '[durable_storage.messages]\nlayout = {type="table"}',
            "durable_storage.messages.layout: layout 'table' can't run on backend 'rocksdb'",
        ),
        ('[authentication]\nplugins = ["x"]', "authentication.plugins: there is no plugin 'x'; there are: backends"),
        ('[authorization]\nplugins = ["layouts"]', "authorization.plugins: the plugin 'layouts' doesn't implement"),
        ('[authentication]\npassword_file = "x"', "there is no file of users at x; 'topicstore users add' makes it"),
        (
            '[listeners.a]\nlisten = "127.0.0.1:0"\ntls = {certificate = "x.pem", key = "y.pem"}',
            "listener a: there is no TLS file x.pem and no y.pem",
        ),
        ('[http.tls]\ncertificate = "server.toml"\nkey = "y.pem"', "http: there is no TLS file y.pem"),
    ],
)
def test_check_says_what_is_wrong(text: str, said: str, run: Run, tmp_path: Path) -> None:
    """`check` reports settings that are invalid or contradict the existing database."""
    with ts.open(tmp_path / "topicstore-data"):
        pass
    (tmp_path / "server.toml").write_text(text)
    assert said in run("check", "--config", "server.toml", code=2).stderr


def test_check_says_what_cannot_be_created(run: Run, tmp_path: Path) -> None:
    """`check` reports a backend that doesn't exist and a settings file that doesn't exist."""
    told = run("check", code=2, TOPICSTORE__DURABLE_STORAGE__MESSAGES__BACKEND="x").stderr
    assert "durable_storage.messages.backend: there is no backend 'x'; there are: duckdb, leveldb, memory" in told
    assert not (tmp_path / "topicstore-data").exists()
    told = run("check", "--config", "none.toml", code=2).stderr
    assert told == "error: there is no file none.toml; 'topicstore config init' prints one with all settings\n"


def test_show_has_each_setting_with_its_origin(run: Run, tmp_path: Path) -> None:
    """`show` prints each setting with its origin, as JSON or as TOML that reads as the same settings."""
    (tmp_path / "server.toml").write_text(
        '[limits]\nconnections = 7\n[durable_storage.messages.options.encryption]\npassword = "hunter2"\n'
        '[[authorization.rules]]\npermission = "deny"\ntopics = ["a", "b"]\n'
    )
    shown = run("show", "--config", "server.toml", TOPICSTORE__LIMITS__IN_FLIGHT="3").stdout
    assert "connections = 7 # file\n" in shown
    assert "in_flight = 3 # TOPICSTORE__LIMITS__IN_FLIGHT\n" in shown
    assert "topic_levels = 128 # default\n" in shown
    assert 'connect_timeout = "10s" # default\n' in shown
    assert "# http is not set\n" in shown
    assert "hunter2" not in shown
    (tmp_path / "again.toml").write_text(shown.replace("***", "hunter2"))
    again = read_settings(tmp_path / "again.toml", {})
    assert again == read_settings(tmp_path / "server.toml", {"TOPICSTORE__LIMITS__IN_FLIGHT": "3"})

    text = run("show", "--json", "--config", "server.toml").stdout
    assert "hunter2" not in text
    rows = {row["setting"]: row for row in json.loads(text)}
    assert rows["limits.connections"] == {"setting": "limits.connections", "value": 7, "origin": "file"}
    assert rows["listeners.mqtt.listen"]["value"] == "127.0.0.1:1883"


def test_the_schema_knows_every_setting(run: Run) -> None:
    """The JSON schema has every setting with its meaning, type and default.

    It accepts the default file, and refuses the files that reading refuses.
    """
    schema = json.loads(run("schema").stdout)
    assert schema == json.loads(json.dumps(json_schema()))
    batch_size = schema["$defs"]["DurableSessionsSettings"]["properties"]["batch_size"]
    assert (batch_size["type"], batch_size["default"], batch_size["minimum"]) == ("integer", 1_000, 1)
    assert "takes from the storage at once" in batch_size["description"]
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: pip install jsonschema")
    checker = jsonschema.Draft202012Validator(schema)
    checker.check_schema(schema)
    assert [] == list(checker.iter_errors(tomllib.loads(default_file())))
    for wrong in ("x = 1", '[limits]\npacket_size = "8m b"', "[limits]\nconnections = 0", "[listeners]"):
        assert list(checker.iter_errors(tomllib.loads(wrong)))
