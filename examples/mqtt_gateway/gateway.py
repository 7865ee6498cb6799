"""An MQTT server embedded in a program: ``python gateway.py DIRECTORY PORT``. Ctrl-C or SIGTERM shuts it down."""

import asyncio
import signal
import sys

import topicstore as ts
from topicstore.server import Address, ListenerSettings, Server, ServerSettings


async def serve(db: ts.Database, port: int) -> None:
    """Serve MQTT on this machine until SIGINT or SIGTERM."""
    ending = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    settings = ServerSettings(listeners={"mqtt": ListenerSettings(listen=Address(f"127.0.0.1:{port}"))})
    async with Server(db, settings) as server:
        print("serving at", *server.addresses, flush=True)
        await ending.wait()


if __name__ == "__main__":
    directory, port = sys.argv[1:]
    with ts.open(directory) as db:
        db.persistence.add("plant/#")  # store these messages even without subscribers, so that they can be replayed
        asyncio.run(serve(db, int(port)))
