"""The demo checks its own claims, keeps its files, and deletes no others."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import topicstore as ts
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from topicstore.cli import cli
from topicstore.cli.demo import mqtt_act
from topicstore.cli.demo.choosing import choose_filter
from topicstore.cli.demo.clients import Progress, Subscriber
from topicstore.cli.demo.fleet import fleet
from topicstore.files.formats import encode_lines


def demo(*arguments: object, code: int = 0, published: int = 0) -> Result:
    """Run the demo, with its MQTT part only if `published` is above 0."""
    options = ["demo", "--published", str(published), *map(str, arguments)]
    result = CliRunner(env={"COLUMNS": None}).invoke(cli, options)
    assert result.exit_code == code, result.output
    return result


def test_a_made_up_fleet_and_a_file_of_ones_own(tmp_path: Path) -> None:
    """The demo kills, resumes and compares the import of a generated fleet or a given file, and keeps the database."""
    place, mine = tmp_path / "demo", tmp_path / "x.jsonl"
    shown = demo("--directory", place, "--messages", 2_000).stdout
    for words in ("killed the import", "resumed the import", "nothing lost", "nothing is damaged", "replay "):
        assert words in shown
    serve, page = shown.splitlines()[-2:]  # the demo ends with the command to serve its database
    assert serve.endswith(f"serve {place / 'database'}")
    assert page.strip() == "http://127.0.0.1:18083/"
    made = (place / "fleet.jsonl").read_bytes()
    mine.write_bytes(encode_lines([ts.Message("a", b"1", timestamp=5)]))
    demo("--directory", place, "--input", mine)
    assert made == (place / "fleet.jsonl").read_bytes()
    assert "2,000 messages, topic by topic" in demo("--directory", place, "--input", place / "fleet.jsonl").stdout
    with ts.open(place / "database", mode="r+") as db:
        assert list(db.replay("#", order="time")) == list(chain.from_iterable(fleet(2_000)))


@pytest.mark.slow
@pytest.mark.parametrize("published", [1, 2_000])
def test_the_second_act(tmp_path: Path, published: int) -> None:
    """In the demo's MQTT part, a server is killed, and each subscriber gets all messages as its QoS promises."""
    if (reason := mqtt_act.missing()) is not None:
        pytest.skip(reason)
    shown = demo("--directory", tmp_path / "demo", "--messages", 100, published=published).stdout
    for words in ("killed the server", "started it again", "nothing lost, each came once"):
        assert words in shown
    half = max(published, 4) // 2
    assert shown.count(f"{half:,} messages published, {half:,} arrived: nothing lost") == 2
    with ts.open(tmp_path / "demo" / "served", mode="r") as db:
        assert half == sum(1 for message in db.replay("demo/+/2"))


def test_the_second_act_finds_doubles() -> None:
    """The demo's MQTT part reports a duplicate delivery at QoS 2 as an error."""
    if (reason := mqtt_act.missing()) is not None:
        pytest.skip(reason)
    readers = [Subscriber(f"reader-{qos}", 4, Progress(), qos, "#") for qos in (1, 2)]
    told: list[tuple[object, ...]] = []
    for reader in readers:
        reader.found.update({("a", b"1"): 1, ("a", b"2"): 2})
    assert not mqtt_act._compare(lambda *words, **_: told.append(words), readers, 2)
    assert told == [
        ("QoS 1", "2 messages published, 2 arrived: nothing lost; 1 came again, as QoS 1 allows"),
        ("QoS 2", "1 of 2 messages came TWICE"),
    ]


def test_without_the_clients_the_second_act_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without paho-mqtt the demo skips its MQTT part, and prints the command that installs it."""
    monkeypatch.setattr(mqtt_act, "find_spec", lambda name: None if name == "paho" else find_spec(name))
    shown = demo("--directory", tmp_path / "demo", "--messages", 3, published=2).stdout
    assert 'needs paho-mqtt: pip install "topicstore[demo]"' in " ".join(shown.split())
    assert "nothing lost" in shown


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_input_out_of_order_and_without_times(tmp_path: Path, ending: str) -> None:
    """The demo also imports and compares late messages, messages without a time, and topics that begin with $."""
    rows = [ts.Message(f"a/{n % 3}/x", b"%d" % n, timestamp=(n * 7919) % 1000) for n in range(500)]
    rows += [ts.Message("$SYS/x", b"", timestamp=5), ts.Message("b", b"\xff")]
    file = tmp_path / f"x.{ending}"
    if ending == "jsonl":
        file.write_bytes(encode_lines(rows))
    else:
        columns = ("topic", "payload", "timestamp")
        pq.write_table(pa.table({name: [getattr(row, name) for row in rows] for name in columns}), file)
    assert "nothing lost" in demo("--directory", tmp_path / "demo", "--input", file).stdout


def test_bad_input(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"topic":"a","payload":"1"}\n{"topic":"a"}\n')
    assert "row 2" in demo("--directory", tmp_path / "demo", "--input", tmp_path / "x.jsonl", code=2).stderr
    (tmp_path / "x.jsonl").write_text('{"topic":"a","payload":"1"}\n{"topic":"+","payload":"1"}\n')
    assert "row 2" in demo("--directory", tmp_path / "demo", "--input", tmp_path / "x.jsonl", code=2).stderr
    demo("--directory", tmp_path / "demo", "--input", tmp_path / "none.jsonl", code=2)


def test_it_deletes_nothing_that_it_did_not_make(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "database").mkdir(parents=True)
    (mine / "database" / "precious").write_text("x")
    assert "left as it is" in demo("--directory", mine, "--messages", 1, code=2).stderr
    assert (mine / "database" / "precious").read_text() == "x"
    (mine / "database" / "precious").unlink()
    (mine / "database").rmdir()
    demo("--directory", mine, "--messages", 1)
    (mine / "notes").write_text("y")
    demo("--directory", mine, "--messages", 1)
    assert (mine / "notes").read_text() == "y"
    inside = mine / "database" / "topicstore.json"
    assert "which the demo removes first" in demo("--directory", mine, "--input", inside, code=2).stderr
    assert inside.exists()
    with ts.open(mine / "database", mode="r+"):
        demo("--directory", mine, "--messages", 1, code=4)
    assert (mine / "database" / "topicstore.json").exists()


def test_a_missing_engine_is_reported_before_anything_is_made(tmp_path: Path) -> None:
    """If an engine is missing, the demo names the command that installs it before the demo creates anything."""
    program = (
        "import sys; sys.modules['rocksdict'] = None\n"
        "from topicstore.cli import main; sys.argv[1:] = ['demo', '--directory', 'demo']; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (2, "") == (done.returncode, done.stdout)
    assert "error: backend 'rocksdb' needs rocksdict: pip install \"topicstore[rocksdb]\"\n" == done.stderr
    assert [] == list(tmp_path.iterdir())


def test_the_fleet_is_the_same_every_time() -> None:
    first, second = (list(chain.from_iterable(fleet(3_000))) for _ in range(2))
    assert first == second
    assert all(json.loads(m.payload) for m in first)
    assert len({m.client_id for m in first}) > 1_000


topics = st.lists(st.sampled_from(["a", "b", "", "$x"]), min_size=1, max_size=4).map("/".join).filter(bool)


@given(st.dictionaries(topics, st.integers(1, 9)))
def test_the_chosen_filter_is_valid_and_matches_something(counts: dict[str, int]) -> None:
    chosen = choose_filter(counts)
    found = [topic for topic in counts if ts.matches(chosen, topic)]
    assert found or all(topic.startswith("$") for topic in counts)


def test_the_chosen_filter_says_something() -> None:
    rooms = {f"home/{room}/{what}": n for n, room in enumerate("abc", 1) for what in ("light", "heat")}
    assert choose_filter(rooms) == "home/+/light"
