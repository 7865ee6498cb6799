"""Workloads: reproducible messages, requests, summaries, and errors in definitions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import topicstore
from topicstore import TopicFilter
from topicstore_benchmarks.workloads.definition import Definition, built_in, from_parquet, read
from topicstore_benchmarks.workloads.file import busiest_wildcard
from topicstore_benchmarks.workloads.workload import Workload, WorkloadError
from topicstore_conformance.faults.threads import PATIENCE
from topicstore_conformance.subjects import datasets

MESSAGES = 45_000

MADE = {
    "kind": "made",
    "messages": 30_000,
    "topic": "a/{device}/{metric}",
    "devices": 100,
    "wildcard": "a/+/value",
    "device": "a/{device}/+",
    "metrics": [{"payload": '{"v":{value:.2f},"empty":{}}'}],
}


def made(**changes: Any) -> Workload:
    return Definition(name="it", source="it.toml", values={**MADE, **changes}).make()


def table(workload: Workload) -> pa.Table:
    return pa.Table.from_batches([workload.part(number) for number in range(workload.parts)])


@pytest.fixture(params=sorted(built_in()))
def workload(request: pytest.FixtureRequest) -> Workload:
    made = read(request.param).limited(2_000 if request.param == "large-payloads" else MESSAGES).make()
    if reason := made.why_missing():
        pytest.skip(reason)
    return made


# --- built-in workloads ---


def test_parts_do_not_depend_on_the_object_that_makes_them(workload: Workload) -> None:
    """A workload's part has the same messages in whichever order and by whichever object the parts are made."""
    whole = table(workload)
    again = [type(workload)(workload.options, workload.beside).part(n) for n in reversed(range(workload.parts))]
    assert whole.equals(pa.Table.from_batches(again[::-1]))


def test_messages_are_in_order_of_time(workload: Workload) -> None:
    """A workload has the requested number of messages, in order of time, with the public schema and no null time."""
    whole = table(workload)
    assert topicstore.SCHEMA == whole.schema
    assert workload.options.messages == whole.num_rows
    times = whole["timestamp"].cast(pa.int64()).to_numpy()
    assert (np.diff(times) >= 0).all()
    assert 0 == whole["timestamp"].null_count


def test_requests_find_some_of_the_messages(workload: Workload) -> None:
    """Every requested filter matches some but not all messages, and there are five distinct device filters."""
    counts = Counter(table(workload)["topic"].to_pylist())
    requests = workload.requests()
    assert len(set(requests["one device"])) == len(requests["one device"]) == 5
    for text in chain.from_iterable(requests.values()):
        matches = TopicFilter(text).matches
        assert 0 < sum(count for topic, count in counts.items() if matches(topic)) < counts.total()


def test_the_digest_names_the_messages() -> None:
    """A workload's digest changes with its options and its number of messages, and is otherwise stable."""
    definition = read("fleet")
    other = Definition(name="fleet", source=definition.source, values={**definition.values, "seed": 8})
    digests = {
        definition.digest(definition.limited(1_000).make()),
        definition.digest(definition.limited(2_000).make()),
        other.digest(other.limited(1_000).make()),
    }
    assert 3 == len(digests)
    assert definition.digest(definition.limited(1_000).make()) in digests


def test_the_digest_is_of_the_whole_file(tmp_path: Path) -> None:
    """The digest of a file workload covers the whole file: one changed byte in the middle changes it."""
    digests = set()
    for middle in (b"0", b"1"):
        (tmp_path / "own.parquet").write_bytes(bytes(2 << 20) + middle + bytes(2 << 20))
        own = from_parquet(tmp_path / "own.parquet")
        digests.add(own.digest(own.make()))
    assert 2 == len(digests)


# --- generated workloads ---


def test_all_devices_report_in_turns() -> None:
    """With ``turns`` every device reports once in each round, and each round has another order."""
    topics = table(made(messages=300))["topic"].to_pylist()
    turns = [topics[start : start + 100] for start in (0, 100, 200)]
    assert [set(turns[0])] * 3 == list(map(set, turns))
    assert turns[0] != turns[1] != turns[2]


def test_summaries_are_true_of_fewer_messages() -> None:
    """The summary of a limited workload states its actual number of devices."""
    assert "100,000 vehicles that each report five metrics" in read("fleet").make().summary
    assert "2,000 vehicles that each report five metrics" in read("fleet").limited(40_000).make().summary
    assert "20 sensors of 20 applications" in read("lorawan").limited(200).make().summary
    for name in built_in():
        devices = getattr(read(name).limited(1_000).make().options, "devices", 0)
        assert not devices or f"{devices:,}" not in read(name).limited(1_000).make().summary or devices <= 1_000


def test_few_messages_are_of_few_devices() -> None:
    """With few messages a workload has fewer devices, so that each device has the minimum number of messages."""
    counts = Counter(table(made(messages=300, messages_a_device=30))["topic"].to_pylist())
    assert {30} == set(counts.values())


def test_a_hot_device() -> None:
    """With ``hot`` device 0 sends the configured fraction of the messages."""
    counts = Counter(table(made(popularity="hot", hot=0.9))["topic"].to_pylist())
    assert counts["a/0/value"] == pytest.approx(27_000, rel=0.02)


def test_zipf() -> None:
    """With ``zipf`` the second device reports half as often as the first, and the tenth a tenth as often."""
    counts = Counter(table(made(popularity="zipf"))["topic"].to_pylist())
    assert counts["a/1/value"] / counts["a/0/value"] == pytest.approx(0.5, rel=0.1)
    assert counts["a/9/value"] / counts["a/0/value"] == pytest.approx(0.1, rel=0.2)


def test_one_metric_a_report() -> None:
    """With ``report = "one"`` each message has one metric, chosen by the metrics' shares."""
    metrics = [{"name": "x", "share": 3, "payload": "1"}, {"name": "y", "bytes": [2, 8]}]
    whole = table(made(report="one", metrics=metrics))
    is_x = pc.ends_with(whole["topic"], "/x")
    assert pc.sum(is_x).as_py() == pytest.approx(22_500, rel=0.02)
    sizes = pc.binary_length(whole.filter(pc.invert(is_x))["payload"])
    assert {"min": 2, "max": 8} == pc.min_max(sizes).as_py()


def test_braces_that_are_no_placeholders_stay() -> None:
    """Braces in a payload pattern that aren't placeholders, as in JSON, are kept."""
    assert table(made(messages=1))["payload"][0].as_py().endswith(b',"empty":{}}')


# --- definitions ---


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[workload\n", "line 1"),
        ("[workload]\n", "missing required field `kind`"),
        ("[load]\n", "`load`"),
        ('[workload]\nkind = "maid"', "there is no kind of workload 'maid'; there are: made, file"),
        ('[workload]\nkind = "file"', "missing required field `path`"),
        ('[workload]\nkind = "file"\npath = "a"\nwildcrad = "#"', "`wildcrad`.* there are: .*requests, path"),
        ('[workload]\nkind = "file"\npath = 5', "Expected `str`, got `int` - at `workload.path`"),
    ],
)
def test_a_bad_file_is_refused(text: str, says: str, tmp_path: Path) -> None:
    """An invalid file is rejected with its name, the wrong key, and the allowed ones."""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=rf"mine\.toml: .*{says}"):
        read(str(path)).make()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"devices": 0}, "Expected `int` >= 1 - at `workload.devices`"),
        ({"topic": "a/{dev}"}, "'topic' has the placeholder {dev}; it may have: device, metric"),
        ({"device": "a/{device:q}"}, "'device' can't be filled in"),
        (
            {"popularity": "some"},
            "Invalid enum value 'some' - at `workload.popularity`; there are: hot, turns, uniform, zipf",
        ),
        ({"metrics": []}, "Expected `array` of length >= 1 - at `workload.metrics`"),
        ({"metrics": [{"name": "x"}]}, "the metric 'x' needs either 'payload' or 'bytes'"),
        ({"metrics": [{"name": "x", "bytes": [9, 1]}]}, "the metric 'x' has the larger number of 'bytes' first"),
        ({"metrics": [{"pay": "x"}]}, "there is no key `pay` - at `workload.metrics[0]`; there are: name, share,"),
        ({"wildcard": "a+"}, "filter 'a+': '+' must be alone in its level"),
        ({"device": "#/{device}"}, "filter '#/0': '#' must be alone in the last level"),
        ({"messages": None}, "Expected `int`, got `null` - at `workload.messages`"),
    ],
)
def test_bad_options_are_refused(changes: dict[str, Any], says: str) -> None:
    """Invalid options are rejected with the name of the key."""
    with pytest.raises(WorkloadError) as refused:
        made(**changes)
    assert f"it.toml: {says}" in str(refused.value)


def test_an_unknown_name_is_refused() -> None:
    """An unknown workload is rejected with a list of the known ones."""
    with pytest.raises(WorkloadError, match="'nope' is neither a workload nor a TOML file; workloads are: bus, cold"):
        read("nope")


def test_a_plugin_brings_a_kind(tmp_path: Path) -> None:
    """A TOML file can name a kind of workload that an installed distribution registers."""
    (tmp_path / "ticks.py").write_text(
        "import pyarrow as pa, topicstore\n"
        "from topicstore import Message, MessageBatch\n"
        "from topicstore.contract.plugin_specs import WorkloadSpec\n"
        "from topicstore_benchmarks.workloads.workload import Workload, WorkloadOptions\n"
        "class Options(WorkloadOptions, frozen=True, kw_only=True):\n"
        "    topic: str\n"
        "class Ticks(Workload):\n"
        "    Options = Options\n"
        "    parts = 2\n"
        "    def part(self, number):\n"
        "        return MessageBatch.from_messages([Message(self.options.topic, b'', timestamp=number)]).to_arrow()\n"
        "    def requests(self):\n"
        "        return {'wildcard': ('#',), 'one device': (self.options.topic,)}\n"
        "@topicstore.hookimpl\n"
        "def topicstore_workloads():\n"
        "    return [WorkloadSpec(name='ticks', target='ticks:Ticks', summary='a message a tick')]\n"
    )
    info = tmp_path / "ticks-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ticks\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[topicstore]\nticks = ticks\n")
    (tmp_path / "clock.toml").write_text('[workload]\nkind = "ticks"\ntopic = "clock"\n')
    program = (
        "from topicstore_benchmarks.workloads.definition import read\n"
        "workload = read('clock.toml').make()\n"
        "print([workload.part(n)['topic'].to_pylist() for n in range(workload.parts)])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ("[['clock'], ['clock']]\n", "") == (done.stdout, done.stderr)


# --- users' own messages ---


def own(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path / "own.parquet", row_group_size=1_000)
    return path / "own.parquet"


def times(rows: int) -> pa.Array:
    return pa.array(range(rows), pa.timestamp("us", "UTC"))


def test_a_file_is_read_in_parts(tmp_path: Path) -> None:
    """A file is read in parts independent of its row groups, and missing columns get the defaults of `Message`."""
    rows = 120_500
    path = own(tmp_path, timestamp=times(rows), topic=[f"a/{n % 7}" for n in range(rows)], payload=[b"x"] * rows)
    whole = table(from_parquet(path).limited(120_001).make())
    assert list(range(120_001)) == whole["timestamp"].cast(pa.int64()).to_pylist()
    assert topicstore.SCHEMA == whole.schema
    assert {""} == set(whole["client_id"].to_pylist())


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"topic": ["a"], "payload": [b""]}, "the column 'timestamp' is missing"),
        ({"timestamp": times(1), "payload": [b""]}, "the column 'topic' is missing"),
        ({"timestamp": times(1), "topic": ["a"], "payload": [b""], "extra": [1]}, "messages have no column 'extra'"),
        ({"timestamp": times(1), "topic": ["a/+"], "payload": [b""]}, "a wildcard"),
        ({"timestamp": pa.nulls(1, times(1).type), "topic": ["a"], "payload": [b""]}, "a timestamp is null"),
        (
            {"timestamp": times(0), "topic": pa.nulls(0, pa.string()), "payload": pa.nulls(0, pa.binary())},
            "no messages",
        ),
    ],
)
def test_a_file_that_has_no_messages_is_refused(columns: dict[str, Any], says: str, tmp_path: Path) -> None:
    """A file without valid messages is rejected with its name and the reason."""
    workload = from_parquet(own(tmp_path, **columns)).make()
    with pytest.raises(WorkloadError, match=rf"own\.parquet.*{says}"):
        workload.part(workload.parts - 1)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """A missing file is reported by `why_missing`, with the folders that were searched."""
    reason = from_parquet(tmp_path / "gone.parquet").make().why_missing()
    assert f"there is no gone.parquet in {tmp_path} or {datasets.folder()}; TOPICSTORE_DATA names the latter" == reason


def test_the_busiest_wildcard() -> None:
    """The busiest wildcard filter matches the most messages, but at most half of them."""
    counts = Counter({"a/x/1": 40, "a/y/1": 35, "b/x/1": 25, "$SYS/x/1": 5})
    assert "a/x/+" == busiest_wildcard(counts)
    assert "#" == busiest_wildcard(Counter({"a": 9}))


def test_what_is_asked_of_a_file_can_be_chosen(tmp_path: Path) -> None:
    """The requests of a file workload can be given, and the others are derived from its topics."""
    path = own(tmp_path, timestamp=times(9), topic=[f"a/{n}" for n in range(9)], payload=[b""] * 9)
    requests = from_parquet(path, {"wildcard": ["a/+"], "mine": ["a/1", "a/2"]}).make().requests()
    found = ("a/2", "a/3", "a/4", "a/5", "a/6")
    assert {"wildcard": ("a/+",), "one device": found, "mine": ("a/1", "a/2")} == requests
