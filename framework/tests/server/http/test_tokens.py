"""Tokens: the file, the command that changes it, and the permissions of each scope over HTTP."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import topicstore as ts
from click.testing import CliRunner, Result
from topicstore.cli import cli
from topicstore.server.http.tokens import TokenFileError, Tokens
from topicstore.server.replaced_file import ReplacedFile
from topicstore_conformance.mqtt.embedded import serving_http

from .conftest import client_of


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path / "tokens")


def test_tokens_are_added_listed_and_revoked(tokens: Tokens) -> None:
    reader, admin = tokens.add("reader", "read"), tokens.add("admin", "admin")
    assert ("read", "admin", None) == (tokens.scope_of(reader), tokens.scope_of(admin), tokens.scope_of("other"))
    assert [("reader", "read"), ("admin", "admin")] == [(one.name, one.scope) for one in tokens.read()]
    tokens.revoke("reader")
    assert (None, "admin") == (tokens.scope_of(reader), tokens.scope_of(admin))
    with pytest.raises(TokenFileError, match="has no token 'reader'"):
        tokens.revoke("reader")
    with pytest.raises(TokenFileError, match="revoke it first"):
        tokens.add("admin", "read")


def test_a_file_that_an_editor_of_windows_has_saved_is_read(tokens: Tokens) -> None:
    """A token file saved by a Windows editor is read: byte order mark and carriage returns are ignored."""
    text = tokens.add("reader", "read")
    tokens.path.write_bytes(b"\xef\xbb\xbf" + tokens.path.read_bytes().replace(b"\n", b"\r\n"))
    assert "read" == tokens.scope_of(text)
    tokens.revoke("reader")
    assert [] == tokens.read()


def test_the_file_holds_hashes_and_only_its_owner_reads_it(tokens: Tokens) -> None:
    text = tokens.add("reader", "read")
    assert len(text) >= 43, "256 random bits"
    assert text not in tokens.path.read_text()
    assert 0o600 == stat.S_IMODE(tokens.path.stat().st_mode)


@pytest.mark.parametrize("name", ["", " a", "a b", "#a", "a\nb", "-a", "ä", "x" * 101])
def test_names_that_a_line_cannot_hold_are_refused(tokens: Tokens, name: str) -> None:
    with pytest.raises(TokenFileError, match="is no token's name"):
        tokens.add(name, "read")
    assert not tokens.path.exists()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A missing directory of the token file is named in the error, even when the first token is added."""
    tokens = Tokens(tmp_path / "nowhere" / "tokens")
    for use in (lambda: tokens.add("reader", "read"), lambda: tokens.revoke("reader")):
        with pytest.raises(TokenFileError, match=r"/nowhere, where the file of tokens belongs, is not there"):
            use()


@pytest.mark.parametrize("line", ["reader", "reader read", "reader all " + "0" * 64, "reader read 00", "a read b c"])
def test_a_line_that_is_no_token_is_named_and_lets_nobody_in(tokens: Tokens, line: str) -> None:
    text = tokens.add("admin", "admin")
    with tokens.path.open("a") as file:
        file.write(f"{line}\n")
    before = tokens.path.read_bytes()
    for use in (
        tokens.read,
        lambda: tokens.scope_of(text),
        lambda: tokens.add("x", "read"),
        lambda: tokens.revoke("admin"),
    ):
        with pytest.raises(TokenFileError, match="line 2"):
            use()
    assert before == tokens.path.read_bytes()


def test_a_file_is_read_again_only_when_it_was_replaced(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tokens.add("reader", "read")
    assert tokens.scope_of(text) == "read"
    with monkeypatch.context() as unread:
        unread.setattr(ReplacedFile, "lines", lambda _: pytest.fail("the file was read again"))
        assert tokens.scope_of(text) == "read"
    tokens.revoke("reader")
    assert tokens.scope_of(text) is None


def test_a_file_that_cannot_be_read_any_more_counts_as_it_was(tokens: Tokens, caplog: pytest.LogCaptureFixture) -> None:
    """A token file that becomes unreadable keeps its last contents in force, and the log says so once.

    A reload raises an error. A file that is removed means that there are no tokens.
    """
    text = tokens.add("reader", "read")
    assert tokens.scope_of(text) == "read"
    tokens.path.write_text(f"{tokens.path.read_text()}damage\n")
    for _ in range(2):
        assert tokens.scope_of(text) == "read"
    assert 1 == caplog.text.count("line 2: not a name, a scope and a hash")
    with pytest.raises(TokenFileError, match="line 2"):
        tokens.reread()
    tokens.path.unlink()
    assert tokens.scope_of(text) is None


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a closed database."""
    path = tmp_path_factory.mktemp("tokens") / "db"
    with ts.open(path, backend="rocksdb"):
        pass
    return path


def run(*arguments: str) -> Result:
    """Run `topicstore tokens` with these arguments."""
    return CliRunner().invoke(cli, ["tokens", *arguments])


def test_a_running_server_lets_in_whom_the_command_added_and_no_longer_whom_it_revoked(directory: Path) -> None:
    with ts.open(directory) as db, serving_http(db, anonymous="never") as server, client_of(server) as http:

        def status(method: str, path: str, token: str) -> int:
            return http.request(method, path, headers={"Authorization": f"Bearer {token}"}).status_code

        added = run("add", "reader", str(directory))
        assert 0 == added.exit_code, added.stderr
        token = added.stdout.strip()
        (site,) = http.get("/ds/sites", headers={"Authorization": f"bearer {token}"}).json()
        assert 200 == status("GET", "/info", token)
        assert 403 == status("PUT", f"/ds/sites/{site}/forget", token)
        admin = run("add", "boss", str(directory), "--scope", "admin").stdout.strip()
        assert 400 == status("PUT", f"/ds/sites/{site}/forget", admin)
        assert "boss admin\nreader read\n" == "".join(sorted(run("list", str(directory)).stdout.splitlines(True)))
        assert 0 == run("revoke", "reader", str(directory)).exit_code
        assert 401 == status("GET", "/info", token)
        assert 401 == status("GET", "/info", token + "x")
        assert 401 == http.get("/info").status_code
    assert 0 == run("revoke", "boss", str(directory)).exit_code


def test_a_directory_without_a_database_gets_no_file(tmp_path: Path) -> None:
    failed = run("add", "reader", str(tmp_path))
    assert 3 == failed.exit_code
    assert "there is no database" in failed.stderr
    assert [] == list(tmp_path.iterdir())


def test_the_settings_name_the_file(tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text('[http]\ntoken_file = "elsewhere"\n')
    assert 0 == run("add", "reader", "--config", str(config)).exit_code
    assert ["reader"] == [one.name for one in Tokens(tmp_path / "elsewhere").read()]


def test_the_listeners_are_listed_with_their_addresses(tmp_path: Path) -> None:
    """The listeners come with their schemes and the addresses that were bound."""
    with ts.open(tmp_path / "db", backend="memory") as db, serving_http(db) as server, client_of(server) as http:
        found = http.get("/listeners").json()
        assert found == {
            "items": [{"name": "mqtt", "scheme": "mqtt", "addresses": server.addresses}],
            "next": None,
        }


def test_a_request_can_ask_for_its_own_scope(tmp_path: Path) -> None:
    """A request learns the scope of its token; a request without any right is refused."""
    with ts.open(tmp_path / "db", backend="memory") as db, serving_http(db, token_file=tmp_path / "tokens") as server:
        tokens = Tokens(tmp_path / "tokens")
        with client_of(server) as http:
            assert http.get("/scope").json() == {"scope": "admin"}, "a request from this machine needs no token"
            for scope in ("read", "write"):
                token = tokens.add(scope, scope)
                assert http.get("/scope", headers={"Authorization": f"Bearer {token}"}).json() == {"scope": scope}
            assert http.get("/scope").status_code == 401
