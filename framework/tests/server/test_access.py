"""Authentication by each supported method, and the authorization requests of the server to plugins."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import argon2
import pytest
import topicstore as ts
from topicstore.contract.access import AuthenticationRequest, AuthorizationRequest, Credentials
from topicstore.server.access import Access, Identity, Login, PasswordFile, PasswordFileError, Refusal
from topicstore.server.access.access import AccessHooks
from topicstore.server.access.threads import Batches, TooManyWaitingError
from topicstore.server.config.model import AuthenticationSettings, AuthorizationSettings, Rule, SettingsError
from topicstore.server.listeners import Peer, Via

pytestmark = pytest.mark.anyio


def login(
    user: str | None = None,
    password: bytes | None = None,
    *,
    client_id: str = "one",
    loopback: bool = True,
    certificate: str | None = None,
    **listener: Any,
) -> Login:
    via = Via(name="here", scheme="mqtt", certificate_users=certificate is not None, **listener)
    peer = Peer(via=via, address="192.0.2.1:5", loopback=loopback, certificate_name=certificate)
    return Login(client_id=client_id, user_name=user, password=password, peer=peer)


def made(rules: AuthorizationSettings | None = None, *plugins: object, **authentication: Any) -> Access:
    """Return an `Access` with these rules, plugins and authentication settings."""
    hook = "topicstore_authenticate" if rules is None else "topicstore_authorize"
    asked = {hook.removeprefix("topicstore_"): hooks(hook, *plugins)} if plugins else {}
    return Access(AuthenticationSettings(**authentication), rules or AuthorizationSettings(), **asked)


async def outcome(access: Access, *logins: Login) -> list[str | None]:
    """Return for each client its user name, or the reason of its refusal after a dash."""
    with closing(access):
        found = [await access.authenticate(one) for one in logins]
    return [f"-{one.why}" if isinstance(one, Refusal) else one.user for one in found]


def hooks(hook: str, *plugins: object) -> AccessHooks:
    return AccessHooks([(f"plugin-{number}", plugin) for number, plugin in enumerate(plugins)], hook)


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    file = PasswordFile(tmp_path / "users", argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1))
    file.put("ann", b"secret")
    return file.path


@pytest.mark.parametrize(
    ("anonymous", "here", "there"),
    [("loopback", None, "-forbidden"), ("never", "-forbidden", "-forbidden"), ("always", None, None)],
)
async def test_anonymous_clients(anonymous: Any, here: str | None, there: str | None) -> None:
    """By default, anonymous clients are accepted from this machine only."""
    access = made(anonymous=anonymous)
    assert [here, there] == await outcome(access, login(), login(loopback=False))


async def test_a_listener_says_which_sources_count(password_file: Path) -> None:
    """A listener chooses whether plugins and passwords are asked, and which clients may be anonymous there."""

    class Plugin:
        @ts.hookimpl
        def topicstore_authenticate(self, request: AuthenticationRequest) -> list[str | bool | None]:
            return ["bob" if one.password == b"token" else None for one in request.clients]

    def logins(**listener: Any) -> list[Login]:
        return [login("ann", b"secret", **listener), login("ann", b"token", **listener), login(**listener)]

    rows = {
        ("plugins", "passwords"): ["ann", "bob", None],
        ("passwords",): ["ann", "-credentials", None],
        ("plugins",): [None, "bob", None],
        (): [None, None, None],
    }
    for sources, expected in rows.items():
        access = Access(
            AuthenticationSettings(password_file=password_file),
            AuthorizationSettings(),
            authenticate=hooks("topicstore_authenticate", Plugin()),
        )
        assert expected == await outcome(access, *logins(sources=sources))
    access = made(anonymous="always", password_file=password_file)
    assert ["ann", "-credentials", "-forbidden"] == await outcome(access, *logins(anonymous="never"))
    access = made(anonymous="never")
    assert [None] == await outcome(access, login(anonymous="always", loopback=False))


async def test_passwords_of_the_file(password_file: Path) -> None:
    """A user name with a wrong password is refused even where anonymous clients are accepted."""
    access = made(password_file=password_file)
    found = await outcome(
        access,
        login("ann", b"secret", loopback=False),
        login("ann", b"wrong"),
        login("ann"),
        login("eve", b"secret"),
        login(),
        login(loopback=False),
    )
    assert ["ann", "-credentials", "-credentials", "-credentials", None, "-forbidden"] == found


async def test_a_name_that_nobody_can_check_is_nobodys() -> None:
    """Without a password file, a client that sends a user name counts as anonymous."""
    assert [None, "-forbidden"] == await outcome(made(), login("ann", b"x"), login("ann", b"x", loopback=False))


async def test_the_name_of_a_certificate_counts(password_file: Path) -> None:
    """The name in a client certificate takes precedence over the CONNECT's user name, and needs no password."""
    access = made(anonymous="never", password_file=password_file)
    assert ["bus-7"] == await outcome(access, login("ann", b"wrong", certificate="bus-7", loopback=False))


async def test_a_file_that_has_gone_lets_nobody_in(password_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the password file is missing, no user is accepted and the log says so.

    A password file that can't be parsed is an error at start.
    """
    access = made(password_file=password_file)
    password_file.unlink()
    assert ["-unavailable"] == await outcome(access, login("ann", b"secret"))
    assert "there is no file of users" in caplog.text
    password_file.write_text("ann:secret\n")
    with pytest.raises(PasswordFileError, match="line 1"):
        made(password_file=password_file)


def test_a_login_does_not_show_its_password() -> None:
    """The repr of a login shows no password."""
    assert "secret" not in f"{login('ann', b'secret')!r}{login('ann', b'secret')}"
    client = Credentials(
        client_id="one",
        user_name="ann",
        password=b"secret",
        certificate_name=None,
        address="192.0.2.1:5",
        loopback=False,
        listener="here",
    )
    assert "secret" not in repr(AuthenticationRequest(clients=(client,)))


# --- plugins ---


class Names:
    """A plugin that knows some clients by their ids, and records the size of each batch that it is asked about."""

    def __init__(self, known: dict[str, str | bool]) -> None:
        self.known, self.calls = known, list[int]()
        self.gate = threading.Event()
        self.gate.set()
        self.called = threading.Event()

    @ts.hookimpl
    def topicstore_authenticate(self, request: AuthenticationRequest) -> Sequence[str | bool | None]:
        self.calls.append(len(request.clients))
        self.called.set()
        self.gate.wait()
        assert "secret" not in repr(request)
        return [self.known.get(client.client_id) for client in request.clients]


async def test_the_first_plugin_that_knows_a_client_says_who_it_is(password_file: Path) -> None:
    """The first plugin that knows a client decides; if none does, the server's settings decide."""
    first, second = Names({"one": "first", "two": False}), Names({"one": "second", "two": "second", "three": "second"})
    access = made(None, first, second, password_file=password_file)
    found = await outcome(
        access,
        login(client_id="one"),
        login("ann", b"secret", client_id="two"),
        login(client_id="three"),
        login("ann", b"secret", client_id="four"),
        login("ann", b"wrong", client_id="four"),
    )
    assert ["first", "-credentials", "second", "ann", "-credentials"] == found


async def test_clients_that_come_while_a_plugin_is_asked_go_with_the_next_call() -> None:
    """Clients that connect while a plugin is being asked are all asked about in the next call."""
    plugin = Names({})
    plugin.gate.clear()
    access = made(None, plugin)
    with closing(access):
        first = asyncio.create_task(access.authenticate(login()))
        await asyncio.to_thread(plugin.called.wait)
        others = [asyncio.create_task(access.authenticate(login())) for _ in range(50)]
        await asyncio.sleep(0)
        plugin.gate.set()
        for task in (first, *others):
            assert isinstance(await task, Identity)
    assert [1, 50] == plugin.calls


class Answering:
    """A plugin that returns the given answers, or raises the given error."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers

    @ts.hookimpl
    def topicstore_authenticate(self, request: AuthenticationRequest) -> Any:
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers


@pytest.mark.parametrize("answers", [LookupError("the directory is down"), [], "a", [True], [1], 7], ids=repr)
async def test_a_plugin_that_fails_lets_nobody_in(answers: object, caplog: pytest.LogCaptureFixture) -> None:
    """If a plugin raises or returns an invalid answer, the client is refused and the failure is logged."""
    access = made(None, Answering(answers))
    assert ["-unavailable"] == await outcome(access, login())
    assert [logging.ERROR] == [record.levelno for record in caplog.records]


class Topics:
    """A plugin that knows the permissions of some topics, and records the authorization requests."""

    def __init__(self, known: dict[str, bool]) -> None:
        self.known, self.asked = known, list[tuple[str, str]]()

    @ts.hookimpl
    def topicstore_authorize(self, request: AuthorizationRequest) -> Sequence[bool | None]:
        self.asked += [(one.action, one.topic) for one in request.questions]
        return [self.known.get(one.topic) for one in request.questions]


LISTED = AuthorizationSettings(
    rules=(Rule(permission="deny", topics=("a/no", "b/no")), Rule(permission="allow", topics=("a/#",)))
)


def someone(*, loopback: bool = False) -> Identity:
    return Identity(user="ann", client_id="one", loopback=loopback)


async def test_plugins_are_asked_before_the_list_and_once_a_connection() -> None:
    """Plugins are asked before the access list, once for each connection and topic.

    The list decides on topics about which no plugin has an answer.
    """
    plugin = Topics({"a/no": True, "a/x": False})
    access = made(LISTED, plugin)
    permissions = access.permissions(someone())
    with closing(access):
        topics = ["a/no", "a/x", "a/y", "b"]
        assert [None] * 4 == [permissions.decided("publish", topic) for topic in topics]
        for _ in range(3):
            assert [True, False, True, False] == await permissions.decide("publish", topics)
        assert [True, False, True, False] == [permissions.decided("publish", topic) for topic in topics]
        assert [("publish", topic) for topic in topics] == plugin.asked
        assert [False] == await permissions.decide("subscribe", ["a/x"])
        assert ("subscribe", "a/x") == plugin.asked[-1]
        assert [False] == await access.permissions(someone()).decide("publish", ["a/x"])
        assert 6 == len(plugin.asked)


async def test_answers_about_messages_are_kept_until_all_are_there() -> None:
    """The plugin is asked once about each topic too long to be cached, even if its answers arrive in several calls."""
    topics = [f"a/{number}/{'x' * 60_000}" for number in range(12)]
    plugin = Topics(dict.fromkeys(topics, True))
    access = made(LISTED, plugin)
    permissions = access.permissions(someone())
    with closing(access):
        assert [None] * 12 == permissions.received(topics)
        for part in (topics[:4], topics[4:8], topics[8:]):
            await permissions.ask_received(part)
        assert [True] * 12 == permissions.received(topics)
        assert [("subscribe", topic) for topic in topics] == plugin.asked


def test_without_plugins_nothing_is_waited_for() -> None:
    """Without plugins every decision is immediate, even for invalid filters.

    Without settings, clients on this machine may do everything.
    """
    with closing(made(LISTED)) as access:
        permissions = access.permissions(someone())
        assert permissions.decided("publish", "a/x") is True
        assert permissions.decided("subscribe", "b/x") is False
        assert permissions.decided("subscribe", "a#") is False
    with closing(made()) as access:
        near = access.permissions(someone(loopback=True))
        assert near.unrestricted
        assert near.decided("publish", "a") is True


def test_a_plugin_that_has_not_the_hook_is_refused() -> None:
    """A plugin that is missing or doesn't implement the hook is an error at start."""
    with pytest.raises(ts.PluginError, match="'plugin-0' doesn't implement topicstore_authorize"):
        hooks("topicstore_authorize", Names({}))
    with pytest.raises(SettingsError, match=r"authentication\.plugins: there is no plugin 'ldap'"):
        made(plugins=("ldap",))


# --- requests in batches ---


async def test_a_question_whose_asker_has_gone_is_not_asked() -> None:
    """A plugin doesn't get the request of a client that disconnected while the request waited."""
    begun, gate, asked = threading.Event(), threading.Event(), list[int]()

    def answer(questions: Sequence[int]) -> Sequence[int]:
        asked.extend(questions)
        begun.set()
        gate.wait()
        return questions

    batches = Batches[int, int](answer, "test")
    with closing(batches):
        tasks = [asyncio.create_task(batches.ask([1]))]
        await asyncio.to_thread(begun.wait)
        tasks += [asyncio.create_task(batches.ask([number])) for number in (2, 3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait(tasks[1:2])
        gate.set()
        assert [[1], [3]] == [await tasks[0], await tasks[2]]
    assert [1, 3] == asked


async def test_questions_that_wait_are_bounded_and_cancelled_at_the_end() -> None:
    """The number of requests that wait for a plugin is limited, and closing cancels them."""
    begun, gate = threading.Event(), threading.Event()

    def answer(questions: Sequence[int]) -> Sequence[int]:
        begun.set()
        gate.wait()
        return [-one for one in questions]

    batches = Batches[int, int](answer, "test", most=2, waiting=3)
    first = asyncio.create_task(batches.ask([1, 2]))
    await asyncio.to_thread(begun.wait)
    second = asyncio.create_task(batches.ask([3, 4, 5]))
    await asyncio.sleep(0)
    with pytest.raises(TooManyWaitingError, match="3 requests wait already"):
        await batches.ask([6])
    gate.set()
    assert [[-1, -2], [-3, -4, -5]] == await asyncio.gather(first, second)
    gate.clear()
    begun.clear()
    third = asyncio.create_task(batches.ask([7]))
    await asyncio.to_thread(begun.wait)
    threading.Timer(0, gate.set).start()
    batches.close()
    with pytest.raises(asyncio.CancelledError):
        await third
