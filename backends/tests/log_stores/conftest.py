"""A fixture with an S3-compatible server on a free local port."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
