"""``topicstore retained``, ``retention``, ``queue`` and ``sessions``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from click.testing import CliRunner, Result
from topicstore.cli import cli
from topicstore_conformance.faults.clock import START, Clock

DAY = 86_400


def run(*arguments: object, stdin: str | None = None, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, list(map(str, arguments)), input=stdin)
    assert result.exit_code == code, result.output
    if code:
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
    return result


def document(*arguments: object) -> dict[str, Any]:
    found = json.loads(run(*arguments, "--json").stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with ts.create(tmp_path / "db", shards=2):
        return tmp_path / "db"


# --- retained ---


def test_retained(path: Path) -> None:
    """In order of topics, in the formats of replay."""
    with ts.open(path) as db:
        db.publish([ts.Message(topic, topic.encode(), "me", 1, True, 1_000_000) for topic in ("b/1", "a/1", "a")])
    lines = [json.loads(line) for line in run("retained", path).stdout.splitlines()]
    assert [("a", "a"), ("a/1", "a/1"), ("b/1", "b/1")] == [(line["topic"], line["payload"]) for line in lines]
    assert ["b/1"] == [json.loads(line)["topic"] for line in run("retained", path, "b/#").stdout.splitlines()]
    assert "1970-01-01T00:00:01Z,a/1,me,1,true,a/1,," in run("retained", path, "+/1", "--format", "csv").stdout
    table = run("retained", path, "a", "--format", "table").stdout.splitlines()
    assert (2, "1970-01-01T00:00:01Z  a      me      1 R  a") == (len(table), table[1])
    assert "" == run("retained", path, "none/#").stdout


# --- retention ---


def test_limits_are_shown_and_changed_one_by_one(path: Path) -> None:
    """What is not named stays; ``none`` lifts one."""
    assert "for ever" in run("retention", path).stdout
    run("retention", "set", path, "--max-age", "1d12h", "--max-bytes", "1.5GB")
    run("retention", "set", path, "--when-full", "drop", "--rotate-every", "90")
    shown = document("retention", "show", path)
    assert (1.5 * DAY, 90.0, 1_500_000_000, "drop", 0, 1) == tuple(
        shown[name] for name in ("max_age", "rotate_every", "max_bytes", "when_full", "live_bytes", "generations")
    )
    text = run("retention", path).stdout
    assert [True] * 4 == [part in text for part in ("36 hours", "90 s", "1.5 GB, then the oldest go", "1 generation\n")]
    changed = document("retention", "set", path, "--max-age", "none")
    assert (None, 90.0) == (changed["max_age"], changed["rotate_every"])


@pytest.mark.parametrize(
    ("option", "text", "seconds_or_bytes"),
    [
        ("--max-age", "7d", 7 * DAY),
        ("--max-age", "0.5", 0.5),
        ("--rotate-every", "2w", 14 * DAY),
        ("--max-bytes", "1000", 1_000),
        ("--max-bytes", "20 kB", 20_000),
        ("--max-bytes", "3M", 3_000_000),
        ("--max-bytes", "1TB", 10**12),
    ],
)
def test_how_limits_are_written(path: Path, option: str, text: str, seconds_or_bytes: float) -> None:
    name = option.removeprefix("--").replace("-", "_")
    assert seconds_or_bytes == document("retention", "set", path, option, text)[name]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--max-age", "soon"],
        ["--max-age", "-1"],
        ["--max-age", "0"],
        ["--max-bytes", "many"],
        ["--max-bytes", "0"],
        ["--max-bytes", "1XB"],
        ["--when-full", "explode"],
    ],
)
def test_limits_that_are_none(path: Path, arguments: list[str]) -> None:
    run("retention", "set", path, *arguments, code=2)
    assert document("retention", path)["max_age"] is None


def test_a_run_says_what_went(tmp_path: Path) -> None:
    """And that nothing did."""
    path = tmp_path / "db"
    with ts.open(path, clock=Clock(START)) as db:
        db.store([ts.Message("a", b"x")] * 3)
        expiring = ts.Properties(message_expiry_interval=1)
        db.publish([ts.Message("r", b"x", retain=True, properties=expiring)])
    assert "1 retained message had expired\n" == run("retention", "run", path).stdout
    assert "nothing was to be done\n" == run("retention", "run", path).stdout
    run("retention", "set", path, "--max-age", "7d")
    said = run("retention", "run", path).stdout
    assert "generation 2 begins\ndropped: generation 1, with 3 messages of " in said
    assert document("retention", "run", path)["dropped"] == []


# --- queues ---


def test_queues_are_listed_read_and_dropped(path: Path) -> None:
    with ts.open(path) as db:
        db.queues.open("to/cloud", max_messages=9, max_bytes=5_000).append(
            [ts.Message(f"a/{n}", b"%d" % n) for n in range(5)]
        )
        db.queues.open("empty")
    (empty, cloud) = document("queue", path)["queues"]
    assert ("empty", 0, None, "refuse") == (
        empty["name"],
        empty["messages"],
        empty["max_messages"],
        empty["overflow"],
    )
    assert ("to/cloud", 5, 9, 5_000) == (
        cloud["name"],
        cloud["messages"],
        cloud["max_messages"],
        cloud["max_bytes"],
    )
    assert "9 messages, 5.0 kB: refuse" in run("queue", "list", path).stdout

    def read(*more: object) -> list[str]:
        lines = run("queue", "read", path, "to/cloud", *more).stdout.splitlines()
        return [json.loads(line)["topic"] for line in lines]

    assert ["a/0", "a/1", "a/2", "a/3", "a/4"] == read()
    assert [["a/0", "a/1"], ["a/0", "a/1"], ["a/2"]] == [
        read("--limit", 2),
        read("--limit", 2, "--commit"),
        read("--limit", 1),
    ]
    assert "a/2" in run("queue", "read", path, "to/cloud", "--format", "table").stdout
    assert "" == run("queue", "read", path, "empty", "--commit").stdout
    assert "needs --yes" in run("queue", "drop", path, "to/cloud", code=2).stderr
    assert "with 3 messages" in run("queue", "drop", path, "to/cloud", "--yes").stdout
    assert ["empty"] == [one["name"] for one in document("queue", path)["queues"]]


@pytest.mark.parametrize("arguments", [["read"], ["drop", "--yes"]])
def test_no_command_makes_a_queue_by_looking(path: Path, arguments: list[str]) -> None:
    name, *more = arguments
    assert "there is no queue 'q'" in run("queue", name, path, "q", *more, code=2).stderr
    assert [] == document("queue", path)["queues"]


# --- sessions ---


def test_sessions_are_listed_shown_and_ended(path: Path) -> None:
    with ts.open(path) as db:
        session = db.sessions.open("me", expiry_interval=None)
        session.subscribe("a/#", 1, subscription_identifier=7)
        session.disconnect()
        db.sessions.open("other", expiry_interval=DAY).disconnect()
        db.publish([ts.Message("a/b", b"x", qos=1)])
    assert ["me", "other"] == [one["client_id"] for one in document("sessions", path)["sessions"]]
    listed = run("sessions", path).stdout
    assert [True, True, True] == [part in listed for part in ("never", "away", "2 sessions")]
    (subscription,) = document("sessions", "show", path, "me")["subscriptions"]
    assert ("a/#", 1, 7) == (subscription["filter"], subscription["qos"], subscription["identifier"])
    assert "a/#" in run("sessions", "show", path, "me").stdout
    assert "was not connected" in run("sessions", "kick", path, "me").stdout
    assert "needs --yes" in run("sessions", "expire", path, "me", code=2).stderr
    run("sessions", "expire", path, "me", "--yes")
    assert ["other"] == [one["client_id"] for one in document("sessions", path)["sessions"]]


@pytest.mark.parametrize("arguments", [["show"], ["kick"], ["expire", "--yes"]])
def test_a_session_that_is_not_there(path: Path, arguments: list[str]) -> None:
    name, *more = arguments
    assert "no session of client 'me'" in run("sessions", name, path, "me", *more, code=2).stderr


@pytest.mark.parametrize("command", ["retained", "retention", "queue", "sessions"])
def test_no_command_makes_a_database_by_looking(tmp_path: Path, command: str) -> None:
    assert "there is no database" in run(command, tmp_path / "none", code=3).stderr
    assert [] == list(tmp_path.iterdir())


def test_groups_are_listed(tmp_path: Path) -> None:
    """Who shares what."""
    with ts.open(tmp_path / "db") as db:
        for client in ("one", "two"):
            db.sessions.open(client, expiry_interval=None).subscribe("$share/cars/fleet/#", 1)
    found = document("sessions", "groups", tmp_path / "db")["groups"]
    assert [("cars", "fleet/#")] == [(group["name"], group["topic_filter"]) for group in found]
    assert ["one", "two"] == [member["client_id"] for member in found[0]["members"]]
    assert "one, two" in run("sessions", "groups", tmp_path / "db").output
