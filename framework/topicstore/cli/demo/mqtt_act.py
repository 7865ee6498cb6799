"""The second part of the demo: MQTT clients publish to a server, which is killed and restarted meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from .clients import Progress, Publisher, Subscriber
from .serving import Serving

__all__ = ["MESSAGES", "SERVED", "missing", "play"]

SERVED = "served"
"""The name of the server's database, beside that of the first part."""
MESSAGES = 10_000
"""The default number of messages to publish, half with QoS 1 and half with QoS 2."""
_LOG = "served.log"
_VERSIONS = (4, 5)
"""The protocol levels of the publishers: MQTT 3.1.1 and MQTT 5."""
Step = Callable[..., None]
"""A function that prints a step of the demo: its title, a text, and optionally a mark."""


def missing() -> str | None:
    """Return a message that names the missing packages of this part; None if all packages are installed."""
    modules = {"paho": "paho-mqtt", "ohmqtt": "ohmqtt"}
    names = [name for module, name in modules.items() if find_spec(module) is None]
    return f'needs {", ".join(names)}: pip install "topicstore[demo]"' if names else None


def play(step: Step, directory: Path, messages: int) -> bool:
    """Publish, kill the server, restart it, and count; return whether subscribers received all that QoS promises.

    messages: the number to publish, rounded down to a multiple that the publishers can share; at least one each.
    """
    count, progress = max(1, messages // (2 * len(_VERSIONS))), Progress()
    server = Serving(directory / SERVED, directory / _LOG)
    with ExitStack() as closing:
        closing.callback(server.kill)
        server.start()
        progress.serving()
        readers = [Subscriber(f"reader-{qos}", v, progress, qos, f"demo/+/{qos}") for qos, v in ((1, 4), (2, 5))]
        writers = [Publisher(f"writer-{v}", v, progress, f"demo/writer-{v}", count) for v in _VERSIONS]
        step("served", f"MQTT on port {server.port}: two paho clients publish, two have subscriptions that stay")
        total = 2 * count * len(writers)
        for client in (*readers, *writers):  # subscribers first, because publishers begin at once
            client.start(server.port)
            closing.callback(client.close)
        _kill_in_the_middle(step, server, writers, progress, total)
        progress.wait(lambda: sum(w.acknowledged for w in writers) == total, "all publishes to be acknowledged")
        progress.wait(lambda: all(len(r.found) == total // 2 for r in readers), "all messages to arrive")
        whole = _compare(step, readers, total // 2)
        for client in (*readers, *writers):
            whole = not client.sessions_lost and whole
        server.stop()
    return whole


def _kill_in_the_middle(step: Step, server: Serving, writers: list[Publisher], progress: Progress, total: int) -> None:
    def acknowledged() -> int:
        return sum(writer.acknowledged for writer in writers)

    fatal = int(total * random.SystemRandom().uniform(0.3, 0.7))
    progress.wait(lambda: acknowledged() >= fatal, "publishes to be acknowledged")
    server.kill()
    step("killed the server", f"by SIGKILL, with {acknowledged():,} of {total:,} messages acknowledged", mark="!")
    started = time.perf_counter()
    server.start()
    progress.serving()
    step("started it again", f"in {time.perf_counter() - started:,.1f} s; the clients go on with their sessions")


def _compare(step: Step, readers: list[Subscriber], expected: int) -> bool:
    """Print the messages that each subscriber received; return whether no message of QoS 2 was received twice."""
    at_least_once, exactly_once = readers
    again = f"{at_least_once.twice:,} came again, as QoS 1 allows" if at_least_once.twice else "none came twice"
    step("QoS 1", f"{expected:,} messages published, {len(at_least_once.found):,} arrived: nothing lost; {again}")
    if exactly_once.twice:
        text = f"{exactly_once.twice:,} of {expected:,} messages came TWICE"
    else:
        text = f"{expected:,} messages published, {exactly_once.received:,} arrived: nothing lost, each came once"
    step("QoS 2", text, mark="✗" if exactly_once.twice else "✓")
    return not exactly_once.twice
