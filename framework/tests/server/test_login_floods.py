"""Many logins at the same time: addresses take turns, failed logins are delayed, disconnected clients cost nothing."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import argon2
import pytest
import topicstore as ts
from topicstore.server.access import PasswordFile
from topicstore.server.access import passwords as password_check
from topicstore.server.access.passwords import FailedLogins
from topicstore.server.access.threads import BusyError, FairThreads
from topicstore.server.config.model import AuthenticationSettings, AuthorizationSettings, ServerSettings
from topicstore.server.config.units import site_of
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.embedded import Embedded
from topicstore_conformance.mqtt.raw_client import RawClient

THREADS = password_check._THREADS
QUICK = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)


# --- taking turns ---


class Calls:
    """Calls for a pool of one thread; they record their order and wait until the test lets them continue."""

    def __init__(self, each: int = 10, most: int = 20) -> None:
        self.made: list[str] = []
        self.gate = threading.Event()
        self.pauses: dict[str, list[float]] = {}
        self.threads = FairThreads(1, "turns", paused=self.paused, each=each, most=most)
        self.tasks: list[asyncio.Task[str]] = []

    def paused(self, address: str, _: str) -> float:
        left = self.pauses.get(address)
        return left.pop() if left else 0.0

    async def ask(self, *names: str) -> None:
        """Submit calls, each named by an address, a user and a number, such as ``"a ann 1"``."""
        for name in names:
            address, user, _ = name.split()
            self.tasks.append(asyncio.create_task(self.threads.run(address, user, lambda name=name: self.call(name))))
            await asyncio.sleep(0)  # let the call begin to wait

    def call(self, name: str) -> str:
        assert self.gate.wait(PATIENCE)
        self.made.append(name)
        return name

    async def results(self) -> list[object]:
        self.gate.set()
        return list(await asyncio.gather(*self.tasks, return_exceptions=True))


@pytest.fixture
def make_calls() -> Iterator[Callable[..., Calls]]:
    made: list[Calls] = []

    def make(**options: int) -> Calls:
        made.append(Calls(**options))
        return made[-1]

    yield make
    for calls in made:
        calls.gate.set()
        calls.threads.end()
        calls.threads.join()


@pytest.mark.anyio
async def test_addresses_have_turns_and_users_of_one_address_too(make_calls: Callable[..., Calls]) -> None:
    """Addresses take turns, and so do the users of one address.

    A call from an idle address waits for at most one call of each other address.
    """
    calls = make_calls()
    await calls.ask("x x 0", *(f"a ann {n}" for n in range(4)), "a bob 1", "b ann 1", "b ann 2", "c ann 1")
    names = [f"a ann {n}" for n in range(4)]
    assert ["x x 0", *names, "a bob 1", "b ann 1", "b ann 2", "c ann 1"] == await calls.results()
    first = ["x x 0", names[0], "b ann 1", "c ann 1"]
    assert [*first, "a bob 1", "b ann 2", names[1], names[2], names[3]] == calls.made


@pytest.mark.anyio
async def test_so_many_calls_wait_of_an_address_and_in_all(make_calls: Callable[..., Calls]) -> None:
    """The number of waiting calls is limited for each address and in total.

    At the total limit, a call of an address with few calls replaces one of the address with the most.
    """
    calls = make_calls(each=3, most=5)
    await calls.ask("x x 0", *(f"a ann {n}" for n in range(4)), "b ann 1", "b ann 2", "c ann 1", "d ann 1", "b ann 3")
    found = [None if isinstance(one, BusyError) else one for one in await calls.results()]
    assert ["x x 0", "a ann 0", None, None, None, "b ann 1", "b ann 2", "c ann 1", "d ann 1", None] == found
    assert ["x x 0", "a ann 0", "b ann 1", "c ann 1", "d ann 1", "b ann 2"] == calls.made


@pytest.mark.anyio
async def test_a_call_that_nobody_waits_for_is_not_made(make_calls: Callable[..., Calls]) -> None:
    """A call whose waiter was cancelled is skipped, unless the call has begun; then it keeps its thread to the end."""
    calls = make_calls(each=3)
    await calls.ask("a ann 0", "a ann 1", "a bob 1", "b ann 1")
    for task in calls.tasks[:3]:
        task.cancel()
    await asyncio.wait(calls.tasks[:3])
    await calls.ask("a ann 2", "a ann 3", "a ann 4")
    found = await calls.results()
    assert ["b ann 1", "a ann 2", "a ann 3", "a ann 4"] == found[3:]
    assert ["a ann 0", "b ann 1", "a ann 2", "a ann 3", "a ann 4"] == calls.made


@pytest.mark.anyio
async def test_an_address_that_pauses_lets_others_go_first(make_calls: Callable[..., Calls]) -> None:
    """A delayed address lets others go first, and is served when its delay is over."""
    calls = make_calls()
    calls.pauses["a"] = [0.001] * 4
    await calls.ask("a ann 1", "b ann 1")
    assert ["a ann 1", "b ann 1"] == await calls.results()
    assert ["b ann 1", "a ann 1"] == calls.made


@pytest.mark.anyio
async def test_calls_that_wait_are_cancelled_at_the_end(make_calls: Callable[..., Calls]) -> None:
    """Ending the threads cancels waiting calls, and later calls are refused."""
    calls = make_calls()
    await calls.ask("a ann 1", "b ann 1")
    calls.threads.end()
    calls.gate.set()
    assert isinstance((await calls.results())[1], asyncio.CancelledError)
    with pytest.raises(BusyError):
        await calls.threads.run("a", "ann", lambda: "x")
    assert ["a ann 1"] == calls.made


def test_who_has_many_addresses_of_ipv6_has_one_turn() -> None:
    """All IPv6 addresses of one /64 network count as one address; each IPv4 address counts alone, in any notation."""
    assert site_of("2001:db8::1") == site_of("2001:db8::ffff:1%eth0") == "2001:db8::/64"
    assert site_of("2001:db8:0:1::1") == "2001:db8:0:1::/64"
    assert site_of("::ffff:192.0.2.1") == site_of("192.0.2.1") == "192.0.2.1"
    assert site_of("192.0.2.2") == "192.0.2.2"
    assert site_of("") == ""


# --- delays after failed logins ---


class Clock:
    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds


def test_an_address_that_guesses_pauses_ever_longer_but_never_long() -> None:
    """An address with many failed logins is delayed ever longer, up to a second; other addresses aren't delayed.

    The delay ends with a correct password.
    """
    clock = Clock()
    failed = FailedLogins(clock)
    pauses = []
    for number in range(30):
        failed.note("a", f"user-{number}", right=False)
        pauses.append(failed.pause("a", "ann"))
    assert [0.0] * 10 == pauses[:10]
    assert 0 < pauses[10] < pauses[11] < pauses[12]
    assert 1.0 == max(pauses)
    assert failed.pause("b", "user-1") <= 0
    clock.seconds += 1.0
    assert failed.pause("a", "ann") <= 0
    failed.note("a", "ann", right=True)
    failed.note("a", "ann", right=False)
    assert failed.pause("a", "ann") <= 0


def test_failures_are_forgotten_with_time() -> None:
    """The number of failed logins that counts for an address is halved each minute."""
    clock = Clock()
    failed = FailedLogins(clock)
    for _ in range(40):
        failed.note("a", "ann", right=False)
    clock.seconds += 180
    failed.note("a", "ann", right=False)
    assert failed.pause("a", "ann") <= 0


def test_a_user_at_whom_many_guess_pauses_where_the_address_has_failed() -> None:
    """A user with many failed logins is delayed only at addresses from which logins failed.

    Otherwise anybody could lock out the user.
    """
    failed = FailedLogins(Clock())
    for number in range(40):
        failed.note(f"address-{number}", "ann", right=False)
    assert failed.pause("address-0", "ann") > 0
    assert failed.pause("address-0", "bob") <= 0
    assert failed.pause("home", "ann") <= 0


def test_what_is_remembered_of_failures_is_bounded() -> None:
    """The number of addresses and users with recorded failures is limited; the oldest failures are removed."""
    failed = FailedLogins(Clock())
    for number in range(12_000):
        for _ in range(1 if number else 20):
            failed.note(f"address-{number}", f"user-{number}", right=False)
    assert failed.pause("address-0", "user-0") <= 0
    assert [10_000, 10_000] == [len(one._found) for one in (failed._addresses, failed._users)]


# --- a server under a flood ---


class Checks:
    """A recorder of the passwords that a server checks; each check waits until the test allows it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passwords: list[bytes] = []
        self.gate = threading.Event()
        matches = PasswordFile.matches

        def counted(file: PasswordFile, stored: str | None, password: bytes) -> bool:
            self.passwords.append(password)
            assert self.gate.wait(PATIENCE)
            return matches(file, stored, password)

        monkeypatch.setattr(PasswordFile, "matches", counted)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Checks]:
    made = Checks(monkeypatch)
    yield made
    made.gate.set()


@pytest.fixture
def guarded(db: ts.Database, tmp_path: Path, checks: Checks, monkeypatch: pytest.MonkeyPatch) -> Iterator[Embedded]:
    """A server with the user ann, which lets a hundred logins of one address wait."""
    monkeypatch.setattr(password_check, "_EACH", 100)
    users = PasswordFile(tmp_path / "users", QUICK)
    users.put("ann", b"secret")
    authentication = AuthenticationSettings(password_file=users.path)
    settings = ServerSettings(authentication=authentication, authorization=AuthorizationSettings(unlisted="allow"))
    with Embedded(db, settings) as embedded:
        yield embedded
        checks.gate.set()


class ClientFrom(RawClient):
    """A client with an address of its own on this machine."""

    def __init__(self, port: int, address: str) -> None:
        super().__init__(port)
        self.close()
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE, source_address=(address, 0))


def waiting(embedded: Embedded) -> int:
    """Return the number of clients whose CONNECT isn't answered."""

    async def count() -> int:
        broker = embedded.server._broker
        return 0 if broker is None else len(broker.serving.opening)

    return embedded.do(count())


def flood(embedded: Embedded, checks: Checks, clients: ExitStack, user: Callable[[int], str]) -> list[RawClient]:
    """Connect sixty clients of one address with wrong passwords; return the clients once their logins all wait."""
    made = [clients.enter_context(embedded.client()) for _ in range(60)]
    for number, client in enumerate(made):
        client.send(wire.connect(f"flood-{number}", user_name=user(number), password=b"wrong"))
    wait_until(lambda: waiting(embedded) == len(made), "all of them to wait")
    wait_until(lambda: len(checks.passwords) == THREADS, "the first of them to be checked")
    return made


@pytest.mark.parametrize("user", [lambda _: "ann", lambda number: f"user-{number}"], ids=["one user", "many users"])
def test_a_login_from_elsewhere_gets_through_beside_a_flood(
    guarded: Embedded, checks: Checks, user: Callable[[int], str]
) -> None:
    """During a flood, a login from another address is checked next after the running checks, even for the same user."""
    with ExitStack() as clients:
        flood(guarded, checks, clients, user)
        good = clients.enter_context(ClientFrom(guarded.port, "127.0.0.2"))
        good.send(wire.connect("good", user_name="ann", password=b"secret"))
        wait_until(lambda: waiting(guarded) == 61, "the good one to wait")
        checks.gate.set()
        assert 0 == good.expect("CONNACK").reason
        assert checks.passwords.index(b"secret") <= 2 * THREADS + 1


def test_a_client_that_has_left_is_checked_no_more(guarded: Embedded, checks: Checks) -> None:
    """Logins of disconnected clients are not checked, and free their slots for other clients at once."""
    with ExitStack() as clients:
        for client in flood(guarded, checks, clients, lambda number: f"user-{number}"):
            client.close()
        wait_until(lambda: waiting(guarded) == 0, "all of them to have left")
        checks.gate.set()
        with guarded.client() as good:
            assert 0 == good.connect("good", user_name="ann", password=b"secret").reason
        assert THREADS + 1 == len(checks.passwords)


def test_a_flood_of_one_address_is_refused_beyond_a_bound(guarded: Embedded, checks: Checks) -> None:
    """Logins of one address above a limit are refused with 0x88; a login from another address can still wait."""
    with ExitStack() as clients:
        flood(guarded, checks, clients, lambda _: "ann")
        more = [clients.enter_context(guarded.client()) for _ in range(60)]
        for client in more:
            client.send(wire.connect("more", user_name="ann", password=b"wrong"))
        good = clients.enter_context(ClientFrom(guarded.port, "127.0.0.2"))
        good.send(wire.connect("good", user_name="ann", password=b"secret"))
        wait_until(lambda: waiting(guarded) == 100 + THREADS + 1, "all others to be refused")
        assert 0x88 == more[-1].expect("CONNACK").reason
        checks.gate.set()
        assert 0 == good.expect("CONNACK").reason
