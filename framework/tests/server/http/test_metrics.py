"""Metrics for Prometheus, compared with the operations performed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import attrs
import httpx
import pytest
import topicstore as ts
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from topicstore.server import Server
from topicstore_conformance.faults.threads import together, wait_until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.embedded import serving_http
from topicstore_conformance.mqtt.raw_client import RawClient

from .conftest import client_of

Values = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


class NotToldError(AssertionError):
    """No sample of a metric has these labels."""


class Scraper:
    """A reader of one server's metrics."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self.values: Values = {}

    def scrape(self) -> Scraper:
        """Read all metrics, as Prometheus does."""
        answer = self._client.get("/metrics")
        assert answer.status_code == 200, answer.text
        self.values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }
        return self

    def __call__(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of a metric with these labels; raise `NotToldError` if there is none."""
        found = [v for (of, has), v in self.values.items() if of == name and labels.items() <= dict(has).items()]
        if not found:
            raise NotToldError(f"there is no {name} with {labels}")
        return sum(found)


@attrs.frozen
class Watched:
    db: ts.Database
    server: Server
    port: int
    client: httpx.Client
    scraper: Scraper

    def until(self, holds: Callable[[Scraper], bool], what: str) -> None:
        """Scrape until a condition holds, because some values appear late."""

        def scraped() -> bool:
            with suppress(NotToldError):
                return holds(self.scraper.scrape())
            return False

        wait_until(scraped, what)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    """A served database of two shards that no other test uses."""
    with ts.open(tmp_path / "db", backend="memory", shards=2) as db, serving_http(db) as server:
        port = int(server.addresses[0].rpartition(":")[2])
        with client_of(server, "") as client:
            yield Watched(db, server, port, client, Scraper(client))


def messages(thread: int, count: int) -> list[ts.Message]:
    return [ts.Message(f"load/{thread}/{number % 7}", b"payload", f"client-{thread}") for number in range(count)]


def test_stores_and_reads_under_load(watched: Watched) -> None:
    """Metrics equal what four threads stored and one thread replayed, and no counter ever decreases."""
    over = threading.Event()
    replayed: list[int] = []

    def store(thread: int) -> Callable[[], None]:
        return lambda: [watched.db.store(messages(thread, 50)) for _ in range(20)] and None

    def replay() -> None:
        replayed.extend(sum(1 for _ in watched.db.replay("load/#")) for _ in range(5))

    def scrape() -> None:
        seen = [0.0]
        while not over.is_set():
            seen.append(watched.scraper.scrape()("topicstore_stored_messages_total"))
            assert seen[-1] >= seen[-2]
            assert watched.scraper("emqx_ds_egress_messages") >= 0

    def load() -> None:
        try:
            together(*(store(thread) for thread in range(4)), replay)
        finally:
            over.set()

    together(load, scrape)
    scraped = watched.scraper.scrape()
    shards = [sum(thread_shard == shard for thread_shard in map(_shard_of(watched.db), range(4))) for shard in range(2)]
    for shard, threads in enumerate(shards):
        labels = {"shard": str(shard), "db": "messages"}
        assert scraped("emqx_ds_egress_batches", **labels) == 20 * threads
        assert scraped("emqx_ds_egress_messages", **labels) == 1_000 * threads
        assert scraped("emqx_ds_egress_bytes", **labels) == 7_000 * threads
        assert scraped("topicstore_stored_payload_bytes_total", shard=str(shard)) == 7_000 * threads
    assert scraped("emqx_ds_egress_batches_failed") == scraped("topicstore_failed_batches_total") == 0
    assert scraped("topicstore_read_messages_total") == sum(replayed)
    assert scraped("topicstore_generation_messages", generation="1") == 4_000
    assert scraped("topicstore_generation_bytes") == watched.db.info().live_bytes


def _shard_of(db: ts.Database) -> Callable[[int], int]:
    return lambda thread: db.storage.shard_of(f"client-{thread}")


def test_latencies_of_stores_and_reads(watched: Watched) -> None:
    for _ in range(3):
        watched.db.store(messages(0, 10))
    assert len(list(watched.db.replay("load/#"))) == 30
    scraped = watched.scraper.scrape()
    shard = str(_shard_of(watched.db)(0))
    assert scraped("topicstore_store_seconds_count", shard=shard) == 3
    assert scraped("topicstore_store_seconds_bucket", shard=shard, le="+Inf") == 3
    assert 0 < scraped("topicstore_store_seconds_sum", shard=shard)
    counters = [one.writer.counters for one in watched.db.storage.shards]
    assert scraped("topicstore_next_seconds_count") == sum(one.reads for one in counters) > 0
    assert scraped("topicstore_next_seconds_sum") == pytest.approx(sum(one.read_seconds for one in counters))
    average = scraped("emqx_ds_egress_flush_time", shard=shard, interval="last5m")
    assert average == pytest.approx(scraped("topicstore_store_seconds_sum", shard=shard) / 3 * 1e6)
    assert scraped("emqx_ds_store_batch_time", shard=shard, interval="current") < average
    assert scraped("emqx_ds_builtin_next_time", shard=shard, interval="current") > 0
    assert 0 <= scraped("topicstore_watermark_age_seconds", shard=shard)


def test_a_batch_that_fails_is_counted(watched: Watched) -> None:
    there = ts.StateWrite(b"key", b"value", expect=b"something else")
    with pytest.raises(ts.StateConflictError):
        watched.db.store(messages(0, 2), state={_shard_of(watched.db)(0): [there]})
    scraped = watched.scraper.scrape()
    assert scraped("emqx_ds_egress_batches_failed", shard=str(_shard_of(watched.db)(0))) == 1
    assert scraped("emqx_ds_egress_batches_failed") == 1
    assert scraped("emqx_ds_egress_messages") == 0
    assert scraped("topicstore_shard_writable") == 2


@pytest.mark.parametrize("version", [4, 5])
def test_packets_by_type_and_reason_code(watched: Watched, version: int) -> None:
    """Every packet of three clients is counted once by type and reason code, even if it is refused or malformed."""
    v5 = version == 5
    with ExitStack() as clients:
        reader, writer, bad = (clients.enter_context(RawClient(watched.port, version=version)) for _ in range(3))
        for number, client in enumerate((reader, writer, bad)):
            client.connect(f"client-{number}")
        assert reader.subscribe("a/#", "+/b", options=1) == (1, 1)
        assert reader.subscribe("$share/g/$SYS/#")[0] >= 0x80
        for qos in (0, 1, 1, 2):
            writer.publish("a/x", b"12345", qos=qos)
        for packet in reader.publishes(4):
            reader.acknowledge(packet)
        assert writer.publish("$SYS/no", b"").reason == (0x90 if v5 else 0)
        assert writer.publish("c/x", b"").reason == (0x10 if v5 else 0)
        writer.ping()
        reader.ping()
        bad.send(wire.frame("SUBSCRIBE", 0, b"\0\1"))  # a SUBSCRIBE whose reserved flags are wrong
        assert bad.ended() is None or v5
        writer.leave()
    watched.until(lambda scraped: scraped("topicstore_mqtt_clients") == 0, "all clients are gone")
    scraped = watched.scraper
    received = _packets(scraped, "received")
    assert received == {
        ("connect", 0): 3,
        ("subscribe", 0): 2,
        ("publish", 0): 6,
        ("puback", 0): 3,
        ("pubrel", 0): 1,
        ("pingreq", 0): 2,
        ("disconnect", 0): 1,
        ("invalid", 0x81): 1,
    }
    only_5 = {("puback", 0): 2, ("puback", 0x90): 1, ("puback", 0x10): 1, ("disconnect", 0x81): 1}
    assert _packets(scraped, "sent") == {
        ("connack", 0): 3,
        ("suback", 0): 1,
        ("suback", 0x87 if v5 else 0x80): 1,
        ("publish", 0): 4,
        ("pubrec", 0): 1,
        ("pubcomp", 0): 1,
        ("pingresp", 0): 2,
        **(only_5 if v5 else {("puback", 0): 3, ("puback", 0x90): 1}),
    }
    assert scraped("topicstore_mqtt_publishes_refused_total") == 1
    assert scraped("topicstore_mqtt_connections_total") == 3
    assert scraped("topicstore_mqtt_received_bytes_total") == watched.server.traffic.bytes_received > 0
    assert scraped("topicstore_mqtt_sent_bytes_total") == watched.server.traffic.bytes_sent > 0


def _packets(scraped: Scraper, way: str) -> dict[tuple[str, int], float]:
    labelled = {has: v for (of, has), v in scraped.values.items() if of == f"topicstore_mqtt_{way}_packets_total"}
    return {(dict(has)["type"], int(dict(has)["reason"], 16)): value for has, value in labelled.items()}


def test_acknowledgements_with_reason_codes(watched: Watched) -> None:
    """Acknowledgements are counted by reason code: refusing PUBRECs, PUBACKs with a reason, unknown PUBRELs."""
    with RawClient(watched.port) as client:
        client.connect("client")
        client.subscribe("a/#", options=2)
        watched.db.publish([ts.Message("a/1", b"", "other", 1), ts.Message("a/2", b"", "other", 2)])
        first, second = client.publishes(2)
        client.send(
            wire.acknowledgement("PUBACK", first.packet_id, 0x80),
            wire.acknowledgement("PUBREC", second.packet_id, 0x97),
            wire.acknowledgement("PUBREL", 77),
        )
        assert client.expect("PUBCOMP").reason == 0x92
        client.send(wire.acknowledgement("PUBREC", 88))
        assert client.expect("PUBREL").reason == 0x92
        client.leave()
    scraped = watched.scraper.scrape()
    received, sent = _packets(scraped, "received"), _packets(scraped, "sent")
    wanted = {("puback", 0x80): 1, ("pubrec", 0x97): 1, ("pubrec", 0): 1, ("pubrel", 0): 1}
    assert {key: received[key] for key in wanted} == wanted
    assert ("puback", 0) not in received
    assert (sent["pubcomp", 0x92], sent["pubrel", 0x92]) == (1, 1)


def test_sessions_their_lag_and_what_is_in_flight(watched: Watched) -> None:
    """Metrics show a disconnected session's 30 waiting messages, and a connected session's two messages in flight."""
    with RawClient(watched.port) as away:
        away.connect("away", session_expiry_interval=3_600)
        away.subscribe("kept/#", options=1)
        away.leave()
    with RawClient(watched.port) as client:
        client.connect("here", receive_maximum=2)
        client.subscribe("kept/#", options=1)
        watched.db.publish([ts.Message(f"kept/{number}", b"12", "writer", 1) for number in range(30)])
        client.publishes(2)

        def reached(scraped: Scraper) -> bool:
            wanted = {"session_lag_messages": 30 + 28, "in_flight_messages": 2, "sessions": 2, "subscriptions": 1}
            return all(scraped(f"topicstore_{name}") == value for name, value in wanted.items())

        watched.until(reached, "the lag is exported")
        found = watched.scraper
        assert found("topicstore_session_lag_max_messages") == 30
        assert found("topicstore_session_lag_sessions") == 2
        assert found("topicstore_session_lag_unknown_sessions") == 0
        assert found("topicstore_connected_sessions") == 1
        assert found("topicstore_session_lag_age_seconds") >= 0


def test_messages_of_qos_0_that_were_dropped(watched: Watched) -> None:
    """Dropped QoS 0 messages are counted, including those of sessions that have ended."""
    dropped = []
    # the two filters of the second client overlap
    for client, filters in (("one", ("live/#",)), ("two", ("live/#", "live/+"))):
        session = watched.db.sessions.open(client, expiry_interval=0)
        for one in filters:
            session.subscribe(one, qos=0)
        session.pause()
        watched.db.publish([ts.Message("live/x", b"", "writer") for _ in range(10_003)])
        watched.db.sessions.lag(client)  # the session reads the routed messages, so that drops are counted
        dropped.append(session.status().missed)
        session.disconnect()
    assert dropped[0] == 3 <= dropped[1]
    watched.until(
        lambda scraped: scraped("topicstore_dropped_qos0_messages_total") == sum(dropped), "the drops are counted"
    )


def test_messages_that_were_dropped_because_too_many_waited(watched: Watched) -> None:
    """Messages that were dropped for a session, because too many waited for it, are counted."""
    session = watched.db.sessions.open("one", expiry_interval=None)
    session.subscribe("queued/#")
    session.disconnect()
    watched.db.publish([ts.Message("queued/x", b"", "writer", 1) for _ in range(10)])
    watched.db.sessions.bound_backlogs(["one"], max_messages=4)
    watched.until(lambda scraped: scraped("topicstore_dropped_queued_messages_total") == 6, "the drops are counted")


def test_queues(watched: Watched) -> None:
    queue = watched.db.queues.open("to the\ncloud", max_messages=3, overflow="drop_newest")
    queue.append([ts.Message("a", b"12", "c") for _ in range(5)])
    watched.until(
        lambda scraped: scraped("topicstore_queue_messages", queue="to the\ncloud") == 3, "the queue is exported"
    )
    assert watched.scraper("topicstore_queue_dropped_messages_total", queue="to the\ncloud") == 2
    assert watched.scraper("topicstore_queue_bytes") == watched.db.queues["to the\ncloud"].bytes


def test_seeks_and_nexts_are_those_of_wildcard_optimized(tmp_path: Path) -> None:
    with ts.open(tmp_path / "db", backend="memory", layout="wildcard_optimized") as db, serving_http(db) as server:
        db.store(messages(0, 100))
        assert len(list(db.replay("load/#"))) == 100
        with client_of(server, "") as client:
            scraped = Scraper(client).scrape()
            counters = db.info().shards[0].reads[1]
            assert scraped("emqx_ds_storage_bitfield_lts_counter_seek") == counters.seeks > 0
            assert scraped("emqx_ds_storage_bitfield_lts_counter_next") == counters.visited + counters.skipped >= 100
            db.add_generation("block")
            db.store(messages(0, 100))
            assert len(list(db.replay("load/#"))) == 200
            seeks = db.info().shards[0].reads[1].seeks
            assert scraped.scrape()("emqx_ds_storage_bitfield_lts_counter_seek") == seeks


def test_both_formats_have_the_same_series(site: httpx.Client) -> None:
    plain = site.get("/metrics")
    open_ = site.get("/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"})
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert open_.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    names = [
        {sample.name for family in parse(answer.text) for sample in family.samples}
        for parse, answer in (
            (text_string_to_metric_families, plain),
            (openmetrics.text_string_to_metric_families, open_),
        )
    ]
    assert names[0] == names[1]
    assert {name.removesuffix("_total") for name in names[0] if name.startswith("emqx_")} == {
        *(f"emqx_ds_egress_{what}" for what in ("batches", "messages", "bytes", "batches_failed", "flush_time")),
        *("emqx_ds_store_batch_time", "emqx_ds_builtin_next_time"),
        *(f"emqx_ds_storage_bitfield_lts_counter_{what}" for what in ("seek", "next")),
    }


@pytest.mark.parametrize(
    "accept", ["", "*/*", "application/openmetrics-text;version=nonsense;escaping=\x7f", "text/html"]
)
def test_any_accept_is_answered(site: httpx.Client, accept: str) -> None:
    assert site.get("/metrics", headers={"Accept": accept}).status_code == 200


def test_figures(watched: Watched) -> None:
    recent = watched.server.http.context.metrics.recent  # type: ignore[union-attr]
    recent.sample()
    watched.db.store(messages(0, 10))
    recent.sample()
    answer = watched.client.get("/api/v5/figures")
    assert answer.status_code == 200
    found = answer.json()
    assert found["totals"]["stored_messages"] == 10
    assert found["totals"]["stored_bytes"] == 70
    series = found["series"]
    assert {len(column) for column in series.values()} == {len(series["at"])}
    assert series["at"] == sorted(series["at"])
    seconds = [found["every"], *((b - a) / 1e6 for a, b in zip(series["at"], series["at"][1:], strict=False))]
    stored = sum(rate * passed for rate, passed in zip(series["stored_messages"], seconds, strict=True))
    assert stored > 0


def test_samples_are_taken_by_one_thread_until_they_are_stopped(tmp_path: Path) -> None:
    """One thread takes samples, however often sampling is started; the first `stop` ends it."""

    def threads() -> int:
        return sum(thread.name == "topicstore-figures" for thread in threading.enumerate())

    others = threads()
    with ts.open(tmp_path / "db", backend="memory") as db, serving_http(db) as server:
        metrics = server.http.context.metrics  # type: ignore[union-attr]
        metrics.start()
        assert threads() == others + 1
        metrics.stop()
        assert threads() == others
        metrics.start()
        assert threads() == others + 1
    assert threads() == others
