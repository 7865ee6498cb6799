"""Questions of a site of a cluster to the sites that keep a shard."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.server.cluster import SiteTls
from topicstore.server.http import keepers
from topicstore.server.http.keepers import Keepers
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.threads import wait_until


class Answering(ThreadingHTTPServer):
    """A site that gives each question the same answer."""

    def __init__(self, status: int, body: bytes) -> None:
        self.asked: list[tuple[str, bytes, str | None]] = []
        """The path, the question and the token of each request."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                question = self.rfile.read(int(self.headers["Content-Length"]))
                server.asked.append((self.path, question, self.headers["Authorization"]))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def server_close(self) -> None:
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
    """Return the `Keepers` of a site whose shard is kept by sites with these URLs, in this order."""
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


def test_a_silent_site_is_waited_for_once(opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that doesn't answer delays one question; that question and the next ones go to the other site."""
    monkeypatch.setattr(keepers, "_QUICK", 0.05)
    monkeypatch.setattr(keepers, "_AVOIDED", 3_600)
    silent = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
    answering = opened.enter_context(Answering(200, b"answer"))
    port = silent.getsockname()[1]
    some = asking(opened, tmp_path, f"http://127.0.0.1:{port}", answering.url)
    for number in range(3):
        assert b"answer" == some.ask(0, b"%d" % number, False)
    assert [("/api/v5/shards/0/ask", b"%d" % number, "Bearer secret") for number in range(3)] == answering.asked
    silent.setblocking(False)
    silent.accept()[0].close()
    with pytest.raises(BlockingIOError):
        silent.accept()


def test_a_site_that_refuses_is_asked_again(opened: ExitStack, tmp_path: Path) -> None:
    """A site that no longer keeps the shard refuses each question at once, and the next site answers it."""
    refusing = opened.enter_context(Answering(421, b'{"detail":"not here"}'))
    answering = opened.enter_context(Answering(200, b"answer"))
    some = asking(opened, tmp_path, refusing.url, answering.url)
    assert [b"answer"] * 2 == [some.ask(0, b"?", True) for _ in range(2)]
    assert 2 == len(refusing.asked) == len(answering.asked)


def test_without_an_answer_each_site_is_named_with_its_reason(opened: ExitStack, tmp_path: Path) -> None:
    """`ShardElsewhereError` says why no site could be asked: no HTTP, a refusal, or no connection."""
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
