"""Commands on a database that a server has open ask the server, and print the same as on a closed database."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import attrs
import pytest
import topicstore as ts
from click.testing import CliRunner
from topicstore.cli import cli
from topicstore.client.remote_sessions import RemoteSessions
from topicstore.contract.engine import KEYS, WriteBatch
from topicstore.server.config.model import ServerSettings
from topicstore.storage.counting.lag import Lag
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.mqtt.embedded import Embedded, serving_http
from topicstore_conformance.mqtt.serving import serving

from .conftest import run

READING = (
    "info --json",
    "replay",
    "replay fleet/1/# --format csv",
    "replay --order any --limit 7 --format table",
    "replay --reverse --limit 1",
    "replay --order timestamp --reverse --limit 5",
    "replay --by timestamp --start @7 --until @11.5",
    "replay --start 1970-01-01T00:00:30",
    "replay --start 1960-01-01",
    "explain # --until 1960-01-01",
    "replay --limit 0",
    "latest",
    "latest fleet/+/state --format csv",
    "topics",
    "topics fleet/# --sort bytes --json",
    "clients fleet/#",
    "streams",
    "streams fleet/1/# --json",
    "learned-topics",
    "learned-topics --json --filter fleet/+/speed --generation 1",
    "explain fleet/1/# --json",
    "verify --json",
    "retained",
    "sessions list",
    "sessions list --no-lag --json",
    "sessions show the/display --json",
    "sessions groups --json",
    "queue list --json",
    "queue read for/ward",
    "queue read for/ward --limit 1",
    "retention show --json",
    "generations list --json",
)
REFUSED = (
    "replay #/a",
    "explain a/#/b",
    "sessions show nobody",
    "learned-topics --generation 9",
    "queue read nothing",
    # names such as ``..``, which look like parts of a path
    "sessions show ..",
    "sessions show . --json",
    "queue read ..",
    "queue read .",
    "sql select",
)
CHANGING = (
    "checkpoint {folder}/{name}-copy",  # works on backends that can make checkpoints
    "checkpoint {folder}/{name}-copy",
    "sessions kick the/display",
    "sessions kick nobody",
    "sessions kick ..",
    "sessions kick .",
    "generations add --option level=2",
    "generations add --layout unheard-of",
    "generations add",
    "generations drop 2 --yes",
    "generations drop 2 --yes --json",
    "generations drop 9 --yes",
    "retention set --max-bytes 1GB --filter debug/#=1h",
    "retention set --filter debug/#=none --json",
    "retention set --filter a/#/b=1h",
    "retention run",
    "compact --json",
    "compact",
    "delete fleet/2/# --yes",
    "delete fleet/# --start @20 --until @21 --yes --json",
    "delete +a --yes",
    "queue read for/ward --limit 1 --commit",
    "queue read for/ward",
    "queue drop for/ward --yes",
    "queue drop for/ward --yes",
    "sessions expire the/display --yes",
    "sessions expire the/display --yes",
    "sessions expire .. --yes",
    "sessions expire . --yes",
    "queue drop .. --yes",
    "queue drop . --yes",
    "import {folder}/more.jsonl",
    "import {folder}/more.jsonl",
    "import {folder}/more.jsonl --again --retain --json",
    "import {folder}/wrong.jsonl",
    "import {folder}/ahead.jsonl",
    "retained",
    "export {folder}/{name}-whole --json",
    "export {folder}/{name}-whole",
    "export {name}-archive --drop --generation 1",
    "generations list",
    "replay fleet/#",
    "delete fleet/0/# --yes",
    "verify",
)
"""Commands that change something, run in this order on two databases that begin with equal contents."""


@attrs.frozen
class Pair:
    """The same database twice: one copy is open in a server or another program, the other is closed."""

    served: Path
    at_rest: Path
    url: str = ""

    def outputs(self, words: str) -> list[tuple[int, str, str]]:
        """Run a command on both copies. Return the exit codes and the outputs, without paths, sizes and times."""
        return [_output_of(path, words) for path in (self.served, self.at_rest)]


def _output_of(path: Path, words: str) -> tuple[int, str, str]:
    first, *rest = words.format(folder=path.parents[1], name=path.parent.name).split()
    behind = rest[:1] if first in {"sessions", "queue", "retention", "generations"} else []
    done = CliRunner().invoke(cli, [first, *behind, str(path), *rest[len(behind) :]], catch_exceptions=False)
    return done.exit_code, _settled(first, done.stdout, path), _settled(first, done.stderr, path)


def _settled(command: str, text: str, path: Path) -> str:
    """Return text without the parts that differ between two databases with equal contents."""
    text = text.replace(str(path), "PATH").replace(path.parent.name, "NAME")
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:[\d.]+)?Z", "TIME", text)
    text = re.sub(r'("(created|sealed|seconds|disk_bytes\w*|file_bytes|when)": )[\d.]+', r"\1N", text)
    text = re.sub(r"in [\d.]+ s(, [\d,]+ a second)?|disk [\d.]+ \w+ before, [\d.]+ \w+ after", "", text)
    if command in {"info", "explain"}:  # the output of these commands consists mostly of the engine's numbers and times
        text = re.sub(r"[─╭╮╰╯│\s]+", " ", re.sub(r"[\d.,e-]+( (bytes|kB|MB))?", "N", text))
    return text


@contextmanager
def pair(folder: Path, backend: str, *, serve: bool = True) -> Iterator[Pair]:
    """Create a database with every kind of data, and open or serve one of two copies of the database."""
    need(backend)
    served, at_rest = folder / "served" / "db", folder / "at-rest" / "db"
    with ts.open(served, mode="x", backend=backend, shards=2, timestamps="message", late="lift") as db:
        db.store(
            [ts.Message(f"fleet/{n % 3}/speed", b"%d" % n, f"bus-{n % 5}", timestamp=10**6 * n) for n in range(60)]
        )
        db.add_generation()
        db.publish([ts.Message("fleet/0/state", b"\xff", "bus-0", retain=True, timestamp=61 * 10**6)])
        db.store([ts.Message("fleet/0/state", b"on", "bus/0", 1, timestamp=10**6 * 62)])
        db.queues.open("for/ward", max_messages=100).append([ts.Message("a/b", b"%d" % n, "c") for n in range(3)])
        for name in (".", ".."):
            db.queues.open(name).append([ts.Message("a/b", name.encode(), "c")])
            db.sessions.open(name, expiry_interval=None)
        session = db.sessions.open("the/display", expiry_interval=None)
        session.subscribe("fleet/+/speed", qos=1)
        session.subscribe("$share/walls/fleet/#", qos=1)
        db.retention.set(delivered="10m")  # as servers do
    shutil.copytree(served, at_rest)
    with ts.open(served) as db:
        if not serve:
            yield Pair(served, at_rest)
            return
        with serving_http(db) as server:
            yield Pair(served, at_rest, server.urls_of_http[0])


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair of databases on LevelDB that tests only read."""
    with pair(tmp_path_factory.mktemp("read"), "leveldb") as made:
        yield made


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair of databases on RocksDB, of which one is open for writing in another program without a server."""
    with pair(tmp_path_factory.mktemp("written"), "rocksdb", serve=False) as made:
        yield made


@pytest.mark.parametrize(
    ("beside", "words"),
    [*(("read", words) for words in (*READING, *REFUSED)), *(("written", words) for words in READING)],
)
def test_what_only_reads_asks_the_server_or_reads(request: pytest.FixtureRequest, beside: str, words: str) -> None:
    """Commands that only read print the same, with the same exit code, with and without a server or a writer."""
    opened, alone = request.getfixturevalue(beside).outputs(words)
    assert alone == opened
    assert "".join(alone[1:]) or "--limit 0" in words


@pytest.mark.parametrize("backend", ["leveldb", "rocksdb"])
def test_what_changes_something_lets_the_server_do_it(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that change something have the same effect in a server; paths are relative to the caller's directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.jsonl").write_text(
        "".join(f'{{"topic":"fleet/9/{n}","payload":"{n}","retain":true,"timestamp":{10**15 + n}}}\n' for n in range(9))
    )
    good = f'{{"topic":"a/b","payload":"1","timestamp":{10**15 + 10}}}\n'
    (tmp_path / "wrong.jsonl").write_text(good + '{"topic":"a/#","payload":"2"}\n')
    (tmp_path / "ahead.jsonl").write_text(good + '\n{"topic":"a/c","payload":"2","timestamp":4102444800000000}\n')
    with pair(tmp_path, backend) as both:
        for words in CHANGING:
            beside, alone = both.outputs(words)
            assert (words, alone) == (words, beside)
    assert _output_of(both.at_rest, "replay") == _output_of(both.served, "replay")
    if backend == "rocksdb":
        alone, beside = (_output_of(tmp_path / f"{name}-copy", "replay") for name in ("at-rest", "served"))
        assert alone == beside
        assert alone[1]


def test_a_name_that_no_request_can_have_is_reported(read: Pair) -> None:
    """A client id that is longer than a URL may be is refused; MQTT allows such ids."""
    assert "length" in run("sessions", "show", read.served, "x" * 65_535, code=2).stderr


def test_a_session_that_ends_while_it_is_listed_has_no_lag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that ends between the listing and the request for its lag is listed without lag."""
    need("leveldb")
    path, lag = tmp_path / "db", RemoteSessions.lag

    def late(self: RemoteSessions, *client_ids: str) -> dict[str, dict[str, Lag]]:
        self.expire("ends")
        return lag(self, *client_ids)

    monkeypatch.setattr(RemoteSessions, "lag", late)
    with ts.open(path, backend="leveldb") as db, serving_http(db):
        for client_id in ("ends", "stays"):
            db.sessions.open(client_id, expiry_interval=None).subscribe("a/#", qos=1)
        assert {"ends", "stays"} <= set(run("sessions", "list", path).stdout.split())
        monkeypatch.undo()
        assert {"stays"} == {"ends", "stays"} & set(run("sessions", "list", path).stdout.split())


def test_statements_are_run_by_the_server(tmp_path: Path) -> None:
    """The server runs SQL statements on DuckDB, and the output is the same as on a closed database."""
    need("duckdb")
    path = tmp_path / "db"
    with ts.open(path, mode="x", backend="duckdb", layout="table") as db:
        db.store([ts.Message(f"a/{n % 3}", b"%d" % n, timestamp=n) for n in range(30)])
    commands = [
        ("sql", path, "select topic, count(*) as n, avg(qos) from messages group by 1 order by 1", *option)
        for option in ((), ("--json",), ("--csv",))
    ]
    alone = [run(*words).stdout for words in commands]
    with ts.open(path) as db, serving_http(db):
        assert alone == [run(*words).stdout for words in commands]
        assert "syntax" in run("sql", path, "selec", code=2).stderr


def test_what_is_stored_meanwhile_is_followed(read: Pair) -> None:
    """`--follow` prints stored messages first; here a limit ends the output before new messages are needed."""
    beside = run("replay", read.served, "fleet/1/#", "--follow", "--limit", 20).stdout
    assert sorted(run("replay", read.at_rest, "fleet/1/#").stdout.splitlines()) == sorted(beside.splitlines())


def test_an_error_that_ends_a_replay_is_printed(tmp_path: Path) -> None:
    """An error that ends a replay is printed after the readable messages, and is the same as without a server."""
    need("leveldb")
    served, at_rest = tmp_path / "served", tmp_path / "at-rest"
    with ts.open(served, backend="leveldb", layout="skipstream") as db:
        db.store([ts.Message("a/b", bytes(400), "c", timestamp=n) for n in range(12_000)])
        engine = db.storage.shards[0].writer.open_engine()
        [(key, value)] = next(engine.scan(KEYS, reverse=True, limit=1))
        write = WriteBatch()
        write.put(KEYS, key, value[:-1] + bytes([value[-1] ^ 255]))
        engine.write(write)
    shutil.copytree(served, at_rest)
    alone = run("replay", at_rest, code=5)
    assert 4_096 < alone.stdout.count("\n") < 12_000
    with ts.open(served) as db, serving_http(db):
        beside, followed = run("replay", served, code=5), run("replay", served, "--follow", code=5)
    assert "checksum" in alone.stderr
    whole = alone.stdout.splitlines()
    for one in (beside, followed):
        assert alone.stderr == one.stderr
        printed = one.stdout.splitlines()
        assert 4_096 < len(printed)
        assert printed == whole[: len(printed)]


# --- sites ---


def test_sites(read: Pair) -> None:
    """`ds info` prints the same from the directory and from a URL, in EMQX's format."""
    shown = run("ds", "info", read.served).stdout
    assert re.fullmatch(
        r"THIS SITE:\n([0-9A-F]{16})\n\nSITES:\n\1    'topicstore@\S+'        up\n\n"
        r"SHARDS:\nShard {29}Replicas\nmessages/0 {24}\1\nmessages/1 {24}\1\n",
        shown,
    )
    url = read.url
    assert shown == run("ds", "info", "--url", url).stdout
    assert "is no site yet" in run("ds", "info", read.at_rest, code=2).stderr


def test_replicas_are_refused_while_there_is_one_site(read: Pair) -> None:
    """The server refuses changes of replicas with its reason; a change that would change nothing succeeds."""
    site = run("ds", "info", read.served).stdout.split("\n")[1]
    at = ("--database", read.served)
    assert run("ds", "set_replicas", "messages", site, *at).stdout == "ok\n"
    assert run("ds", "join", "messages", site, *at).stdout == "ok\n"
    assert "no cluster shares the storage" in run("ds", "leave", "messages", site, *at, code=2).stderr
    assert "only a site that is gone" in run("ds", "forget", site, *at, code=2).stderr
    assert "there is no site" in run("ds", "join", "messages", "0" * 16, *at, code=2).stderr
    assert "there is no storage 'other/one'" in run("ds", "join", "other/one", site, *at, code=2).stderr
    assert "no server has" in run("ds", "forget", site, "--database", read.at_rest, code=2).stderr


def test_transitions_are_shown_while_there_are_some() -> None:
    """`ds info` lists transitions and marks sites that are down, in the format of EMQX's own example."""
    from topicstore.cli.commands.ds import sections
    from topicstore.client.sites import PlacedShard, PlacedSite, Placement

    one, two, three = "D8894F95DC86DFDB", "5C6028D6CE9459C7", "F4E92DEA197C8EBC"
    shown = Placement(
        one,
        [PlacedSite(two, "n2@host", up=True), PlacedSite(three, "n3@host", up=False)],
        [
            PlacedShard("messages/0", [two, one], [f"+{three}"]),
            PlacedShard("messages/1", [two], [f"+{three}", f"+{one}"]),
        ],
    )
    assert "\n".join(sections(shown)) == (
        "THIS SITE:\nD8894F95DC86DFDB\n\n"
        "SITES:\n5C6028D6CE9459C7    'n2@host'        up\nF4E92DEA197C8EBC    'n3@host'    (x) down\n\n"
        "SHARDS:\nShard                             Replicas\n"
        "messages/0                        5C6028D6CE9459C7      D8894F95DC86DFDB\n"
        "messages/1                        5C6028D6CE9459C7\n\n"
        "REPLICA TRANSITIONS:\nShard                         Transitions\n"
        "messages/0                    +F4E92DEA197C8EBC\n"
        "messages/1                    +F4E92DEA197C8EBC  +D8894F95DC86DFDB"
    )


# --- servers that can't be asked ---


def test_tokens(read: Pair, tmp_path: Path) -> None:
    """The server refuses an unknown token, and a token without the needed scope, with exit code 4."""
    url, file = read.url, tmp_path / "token"
    file.write_text("wrong\n")
    asking = ("--url", url, "--token-file", file)
    assert "refuses" in run("ds", "info", *asking, code=4).stderr
    made = run("tokens", "add", "reader", read.served, "--scope", "read")
    file.write_text(made.stdout)
    assert run("ds", "info", *asking).stdout == run("ds", "info", read.served).stdout
    assert "this needs admin" in run("ds", "forget", "0" * 16, *asking, code=4).stderr
    assert "--token-file" in run("ds", "info", "--token-file", file, code=2).stderr
    assert "token" in run("ds", "info", "--url", url, "--token-file", tmp_path / "none", code=2).stderr


def test_a_server_that_went_away(tmp_path: Path) -> None:
    """After a server was killed, its database is read from the directory, and the stale `server.json` is ignored."""
    need("leveldb")
    path = tmp_path / "db"
    with ts.open(path, backend="leveldb") as db:
        db.store([ts.Message("a", b"1")])
    with serving(path, "--http", "127.0.0.1:0") as server:
        beside, url = run("replay", path).stdout, f"http://{server.ready['http'][0]}"
        server.kill()
    assert (path / "server.json").exists()
    assert beside == run("replay", path).stdout != ""
    assert "down" in run("ds", "info", path).stdout
    assert "doesn't answer" in run("ds", "info", "--url", url, code=4).stderr
    with ts.open(path):
        assert "is open elsewhere" in run("replay", path, code=4).stderr


def test_a_missing_extra_is_named(read: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra `server`, a command says how to install it."""
    monkeypatch.setitem(sys.modules, "httpx", None)
    assert 'pip install "topicstore[server]"' in run("info", read.served, code=2).stderr


def test_a_closed_database_needs_no_client(read: Pair) -> None:
    """A command on a closed database imports no HTTP library, and no module of the client or the server."""
    program = (
        "import sys; from topicstore.cli import cli\n"
        f"cli(['info', {str(read.at_rest)!r}], standalone_mode=False)\n"
        "loaded = [name for name in sys.modules if name.split('.')[0] in ('httpx', 'litestar', 'uvicorn')]\n"
        "loaded += [name for name in sys.modules if name.startswith(('topicstore.client', 'topicstore.server'))]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_a_server_without_http_says_so(tmp_path: Path) -> None:
    """A server without HTTP is reported as running, with the option that would make it reachable."""
    need("leveldb")
    path = tmp_path / "db"
    with ts.open(path, backend="leveldb") as db, Embedded(db, ServerSettings(http=None)):
        for words in (("info", path), ("ds", "info", path), ("ds", "forget", "0" * 16, "--database", path)):
            said = run(*words, code=4).stderr
            assert f"{path} is open in a server, process {os.getpid()}, that serves no HTTP" in said
            assert "start it with --http 127.0.0.1:18083" in said
    assert not (path / "server.json").exists()
    assert "no server has" in run("ds", "forget", "0" * 16, "--database", path, code=2).stderr


@pytest.mark.parametrize("url", ["127.0.0.1:18083", "http://", "http://[::1", "ftp://a:1", "http://a:port"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    """A wrong URL is refused, with an example of a right one."""
    assert "is no URL of a server, such as http://127.0.0.1:18083" in run("ds", "info", "--url", url, code=2).stderr


def test_what_is_no_topicstore_is_reported(read: Pair) -> None:
    """A URL with a wrong path, and another program's HTTP server, are reported with different errors."""
    url = f"{read.url}/api/v5"
    said = run("ds", "info", "--url", url, code=2).stderr
    assert said == "error: there is no GET /api/v5/api/v5/ds/sites; /schema shows what there is\n"
    for status in (200, 404):

        class Other(BaseHTTPRequestHandler):
            def do_GET(self, status: int = status) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"<p>hello")

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        with HTTPServer(("127.0.0.1", 0), Other) as other, ThreadPoolExecutor() as threads:
            answered = threads.submit(other.handle_request)
            url = f"http://127.0.0.1:{other.server_port}"
            assert f"what answers at {url} is no server of topic" in run("ds", "info", "--url", url, code=2).stderr
            answered.result()


def test_replicas_of_no_database_are_not_changed(tmp_path: Path) -> None:
    """Changing replicas of a database that doesn't exist fails without looking for a server."""
    said = run("ds", "forget", "0" * 16, "--database", tmp_path / "none", code=3).stderr
    assert "there is no database at" in said
