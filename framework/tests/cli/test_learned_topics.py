"""`topicstore learned-topics`: the learned tree, as text and JSON."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts

from .conftest import document as document_of
from .conftest import run as run_program

FLEET = [f"fleet/{line}/bus-{bus}/{metric}" for line in range(3) for bus in range(8) for metric in ("speed", "temp")]
ODD = [
    "$SYS/load",
    "$SYS/",
    "/",
    "a",
    "a/b",
    '"',
    "\\",
    "a\\n/\\",
    'x"]; n1 -> n2; //',
    "\u202e\x1b[31m/\n",
    "/".join("d" * 40),
]
OPTIONS = {"block": {"thresholds": [100, 20, 6]}}


run, document = partial(run_program, "learned-topics"), partial(document_of, "learned-topics")


def store(db: ts.Database, topics: list[str], publishers: int = 7) -> None:
    db.store([ts.Message(topic, b"x", f"client-{number % publishers}") for number, topic in enumerate(topics)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database of two shards and two generations, in which few buses of a line have streams of their own."""
    with ts.open(tmp_path / "db", mode="x", shards=2, options=OPTIONS) as db:
        store(db, [*FLEET, *FLEET, *ODD])
        db.add_generation()
        store(db, FLEET[:5], 1)
    return tmp_path / "db"


def paths(nodes: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [tuple(node["path"]) for node in nodes]


def test_every_learned_node_is_there_once(path: Path) -> None:
    """Nodes with the same path in several shards and generations are merged, and list all their streams."""
    with ts.open(path, mode="r+") as db:
        learned = db.learned_topics()
    found = document(path)
    expected: dict[tuple[str, ...], list[dict[str, int]]] = {}
    for (shard, generation), nodes in learned.items():
        for node in nodes:
            streams = expected.setdefault(node.path, [])
            if node.stream is not None:
                streams.append({"shard": shard, "generation": generation, "stream": node.stream})
    assert len(learned) == 4
    assert expected == {tuple(node["path"]): node["streams"] for node in found["nodes"]}
    assert len(expected) == len(found["nodes"])
    assert (str(path), None, [1, 2], []) == tuple(found[key] for key in ("path", "filter", "generations", "unlearned"))


def test_streams_within_a_node_are_its_own_and_those_below(path: Path) -> None:
    """`streams_within` counts a node's own streams and those of the nodes below; parents come before children."""
    nodes = document(path)["nodes"]
    own = {tuple(node["path"]): len(node["streams"]) for node in nodes}
    for node in nodes:
        within = sum(count for below, count in own.items() if below[: len(node["path"])] == tuple(node["path"]))
        assert within == node["streams_within"]
    order = paths(nodes)
    assert all(order.index(one[:-1]) < order.index(one) for one in order if len(one) > 1)


def test_one_generation(path: Path) -> None:
    """`--generation` shows only the structure that this generation learned or inherited, and refuses an unknown one."""
    found = document(path, "--generation", 2)
    streams = [stream for node in found["nodes"] for stream in node["streams"]]
    assert [2] == found["generations"]
    assert {2} == {stream["generation"] for stream in streams}
    assert {("fleet", "0", "+", "speed"), ("fleet", "0", "+", "temp")} <= set(paths(found["nodes"]))
    assert 2 == len(streams)
    assert "there is no generation 3" in run(path, "--generation", 3, code=2).stderr


def test_a_filter_leaves_the_streams_that_may_match(path: Path) -> None:
    """`--filter` keeps nodes that may match it, and their parents."""
    wanted = ("fleet", "+", "bus-3", "speed")
    found = document(path, "--filter", "/".join(wanted))
    for way in paths(found["nodes"]):
        assert all(level in ("+", asked) or asked == "+" for level, asked in zip(way, wanted, strict=False))
    with ts.open(path, mode="r+") as db:
        listed = {(s.shard, s.generation, s.number) for s in db.streams("/".join(wanted))}
    assert listed == {tuple(stream.values()) for node in found["nodes"] for stream in node["streams"]}
    assert [] == document(path, "--filter", "other/#")["nodes"]
    assert "'+' must be alone" in run(path, "--filter", "a+", code=2).stderr


def test_text_is_indented(tmp_path: Path) -> None:
    """Each level is indented by two spaces; empty levels are quoted, and control characters are escaped."""
    with ts.open(tmp_path / "db", mode="x", options={"block": {"thresholds": [9, 2]}}) as db:
        store(db, ["a/x", "a/y", "a/z", "/\x1b[2J", "$SYS/a"])
    assert run(tmp_path / "db").stdout.splitlines() == [
        f"{tmp_path / 'db'}, 1 generation of 1 shard: 5 streams",
        '  ""  1 stream',
        "    \\x1b[2J  1 stream",
        "  $SYS  1 stream",
        "    a  1 stream",
        "  a  3 streams",
        "    x  1 stream",
        "    y  1 stream",
        "    + (all other)  1 stream",
        "A level's first tokens (thresholds) keep streams of their own; + and # take the rest",
    ]


@pytest.mark.parametrize(("topics", "shown"), [(5, 5), (6, 6), (7, 5), (300, 5)])
def test_wide_nodes_are_abbreviated(tmp_path: Path, topics: int, shown: int) -> None:
    """A node with many children shows only the first one and the wildcard, if that hides at least two; JSON has all."""
    with ts.open(tmp_path / "db", mode="x", options={"block": {"thresholds": [9, 200]}}) as db:
        store(db, [f"a/{number:03}" for number in range(topics)])
    own = min(topics, 200)
    lines = [line for line in run(tmp_path / "db").stdout.splitlines()[2:] if "(thresholds)" not in line]
    assert [f"    {number:03}  1 stream" for number in range(shown)] == lines[:shown]
    rest = own - shown
    more = [f"    … {rest} more  {rest} streams"] if rest else []
    wild = ["    + (all other)  1 stream"] if topics > own else []
    assert more + wild == lines[shown:]
    assert 1 + own + bool(wild) == len(document(tmp_path / "db")["nodes"])


def test_layouts_that_learn_nothing(tmp_path: Path) -> None:
    """The command names generations whose layout learns nothing, or that hold no messages."""
    with ts.open(tmp_path / "db", mode="x", layout="reference") as db:
        store(db, ["a", "b"])
        db.add_generation("block")
    shown = run(tmp_path / "db").stdout.splitlines()
    assert shown[1:] == [
        "generation 1: layout 'reference' learns nothing of topics",
        "generation 2: it holds no messages",
    ]
    assert ([], [1, 2]) == tuple(document(tmp_path / "db")[key] for key in ("nodes", "unlearned"))


def test_a_terminal_gets_branches(
    path: Path, monkeypatch: pytest.MonkeyPatch, on_a_terminal: Callable[..., str]
) -> None:
    """On a terminal, rich draws the tree with the same levels and numbers."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    shown = on_a_terminal("stdout", "learned-topics", path)
    drawn = [re.sub(r"\x1b\[\d*m", "", line).lstrip("│├└─ \xa0") for line in shown.splitlines()]
    assert shown != re.sub("[│├└─]", "", shown)
    assert [line.lstrip() for line in run(path).stdout.splitlines()] == [line.rstrip() for line in drawn]
