"""Users, rules and bans over HTTP: each change is written to its file, and takes effect immediately."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore.server import Server
from topicstore.server.access.passwords import PasswordFile
from topicstore.server.config.edit import _with_rules
from topicstore.server.config.load import read_settings
from topicstore.server.config.model import Rule, SettingsError
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.embedded import serving_http
from topicstore_conformance.mqtt.raw_client import RawClient

from .conftest import client_of

FILE = """# the settings of the plant
[listeners.mqtt]
listen = "127.0.0.1:0"   # any port
[authentication]
password_file = "users"
{}
[http]
listen = "127.0.0.1:0"
"""
RULES = """
[[authorization.rules]]
permission = "allow"     # everybody
topics = ["a/#"]
"""
ALLOW, DENY = {"permission": "allow", "topics": ["b/#"]}, {"permission": "deny", "topics": ["b/c"], "users": ["ann"]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "server.toml").write_text(FILE.format(RULES))
    PasswordFile(tmp_path / "users").put("bob", b"pw-bob")
    return tmp_path / "server.toml"


@pytest.fixture
def server(db: ts.Database, file: Path) -> Iterator[Server]:
    """A server that starts with default settings, and takes those of a file at its first reload."""
    Path(db.path).mkdir(exist_ok=True)  # for the files of bans and tokens

    def read() -> object:
        return read_settings(file, {})

    with serving_http(db, read=read, file=file) as server:  # type: ignore[arg-type]
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    assert server.http is not None
    with client_of(server) as client:
        client.headers["Authorization"] = f"Bearer {server.http.context.tokens.own}"
        assert 200 == client.post("/config/reload").status_code
        yield client


def answer(server: Server, user: str, password: str) -> int:
    with RawClient(int(server.addresses[0].rpartition(":")[2])) as client:
        client.send(wire.connect("one", user_name=user, password=password.encode()))
        return client.expect("CONNACK").reason


def test_users_are_changed_in_their_file(server: Server, client: httpx.Client, file: Path) -> None:
    """Changes of users take effect on the next connection, and no response contains a password."""
    assert [{"name": "bob"}] == client.get("/users").json()["items"]
    added = client.put("/users/ann%2Fx", json={"password": "pw-one"})
    assert ({"name": "ann/x", "new": True}, 0) == (added.json(), answer(server, "ann/x", "pw-one"))
    changed = client.put("/users/ann%2Fx", json={"password": "pw-two"})
    assert {"name": "ann/x", "new": False} == changed.json()
    assert [0x86, 0] == [answer(server, "ann/x", one) for one in ("pw-one", "pw-two")]
    assert ["ann/x", "bob"] == PasswordFile(file.with_name("users")).names()
    assert {"name": "bob"} == client.delete("/users/bob").json()
    assert (0x86, 404) == (answer(server, "bob", "pw-bob"), client.delete("/users/bob").status_code)
    for name, password in (("bad%0Aname", "x"), ("empty", "")):
        refused = client.put(f"/users/{name}", json={"password": password})
        assert (400, False) == (refused.status_code, "pw-" in refused.text)
    assert "pw-" not in client.put("/users/ann", json={"password": "pw-one", "x": 1}).text


def test_rules_are_changed_in_the_settings(server: Server, client: httpx.Client, file: Path) -> None:
    """Access rules are replaced in the settings file and apply at once; the file's other lines stay."""
    assert [["a/#"]] == [one["topics"] for one in client.get("/rules").json()["items"]]
    done = client.put("/rules", json=[DENY, ALLOW])
    assert (200, ["authorization.rules"]) == (done.status_code, done.json()["changed"])
    shown = client.get("/rules").json()["items"]
    assert [("deny", ["b/c"], ["ann"]), ("allow", ["b/#"], ["*"])] == [
        (one["permission"], one["topics"], one["users"]) for one in shown
    ]
    assert client.get("/config").json()["authorization"]["rules"] == shown
    assert read_settings(file, {}).authorization.rules == server.settings.authorization.rules
    text = file.read_text()
    assert all(line in text for line in FILE.format("").splitlines())
    assert "everybody" not in text
    client.put("/rules", json=[])
    assert [] == client.get("/rules").json()["items"]
    assert "rules" not in file.read_text()


def test_rules_that_cannot_be_change_nothing(client: httpx.Client, file: Path) -> None:
    """Invalid rules, and rules for a file that is otherwise invalid, are refused; file and rules stay as they were."""
    before = file.read_text()
    for wrong in ([{"permission": "allow"}], [{**ALLOW, "topics": ["a/#/b"]}], [{**ALLOW, "users": 1}], {}):
        assert 400 == client.put("/rules", json=wrong).status_code
    assert before == file.read_text()
    file.write_text(before + "[limits]\nconections = 1\n")
    refused = client.put("/rules", json=[ALLOW])
    assert (400, True) == (refused.status_code, "conections" in refused.json()["detail"])
    assert before + "[limits]\nconections = 1\n" == file.read_text()
    assert 1 == len(client.get("/rules").json()["items"])


def test_without_files_nothing_is_changed(http: httpx.Client) -> None:
    """A server without a settings file or a password file refuses changes of rules and users."""
    assert 400 == http.put("/rules", json=[]).status_code
    assert 409 == http.put("/users/ann", json={"password": "x"}).status_code
    assert 409 == http.get("/users").status_code


def test_bans_are_made_and_lifted(server: Server, client: httpx.Client) -> None:
    """Bans are added, listed and lifted with immediate effect; invalid ones are refused."""
    assert {"items": [], "next": None} == client.get("/bans").json()
    made = client.post("/bans", json={"kind": "user", "value": "bob", "seconds": 3_600, "reason": "noise"})
    assert (201, "noise", True) == (made.status_code, made.json()["reason"], made.json()["until"] is not None)
    assert 0x8A == answer(server, "bob", "pw-bob")
    address = client.post("/bans", json={"kind": "address", "value": "2001:DB8::/32"}).json()
    assert ("2001:db8::/32", None) == (address["value"], address["until"])
    assert [address, made.json()] == client.get("/bans").json()["items"]
    assert made.json() == client.delete("/bans", params={"kind": "user", "value": "bob"}).json()
    assert 404 == client.delete("/bans", params={"kind": "user", "value": "bob"}).status_code
    assert 0 == answer(server, "bob", "pw-bob")
    for wrong in ({"kind": "address", "value": "x"}, {"kind": "x", "value": "x"}, {"kind": "user", "value": ""}):
        assert 400 == client.post("/bans", json=wrong).status_code
    assert 400 == client.post("/bans", json={"kind": "user", "value": "x", "seconds": -1}).status_code
    client.delete("/bans", params={"kind": "address", "value": "2001:db8:0::/32"})
    assert [] == client.get("/bans").json()["items"]


@pytest.mark.parametrize("path", ["/users", "/rules", "/bans"])
def test_only_administrators_see_them(server: Server, path: str) -> None:
    """Users, rules and bans need the scope `admin`."""
    assert server.http is not None
    tokens = server.http.context.tokens
    with client_of(server) as client:
        assert 401 == client.get(path, headers={"Authorization": "Bearer x"}).status_code
        text = tokens.add("writer", "write")
        try:
            assert 403 == client.get(path, headers={"Authorization": f"Bearer {text}"}).status_code
        finally:
            tokens.revoke("writer")


FORMS = st.sampled_from(
    [
        "",
        "# nothing\n",
        'authorization.unlisted = "deny"\n',
        '[authorization]\nunlisted = "deny"  # all\n[log]\nlevel = "info"\n',
        '[authorization]\nrules = [{ permission = "allow", topics = ["x"] }]\n',
        'authorization = { unlisted = "deny", rules = [] }\n[log]\n',
        RULES + '[log]\nlevel = "info"\n' + RULES,
        RULES + '[log]\nlevel = "info"\n[authorization]\nunlisted = "deny"\n',
    ]
)
TEXTS = st.text(min_size=1, max_size=8)


@given(
    FORMS,
    st.lists(
        st.builds(
            Rule,
            permission=st.sampled_from(["allow", "deny"]),
            topics=st.lists(TEXTS, min_size=1, max_size=2).map(tuple),
            action=st.sampled_from(["publish", "both"]),
            users=st.lists(TEXTS, max_size=2).map(tuple),
        ),
        max_size=3,
    ),
)
def test_other_settings_of_the_file_stay(text: str, rules: list[Rule]) -> None:
    """Replacing the rules of a settings file of any form keeps all other settings, or is refused."""
    try:
        found = _with_rules(Path("server.toml"), text, rules)
    except SettingsError:
        return
    before, after = tomllib.loads(text), tomllib.loads(found)
    for one in (before, after):
        one.setdefault("authorization", {}).pop("rules", None)
    assert before == after
