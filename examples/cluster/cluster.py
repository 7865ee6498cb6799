"""Three servers on this machine that share their messages: ``python cluster.py DIRECTORY``.

The program starts the servers, publishes to one of them, kills it, and reads the messages from another.
"""

import json
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from paho.mqtt import publish

READINGS = 20


class Site:
    """One server of the cluster: a process of ``topicstore serve``."""

    def __init__(self, directory: Path, name: str) -> None:
        log = (directory / "log").absolute().as_uri()
        here = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
        command = (sys.executable, "-m", "topicstore.cli", "serve", str(directory / name), "--print-ready")
        self.name = name
        with (directory / f"{name}.log").open("wb") as errors:
            self.process = subprocess.Popen(  # noqa: S603 - the command is topicstore's
                [*command, *here, "--cluster", log, "--site", name], stdout=subprocess.PIPE, stderr=errors
            )

    def __enter__(self) -> Self:
        return self

    def wait_until_ready(self) -> None:
        """Read the line that the server prints when it serves."""
        assert self.process.stdout is not None  # noqa: S101 - it is a pipe
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"site {self.name} did not start; its log is beside its directory")
        ready = json.loads(line)
        self.mqtt, self.http = ready["mqtt"][0], ready["http"][0]

    def messages(self) -> list[dict[str, Any]]:
        """Return all messages, read over HTTP."""
        with urllib.request.urlopen(f"http://{self.http}/api/v5/messages?filter=plant/%23") as response:
            return [json.loads(line) for line in response]

    def kill(self) -> None:
        """End the process as a power failure would."""
        self.process.kill()
        self.process.wait()

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.communicate()


def main(directory: Path) -> None:
    """Run the three servers, and one of them only for a while."""
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as running:
        sites = [running.enter_context(Site(directory, name)) for name in ("site-a", "site-b", "site-c")]
        for site in sites:
            site.wait_until_ready()
            print(f"{site.name} serves", flush=True)
        first, second, _ = sites
        host, port = first.mqtt.rsplit(":", 1)
        readings: Any = [(f"plant/press-{number % 3}", f"{number}", 1, False) for number in range(READINGS)]
        publish.multiple(readings, hostname=host, port=int(port), client_id="gauge")
        print(f"{first.name} has acknowledged {READINGS} readings, and is killed", flush=True)
        first.kill()
        found = second.messages()
        print(f"{second.name} has {len(found)} readings, the last one {found[-1]['payload']}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
