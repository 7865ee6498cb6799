"""Client ids: patterns that bind them to users, the cost of matching, and protection against takeover by others."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import argon2
import pytest
import topicstore as ts
from topicstore.server.access import Access, PasswordFile
from topicstore.server.access.permissions import ClientIdPatterns, NamePattern
from topicstore.server.config.model import (
    AuthenticationSettings,
    AuthorizationSettings,
    Rule,
    ServerSettings,
    SettingsError,
)
from topicstore_conformance.mqtt.embedded import Embedded

both = pytest.mark.parametrize("version", [4, 5])
QUICK = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)


def slowly_matches(text: str, name: str) -> bool:
    """Return whether a pattern matches, by trying every possible length for each ``*``."""
    if not text:
        return not name
    if text[0] == "*":
        return any(slowly_matches(text[1:], name[at:]) for at in range(len(name) + 1))
    return name[:1] == text[0] and slowly_matches(text[1:], name[1:])


def test_a_pattern_matches_what_its_texts_in_order_make() -> None:
    """A pattern gives the same result as exhaustive search, for all patterns and names of a few characters.

    The names may contain ``*``.
    """
    names = ["".join(one) for length in range(5) for one in itertools.product("ab*", repeat=length)]
    for text in ("".join(one) for length in range(6) for one in itertools.product("ab*", repeat=length)):
        pattern = NamePattern(text)
        assert [name for name in names if slowly_matches(text, name)] == [
            name for name in names if pattern.matches(name)
        ]


@pytest.mark.parametrize(
    ("text", "name"),
    [("plant-*-line-*-sensor-*-v2", "-line--sensor-"), ("*a*b*a*b*c", "ab"), ("*-x-*-x-*-x-*y*", "-x-")],
)
def test_a_long_name_takes_time_in_proportion_to_its_length(text: str, name: str) -> None:
    """Matching takes time in proportion to the name's length, because a client may send a name of 48 kB.

    Trying every ``*`` anew would take the square of that time.
    """
    pattern = NamePattern(text)

    def seconds(repeated: int) -> float:
        long = "plant-" + name * repeated
        began = time.process_time()
        for _ in range(300):
            assert not pattern.matches(long)
        return time.process_time() - began

    assert seconds(3_200) < 100 * max(seconds(200), 0.000_5)


def test_a_user_has_the_client_ids_that_patterns_make_of_its_name() -> None:
    """A pattern's %u stands for the user's name, in which ``*`` and %u are ordinary characters.

    An anonymous client matches no pattern with %u.
    """
    patterns = ClientIdPatterns(["%u", "%u-*-x", "free-*"])
    assert [one for one in ("ann", "ann-1-x", "ann-1", "bob", "annx", "") if patterns.match(one, "ann")] == [
        "ann",
        "ann-1-x",
    ]
    assert patterns.match("free-1", "ann")
    assert patterns.match("free-1", None)
    assert not patterns.match("ann", None)
    assert not ClientIdPatterns(["%u"]).match("", "")
    assert patterns.match("a*", "a*")
    assert not patterns.match("abc", "a*")
    assert patterns.match("%u", "%u")
    assert not patterns.match("ann", "%u")


def test_a_client_id_is_of_one_user_at_most() -> None:
    """A client id belongs to at most one user, for all allowed combinations of patterns."""
    names = ["".join(one) for length in (1, 2, 3) for one in itertools.product("a-.", repeat=length)]
    ids = ["".join(one) for length in range(1, 6) for one in itertools.product("a-.", repeat=length)]
    for texts in (["%u"], ["%u-*"], ["%u", "%u-*"], ["%u-*", "%u.a*"], ["%u--*", "%u.-*"], ["a%u-*", "-%u", "-%u.*"]):
        patterns = ClientIdPatterns(texts)
        for client_id in ids:
            assert len([name for name in names if patterns.match(client_id, name)]) <= 1, (texts, client_id)


@pytest.mark.parametrize(
    "texts", [["%u*"], ["*%u"], ["*-%u"], ["%u-%u"], ["%u-*", "x%u"], ["a-%u", "a-b-%u"], ["ok", "%u*"]]
)
def test_patterns_by_which_two_users_have_the_same_client_id_are_refused(texts: list[str]) -> None:
    """Patterns that give two users the same client id are an error at start that names the setting."""
    for make, place in (
        (lambda: Access(AuthenticationSettings(client_id=tuple(texts)), AuthorizationSettings()), "authentication"),
        (
            lambda: Access(
                AuthenticationSettings(),
                AuthorizationSettings(rules=(Rule(permission="deny", topics=("#",), clients=tuple(texts)),)),
            ),
            r"authorization\.rules\[0\]\.clients",
        ),
    ):
        with pytest.raises(SettingsError, match=f"{place}.*%u"):
            make()


@pytest.fixture
def serve(db: ts.Database, tmp_path: Path) -> Callable[..., Embedded]:
    """Return a function that creates a server with three users and the given setting for client ids."""
    users = PasswordFile(tmp_path / "users", QUICK)
    for name in ("ann", "bob", "ann-b"):
        users.put(name, b"secret")

    def made(client_id: str | Sequence[str], **authorization: Any) -> Embedded:
        authentication = AuthenticationSettings(
            password_file=users.path, client_id=client_id if isinstance(client_id, str) else tuple(client_id)
        )
        rules = AuthorizationSettings(**{"unlisted": "allow", **authorization})
        return Embedded(db, ServerSettings(authentication=authentication, authorization=rules))

    return made


def reason(embedded: Embedded, client_id: str, user: str | None, version: int = 5) -> int:
    """Connect a client that starts a new session; return the reason code of the CONNACK."""
    named = {} if user is None else {"user_name": user, "password": b"secret"}
    with embedded.client(version=version) as client:
        return int(client.connect(client_id, **named).reason)


@both
@pytest.mark.parametrize("setting", ["username", ["%u"], ["%u", "%u:*"]])
def test_nobody_ends_the_session_of_another_user(serve: Callable[..., Embedded], setting: Any, version: int) -> None:
    """No other user and no anonymous client can take over a user's session: the CONNECT is refused with 0x85.

    In MQTT 3.1.1 the return code is 2.
    """
    refused = 2 if version == 4 else 0x85
    with serve(setting) as embedded, embedded.client(version=version) as ann:
        assert ann.connect("ann", keep=True, user_name="ann", password=b"secret").reason == 0
        assert ann.subscribe("a", options=1) == (1,)
        assert [refused, refused] == [reason(embedded, "ann", user, version) for user in ("bob", None)]
        ann.ping()
        with embedded.client(version=version) as again:
            assert again.connect("ann", keep=True, user_name="ann", password=b"secret").present


def test_a_client_id_that_the_server_chooses_is_anybodys(serve: Callable[..., Embedded]) -> None:
    """A client id assigned by the server may be used by any user, and so may an id that a pattern without %u allows."""
    with serve(["%u", "%u-*", "free-*"]) as embedded:
        assert [0, 0, 0] == [reason(embedded, "", "ann"), reason(embedded, "", None), reason(embedded, "free-1", None)]
        assert [0, 0] == [reason(embedded, one, "ann") for one in ("ann", "ann-b-1")]
        assert [0x85, 0x85] == [reason(embedded, one, "ann-b") for one in ("ann-b", "ann-b-1")]


def test_any_client_id_is_allowed_by_default(serve: Callable[..., Embedded]) -> None:
    with serve("any") as embedded:
        assert 0 == reason(embedded, "ann", "bob")


def test_rules_speak_of_the_client_ids_of_a_user(serve: Callable[..., Embedded]) -> None:
    """An allowing rule with %u in client ids holds only for unambiguous user names; a denying one holds for all."""
    allowed = Rule(permission="allow", topics=("a",), clients=("%u-*",))
    with serve("any", rules=(allowed,), unlisted="deny") as embedded:
        for client_id, user, granted in (("ann-1", "ann", 0), ("bob-1", "ann", 0x87), ("ann-b-1", "ann-b", 0x87)):
            with embedded.client(client_id, user_name=user, password=b"secret") as client:
                assert (granted,) == client.subscribe("a"), (client_id, user)
    denied = Rule(permission="deny", topics=("a",), clients=("%u-*",))
    with serve("any", rules=(denied,)) as embedded:
        for client_id, user, granted in (("ann-1", "ann", 0x87), ("bob-1", "ann", 0), ("ann-b-1", "ann-b", 0x87)):
            with embedded.client(client_id, user_name=user, password=b"secret") as client:
                assert (granted,) == client.subscribe("a"), (client_id, user)
