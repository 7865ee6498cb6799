"""Environment variables override the settings file, and are checked as strictly."""

from __future__ import annotations

from pathlib import Path

import pytest
from topicstore.server.config.load import Variable, read_settings
from topicstore.server.config.model import SettingsError

FILE = """
[limits]
connections = 5

[listeners.Plain]
listen = "127.0.0.1:1884"
"""
RULE = '[[authorization.rules]]\npermission = "allow"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "server.toml").write_text(FILE)
    return tmp_path / "server.toml"


def test_a_variable_counts_before_the_file(file: Path) -> None:
    """A variable overrides the file in any section, named table or storage; everything else stays as in the file."""
    found = read_settings(
        file,
        {
            "TOPICSTORE__DURABLE_SESSIONS__BATCH_SIZE": "7",
            "TOPICSTORE__DURABLE_STORAGE__MESSAGES__LOCAL_WRITE_BUFFER__FLUSH_INTERVAL": "100ms",
            "TOPICSTORE__DURABLE_STORAGE__MESSAGES__LAYOUT__LEVEL": "3",
            "TOPICSTORE__LISTENERS__PLAIN__PROTOCOL": "websocket",
            "TOPICSTORE__LIMITS__CONNECTIONS": "6",
            "TOPICSTORE__PROTOCOL__STORE_QOS0": "true",
            "TOPICSTORE__AUTHENTICATION__PLUGINS": '["a", "b"]',
            "TOPICSTORE_UNRELATED": "x",
        },
    )
    assert found.durable_sessions.batch_size == 7
    assert found.messages.local_write_buffer.flush_interval == 0.1
    assert found.messages.layout_options == {"level": 3}
    assert (found.listeners["Plain"].protocol, str(found.listeners["Plain"].listen)) == ("websocket", "127.0.0.1:1884")
    assert found.limits.connections == 6
    assert found.protocol.store_qos0
    assert found.authentication.plugins == ("a", "b")


def test_without_a_file_too() -> None:
    """Without a settings file, variables override the defaults."""
    found = read_settings(None, {"TOPICSTORE__HTTP__LISTEN": "127.0.0.1:0"})
    assert found.http is not None
    assert found.http.listen.port == 0
    assert read_settings(None, {}).http is not None


def test_paths_are_relative_to_the_current_directory(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths in variables are relative to the current directory, and not to the file."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = read_settings(file, {"TOPICSTORE__LOG__FILE": "server.log"})
    assert found.log.file == tmp_path / "elsewhere" / "server.log"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LIMITS__CONECTIONS", "1", "limits has no key 'conections'; is TOPICSTORE__LIMITS__CONNECTIONS meant?"),
        ("LIMITS__QQQ", "1", "limits has no key 'qqq'; it may have: packet_size, connections"),
        ("LIMIT__CONNECTIONS", "1", "the settings has no key 'limit'; is TOPICSTORE__LIMITS meant?"),
        ("LIMITS__CONNECTIONS", "many", "limits.connections: expected int, got str"),
        ("LIMITS__CONNECTIONS", "1\nx = 2", "limits.connections: expected int, got str"),
        ("LIMITS__CONNECTIONS__A", "1", "limits.connections is set as a whole"),
        ("LISTENERS__PLAIN__LISTEN", "1884", "listeners.Plain.listen: 1884 is not HOST:PORT"),
        ("LISTENERS__OTHER__PROTOCOL", "mqtt", "listeners.other: object missing required field listen"),
        ("", "1", "the settings has no key ''"),
    ],
)
def test_what_is_wrong_is_said_with_the_variable(name: str, value: str, said: str, file: Path) -> None:
    """An error names the variable, and suggests the existing variable with the nearest name."""
    with pytest.raises(SettingsError) as caught:
        read_settings(file, {f"TOPICSTORE__{name}": value})
    assert f"TOPICSTORE__{name}: " in str(caught.value)[: len(name) + 14]
    assert said in str(caught.value)


def test_options_of_the_command_line_override_the_environment(tmp_path: Path) -> None:
    """``--cluster`` and ``--site`` apply before the settings are checked, so a file may have ``n_sites`` alone."""
    (file := tmp_path / "server.toml").write_text("[durable_storage.messages]\nn_sites = 2\n")
    options = [Variable("--cluster", ("cluster", "url"), "file:///x"), Variable("--site", ("cluster", "site"), "a")]
    environ = {"TOPICSTORE__CLUSTER__SITE": "b", "TOPICSTORE__CLUSTER__POLL_INTERVAL": "9s"}
    found = read_settings(file, environ, options=options)
    assert found.cluster is not None
    assert (2, "file:///x", "a", 9) == (
        found.messages.n_sites,
        found.cluster.url,
        found.cluster.site,
        found.cluster.poll_interval,
    )
    with pytest.raises(SettingsError, match=r"n_sites: 2 sites need a section \[cluster\]"):
        read_settings(file, {})
    with pytest.raises(SettingsError, match=r"^--site: cluster: object missing required field url"):
        read_settings(file, {}, options=options[1:])


def test_a_variable_within_what_is_no_table(tmp_path: Path) -> None:
    """A variable for a key below a value that isn't a table in the file is an error."""
    (tmp_path / "server.toml").write_text("limits = 3")
    with pytest.raises(SettingsError, match="the file has no table 'limits' but 3"):
        read_settings(tmp_path / "server.toml", {"TOPICSTORE__LIMITS__CONNECTIONS": "1"})


@pytest.mark.parametrize(
    ("wrong", "line", "key"),
    [
        ("[limits]\nconnectionz = 1", 2, "connectionz"),
        (f'{RULE}{RULE}actions = "both"', 5, "actions"),
        ("[listeners.a]\nlistenn = 3", 2, "listenn"),
        ("[durable_storage.messages]\nlocal_write_buffer = { max = 3 }", 2, "max"),
    ],
)
def test_an_error_names_the_line(wrong: str, line: int, key: str, tmp_path: Path) -> None:
    """An error names the line of the key, also in lists of tables; in an inline table, the line of that table."""
    before = '[log]\nlevel = "info"\n\n'
    (tmp_path / "server.toml").write_text(f"{before}{wrong}\n[protocol]\n")
    with pytest.raises(SettingsError) as caught:
        read_settings(tmp_path / "server.toml", {})
    assert str(caught.value).startswith(f"{tmp_path / 'server.toml'}, line {line + 3}: "), caught.value
    assert repr(key) in str(caught.value)
