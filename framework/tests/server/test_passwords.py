"""The password file: its contents, its readers, and changes to it."""

from __future__ import annotations

import asyncio
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import argon2
import pytest
from topicstore.server.access.passwords import FailedLogins, PasswordCheck, PasswordFile, PasswordFileError

QUICK = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
"""A fast hasher, because the cost of hashing isn't tested here."""


@pytest.fixture
def users(tmp_path: Path) -> PasswordFile:
    return PasswordFile(tmp_path / "users", QUICK)


def test_users_are_added_changed_and_removed(users: PasswordFile) -> None:
    """Adding an existing user changes the password, and a removed user is gone."""
    assert users.put("ann", b"first")
    assert users.put("b:ob", b"x")
    assert not users.put("ann", b"second")
    assert ["ann", "b:ob"] == users.names()
    stored = users.read()
    assert users.matches(stored["ann"], b"second")
    assert not users.matches(stored["ann"], b"first")
    users.remove("b:ob")
    assert ["ann"] == users.names()
    with pytest.raises(PasswordFileError, match="has no user 'b:ob'"):
        users.remove("b:ob")


def test_passwords_are_hashed_by_argon2id_and_only_the_owner_reads_them(users: PasswordFile) -> None:
    """Passwords are hashed by Argon2id with a salt each, and only the owner may read the file."""
    users.put("ann", b"secret")
    users.put("bob", b"secret")
    text = users.path.read_text()
    assert "secret" not in text
    assert all(line.partition(":")[2].startswith("$argon2id$") for line in text.splitlines())
    assert 2 == len(set(users.read().values()))
    assert 0o600 == stat.S_IMODE(users.path.stat().st_mode)


def test_a_file_without_a_hasher_uses_the_librarys_costs(tmp_path: Path) -> None:
    """A password file without a configured hasher uses argon2's default costs."""
    file = PasswordFile(tmp_path / "users")
    file.put("ann", b"secret")
    assert argon2.extract_parameters(file.read()["ann"]) == argon2.profiles.get_default_parameters()


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_file_that_an_editor_of_windows_has_saved_is_read(users: PasswordFile, mark: bytes, end: bytes) -> None:
    """A password file saved by a Windows editor is read: byte order mark and carriage returns are ignored.

    A password change still replaces the line of the file's first user, after the byte order mark.
    """
    users.put("ann", b"first")
    users.put("bob", b"second")
    users.path.write_bytes(mark + users.path.read_bytes().replace(b"\n", end))
    assert ["ann", "bob"] == users.names()
    assert users.matches(users.read()["bob"], b"second")
    assert not users.put("ann", b"other")
    assert users.matches(users.read()["ann"], b"other")


def test_comments_stay(users: PasswordFile) -> None:
    """Comments in the file are kept."""
    users.put("ann", b"x")
    users.path.write_text("# the hall\n\n" + users.path.read_text())
    users.put("bob", b"y")
    assert users.path.read_text().startswith("# the hall\n")
    assert ["ann", "bob"] == users.names()


@pytest.mark.parametrize("name", ["", " ann", "ann ", "#ann", "a\nb", "a\0b", "a\tb"])
def test_names_that_a_line_cannot_hold_are_refused(users: PasswordFile, name: str) -> None:
    """A user name with a character that the file's format can't represent is refused, and nothing is written."""
    with pytest.raises(PasswordFileError, match="is no user name"):
        users.put(name, b"x")
    assert not users.path.exists()


@pytest.mark.parametrize("size", [0, 65_536])
def test_passwords_that_mqtt_cannot_carry_are_refused(users: PasswordFile, size: int) -> None:
    """Passwords that are empty, or longer than MQTT allows, are refused."""
    with pytest.raises(PasswordFileError, match="1 to 65,535 bytes"):
        users.put("ann", b"x" * size)


@pytest.mark.parametrize("line", ["ann", "ann:", ":x", "ann:secret", "ann:$argon2id$v=19$nonsense"])
def test_a_line_that_is_no_user_is_named_and_the_file_left_alone(users: PasswordFile, line: str) -> None:
    """An invalid line is reported by its number, and the file is not changed.

    For example, a password in plain text would otherwise count as a hash that no password matches.
    """
    users.put("bob", b"x")
    users.path.write_text(f"{users.path.read_text()}{line}\n")
    before = users.path.read_bytes()
    for change in (users.read, lambda: users.put("eve", b"x"), lambda: users.remove("bob")):
        with pytest.raises(PasswordFileError, match="line 2"):
            change()
    assert before == users.path.read_bytes()
    assert [users.path] == list(users.path.parent.iterdir())


def test_two_changes_at_the_same_time_are_not_lost(users: PasswordFile) -> None:
    """A change is refused while another process changes the file, so that no change is lost."""
    users.put("ann", b"x")
    begun = users.path.with_name("users.new")
    begun.touch()
    with pytest.raises(PasswordFileError, match="somebody is changing the users now"):
        users.put("bob", b"x")
    assert begun.exists()
    assert ["ann"] == users.names()


def test_a_missing_file_is_an_error_for_readers(users: PasswordFile) -> None:
    """Reading a missing file is an error; adding a user creates the file."""
    for read in (users.read, users.signature, lambda: users.remove("ann")):
        with pytest.raises(PasswordFileError, match="there is no file of users"):
            read()


# --- checking passwords in a server ---


class Counted(PasswordFile):
    """A password file that records the threads of its hash computations, and can block them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, QUICK)
        self.threads: list[threading.Thread] = []
        self.gate = threading.Event()
        self.gate.set()

    def matches(self, stored: str | None, password: bytes) -> bool:
        self.threads.append(threading.current_thread())
        self.gate.wait()
        return super().matches(stored, password)


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    file = Counted(tmp_path / "users")
    file.put("ann", b"secret")
    return file


@pytest.fixture
def check(counted: Counted) -> Iterator[PasswordCheck]:
    made = PasswordCheck(counted)
    yield made
    counted.gate.set()
    made.close()


@pytest.mark.anyio
async def test_hashes_are_computed_in_threads_and_right_ones_remembered(counted: Counted, check: PasswordCheck) -> None:
    """Hashes are computed in threads, and correct passwords are cached; wrong ones always cost a computation."""
    assert await check.matches("ann", b"secret")
    assert await check.matches("ann", b"secret")
    assert 1 == len(counted.threads)
    for name, password in (("ann", b"wrong"), ("ann", b"wrong"), ("eve", b"secret"), ("", b"")):
        assert not await check.matches(name, password)
    assert 5 == len(counted.threads)
    assert threading.main_thread() not in counted.threads


@pytest.mark.anyio
async def test_wrong_passwords_are_noted_by_address_and_user(counted: Counted) -> None:
    """Failed logins are recorded by address and user, and a correct password clears the address."""
    failed = FailedLogins()
    check = PasswordCheck(counted, failed)
    try:
        for _ in range(12):
            assert not await check.matches("ann", b"wrong", "here")
        assert failed.pause("here", "anybody") > 0
        assert failed.pause("there", "anybody") <= 0
        assert await check.matches("ann", b"secret", "here")
        assert failed.pause("here", "anybody") <= 0
    finally:
        check.close()


@pytest.mark.anyio
async def test_a_file_that_cannot_be_read_any_more_counts_as_it_was(
    counted: Counted, check: PasswordCheck, caplog: pytest.LogCaptureFixture
) -> None:
    """A password file that becomes invalid keeps its last contents in force, and the log says so once.

    A reload with such a file raises an error.
    """
    before = counted.path.read_text()
    counted.path.write_text(f"{before}bob:secret\n")
    assert await check.matches("ann", b"secret")
    assert not await check.matches("bob", b"secret")
    assert 1 == caplog.text.count("users, line 2: not a user name")
    with pytest.raises(PasswordFileError, match="line 2"):
        check.reread()
    counted.path.write_text(before)
    counted.put("bob", b"b")
    assert await check.matches("bob", b"b")


@pytest.mark.anyio
async def test_the_event_loop_goes_on_while_hashes_are_computed(counted: Counted, check: PasswordCheck) -> None:
    """The event loop runs while a hash is computed in a thread."""
    counted.gate.clear()
    waiting = asyncio.create_task(check.matches("ann", b"secret"))
    await asyncio.sleep(0)
    assert not waiting.done()
    counted.gate.set()
    assert await waiting


@pytest.mark.anyio
async def test_a_changed_file_counts_from_the_next_connection_on(counted: Counted, check: PasswordCheck) -> None:
    """A change of the file applies to the next login, even if the old password is cached."""
    assert await check.matches("ann", b"secret")
    counted.put("bob", b"b")
    assert await check.matches("bob", b"b")
    counted.put("ann", b"other")
    assert not await check.matches("ann", b"secret")
    assert await check.matches("ann", b"other")
    counted.remove("ann")
    assert not await check.matches("ann", b"other")
    counted.path.unlink()
    with pytest.raises(PasswordFileError, match="no file of users"):
        await check.matches("bob", b"b")
