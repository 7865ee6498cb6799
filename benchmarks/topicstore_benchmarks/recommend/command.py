"""The command ``topicstore recommend``."""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click
from topicstore import (
    ImportSourceError,
    InvalidFilterError,
    InvalidMessageError,
    MessageBatch,
    PluginError,
    TopicFilter,
)
from topicstore.cli.files.rows import BadRowError, Rows
from topicstore.cli.files.source import Source
from topicstore.cli.files.source_detection import FORMATS, STANDARD_INPUT, open_source
from topicstore.cli.terminal.completion import backend_names
from topicstore.cli.terminal.display import console, count_of, make_table, milliseconds, print_json, visible
from topicstore.cli.terminal.exits import DAMAGED, Failure
from topicstore.cli.terminal.options import PATH, arguments_of, json_option
from topicstore.contract.columns import to_iterable
from topicstore.contract.times import format_time
from topicstore.plugins import load_target, registry

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from .choosing import Comparison, Question

__all__ = ["recommend"]

_LIMIT = 100_000
_BATCH_SIZE = 1_000
"""The number of messages that a buffered writer stores in one batch."""


@attrs.frozen(kw_only=True)
class _Sample:
    """The messages with which the layouts are measured."""

    name: str
    batches: list[MessageBatch]
    counts: Counter[str]
    """The number of messages by topic."""
    cut: bool
    """Whether the file has more messages."""


@click.command()
@click.argument("sample", type=PATH)
@click.option("--filter", "filters", multiple=True, metavar="FILTER", help="That you will replay. May be repeated.")
@click.option("--filters", "file", type=PATH, metavar="FILE", help="File with such filters, one a line.")
@click.option("--format", "file_format", type=click.Choice(FORMATS), help="What SAMPLE is.  [default: its ending]")
@click.option("--backend", default="rocksdb", show_default=True, shell_complete=backend_names, help="Storage engine.")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="PLUGIN.NAME=VALUE",
    help="Option of the backend or of a layout, such as block.compression=zstd.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), default=_LIMIT, show_default=True, metavar="ROWS", help="Take so many."
)
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Where temporary databases go; best on the disk that you will use.  [default: the system's]",
)
@json_option
def recommend(
    sample: Path,
    *,
    filters: tuple[str, ...],
    file: Path | None,
    file_format: str | None,
    backend: str,
    options: tuple[str, ...],
    limit: int,
    directory: Path | None,
    as_json: bool,
) -> None:
    """Measure all layouts on SAMPLE, a file of your own messages that `import` takes, and say which is best.

    Each layout gets a process and a temporary database with the same messages, sorted by time, and replays
    each filter several times, the layouts in turns. The smallest total over the filters wins: give a filter
    twice if it counts twice. Layouts within 10 %, or nearer than 5 ms, count as equal; of these, the one
    wins that needs the least time times bytes to store a message. `reference` is measured too, but never
    recommended. All must return the stored messages.

    Replays are measured after `compact`. Where a layout merges (block), the filters are measured before it
    too: narrow ones can take many times as long until the stored messages are merged, which happens in the
    background, or by `compact`.

    Without filters, some are made from the topics of SAMPLE: the topic of median traffic, the busiest one,
    and the first with one level as "+". The replay of everything, and one of the last hundredth, are shown
    but don't count.

    \b
    Examples:
      topicstore recommend messages.parquet --filter 'fleet/+/+/speed'
      topicstore recommend messages.jsonl.gz --filters filters.txt --json
    """  # noqa: D301 - click wants the character
    from .choosing import compare, representative_filters

    load_target(registry().backend(backend))  # a missing requirement is reported before the sample is read
    wanted = [*filters, *(() if file is None else _read_filters(file))]
    for text in wanted:
        TopicFilter(text)  # a bad filter is reported before the sample is read
    taken = _read_sample(sample, file_format, limit)
    wanted = wanted or representative_filters(taken.counts)
    with tempfile.TemporaryDirectory(prefix="topicstore-recommend-", dir=directory) as place, _status() as say:
        arguments = arguments_of(plugins=(), options=options)
        try:
            found = compare(taken.batches, wanted, Path(place), backend=backend, progress=say, **arguments)
        except PluginError as wrong:
            raise Failure(str(wrong), DAMAGED) from wrong
    if taken.cut:
        caveat = f"only the first {found.messages:,} messages of the sample were taken; --limit takes more"
        found = attrs.evolve(found, caveats=[*found.caveats, caveat])
    if as_json:
        print_json({"sample": taken.name, **attrs.asdict(found)})
    else:
        _print(console(), taken, found)
        click.echo("\nnext:")
        for line in _next_steps(sample, found, options):
            click.echo(f"  {line}")


def _read_filters(file: Path) -> list[str]:
    """Return the filters in a file with one on each line; blank lines are skipped."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # any other line break may be part of a filter
    except OSError as bad:
        hint = "; a filter itself is given with --filter" if isinstance(bad, FileNotFoundError) else ""
        raise click.BadParameter(f"{file}: {bad.strerror}{hint}", param_hint="'--filters'") from bad
    except UnicodeDecodeError as bad:
        raise click.BadParameter(f"{file} is not a text file of UTF-8", param_hint="'--filters'") from bad
    filters = []
    for number, line in enumerate(lines, 1):
        text = line.removesuffix("\r")
        try:
            if text.strip():
                filters.append(TopicFilter(text).text)
        except InvalidFilterError as bad:
            raise InvalidFilterError(f"{file}, line {number}: {bad}") from bad
    if not filters:
        raise click.BadParameter(f"{file} holds no filters", param_hint="'--filters'")
    return filters


def _read_sample(file: Path, file_format: str | None, limit: int) -> _Sample:
    """Read the first rows of a file. Raises `ImportSourceError` for an empty file and for a bad row, naming the row."""
    batches: list[MessageBatch] = []
    counts: Counter[str] = Counter()
    room, cut = limit, False
    with open_source(file, file_format) as source, contextlib.closing(source.read(0, _BATCH_SIZE)) as read:
        try:
            for rows in read:
                cut = len(rows) > room
                batches.append(_batch(source, rows.head(room)))
                counts.update(to_iterable(batches[-1].topics))
                room -= len(batches[-1])
                if cut:
                    break
        except BadRowError as bad:
            raise ImportSourceError(bad.described_in(source.name)) from bad
        if not counts:
            raise ImportSourceError(f"{source.name} has no messages")
        return _Sample(name=source.name, batches=batches, counts=counts, cut=cut)


def _batch(source: Source, rows: Rows) -> MessageBatch:
    try:
        return rows.batch()
    except InvalidMessageError as bad:
        first, last = rows.first + 1, rows.end
        where = f"row {rows.number(bad.index) + 1:,}" if bad.index is not None else f"rows {first:,} to {last:,}"
        raise ImportSourceError(f"{source.name}, {where}: {bad.reason}") from bad


@contextlib.contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Show the current step on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("measuring") as status:
        yield lambda what: status.update(Text(visible(what)))


def _print(out: Console, sample: _Sample, found: Comparison) -> None:
    contents = f"{count_of(found.messages, 'message')} in {count_of(found.topics, 'topic')}"
    click.echo(f"{visible(sample.name)}: {contents}, on {found.backend}\n")
    out.print(_layouts_table(found))
    click.echo("the filters are timed after compaction and, where that has merged something, before it\n")
    out.print(_replays_table(found))
    click.echo()
    for layout, reason in found.left_out.items():
        click.echo(f"not measured: {layout}: {visible(reason)}")
    out.print(f"recommended: {found.recommended}", style="bold", markup=False)
    click.echo(f"  {found.reason}")
    for caveat in found.caveats:
        click.echo(f"  note: {visible(caveat)}")


def _layouts_table(found: Comparison) -> Table:
    headers = ("layout", "stored\na second>", "compaction\ns>", "bytes\neach>", "visible\nafter>")
    timed = ("filters\nms>", "before\ncompaction>")
    rows = [
        (
            one.layout,
            f"{one.store_rate:,.0f}",
            f"{one.compact_seconds:,.2f}" if one.merged else None,
            f"{one.bytes_per_message:,.1f}",
            f"{one.delay_seconds:,.3g} s" if one.delay_seconds else "at once",
            milliseconds(one.total_seconds),
            None if one.unmerged_seconds is None else milliseconds(one.unmerged_seconds),
        )
        for one in found.layouts
    ]
    return make_table(*headers, *timed, title="Layouts", rows=rows)


def _replays_table(found: Comparison) -> Table:
    rows: list[tuple[object, ...]] = []
    for number, question in enumerate(found.questions):
        for one in found.layouts:
            replay = one.replays[number]
            first = one is found.layouts[0]
            asked = (_asked(question), replay.messages) if first else ("", "")
            rows.append((*asked, one.layout, milliseconds(replay.seconds), f"{replay.rate:,.0f}"))
    return make_table("filter~", "messages>", "layout", "ms>", "a second>", title="Replays", rows=rows)


def _asked(question: Question) -> str:
    """Return a filter with the number of times that it counts."""
    if not question.weight:
        since = f" since {format_time(question.start)[:19]}Z" if question.start else ""
        return f"{question.topic_filter}{since} (not counted)"
    return f"{question.topic_filter} (counts {question.weight} times)" if question.weight > 1 else question.topic_filter


def _next_steps(sample: Path, found: Comparison, options: Sequence[str]) -> Iterator[str]:
    """Yield commands that follow the recommendation, for a new database and for an existing one."""
    layout, backend = found.recommended, found.backend
    source = "FILE" if sample == STANDARD_INPUT else shlex.quote(str(sample))
    of_layout, of_backend = (
        "".join(f" --option {shlex.quote(text)}" for text in options if text.startswith(f"{plugin}."))
        for plugin in (layout, backend)
    )
    engine = "" if backend == "rocksdb" else f" --backend {backend}"
    yield f"topicstore import DIR {source} --layout {layout}{of_layout}{engine}{of_backend}"
    yield f"topicstore generations add DIR --layout {layout}{of_layout}"
