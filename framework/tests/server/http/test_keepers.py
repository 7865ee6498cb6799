"""Requests of a site for shards of which it has no replica, to the sites that have one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.server.cluster import SiteTls
from topicstore.server.http import keepers
from topicstore.server.http.keepers import Keepers
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.threads import MOMENT, PATIENCE, begin, wait_until


class Answering(ThreadingHTTPServer):
    """A site that answers each request with the same status and body, slowly if there is a pause after each byte."""

    def __init__(self, status: int, body: bytes, pause: float = 0, listening: socket.socket | None = None) -> None:
        self._ended = threading.Event()
        self.asked: list[tuple[str, bytes, str | None]] = []
        """The path, the body and the token of each request."""
        server, ended = self, self._ended

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received = self.rfile.read(int(self.headers["Content-Length"]))
                server.asked.append((self.path, received, self.headers["Authorization"]))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with suppress(ConnectionError):
                    for piece in [body[at : at + 1] for at in range(len(body))] if pause else [body]:
                        self.wfile.write(piece)
                        ended.wait(pause)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler, bind_and_activate=listening is None)
        if listening is not None:
            self.socket.close()
            self.socket, self.server_address = listening, listening.getsockname()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def server_close(self) -> None:
        self._ended.set()
        self.shutdown()
        self._thread.join()
        super().server_close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[ExitStack]:  # noqa: ARG001 - it is removed afterwards
    """A stack of the objects that a test opens; closes them before the test's directory is removed."""
    need("rocksdb")
    with ExitStack() as closer:
        yield closer


def asking(opened: ExitStack, root: Path, *urls: str) -> Keepers:
    """Return the `Keepers` of a site, for a shard with replicas at sites of these URLs, in this order."""
    found: list[ts.Database] = []
    for name, url in zip("abc", ("", *urls), strict=False):
        cluster = ts.Cluster(
            (root / "log").as_uri(), beat_interval=0.02, poll_interval=0.02, takeover_after=3_600, http_address=url
        )
        found.append(opened.enter_context(ts.open(root / name, cluster=cluster, site=name)))
        wait_until(lambda: len(found[0].cluster.keepers(0)) == len(found) - 1, "a copy at the site")  # type: ignore[union-attr]
    assert found[0].cluster is not None
    assert [*urls] == [one.http_address for one in found[0].cluster.keepers(0)]
    return Keepers(found[0], found[0].cluster, "secret", SiteTls(None))


class Unresponsive:
    """A site that accepts connections, but answers no request before `speak` is called."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened
        self._socket = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._socket.settimeout(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def asked(self, most: int = 100) -> int:
        """Return the number of connections since the last call."""
        for number in range(most):
            try:
                self._opened.enter_context(self._socket.accept()[0])
            except BlockingIOError:
                return number
        return most

    def speak(self, body: bytes) -> Answering:
        return self._opened.enter_context(Answering(200, body, listening=self._socket))


def test_an_unresponsive_site_delays_one_request(
    opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a request to a site timed out, requests go only to the next site, until the first answers a probe.

    The unresponsive site gets one probe after each pause. Only the thread that follows the shards waits for its answer.
    """
    monkeypatch.setattr(keepers, "_QUICK", 0.5)
    unresponsive, answering = Unresponsive(opened), opened.enter_context(Answering(200, b"answer"))
    some = asking(opened, tmp_path, unresponsive.url, answering.url)
    for number in range(3):
        assert b"answer" == some.ask(0, b"%d" % number, False)
    assert [("/api/v5/shards/0/ask", b"%d" % number, "Bearer secret") for number in range(3)] == answering.asked
    some.look()
    assert 1 == unresponsive.asked()
    some._reach["b"]._again = 0
    some.look()
    assert b"answer" == some.ask(0, b"?", False)
    assert 1 == unresponsive.asked()
    speaking = unresponsive.speak(b"here again")
    monkeypatch.setattr(keepers, "_QUICK", PATIENCE)
    some._reach["b"]._again = 0
    some.look()
    assert b"here again" == some.ask(0, b"?", False)
    assert 2 == len(speaking.asked)


def test_long_requests_do_not_hold_up_quick_ones(
    opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quick request is sent while as many long requests as allowed wait. After it times out, others fail at once."""
    monkeypatch.setattr(keepers, "_QUICK", 0.05)
    monkeypatch.setattr(keepers, "_CALLS", 2)
    unresponsive = Unresponsive(opened)
    some = asking(opened, tmp_path, unresponsive.url)
    waiting = [begin(lambda: some.ask(0, b"long", True)) for _ in range(2)]
    for _ in waiting:
        wait_until(lambda: unresponsive.asked(1), "a request")
    with pytest.raises(ts.ShardElsewhereError, match="site b: timed out"):
        some.ask(0, b"?", False)
    for waits in (False, True):
        with pytest.raises(ts.ShardElsewhereError, match="site b had no answer a moment ago"):
            some.ask(0, b"?", waits)
    opened.close()
    for one in waiting:
        assert isinstance(one.exception(PATIENCE), ts.ShardElsewhereError)


def test_an_answer_that_trickles_is_not_waited_for(
    opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that arrives too slowly on the whole counts as missing, although each piece comes in time."""
    monkeypatch.setattr(keepers, "_QUICK", 0.5)
    monkeypatch.setattr(keepers, "_SLOWEST", 1 << 40)
    some = asking(opened, tmp_path, opened.enter_context(Answering(200, b"x" * 10_000, MOMENT)).url)
    with pytest.raises(ts.ShardElsewhereError, match="site b: "):
        some.ask(0, b"?", False)


def test_the_pause_grows_while_a_site_is_unresponsive() -> None:
    """Each request that times out doubles the pause before the next probe, up to a bound.

    Refused connections don't double the pause, nor do requests that began before the failure was known. After a site
    has answered for as long as its last pause, the next pause is the shortest again.
    """
    reach, now, pauses = keepers.Reach(), 100.0, list[float]()

    def fail(began: float, *, late: bool = True) -> float:
        reach.fail(7, began, began + 3, late=late)
        return reach._again - began - 3

    for _ in range(6):
        pauses.append(fail(now))
        assert reach.due(reach._again - 0.1) is None
        assert 7 == reach.due(reach._again)
        again = reach._again
        fail(now + 1)  # had begun before the failure was known
        assert again == reach._again
        now = again + 0.1
    assert [2, 4, 8, 16, 30, 30] == pytest.approx(pauses)
    reach.answer()
    assert (None, None) == (reach.shard, reach.due(now + 1_000))
    assert 30 == pytest.approx(fail(now + 29))
    assert 2 == pytest.approx(fail(reach._again, late=False))
    assert 2 == pytest.approx(fail(reach._again + 3))


def test_a_site_that_refuses_is_asked_again(opened: ExitStack, tmp_path: Path) -> None:
    """A site that has lost its replica refuses each request at once, and the next site answers the request."""
    refusing = opened.enter_context(Answering(421, b'{"detail":"not here"}'))
    answering = opened.enter_context(Answering(200, b"answer"))
    some = asking(opened, tmp_path, refusing.url, answering.url)
    assert [b"answer"] * 2 == [some.ask(0, b"?", True) for _ in range(2)]
    assert 2 == len(refusing.asked) == len(answering.asked)


def test_without_an_answer_each_site_is_named_with_its_reason(opened: ExitStack, tmp_path: Path) -> None:
    """`ShardElsewhereError` has for each site the reason why it gave no answer: no HTTP, a refusal, no connection."""
    refusing = opened.enter_context(Answering(500, b"<html>"))
    some = asking(opened, tmp_path, refusing.url, "")
    with pytest.raises(ts.ShardElsewhereError) as failed:
        some.ask(0, b"?", False)
    assert "site b: status 500; site c serves no HTTP" in str(failed.value)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    some = asking(opened, tmp_path / "other", f"http://127.0.0.1:{port}")
    for said in ("site b: ", "site b had no answer a moment ago"):
        with pytest.raises(ts.ShardElsewhereError, match=said):
            some.ask(0, b"?", False)
