"""A server that speaks as S3 does, on a free port of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of moto's server, which holds everything in memory."""
    server = pytest.importorskip("moto.server", reason='needs moto: pip install "moto[server]"')
    threaded = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    threaded.start()
    host, port = threaded.get_host_and_port()
    yield f"http://{host}:{port}"
    threaded.stop()
