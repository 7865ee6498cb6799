"""The command ``topicstore import``."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import click

import topicstore
from topicstore.cli.connecting import AnyDatabase, opened
from topicstore.cli.files.importing import Imported, Importer
from topicstore.cli.files.source import Source
from topicstore.cli.files.source_detection import FORMATS, STANDARD_INPUT, open_source
from topicstore.cli.terminal.display import bar, count_of, print_json
from topicstore.cli.terminal.options import PATH, arguments_of, creation_options, json_option, warn_unless_kept
from topicstore.files.mapping import ColumnMap
from topicstore.files.time_units import AUTO, UNITS
from topicstore.storage.directory.manifest import MANIFEST, read_manifest

__all__ = ["import_"]


@click.command("import")
@click.argument("path", type=PATH)
@click.argument("files", type=PATH, nargs=-1)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(FORMATS),
    help="What the files are.  [default: their ending; of standard input: jsonl]",
)
@click.option("--source", "name", metavar="NAME", help="Know the one file or stream by NAME, not by its content.")
@click.option(
    "--map",
    "maps",
    multiple=True,
    metavar="COLUMN=SOURCE",
    help="Take COLUMN of the messages from a column of the files, or from a template of several.",
)
@click.option("--set", "fixed", multiple=True, metavar="COLUMN=TEXT", help="The same topic, client_id, … for all.")
@click.option("--ignore", "ignored", multiple=True, metavar="NAME", help="Pass over a column of the files.")
@click.option(
    "--time-unit",
    "--unit",
    type=click.Choice([AUTO, *UNITS]),
    help="Of times that are numbers.  [default: us for timestamp; else by their size]",
)
@click.option("--zone", metavar="ZONE", help="Of times without one, such as Europe/Berlin.  [default: UTC]")
@click.option("--retain", is_flag=True, help="Keep messages with the retain flag as retained messages, too.")
@click.option("--batch-size", type=click.IntRange(1, 1_000_000), default=4_096, show_default=True, metavar="ROWS")
@click.option(
    "--limit", type=click.IntRange(min=0), metavar="ROWS", help="Stop after so many; the next import goes on."
)
@click.option("--skip", type=click.IntRange(min=0), default=0, metavar="ROWS", help="Pass over the first ROWS rows.")
@click.option("--again", is_flag=True, help="Import from the first row, even what was imported before.")
@click.option(
    "--allow-ancient", is_flag=True, help="Take times in the first two months of 1970, which seem to be in seconds."
)
@creation_options
@json_option
def import_(
    path: Path,
    files: tuple[Path, ...],
    file_format: str | None,
    name: str | None,
    *,
    as_json: bool,
    maps: tuple[str, ...],
    fixed: tuple[str, ...],
    ignored: tuple[str, ...],
    time_unit: str | None,
    zone: str | None,
    retain: bool,
    batch_size: int,
    limit: int | None,
    skip: int,
    again: bool,
    allow_ancient: bool,
    **given: Any,
) -> None:
    """Store the messages of FILES, in their order, in the database PATH, which is created if missing.

    Formats are JSON lines (.jsonl, .ndjson), other JSON (.json: objects, or an array of them), CSV and Parquet;
    all except Parquet may be gzipped. Without FILES, or for "-", standard input is read: JSON lines, or the format
    of --format. Rows from a pipe are stored within a tenth of a second.

    A directory that `export` wrote is restored, generation by generation, in order of positions. Then every row
    is looked up in PATH and compared, except for its position, which is new. A new database gets the number of
    shards of the exported one. The exported database itself gets only the rows that it lacks.

    Columns: timestamp, topic, client_id, qos, retain, payload (or payload_base64), properties; only topic
    and a payload are required. A payload that is not text, such as a JSON object, is stored as compact JSON.
    A timestamp is ISO 8601, or a number of microseconds since the epoch. The column may also be named ts or time;
    the unit of a number (s, ms, us or ns) is then inferred from its size, for the years 2001 to 2128. Times finer
    than microseconds are rounded down, with a note unless --time-unit is given. The delimiter of CSV (comma,
    semicolon or tab) is detected in the first record. `import` reads the output of `replay` and of
    `mosquitto_sub -F %j` unchanged. Any other column ends the import, unless an option names it:

    \b
      --map payload=data                      the column data
      --map topic='plant/{site}/{id}'         a template of columns
      --map client_id='{topic[2]}'            a level, from 0; [-1] is the last
      --set topic=hall/co2                    the same for all messages
      --ignore quality                        the column is not imported

    An import that was begun with a mapping continues only with the same mapping.
    With --retain, the last message of a topic with the retain flag becomes its retained message; an empty payload
    clears it.

    An interrupted import continues exactly where it stopped when it is run again, because its progress is
    committed with the messages. A finished import is not repeated, except with --again. Files are identified by
    their content, so a renamed file is not imported a second time.

    A bad row ends the import; the rows before it are stored. If there are none, a new database is removed again.
    If a text file begins with all rows that an earlier import has stored, the import continues after them. So you
    can correct a bad row, or append to a file, and import it again. A changed Parquet file counts as a new one;
    use --skip for the rows that were stored.

    If a server has PATH open, the rows are sent to it. An export can be restored only while no server has PATH open.

    A stream can continue only if --source gives it a name. As many rows as were stored under that name are then
    skipped at its beginning; if they differ from the stored ones, the stream is refused. If a file that --source
    names begins with other rows, as after a log was rotated, it is imported from its first row.
    """  # noqa: D301 - click wants the character
    mapping = ColumnMap.given(maps, fixed, ignored, time_unit, zone)
    files = files or (STANDARD_INPUT,)
    if name is not None and len(files) > 1:
        raise click.UsageError("--source names one file or stream, not several")
    done: list[Imported] = []
    exports = {file for file in files if _is_export(file)}
    if name is not None and exports:
        raise click.UsageError("--source names a file or stream, not an export")
    if exports and (retain or not mapping.plain):
        raise click.UsageError(
            "--map, --set, --ignore, --time-unit, --zone and --retain are for files, not for an export"
        )
    if skip and exports:
        raise click.UsageError("--skip passes over rows of a file; of an export, every row is looked for at the end")
    warn_unless_kept(given["backend"])
    with _imported_into(path, {**arguments_of(**given), "allow_ancient": allow_ancient}, sorted(exports)) as db:
        importer = Importer(
            db=db,
            batch_size=batch_size,
            again=again,
            skip=skip,
            retain=retain,
            limit=limit,
            note=lambda text: click.echo(f"note: {text}", err=True),
        )
        for one in chain.from_iterable(
            _generations(db, file) if file in exports else [open_source(file, file_format, name, mapping)]
            for file in files
        ):
            with one as source, bar(source.name) as update:
                importer.observe = lambda source, messages, update=update: update(*source.progress(), messages)  # type: ignore[misc]
                done.append(importer.run(source))
            if not as_json:
                click.echo(_summary(done[-1]))
        flagged = sum(one.retain_flags for one in done if one.format != "export")
        if flagged and not retain and not as_json:
            are = f"{count_of(flagged, 'message')} with the retain flag"
            click.echo(f"{are} did not become retained messages; --retain does that")
    if not done:
        click.echo("nothing was to be imported: the export has no generation yet", err=True)
    if as_json:
        sources = [attrs.asdict(one) for one in done]
        print_json({"path": str(path), "messages": sum(one.messages for one in done), "sources": sources})


def _is_export(path: Path) -> bool:
    if path == STANDARD_INPUT or not path.is_dir():
        return False
    from topicstore.lifecycle.restoring import is_export

    return is_export(path)


def _generations(db: AnyDatabase, file: Path) -> list[Source]:
    from topicstore.cli.files.export_source import open_export

    if not isinstance(db, topicstore.Database):
        raise topicstore.UnsupportedError(
            f"{db.path}: a server has the database open, and puts no export back; stop it, import {file}, and start it "
            "again"
        )
    return open_export(file, db)


@contextlib.contextmanager
def _imported_into(path: Path, arguments: dict[str, Any], exports: Sequence[Path]) -> Iterator[AnyDatabase]:
    """Open a database, or create one whose positions follow the messages' own times.

    A new database is removed again if the import fails before anything was stored.
    """
    there, new = path.exists(), read_manifest(path) is None
    if new:
        arguments = {"timestamps": "message", **_like(exports), **arguments}
    with opened(path, "a", **arguments) as db:
        if not new and db.manifest.timestamps == "commit":
            by = "time ranges go by the time of this import, and with --by timestamp by the messages' own times"
            click.echo(f"note: {path} was created with --timestamps commit: {by}", err=True)
        try:
            yield db
        except BaseException:
            if new and not db.info().messages:
                (path / MANIFEST).unlink(missing_ok=True)  # no other process opens it, because it is still locked
                db.close()
                _remove(path, and_itself=not there)
            raise


def _remove(path: Path, *, and_itself: bool) -> None:
    """Remove a database: the whole directory, or only the contents if the directory existed before the database."""
    if and_itself:
        shutil.rmtree(path, ignore_errors=True)
        return
    for entry in path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _like(exports: Sequence[Path]) -> dict[str, Any]:
    """Return the arguments of a new database that exports are restored into, taken from the first export.

    These are its number of shards, and its handling of late messages. If its positions were times of storing, its
    messages' own times may not rise with positions, so late messages must be accepted (``late="lift"``).
    """
    if not exports:
        return {}
    from topicstore.lifecycle.export_format import read_head

    head = read_head(exports[0])
    if head is None:
        return {}
    lift = head.late == "lift" or head.timestamps == "commit"
    return {"shards": head.shards, "late": "lift" if lift else "raise"}


def _summary(done: Imported) -> str:
    if done.outcome == "already imported":
        return f"{done.name}: already imported, {count_of(done.rows, 'row')}; --again imports it a second time"
    text = f"{done.name}: {count_of(done.messages, 'message')} in {done.seconds:,.1f} s"
    if done.messages and done.seconds > 0.2:
        text += f", {done.messages / done.seconds:,.0f} a second"
    if done.resumed:
        text += f"; went on after row {done.resumed:,}"
    if done.lifted:
        text += f"; {done.lifted:,} came late and were put after the last before them"
    if done.outcome == "limit reached":
        text += f"; stopped by --limit, the next import goes on after row {done.rows:,}"
    return text
