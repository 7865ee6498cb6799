"""`Database.sql` on any backend: its tables, the conditions that narrow reads, and errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pyarrow as pa
import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.engine import DATA, WriteBatch
from topicstore.contract.layout import ReadCounters
from topicstore_conformance.conditions.skipping import need
from topicstore_layouts.block.format import Block

duckdb = pytest.importorskip("duckdb", reason='needs duckdb: pip install "topicstore[duckdb]"')

BEGIN = 1_748_779_200_000_000
PAIRS = [("memory", "reference"), ("rocksdb", "block"), ("duckdb", "block")]
TOPICS = ["a", "a/b", "a/b/c", "a/é", "a-", "b", "b/p'\"", "$SYS/x"]
CLIENTS = ["", "c0", "c1", "c'2"]


def messages(count: int) -> list[ts.Message]:
    """Return messages of all topics and clients, a second apart."""
    return [
        ts.Message(
            TOPICS[n % len(TOPICS)],
            b"%d" % n,
            CLIENTS[n // 3 % len(CLIENTS)],
            qos=n % 3,
            timestamp=BEGIN + n * 1_000_000,
            properties=ts.Properties(content_type="text") if n % 5 == 0 else None,
        )
        for n in range(count)
    ]


@pytest.fixture(scope="module", params=PAIRS, ids="/".join)
def db(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ts.Database]:
    """Yield a database of three shards and two generations, whose positions follow the messages' times."""
    backend, layout = request.param
    need(backend, layout)
    path = tmp_path_factory.mktemp("sql") / "db"
    with ts.open(path, backend=backend, layout=layout, shards=3, timestamps="message") as opened:
        rows = messages(240)
        opened.store(rows[:100])
        opened.add_generation()
        opened.store(rows[100:])
        yield opened


@pytest.fixture(scope="module")
def whole(db: ts.Database) -> pa.Table:
    """Return all messages with ids and the time of each position."""
    found = db.replay_arrow("#", ids=True).read_all()
    time = pa.array([position >> 11 for position in found["position"].to_pylist()]).cast(pa.timestamp("us", tz="UTC"))
    return found.append_column("time", time)


texts = st.sampled_from([*TOPICS, "a/", "a0", "none", "é", "a/\U0010ffff"])
times = st.integers(-5, 245).map(lambda n: f"make_timestamptz({BEGIN + n * 1_000_000 + n % 3 - 1})")
operators = st.sampled_from(["=", "<", "<=", ">", ">=", "<>"])


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def listed(values: list[str]) -> str:
    return f"({', '.join(map(quoted, values))})"


comparisons = st.one_of(
    st.builds("topic {} {}".format, operators, texts.map(quoted)),
    st.builds("{} {} topic".format, texts.map(quoted), operators),
    st.builds("topic IN {}".format, st.lists(texts, min_size=1).map(listed)),
    st.builds("topic BETWEEN {} AND {}".format, texts.map(quoted), texts.map(quoted)),
    st.builds("topic LIKE {}".format, st.sampled_from(["'a%'", "'a/b'", "'%'", "'a/_'"])),
    st.builds("client_id {} {}".format, operators, st.sampled_from(CLIENTS).map(quoted)),
    st.builds("client_id IN {}".format, st.lists(st.sampled_from(CLIENTS), min_size=1).map(listed)),
    st.builds("{} {} {}".format, st.sampled_from(["time", "timestamp"]), operators, times),
    st.builds("{} BETWEEN {} AND {}".format, st.sampled_from(["time", "timestamp"]), times, times),
    st.builds("position {} {}".format, operators, st.integers(0, 245).map(lambda n: (BEGIN + n * 1_000_000) << 11)),
    st.builds("shard {} {}".format, operators, st.integers(0, 4)),
    st.builds("shard IN ({}, {})".format, st.integers(0, 4), st.integers(0, 4)),
    st.builds("qos {} {}".format, operators, st.integers(0, 2)),
    st.sampled_from(["topic IS NULL", "timestamp IS NOT NULL", "properties.content_type = 'text'", "payload = '7'"]),
)
conditions = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        st.builds("({} AND {})".format, inner, inner),
        st.builds("({} OR {})".format, inner, inner),
        st.builds("NOT ({})".format, inner),
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def oracle(whole: pa.Table) -> Iterator[Any]:
    """Yield a DuckDB that has all messages in memory."""
    with duckdb.connect(":memory:") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("messages", whole)
        yield connection


@given(condition=conditions)
def test_conditions_narrow_only_what_is_read(db: ts.Database, oracle: Any, condition: str) -> None:
    """A statement with any condition returns the rows that DuckDB finds among all messages."""
    statement = f"SELECT shard, position, payload FROM messages WHERE {condition} ORDER BY ALL"
    assert oracle.sql(statement).to_arrow_table().to_pylist() == db.sql(statement).to_pylist()


def read(db: ts.Database) -> list[ReadCounters]:
    """Return the counters of all slabs, in order of shards."""
    return [attrs.evolve(s.counters) for shard in db.storage.shards for _, s in shard.generations.with_slabs()]


def rows_read(db: ts.Database, statement: str, *parameters: Any) -> int:
    """Run a statement, and return how many messages were read for it."""
    before = sum(counters.rows for counters in read(db))
    db.sql(statement, parameters)
    return sum(counters.rows for counters in read(db)) - before


def test_a_topic_is_read_alone(db: ts.Database) -> None:
    """A condition on topics reads the messages of these topics only, also as a parameter or in a list."""
    counts = {tally.topic: tally.messages for tally in db.topics()}
    assert counts["a/b"] == rows_read(db, "SELECT count(*) FROM messages WHERE topic = 'a/b'")
    assert counts["a/b"] == rows_read(db, "SELECT count(*) FROM messages WHERE topic = ?", "a/b")
    expected = counts["a/b"] + counts["b"]
    assert expected == rows_read(db, "SELECT * FROM messages WHERE topic IN ('a/b', 'b', 'none') AND qos >= 0")
    below = sum(messages for topic, messages in counts.items() if topic.startswith("a/")) + counts["a"]
    assert below == rows_read(db, "SELECT payload FROM messages WHERE topic >= 'a/' AND topic < 'a0'")
    assert 0 == rows_read(db, "SELECT * FROM messages WHERE topic = 'none' OR topic = '$SYS/x'")


def test_a_client_is_read_from_its_shard(db: ts.Database, whole: pa.Table) -> None:
    """A condition on client ids reads only their shards."""
    expected = whole["shard"].to_pylist().count(db.shard_of("c1"))
    assert expected == rows_read(db, "SELECT * FROM messages WHERE client_id = 'c1'")


def test_a_time_is_read_as_a_range(db: ts.Database) -> None:
    """A condition on the time reads only positions of that time."""
    statement = "SELECT topic FROM messages WHERE time >= make_timestamptz(?) AND time < make_timestamptz(?)"
    expected = len(list(db.replay("#", BEGIN + 30_000_000, BEGIN + 50_000_000)))
    assert expected == rows_read(db, statement, BEGIN + 30_000_000, BEGIN + 50_000_000) > 0


def test_own_times_are_read_by_zones(tmp_path: Path) -> None:
    """A condition on the messages' own times finds late messages, and reads nothing if no message has such a time."""
    need("rocksdb", "block")
    with ts.open(tmp_path / "db") as db:
        db.store(messages(100))
        assert [3] == db.sql(
            f'SELECT count(*) FROM messages WHERE "timestamp" < make_timestamptz({BEGIN + 3_000_000})'
        )[0].to_pylist()
        assert 0 == rows_read(db, "SELECT * FROM messages WHERE \"timestamp\" < '2001-01-01'")


def test_counts_are_tables(db: ts.Database) -> None:
    """The tables `topics`, `clients` and `latest` have the rows that the methods of these names return."""
    for table, found in (("topics", db.topics()), ("clients", db.clients())):
        rows = db.sql(f"SELECT * REPLACE (epoch_us(first) AS first, epoch_us(last) AS last) FROM {table}").to_pylist()
        assert list(map(attrs.asdict, found)) == rows
    last = ts.MessageBatch.of(db.sql("SELECT * FROM LATEST ORDER BY topic"))
    assert db.latest() == last.to_messages()
    joined = db.sql(
        "SELECT count(*) FROM messages JOIN topics USING (topic) WHERE client_id IN (SELECT client_id FROM clients)"
    )
    assert 1 == joined.num_rows


def test_columns_of_messages(db: ts.Database) -> None:
    """The table `messages` has the documented columns, in order, with the sizes of payloads."""
    described = db.sql("DESCRIBE messages")["column_name"].to_pylist()
    names = "time timestamp topic client_id qos retain payload payload_bytes properties shard position"
    assert names.split() == described
    found = db.sql("SELECT payload_bytes = octet_length(payload), count(*) FROM messages GROUP BY 1").to_pydict()
    assert [[True], [len(list(db.replay("#")))]] == list(found.values())


def test_only_columns_that_are_used_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads are not decompressed for a statement that doesn't use them."""
    need("rocksdb", "block")

    def refuse(_: Block) -> Any:
        raise AssertionError("payloads were read")

    with ts.open(tmp_path / "db") as db:
        db.store(messages(50))
        monkeypatch.setattr(Block, "payloads", refuse)
        assert 1 == db.sql("SELECT count(*), min(client_id) FROM messages WHERE topic <> 'x'").num_rows
        with pytest.raises(AssertionError, match="payloads were read"):
            db.sql("SELECT max(payload) FROM messages")


@pytest.mark.parametrize(
    "statement",
    ["SELECT", "SELECT nothing FROM messages", "SELECT 1; SELECT 2", "CREATE TABLE t (i INT)", "FROM t", "FROM db"],
)
def test_wrong_statements(db: ts.Database, statement: str) -> None:
    """A statement that is wrong, that writes, or that names a variable of the program is refused."""
    with pytest.raises(ts.InvalidArgumentError):
        db.sql(statement)


def test_copies_are_refused(db: ts.Database, tmp_path: Path) -> None:
    """A statement can't write files."""
    with pytest.raises(ts.InvalidArgumentError, match="only statements that read"):
        db.sql(f"COPY (FROM messages) TO '{tmp_path / 'out.csv'}'")
    assert [] == list(tmp_path.iterdir())


def test_damage_is_reported(tmp_path: Path) -> None:
    """Damage among the messages that a statement reads raises `CorruptionError`, not an error of DuckDB."""
    with ts.open(tmp_path / "db", backend="memory", layout="reference") as db:
        db.store(messages(20))
        engine = db.storage.shards[0].writer.open_engine()
        key, value = next(iter(engine.scan(DATA)))[3]
        write = WriteBatch()
        write.put(DATA, key, value[:-1] + b"?")
        engine.write(write, sync=False)
        with pytest.raises(ts.CorruptionError, match="message at position"):
            db.sql("SELECT max(payload) FROM messages")


def test_without_duckdb(monkeypatch: pytest.MonkeyPatch, db: ts.Database) -> None:
    """Without DuckDB, the error names the package to install."""
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ts.BackendUnavailableError, match=r"pip install \"topicstore\[duckdb\]\""):
        db.sql("SELECT 1")


def test_rows_are_read_within_the_engine(tmp_path: Path) -> None:
    """If all messages are rows of DuckDB, the engine runs the statement; otherwise all generations are read."""
    need("duckdb", "table")
    with ts.open(tmp_path / "db", backend="duckdb", layout="table") as db:
        db.store(messages(24))
        slab = db.storage.shards[0].generations.slab(1)
        assert [24] == db.sql("SELECT count(*) FROM messages WHERE generation = 1")[0].to_pylist()
        assert 0 == slab.counters.rows
        assert [21] == db.sql("SELECT sum(messages)::INT FROM topics")[0].to_pylist()
        db.add_generation("block")
        db.store(messages(8))
        assert [28] == db.sql("SELECT count(*) FROM messages")[0].to_pylist()
