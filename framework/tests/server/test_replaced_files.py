"""Files that commands change while a server reads them: the server can still read them after any change."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import argon2
import pytest
import topicstore as ts
from topicstore.server.access import PasswordFile, PasswordFileError
from topicstore.server.config.model import AuthenticationSettings, HttpSettings, Limits, ServerSettings
from topicstore.server.http.tokens import TokenFileError, Tokens
from topicstore_conformance.mqtt.embedded import ANY_PORT, Embedded

QUICK = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
SOMEBODY = 4_321
"""The number of a user and a group that need not exist."""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to others")

Change = Callable[[Path, str], None]


def change_users(path: Path, name: str) -> None:
    PasswordFile(path, QUICK).put(name, b"secret")


def change_tokens(path: Path, name: str) -> None:
    Tokens(path).add(name, "read")


def names(directory: Path) -> list[str]:
    return [one.name for one in directory.iterdir()]


both = pytest.mark.parametrize("change", [change_users, change_tokens])


@both
def test_permissions_stay(tmp_path: Path, change: Change) -> None:
    """A new file is readable by its owner only, and a changed file keeps its permissions."""
    path = tmp_path / "file"
    change(path, "ann")
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    path.chmod(0o640)
    change(path, "bob")
    assert 0o640 == stat.S_IMODE(path.stat().st_mode)
    assert ["file"] == names(tmp_path)


@both
@as_root
def test_owner_and_group_stay_when_root_changes_a_file(tmp_path: Path, change: Change) -> None:
    """A new file gets the owner of its directory, which is the server's user; a changed file keeps owner and group."""
    os.chown(tmp_path, SOMEBODY, SOMEBODY + 1)
    path = tmp_path / "file"
    for name in ("ann", "bob"):
        change(path, name)
        found = path.stat()
        assert (SOMEBODY, SOMEBODY + 1, 0o600) == (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode))
        os.chown(tmp_path, 0, 0)


@both
@as_root
def test_whoever_can_not_keep_the_owner_changes_nothing(change: Change) -> None:
    """A change that can't keep the file's owner is refused, because the server could no longer read the file."""
    with tempfile.TemporaryDirectory() as directory:  # users other than root can reach the directory
        path = Path(directory, "file")
        path.parent.chmod(0o777)
        change(path, "ann")
        path.chmod(0o644)
        before = path.read_bytes()
        os.seteuid(SOMEBODY)
        try:
            with pytest.raises((PasswordFileError, TokenFileError), match="would not keep its owner"):
                change(path, "bob")
        finally:
            os.seteuid(0)
        assert before == path.read_bytes()
        assert ["file"] == names(path.parent)


@both
def test_a_link_stays_and_leads_to_the_changed_file(tmp_path: Path, change: Change) -> None:
    """A symbolic link stays and its target is changed, also through further links or if the target is missing.

    The temporary file is written beside the target.
    """
    (tmp_path / "links").mkdir()
    (tmp_path / "files").mkdir()
    link, further, path = tmp_path / "links" / "link", tmp_path / "further", tmp_path / "files" / "file"
    link.symlink_to("../further")
    further.symlink_to("files/file")
    (tmp_path / "links").chmod(0o500)
    for name in ("ann", "bob"):
        change(link, name)
        assert link.is_symlink()
        assert further.is_symlink()
        assert name in path.read_text()
    assert [["link"], ["file"]] == [names(tmp_path / one) for one in ("links", "files")]


@pytest.mark.parametrize("file", ["users", "tokens"])
def test_a_reload_says_what_it_cannot_read_and_changes_nothing(db: ts.Database, tmp_path: Path, file: str) -> None:
    """A reload with an unreadable password or token file raises, and changes no setting and no access."""
    users, tokens = PasswordFile(tmp_path / "users", QUICK), Tokens(tmp_path / "tokens")
    users.put("ann", b"secret")
    token = tokens.add("reader", "read")
    http = HttpSettings(listen=ANY_PORT, token_file=tokens.path)
    settings = ServerSettings(authentication=AuthenticationSettings(password_file=users.path), http=http)
    with Embedded(db, settings) as embedded:
        server = embedded.server
        assert server.http is not None
        assert "read" == server.http.context.tokens.scope_of(token)
        before = server.settings
        (tmp_path / file).write_text(f"{(tmp_path / file).read_text()}damage\n")
        with pytest.raises((PasswordFileError, TokenFileError), match=f"{file}, line 2"):
            embedded.do(server.reload(ServerSettings(**{**_fields(before), "limits": Limits(connections=1)})))
        assert before == server.settings
        assert "read" == server.http.context.tokens.scope_of(token)
        with embedded.client() as client:
            assert 0 == client.connect("ann", user_name="ann", password=b"secret").reason


def _fields(settings: ServerSettings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}
