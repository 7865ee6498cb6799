"""Each command's output is compared with ``outputs.txt``: the JSON that scripts read, and the text that people read.

Of a JSON document, keys and types are compared, and of a list the first element; of text everything but times, sizes on
disk, and the engine's numbers. ``python framework/tests/cli/test_outputs.py`` writes the file anew; review the
difference before you commit it.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

import topicstore as ts
from click.testing import CliRunner
from topicstore.cli import cli

FROZEN = Path(__file__).with_name("outputs.txt")
_FREE = {"counters", "engine", "details", "options", "epochs"}
"""The keys of objects whose contents depend on the engine or the layout."""


def fill(path: Path) -> None:
    """Make a database that holds every kind of data, and files to import."""
    with ts.open(path / "data", mode="x", shards=2, timestamps="message", late="lift") as db:
        db.store(
            [ts.Message(f"fleet/{n % 3}/speed", b"%d" % n, f"bus-{n % 5}", timestamp=10**6 * n) for n in range(60)]
        )
        db.add_generation()
        db.publish([ts.Message("fleet/0/state", b"\xff", "bus-0", retain=True, timestamp=61 * 10**6)])
        db.queues.open("forward", max_messages=100).append(
            [ts.Message("a/b", b"%d" % n, "c", timestamp=n) for n in range(3)]
        )
        session = db.sessions.open("display", expiry_interval=None)
        session.subscribe("fleet/+/speed", 1, subscription_identifier=7)
        session.subscribe("$share/walls/fleet/#", 1)
        session.disconnect()
        db.sessions.open("other", expiry_interval=86_400).subscribe("$share/walls/fleet/#", 1)
    line = '{"topic":"fleet/9","payload":"1","retain":true,"timestamp":1000000000000000}\n'
    (path / "more.jsonl").write_text(line)
    (path / "wrong.jsonl").write_text(line.replace("00}", "01}") + '{"topic":"a/#","payload":"2"}\n')


def output(words: str) -> str:
    """Return a command's output: text, or the shape of its JSON; then errors and notes, and a nonzero exit code."""
    done = CliRunner(env={"COLUMNS": None}).invoke(cli, shlex.split(words), catch_exceptions=False)
    found = _text(words.split()[0], done.stdout)
    if "--json" in words and done.stdout:
        found = json.dumps(_shape(json.loads(done.stdout)), ensure_ascii=False) + "\n"
    noted = "".join(f"2> {line}\n" for line in done.stderr.splitlines())
    return found + noted + (f"exit code {done.exit_code}\n" if done.exit_code else "")


def _text(command: str, text: str) -> str:
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:[\d.]+)?Z", "TIME", text)
    text = re.sub(r"in [\d.]+ s(, [\d,]+ a second)?| *[\d.]+ (bytes|[kM]B)", " N", text).replace(
        str(Path.cwd()), "FOLDER"
    )
    text = re.sub("─+", "─", text)
    if command in {"info", "explain"}:
        text = re.sub(r"\d[\d.,e-]*( (bytes|kB|MB|GB))?|[0-9a-f]{32}", "N", text)
        text = re.sub(r"[─╭╮╰╯│ ]{2,}", "  ", re.sub(r"(?m)^.*\b(by|id) .*\n|^ +[a-z].*\n", "", text))
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: {} if key in _FREE else _shape(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_shape(one) for one in value[:1]]
    return None if value is None else type(value).__name__


def outputs(path: Path) -> str:
    """Run the commands of the file in order, because earlier commands affect the output of later ones."""
    fill(path)
    commands = re.findall(r"^\$ topicstore (.*)$", FROZEN.read_text(encoding="utf-8"), re.MULTILINE)
    with contextlib.chdir(path):
        return "".join(f"$ topicstore {words}\n{output(words)}" for words in commands)


def test_outputs(tmp_path: Path) -> None:
    """Each command prints the text in ``outputs.txt``."""
    assert FROZEN.read_text(encoding="utf-8").splitlines() == outputs(tmp_path).splitlines()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        FROZEN.write_text(outputs(Path(folder)), encoding="utf-8")
