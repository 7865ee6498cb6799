"""Servers on free local ports: an S3-compatible one, and one that refuses or fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

import pytest


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of moto's server, which keeps everything in memory.

    It answers one request at a time, because moto's conditional PUT is not atomic: it looks for the object and then
    stores it.
    """
    moto = pytest.importorskip("moto.server", reason='needs moto: pip install "moto[server]"')
    from werkzeug.serving import make_server

    answer, alone = moto.DomainDispatcherApplication(moto.create_backend_app), Lock()

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with alone:
            found: Iterable[bytes] = answer(environ, start_response)
            return found

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=moto.MotoRequestHandler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class Answering(ThreadingHTTPServer):
    """A server that answers every request with one status and one code of an S3 error."""

    daemon_threads = True
    status, code = 403, "AccessDenied"


class _Answer(BaseHTTPRequestHandler):
    server: Answering

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = f"<Error><Code>{self.server.code}</Code><Message>the reason</Message></Error>".encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - the names that `http.server` looks for

    def log_message(self, *_: object) -> None:
        """Write nothing to stderr."""


@pytest.fixture
def answering() -> Iterator[Answering]:
    """A running server; the test sets the status and the code of its answers."""
    with Answering(("127.0.0.1", 0), _Answer) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
