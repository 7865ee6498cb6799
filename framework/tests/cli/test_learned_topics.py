"""`topicstore learned-topics`: the learned tree, as text, JSON and a graph; counts against what was stored."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from click.testing import CliRunner, Result
from topicstore.cli import cli

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


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, ["learned-topics", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def document(*arguments: object) -> dict[str, Any]:
    found = json.loads(run(*arguments, "--json").stdout)
    assert isinstance(found, dict)
    return found


def store(db: ts.Database, topics: list[str], publishers: int = 7) -> None:
    db.store([ts.Message(topic, b"x", f"client-{number % publishers}") for number, topic in enumerate(topics)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two shards and generations; buses from the sixth on share a level in each."""
    with ts.open(tmp_path / "db", mode="x", shards=2, options=OPTIONS) as db:
        store(db, [*FLEET, *FLEET, *ODD])
        db.add_generation()
        store(db, FLEET[:5], 1)
    return tmp_path / "db"


def paths(nodes: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [tuple(node["path"]) for node in nodes]


def test_every_learned_node_is_there_once(path: Path) -> None:
    """Those of shards and generations that have the same path are one, with the streams of all."""
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
    """And parents come before children."""
    nodes = document(path)["nodes"]
    own = {tuple(node["path"]): len(node["streams"]) for node in nodes}
    for node in nodes:
        within = sum(count for below, count in own.items() if below[: len(node["path"])] == tuple(node["path"]))
        assert within == node["streams_within"]
    order = paths(nodes)
    assert all(order.index(one[:-1]) < order.index(one) for one in order if len(one) > 1)
    assert "messages" not in nodes[0]


def test_one_generation(path: Path) -> None:
    """What it learned, or inherited; one that isn't there is refused."""
    found = document(path, "--generation", 2)
    streams = [stream for node in found["nodes"] for stream in node["streams"]]
    assert [2] == found["generations"]
    assert {2} == {stream["generation"] for stream in streams}
    assert {("fleet", "0", "+", "speed"), ("fleet", "0", "+", "temp")} <= set(paths(found["nodes"]))
    assert 2 == len(streams)
    assert "there is no generation 3" in run(path, "--generation", 3, code=2).stderr


def test_a_filter_leaves_the_streams_that_may_match(path: Path) -> None:
    """And the levels above them."""
    wanted = ("fleet", "+", "bus-3", "speed")
    found = document(path, "--filter", "/".join(wanted))
    for way in paths(found["nodes"]):
        assert all(level in ("+", asked) or asked == "+" for level, asked in zip(way, wanted, strict=False))
    with ts.open(path, mode="r+") as db:
        listed = {(s.shard, s.generation, s.number) for s in db.streams("/".join(wanted))}
    assert listed == {tuple(stream.values()) for node in found["nodes"] for stream in node["streams"]}
    assert [] == document(path, "--filter", "other/#")["nodes"]
    assert "'+' must be alone" in run(path, "--filter", "a+", code=2).stderr


@pytest.mark.parametrize("topic_filter", [None, "fleet/1/+/temp", "fleet/+/bus-7/#", "$SYS/#", "+"])
def test_counts(path: Path, topic_filter: str | None) -> None:
    """Of all messages that match, those below `$` too: where they end, and over all that is below."""
    stored = Counter([*FLEET, *FLEET, *FLEET[:5], *ODD])
    wanted = {t: n for t, n in stored.items() if topic_filter is None or ts.TopicFilter(topic_filter).matches(t)}
    nodes = document(path, "--count", *(() if topic_filter is None else ("--filter", topic_filter)))["nodes"]
    tops = [node for node in nodes if len(node["path"]) == 1]
    assert sum(wanted.values()) == sum(node["messages_within"] for node in tops)
    assert sum(wanted.values()) == sum(node["messages"] for node in nodes)
    assert len(wanted) == sum(node["topics_within"] for node in tops)
    for top in tops:
        below = {topic: count for topic, count in wanted.items() if topic.split("/")[0] == top["path"][0]}
        assert (sum(below.values()), len(below)) == (top["messages_within"], top["topics_within"])
    for node in nodes:
        if "+" not in node["path"] and "#" not in node["path"]:
            count = wanted.get("/".join(node["path"]), 0)
            assert node["messages"] <= count  # where a shard or generation learned a level as `+`, it is there
            assert node["topics"] == (node["messages"] > 0)


def test_topics_in_two_shards_count_once(tmp_path: Path) -> None:
    """Also where one has the topic at a level's own node, and the other below `+`."""
    with ts.open(tmp_path / "db", mode="x", shards=2, options={"block": {"thresholds": [1]}}) as db:
        clients = {db.shard_of(f"client-{number}"): f"client-{number}" for number in range(20)}
        db.store([ts.Message("a", b"", clients[0]), ts.Message("b", b"", clients[0])])
        db.store([ts.Message("b", b"", clients[1]), ts.Message("b", b"", clients[1])])
    nodes = {tuple(node["path"]): node for node in document(tmp_path / "db", "--count")["nodes"]}
    assert {("a",): (1, 1), ("b",): (2, 1), ("+",): (1, 1)} == {
        path: (node["messages"], node["topics"]) for path, node in nodes.items()
    }
    assert ": 3 streams, 4 messages of 2 topics" in run(tmp_path / "db", "--count").stdout


def test_what_no_filter_matches_is_not_counted(tmp_path: Path) -> None:
    """It says so; a filter that names the level counts it."""
    with ts.open(tmp_path / "db", mode="x", options={"block": {"thresholds": [1]}}) as db:
        store(db, ["$a/x", "$b/x", "c"])
    found = run(tmp_path / "db", "--count")
    assert "no filter matches what is below $+" in found.stderr
    assert "2 messages of 2 topics" in found.stdout.splitlines()[0]
    named = run(tmp_path / "db", "--count", "--filter", "$b/#")
    assert named.stderr == ""
    assert "1 message of 1 topic" in named.stdout.splitlines()[0]


def test_text_is_indented(tmp_path: Path) -> None:
    """Two blanks a level; empty levels and what could act on a terminal are shown harmlessly."""
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


def test_counts_come_with_the_most_first(tmp_path: Path) -> None:
    """Where nothing is, nothing is shown; without counts, numbers are in their order, and nothing is left out."""
    with ts.open(tmp_path / "db", mode="x", options={"block": {"thresholds": [2, 9]}}) as db:
        store(db, ["a/2", "a/10", "a/10", *["b/1"] * 4, "c/9", "a/9"])
        db.delete("c/#")
        db.delete("a/9")
    shown = run(tmp_path / "db", "--count").stdout.splitlines()
    assert [
        "  b  1 stream, 4 messages of 1 topic",
        "    1  1 stream, 4 messages of 1 topic",
        "  a  3 streams, 3 messages of 2 topics",
        "    10  1 stream, 2 messages of 1 topic",
        "    2  1 stream, 1 message of 1 topic",
    ] == shown[1:]
    plain = run(tmp_path / "db").stdout.splitlines()
    assert ["  a", "    2", "    9", "    10", "  b", "    1", "  + (all other)", "    9"] == [
        line.rpartition("  ")[0] for line in plain[1:-1]
    ]


def test_a_filter_that_nothing_matches(path: Path) -> None:
    assert "no topics match nosuch/+" == run(path, "--filter", "nosuch/+").stdout.splitlines()[-1]


@pytest.mark.parametrize(("topics", "shown"), [(5, 5), (6, 6), (7, 5), (300, 5)])
def test_wide_nodes_are_abbreviated(tmp_path: Path, topics: int, shown: int) -> None:
    """As text and as a graph; never the wildcard, and never by one; `--all` shows everything."""
    with ts.open(tmp_path / "db", mode="x", options={"block": {"thresholds": [9, 200]}}) as db:
        store(db, [f"a/{number:03}" for number in range(topics)])
    own = min(topics, 200)
    lines = [line for line in run(tmp_path / "db", "--count").stdout.splitlines()[2:] if "(thresholds)" not in line]
    assert [f"    {number:03}  1 stream, 1 message of 1 topic" for number in range(shown)] == lines[:shown]
    rest = own - shown
    more = [f"    … {rest} more  {rest} streams, {rest} messages of {rest} topics"] if rest else []
    wild = [f"    + (all other)  1 stream, {topics - own} messages of {topics - own} topics"] if topics > own else []
    assert more + wild == lines[shown:]
    assert own + bool(wild) == len(run(tmp_path / "db", "--all").stdout.splitlines()) - 2 - bool(wild)
    assert bool(more) == ("… " in run(tmp_path / "db", "--dot").stdout)
    assert "…" not in run(tmp_path / "db", "--dot", "--all").stdout


def parse_dot(text: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the lines of each node's label, and each node's parent, by the rules of Graphviz's language."""
    first, *statements, last = text.rstrip("\n").split("\n")
    assert ("digraph topics {", "}") == (first, last)
    labels, parents = {}, {}
    for statement in statements[2:]:
        node = re.fullmatch(r'  (n\d+) \[label="((?:[^"\\]|\\.)*)"(?:, style=bold)?\];', statement)
        edge = re.fullmatch(r"  (n\d+) -> (n\d+);", statement)
        if node:
            parts = re.split(r"((?:\\.)+?)", node[2])
            unescaped = "".join("\n" if p == "\\n" else p[1:] if p.startswith("\\") else p for p in parts)
            labels[node[1]] = unescaped.split("\n")
        else:
            assert edge, statement
            parents[edge[2]] = edge[1]
    return labels, parents


def test_the_graph_is_the_tree(path: Path) -> None:
    """Read back, it has the same paths and numbers, whatever is in the levels."""
    labels, parents = parse_dot(run(path, "--dot", "--all").stdout)

    def way(node: str) -> tuple[str, ...]:
        return (*way(parents[node]), labels[node][0]) if node in parents else ()

    shown = {way(node): lines[1] for node, lines in labels.items() if node in parents}
    assert len(labels) == 1 + len(shown)
    assert str(path) == labels["n0"][0]
    expected = {
        tuple(ascii_of(level) for level in node["path"]): node["streams_within"] for node in document(path)["nodes"]
    }
    assert {way: f"{count} stream{'s' * (count != 1)}" for way, count in expected.items()} == shown


def ascii_of(level: str) -> str:
    """Return a level as it is shown; of `ODD`, only these have characters that are not."""
    return {"": '""', "\u202e\x1b[31m": "\\u202e\\x1b[31m", "\n": "\\n"}.get(level, level)


def test_a_graph_or_json(path: Path) -> None:
    """Not both."""
    assert "choose one" in run(path, "--dot", "--json", code=2).stderr


def test_no_database(tmp_path: Path) -> None:
    """None is made by looking."""
    assert "there is no database" in run(tmp_path / "none", code=3).stderr
    assert [] == list(tmp_path.iterdir())


def test_layouts_that_learn_nothing(tmp_path: Path) -> None:
    """They are named; so are generations without messages."""
    with ts.open(tmp_path / "db", mode="x", layout="reference") as db:
        store(db, ["a", "b"])
        db.add_generation("block")
    shown = run(tmp_path / "db", "--count").stdout.splitlines()
    assert shown[1:] == [
        "generation 1: layout 'reference' learns nothing of topics",
        "generation 2: it holds no messages",
    ]
    assert ([], [1, 2]) == tuple(document(tmp_path / "db")[key] for key in ("nodes", "unlearned"))
    assert 0 == len(parse_dot(run(tmp_path / "db", "--dot").stdout)[1])


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_a_terminal_gets_branches(path: Path) -> None:
    """Drawn by rich; the same levels and numbers."""
    ours, theirs = os.openpty()
    code = "from topicstore.cli import main; import sys; sys.argv[1:] = ['learned-topics', sys.argv[1]]; main()"
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "PYTHONUTF8": "1"}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=theirs, env=environment) as program:
        os.close(theirs)
        shown = b""
        while True:
            try:
                read = os.read(ours, 65_536)
            except OSError:  # on Linux, the end of a pseudo-terminal
                break
            if not read:
                break
            shown += read
    os.close(ours)
    assert 0 == program.returncode
    drawn = [re.sub(r"\x1b\[\d*m", "", line).lstrip("│├└─ \xa0") for line in shown.decode().splitlines()]
    assert [line.lstrip() for line in run(path).stdout.splitlines()] == [line.rstrip() for line in drawn]
