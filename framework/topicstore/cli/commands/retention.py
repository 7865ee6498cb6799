"""The command ``topicstore retention``, which shows and changes the limits, and drops messages that exceed them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import attrs
import click

from topicstore.cli.command import Answer, GroupWithDefault, answers
from topicstore.cli.connecting import AnyDatabase, opened
from topicstore.cli.terminal.display import count_of, fields, make_table, short_time, size
from topicstore.cli.terminal.options import Duration, or_end
from topicstore.contract.positions import span_text
from topicstore.contract.quantities import INFINITY, parse_size
from topicstore.lifecycle.retention_outlook import Departure
from topicstore.lifecycle.retention_policy import RetentionSettings
from topicstore.storage.generations import location_of

__all__ = ["limits", "retention"]

_NONE = "none"
_ENDLESS = (INFINITY, "forever", _NONE)
"""The word for no limit, and its earlier spellings."""
_AGE = Duration(*_ENDLESS)


def _size(text: str) -> int | str:
    """Return a number of bytes, or a word of `_ENDLESS`."""
    if text in _ENDLESS:
        return text
    try:
        return parse_size(text)
    except ValueError as bad:
        raise click.BadParameter(f"{bad}, or {INFINITY}") from bad


def _filter_age(text: str) -> tuple[str, float | str]:
    """Parse FILTER=TIME; return the topic filter and the time its messages stay, in seconds or as a word."""
    topic_filter, _, length = text.rpartition("=")
    if not topic_filter:
        raise click.BadParameter(
            f"{text!r} is not FILTER=TIME, such as 'debug/#=1h', 'alarms/#={INFINITY}', 'x/#=none'"
        )
    return topic_filter, _AGE.convert(length, None, None)


@click.group(cls=GroupWithDefault, default="show", subcommand_metavar="[show|set|run] PATH …")
def retention() -> None:
    """Show or change the limits on the age and the bytes of messages, and remove messages that exceed them.

    A program that has the database open removes such messages itself when it stores. `retention PATH` shows the
    limits.
    """


@retention.command()
@answers("r")
def show(db: AnyDatabase) -> Answer:
    """Show the limits of PATH, the size of its contents, and the messages that will be removed, with the times."""
    settings, generations, coming = db.retention.settings, db.generations(), db.retention.outlook(count=True)
    held = sum(generation.live_bytes for generation in generations)
    document = {**attrs.asdict(settings), "live_bytes": held, "generations": len(generations)}
    yield {**document, "outlook": [attrs.asdict(one) for one in coming]}
    yield fields([*limits(settings), ("holds", f"{size(held)} in {count_of(len(generations), 'generation')}")])
    rows = [
        (
            one.what,
            "" if one.messages is None else one.messages,
            None if one.when is None else short_time(one.when),
            one.why,
        )
        for one in coming
    ]
    yield make_table("what", "messages>", "goes from", "why~", rows=rows)


def limits(settings: RetentionSettings) -> list[tuple[str, str]]:
    """Return the settings as pairs of label and text, for people."""
    rotation = settings.rotation
    full = {"refuse": "more is refused", "drop": "the oldest go"}[settings.when_full]
    age = settings.delivered
    waiting = [] if age is None else [("only for sessions", f"{_stay(age)} at least, until no session needs it")]
    archive = [] if settings.archive_to is None else [("what goes", f"is archived to {settings.archive_to}")]
    return [
        ("messages stay", _stay(settings.max_age)),
        *((f"what matches {name}", _stay(length)) for name, length in settings.filters.items()),
        *waiting,
        ("a generation lasts", "until another is added" if rotation is None else span_text(rotation)),
        ("limit on bytes", "none" if settings.max_bytes is None else f"{size(settings.max_bytes)}, then {full}"),
        *archive,
    ]


def _stay(length: float | None) -> str:
    return "for ever" if length is None else span_text(round(length * 1e6))


@retention.command("set")
@answers()
@click.option("--max-age", type=_AGE, metavar="TIME", help="Messages older than this go: 12h, 30d, or infinity.")
@click.option(
    "--filter",
    "filters",
    type=_filter_age,
    multiple=True,
    metavar="FILTER=TIME",
    help="Keep messages that match FILTER for this time instead: 1h, 90d, infinity; none removes the filter.",
)
@click.option(
    "--rotate-every", type=_AGE, metavar="TIME", help="A generation is written for so long.  [default: max-age / 4]"
)
@click.option(
    "--max-bytes", type=_size, metavar="SIZE", help="Bytes of values in all generations: 500MB, 10GB, or infinity."
)
@click.option(
    "--when-full", type=click.Choice(["refuse", "drop"]), help="Refuse to store, or drop the oldest generations."
)
@click.option(
    "--delivered",
    type=_AGE,
    metavar="TIME",
    help="Remove messages that are stored only for sessions at this age, once no session needs them: 10m, infinity.",
)
@click.option(
    "--archive-to",
    metavar="DIRECTORY",
    help="Export generations there, and read them from there, instead of dropping them; or none.",
)
@click.option("--yes", is_flag=True, help="Don't ask, whatever the next run may remove.")
def set_(path: Path, *, filters: tuple[tuple[str, float | str], ...], yes: bool, **limits_given: Any) -> Answer:
    """Change limits of PATH; limits not named stay unchanged. Nothing is removed before the next run, or store.

    If the next run may remove messages, they are shown, and the limits are changed if you say so, or with --yes.

    Messages stay at least for --max-age, and up to --rotate-every longer, because whole generations are removed.
    Messages that match a --filter stay for its time, or for the longest time if several match. `retention run`
    deletes older ones at once; a program that stores deletes them after at most another quarter of that time.

    \b
    Example:
      topicstore retention set data --max-age 30d --filter 'alarms/#=infinity'
    """  # noqa: D301 - click wants the character
    changed: dict[str, Any] = {
        name: None if value in _ENDLESS else value for name, value in limits_given.items() if value is not None
    }
    if not changed and not filters:
        raise click.UsageError("name a limit to change")
    archive_to = changed.get("archive_to")
    if archive_to is not None:
        changed["archive_to"] = location_of(path, Path(archive_to))
    with opened(path, "r+", auto_compact=False) as db:
        if filters:
            lengths: dict[str, Any] = {**db.retention.settings.filters, **dict(filters)}
            changed["filters"] = {
                name: None if length in _ENDLESS else length for name, length in lengths.items() if length != _NONE
            }
        if not yes:
            _confirm([one for one in db.retention.outlook(limits=changed, count=True) if one.due])
        settings = db.retention.set(**changed)
    yield settings
    yield fields(limits(settings))


def _named(one: Departure) -> str:
    return one.what + ("" if one.messages is None else f" ({count_of(one.messages, 'message')})")


def _confirm(going: list[Departure]) -> None:
    """Show the messages to remove, and ask for confirmation; without a terminal, raise an error."""
    if not going:
        return
    named = list(map(_named, going))
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"nothing was changed: with these limits the next run, or store, may remove {', '.join(named)}; "
            "that needs --yes where nobody can be asked"
        )
    click.echo("with these limits the next run, or store, may remove:", err=True)
    for name, one in zip(named, going, strict=True):
        click.echo(f"  {name}: {one.why}", err=True)
    or_end("Change the limits?", "nothing was changed")


@retention.command()
@answers("r+", auto_compact=False)
@click.option("--dry-run", is_flag=True, help="Say what a run would remove now, and change nothing.")
def run(db: AnyDatabase, *, dry_run: bool) -> Answer:
    """Begin a new generation in PATH if one is due, remove messages beyond the limits, and say why others stay."""
    if dry_run:
        due = [one for one in db.retention.outlook(count=True) if one.due]
        yield {"outlook": [attrs.asdict(one) for one in due]}
        yield from (f"a run removes {_named(one)}: {one.why}" for one in due)
        if not due:
            yield "a run removes nothing"
        return
    report = db.retention.run()
    yield report
    held, took = count_of(report.messages, "message"), size(report.live_bytes)
    if report.rotated is not None:
        yield f"generation {report.rotated} begins"
    if report.dropped:
        yield f"dropped: generation {', '.join(map(str, report.dropped))}, with {held} of {took}"
    if report.archived:
        yield f"archived: generation {', '.join(map(str, report.archived))}, with {held}, which took {took} here"
    for name, count in report.deleted.items():
        yield f"deleted: {count_of(count, 'message')} {f'matching {name}' if name else 'that no filter matches'}"
    if report.expired:
        yield f"{count_of(report.expired, 'retained message')} had expired"
    if (report.rotated, report.dropped, report.archived, report.expired, report.deleted) == (None, (), (), 0, {}):
        yield "\n  ".join(["nothing was to be done:", *report.why])
