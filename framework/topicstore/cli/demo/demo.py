"""The command ``topicstore demo``: fill a database, kill it in the middle, resume, replay, and check the result.

The second part of the demo, with a server, is in `mqtt_act`.
"""

from __future__ import annotations

import contextlib
import random
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import attrs
import click

import topicstore
from topicstore import Database, ImportSourceError, matches
from topicstore.cli.files.importing import Imported, Importer
from topicstore.cli.files.rows import BadRowError
from topicstore.cli.files.source_detection import open_source
from topicstore.cli.terminal.display import bar, console, size, visible
from topicstore.cli.terminal.exits import DAMAGED, USAGE, Failure
from topicstore.cli.terminal.options import PATH
from topicstore.digests import TopicDigests
from topicstore.files.formats import encode_lines
from topicstore.plugins import load_target, registry
from topicstore.storage.directory.directory_lock import DirectoryLock
from topicstore.storage.directory.manifest import DEFAULT_BACKEND

from . import mqtt_act
from .choosing import choose_filter
from .fleet import DEVICES, fleet

__all__ = ["demo"]

_MARK = ".made-by-topicstore-demo"
_DATABASE = "database"
_FLEET = "fleet.jsonl"


@attrs.frozen(kw_only=True)
class _Killed:
    """The outcome of the import that is killed."""

    rows: int
    """The number of rows that the import had reported as stored."""
    finished: bool
    """Whether the import had finished before it could be killed."""


@attrs.frozen(kw_only=True)
class _Source:
    """The messages of the file that is imported."""

    digests: TopicDigests
    messages: int
    bytes: int
    """The bytes of topics, client ids and payloads."""
    timed: bool
    """Whether every message has a time of its own."""


@click.command()
@click.option("--input", "file", type=PATH, help="File to import instead of a made-up fleet.")
@click.option("--directory", type=PATH, default=Path("demo-data"), show_default=True, help="Where everything goes.")
@click.option(
    "--messages", type=click.IntRange(min=1), default=300_000, show_default=True, help="Of the made-up fleet."
)
@click.option(
    "--published",
    type=click.IntRange(min=0),
    default=mqtt_act.MESSAGES,
    show_default=True,
    help="Messages that MQTT clients publish in the second act; 0 leaves it out.",
)
@click.pass_context
def demo(ctx: click.Context, file: Path | None, directory: Path, messages: int, published: int) -> None:
    """Fill a database, kill it in the middle, resume, replay, and check that nothing is lost or doubled.

    The second part does the same with a server: MQTT clients publish, `serve` is killed in the middle and
    restarted, and subscribers count the messages.

    The input may be any file that `import` reads. The database stays in the directory; the next demo replaces it.
    The demo exits with 1 if anything is lost, doubled, changed or damaged.
    """
    load_target(registry().backend(DEFAULT_BACKEND))  # a missing requirement is reported before anything is made
    _check_directory(directory, file)
    if file is None:
        _clear(directory)
        file = directory / _FLEET
        made = _made_up(file, messages)
        _step("made a fleet", f"{DEVICES:,} vehicles, {messages:,} messages in {made:,.1f} s, in {file}")
        source = _read_source(file)
    else:
        source = _read_source(file)  # an unreadable file must not cost the last demo's database
        _clear(directory)
    path = directory / _DATABASE
    _step(
        "read the source",
        f"{source.messages:,} messages in {len(source.digests.counts):,} topics; "
        f"{size(file.stat().st_size)} in the file, {size(source.bytes)} of topics, client ids and payloads",
    )
    killed = _killed_import(path, file, source.messages)
    if killed.finished:
        _step("import", f"finished all {killed.rows:,} rows before it could be killed", mark="!")
    else:
        part = killed.rows / max(source.messages, 1)
        _step("killed the import", f"by SIGKILL, with {killed.rows:,} rows reported safe ({part:.0%})", mark="!")
    with contextlib.closing(topicstore.open(path, mode="r+")) as db:
        whole = _resume(db, file, source, killed)
        whole = _check(db, source) and whole
        disk = db.info().disk_bytes
    each = disk / max(source.messages, 1)
    _step(
        "on disk",
        f"{size(disk)}, {each:,.1f} bytes a message; the messages have {size(source.bytes)}, "
        f"the file {size(file.stat().st_size)}",
    )
    if published:
        whole = _serve(directory, published) and whole
    _say_what_next(path, choose_filter(source.digests.counts))
    if not whole:
        ctx.exit(DAMAGED)


def _check_directory(directory: Path, file: Path | None) -> None:
    """Raise an error if the directory wasn't made by the demo, or if the input file is in its database."""
    if file is not None:
        if not file.is_file():
            raise ImportSourceError(f"{file} is not a file")
        database = directory / _DATABASE
        if database.resolve() in file.resolve().parents:
            raise Failure(f"{file} lies in {database}, which the demo removes first", USAGE)
    mark = directory / _MARK
    if directory.exists() and not mark.is_file() and (not directory.is_dir() or any(directory.iterdir())):
        raise Failure(f"{directory} was not made by the demo and is left as it is; choose another --directory", USAGE)


def _clear(directory: Path) -> None:
    """Create the directory, and remove the databases that an earlier demo left in it, but no other files.

    A generated fleet stays, because the guides use it as a sample; the next demo overwrites it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    mark = directory / _MARK
    mark.write_text("The demo removes what it made here when it runs again.\n")
    databases = [found for name in (_DATABASE, mqtt_act.SERVED) if (found := directory / name).is_dir()]
    for database in databases:
        DirectoryLock(database).release()  # raises an error if a process has the database open
    for database in databases:
        shutil.rmtree(database)


def _serve(directory: Path, messages: int) -> bool:
    """Run the MQTT part of the demo, if its packages are installed; return whether nothing was lost or duplicated."""
    reason = mqtt_act.missing()
    if reason is not None:
        _step("left out MQTT", reason, mark="!")
        return True
    return mqtt_act.play(_step, directory, messages)


def _made_up(file: Path, messages: int) -> float:
    started = time.perf_counter()
    with file.open("wb") as target:
        for chunk in fleet(messages):
            target.write(encode_lines(chunk))
    return time.perf_counter() - started


def _read_source(file: Path, *, timed: bool = True) -> _Source:
    """Read the file and compute its digests. If a message has no time, read it again with digests without times."""
    digests, messages, size = TopicDigests(times=timed), 0, 0
    with (
        open_source(file) as source,
        contextlib.closing(source.read(0, 8_192)) as read,
        bar("reading the source") as progress,
    ):
        try:
            for rows in read:
                chunk = rows.messages if isinstance(rows.messages, list) else rows.batch().to_messages()
                if timed and any(m.timestamp is None for m in chunk):
                    break
                digests.add(chunk)
                messages += len(chunk)
                size += sum(len(m.topic) + len(m.client_id) + len(m.payload) for m in chunk)
                progress(*source.progress(), messages)
            else:
                return _Source(digests=digests, messages=messages, bytes=size, timed=timed)
        except BadRowError as bad:
            raise ImportSourceError(bad.described_in(str(file))) from bad
    return _read_source(file, timed=False)


def _killed_import(path: Path, file: Path, total: int) -> _Killed:
    """Import the file in a child process, which kills itself with SIGKILL after part of the rows were stored."""
    fatal = int(total * random.SystemRandom().uniform(0.3, 0.7))
    command = [sys.executable, "-m", "topicstore.cli.demo.doomed_import", str(path), str(file)]
    rows = 0
    with (
        subprocess.Popen(  # noqa: S603 - this program, with arguments from its own caller
            [*command, str(fatal), str(_batch_size(total))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as child,
        bar("importing, to be killed") as progress,
    ):
        for line in child.stdout or ():
            rows = int(line)
            progress(rows, total, rows)
        _, complaint = child.communicate()
    if child.returncode > 0:
        raise Failure(complaint.decode(errors="replace").removeprefix("error: "), child.returncode)
    return _Killed(rows=rows, finished=child.returncode == 0)


def _batch_size(messages: int) -> int:
    """Return a batch size that gives many batches even for few messages, so that the kill can hit the middle."""
    return max(1, min(4_096, messages // 64))


def _resume(db: Database, file: Path, source: _Source, killed: _Killed) -> bool:
    found = db.info().messages
    safe = found >= killed.rows
    missing = "none of those reported is missing" if safe else f"{killed.rows - found:,} of those reported are MISSING"
    _step("opened it again", f"{found:,} messages are there; {missing}", mark="✓" if safe else "✗")
    done = _import_rest(db, file, source.messages)
    rate = f": {done.messages / done.seconds:,.0f} a second" if done.messages and done.seconds else ""
    text = f"after row {done.resumed:,}; {done.messages:,} messages in {done.seconds:,.1f} s{rate}"
    _step("resumed the import", "nothing was left to do" if done.outcome == "already imported" else text)
    return safe


def _import_rest(db: Database, file: Path, total: int) -> Imported:
    importer = Importer(db=db, batch_size=_batch_size(total))
    with open_source(file) as source, bar("importing the rest") as progress:
        importer.observe = lambda source, messages: progress(*source.progress(), messages)
        return importer.run(source)


def _check(db: Database, source: _Source) -> bool:
    """Replay a wildcard filter and then everything, compare with the source, and verify the database.

    Returns whether everything is right.
    """
    topic_filter = choose_filter(source.digests.counts)
    expected = {topic: n for topic, n in source.digests.counts.items() if matches(topic_filter, topic)}
    count, seconds = _timed_replay(db, topic_filter)
    right = count == sum(expected.values())
    text = f"{count:,} messages of {len(expected):,} topics in {seconds:,.2f} s"
    wrong = "" if right else f", but the source has {sum(expected.values()):,}"
    _step("replayed a wildcard", f"{visible(topic_filter)}: {text}{wrong}", mark="✓" if right else "✗")

    count, seconds = _timed_replay(db, "#")
    # A filter that begins with a wildcard leaves out topics that begin with "$".
    stored = TopicDigests(times=source.timed)
    for one in ("#", *sorted({f"{topic.split('/')[0]}/#" for topic in source.digests.counts if topic[0] == "$"})):
        stored.add(db.replay(one, order="time"))
    _step("replayed all", f"{count:,} messages in {seconds:,.2f} s: {count / max(seconds, 1e-9):,.0f} a second")

    found = source.digests.differences(stored)
    if found.none:
        text = f"{stored.messages:,} messages, topic by topic in order: nothing lost, nothing doubled, nothing changed"
    else:
        text = f"{found.lost:,} LOST, {found.doubled:,} DOUBLED, {len(found.changed):,} topics CHANGED"
    _step("compared", text, mark="✓" if found.none else "✗")

    report = db.verify()
    text = f"{report.messages:,} messages read and checked: " + (
        "nothing is damaged" if report.ok else f"{len(report.damages):,} places are DAMAGED"
    )
    _step("verified", text, mark="✓" if report.ok else "✗")
    return right and found.none and report.ok


def _timed_replay(db: Database, topic_filter: str) -> tuple[int, float]:
    started = time.perf_counter()
    count = sum(1 for _ in db.replay(topic_filter, order="time"))
    return count, time.perf_counter() - started


_COLOURS = {"✓": "green", "✗": "red", "!": "yellow"}


def _step(what: str, text: str, mark: str = "✓") -> None:
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 2))
    line.add_column(width=1)
    line.add_column(width=20, style="bold")
    line.add_column(overflow="fold")
    line.add_row(Text(mark, style=_COLOURS[mark]), what, Text(text))
    console().print(line)


def _say_what_next(path: Path, topic_filter: str) -> None:
    program = _program()
    where = shlex.quote(str(path))
    click.echo("\nLook at it:")
    quoted = shlex.quote(topic_filter)
    if quoted == topic_filter:
        quoted = f"'{topic_filter}'"  # some shells expand "#" or "+", so filters are best quoted
    for rest in (f"info {where}", f"replay {where} {quoted} --limit 5", f"streams {where}"):
        click.echo(f"  {program} {rest}")
    click.echo("\nServe it over MQTT and HTTP, with a page for the browser:")
    click.echo(f"  {program} serve {where}")
    click.echo("  http://127.0.0.1:18083/")


def _program() -> str:
    """Return the command that starts this program from the current directory."""
    if shutil.which("topicstore"):
        return "topicstore"
    beside = Path(sys.executable).with_name("topicstore")
    if not beside.exists():
        return f"{shlex.quote(sys.executable)} -m topicstore.cli"
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))
