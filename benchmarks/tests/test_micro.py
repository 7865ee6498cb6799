"""Micro-benchmarks of the data path. They run as tests; ``--benchmark-enable`` times them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import topicstore
from topicstore import Message, MessageBatch, TopicFilter
from topicstore.contract.columns import Constant
from topicstore.contract.engine import KEYSPACES, WriteBatch
from topicstore.contract.positions import consecutive_positions, message_positions
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.subjects.pairs import layouts_on, make_backend
from topicstore_layouts.block.compression import CODECS, Compressor
from topicstore_layouts.block.format import MIXED, Block, Columns, block_seed, encode_block
from topicstore_layouts.shared.learned_topics import LearnedTopics

pytest.importorskip("pytest_benchmark", reason='needs pytest-benchmark: pip install "topicstore[bench]"')

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

ROWS = 1_000
FIRST = 1 << 60
LAST = FIRST + ROWS - 1
SEED = block_seed(LAST, 0)
TOPICS = [f"fleet/line-{number % 30}/bus-{number}/speed" for number in range(ROWS)]

every_layout = pytest.mark.parametrize("layout", layouts_on("memory"))
every_codec = pytest.mark.parametrize("codec", CODECS)


def messages() -> list[Message]:
    source = random.Random(7)
    return [
        Message(topic, b'{"speed": %d, "heading": 90}' % source.randrange(90), f"gateway-{n % 10}", 1)
        for n, topic in enumerate(TOPICS)
    ]


def columns() -> Columns:
    """Return the columns of a thousand messages, as they are made when messages are stored."""
    payloads = [message.payload for message in messages()]
    return Columns(
        positions=consecutive_positions(FIRST, ROWS),
        topics=np.arange(ROWS, dtype=np.uint32),
        client_ids=np.arange(ROWS, dtype=np.uint32) % 10,
        qos=Constant(1, ROWS),
        retain=Constant(False, ROWS),
        timestamps=Constant(FIRST >> 11, ROWS),
        properties=Constant(None, ROWS),
        payloads=payloads,
        sizes=list(map(len, payloads)),
    )


@every_codec
def test_encode_block(benchmark: BenchmarkFixture, codec: str) -> None:
    """Encode a thousand rows as bytes."""
    value = benchmark(encode_block, columns(), MIXED, FIRST, SEED, Compressor(codec, 1))
    assert ROWS == Block(value, LAST, SEED).rows


@every_codec
def test_decode_block(benchmark: BenchmarkFixture, codec: str) -> None:
    """Decode bytes into a thousand rows, with payloads as objects."""
    value = encode_block(columns(), MIXED, FIRST, SEED, Compressor(codec, 1))
    found = benchmark(lambda: Block(value, LAST, SEED).columns())
    assert columns().payloads == found.payloads


@every_codec
def test_decode_block_into_arrow(benchmark: BenchmarkFixture, codec: str) -> None:
    """Decode bytes into an Arrow array of payloads, without objects."""
    value = encode_block(columns(), MIXED, FIRST, SEED, Compressor(codec, 1))
    found = benchmark(lambda: Block(value, LAST, SEED).payloads().toarrow())
    assert columns().payloads == found.to_pylist()


def test_learn_new_topics(benchmark: BenchmarkFixture) -> None:
    """Add a thousand topics to an empty trie."""

    def learn() -> LearnedTopics:
        trie = LearnedTopics(1, (100, 20))
        for topic in TOPICS:
            trie.learn(topic)
        return trie

    assert 21 * 20 + 21 >= len(benchmark(learn)) > 20


def test_learn_known_topics(benchmark: BenchmarkFixture) -> None:
    """Add a thousand topics that are already in the trie."""
    trie = LearnedTopics(1, (100, 20))
    known = list(map(trie.learn, TOPICS))
    assert known == benchmark(lambda: list(map(trie.learn, TOPICS)))


def test_match_streams(benchmark: BenchmarkFixture) -> None:
    """Find the streams that match a filter with two wildcards."""
    trie = LearnedTopics(1, (100, 20))
    streams = set(map(trie.learn, TOPICS))
    assert sorted(streams) == benchmark(trie.match, TopicFilter("fleet/+/+/speed"))


def flood() -> list[str]:
    """Return ten thousand topics without a common structure, which are the same in every run."""
    source = random.Random(5)
    tokens = [f"t{number}" for number in range(150)]
    return ["/".join(source.choices(tokens, k=5)) for _ in range(10 * ROWS)]


def test_learn_unrelated_topics(benchmark: BenchmarkFixture) -> None:
    """Add ten thousand topics without a common structure to an empty trie."""

    def learn() -> LearnedTopics:
        trie = LearnedTopics(1, (100, 20))
        trie.learn_all(flood())
        return trie

    assert ROWS < len(benchmark(learn))


@pytest.mark.parametrize("levels", range(6))
def test_match_a_full_trie(benchmark: BenchmarkFixture, levels: int) -> None:
    """Match filters with various numbers of levels against the streams of unrelated topics."""
    trie, topics = LearnedTopics(1, (100, 20)), flood()
    trie.learn_all(topics)
    known = topics[0].split("/")[:levels]
    found = benchmark(trie.match, TopicFilter("/".join(known if levels == 5 else [*known, "#"])))
    assert trie.find(topics[0]) in found


def test_load_topics(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Load the trie of ten thousand unrelated topics from an engine in memory."""
    trie = LearnedTopics(1, (100, 20))
    trie.learn_all(flood())
    engine, write = make_backend("memory").open_shard(tmp_path / "shard", KEYSPACES, create=True), WriteBatch()
    trie.save(write)
    engine.write(write)
    assert len(trie) == len(benchmark(LearnedTopics.load, engine, 1, (100, 20)))
    engine.close()


@pytest.mark.parametrize("text", ["fleet/line-7/bus-7/speed", "fleet/+/+/speed", "fleet/line-7/#", "#"])
def test_filter_matches(benchmark: BenchmarkFixture, text: str) -> None:
    """Match a filter against a thousand topics."""
    matches = TopicFilter(text).matches
    found = benchmark(lambda: [topic for topic in TOPICS if matches(topic)])
    expected = {"fleet/line-7/bus-7/speed": 1, "fleet/line-7/#": len(range(7, ROWS, 30))}
    assert expected.get(text, ROWS) == len(found)


def test_batch_from_messages(benchmark: BenchmarkFixture) -> None:
    """Validate a thousand message objects and convert them to columns."""
    assert ROWS == len(benchmark(MessageBatch.from_messages, messages()))


def test_batch_to_messages(benchmark: BenchmarkFixture) -> None:
    """Convert columns to a thousand message objects."""
    batch = MessageBatch.from_messages(messages())
    assert messages() == benchmark(batch.to_messages)


def test_positions_of_a_commit(benchmark: BenchmarkFixture) -> None:
    """Compute a thousand consecutive positions."""
    positions = benchmark(consecutive_positions, FIRST + 1, ROWS)
    assert [FIRST + 1, FIRST + ROWS] == positions[[0, -1]].tolist()


def test_positions_of_messages(benchmark: BenchmarkFixture) -> None:
    """Compute the positions of a thousand message times, some of which are late or equal."""
    times = np.arange(ROWS, dtype=np.int64) // 3 % 100 + (FIRST >> 11)
    positions = benchmark(message_positions, 0, times)
    assert (np.diff(positions.astype(np.int64)) > 0).all()


def stored(layout: str, path: Path) -> topicstore.Database:
    """Return a compacted database with ten batches of a thousand messages each."""
    db = topicstore.open(path, backend="memory", layout=layout, auto_compact=False)
    for _ in range(10):
        db.store(messages())
    db.compact()
    return db


@every_layout
def test_store(benchmark: BenchmarkFixture, layout: str, tmp_path: Path) -> None:
    """Store a thousand message objects with known topics in an engine in memory."""
    with topicstore.open(tmp_path, backend="memory", layout=layout, auto_compact=False) as db:
        batch = messages()
        db.store(batch)
        assert ROWS == benchmark(db.store, batch).count


@every_layout
@pytest.mark.parametrize("text", ["fleet/line-7/bus-7/speed", "fleet/+/bus-7/+", "fleet/line-7/#", "#"])
def test_replay(benchmark: BenchmarkFixture, layout: str, text: str, tmp_path: Path) -> None:
    """Replay a filter that matches one message in a thousand, a few in a hundred, or all."""
    with stored(layout, tmp_path) as db:
        found = benchmark(lambda: list(db.replay(text)))
        expected = sum(map(TopicFilter(text).matches, TOPICS))
        assert 10 * expected == len(found)


@every_layout
def test_replay_into_arrow(benchmark: BenchmarkFixture, layout: str, tmp_path: Path) -> None:
    """Replay all messages as Arrow batches, without objects."""
    with stored(layout, tmp_path) as db:
        assert 10 * ROWS == benchmark(lambda: sum(batch.num_rows for batch in db.replay_arrow("#")))


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT topic, count(*) FROM messages GROUP BY topic",
        "SELECT date_trunc('hour', time), count(*), avg(payload_bytes) FROM messages GROUP BY 1",
        "SELECT client_id, count(*) FROM messages GROUP BY 1 ORDER BY 2 DESC LIMIT 10",
        "SELECT split_part(topic, '/', 2), count(DISTINCT topic), max(time) FROM messages GROUP BY 1",
    ],
)
def test_sql(benchmark: BenchmarkFixture, statement: str, tmp_path: Path) -> None:
    """Run SQL aggregates over ten thousand messages of the layout `table`."""
    need("duckdb")
    with topicstore.open(tmp_path, backend="duckdb", layout="table") as db:
        for _ in range(10):
            db.store(messages())
        assert 0 < benchmark(db.sql, statement).num_rows <= ROWS
