"""The command ``topicstore learned-topics``, which prints what the layouts learned of the topics, as one tree."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs
import click

import topicstore
from topicstore.cli.connecting import opened
from topicstore.cli.terminal.options import PATH, json_option
from topicstore.storage.generations import GenerationInfo

__all__ = ["learned_topics"]

_SHOWN = 5
"""The number of a node's children that are shown, besides a wildcard."""
_MEANINGS = {"+": "(all other)", "$+": "(all other)", "#": "(all other, and what follows)"}
"""The levels that stand for others."""
_WILDCARDS = "A level's first tokens (thresholds) keep streams of their own; + and # take the rest"

_Stream = tuple[int, int, int]
"""A shard, a generation and the number of a stream."""


@attrs.define(eq=False)
class _Node:
    """One level of topics, of all the shards and generations shown."""

    level: str = ""
    parent: _Node | None = None
    depth: int = 0
    children: dict[str, _Node] = attrs.field(factory=dict)
    streams: list[_Stream] = attrs.field(factory=list)
    """The streams of topics that end here."""
    streams_within: int = 0
    """The number of streams here and below."""

    @property
    def wild(self) -> bool:
        return self.level in _MEANINGS

    @property
    def path(self) -> list[str]:
        """The levels from the first one to this one."""
        found: list[str] = []
        node = self
        while node.parent is not None:
            found.append(node.level)
            node = node.parent
        return found[::-1]

    def ordered(self) -> list[_Node]:
        """Return the children; wildcards come after other levels."""
        from topicstore.cli.terminal.display import natural

        return sorted(self.children.values(), key=lambda child: (child.wild, natural(child.level)))

    def below(self) -> Iterator[_Node]:
        """Yield the nodes below this one, parents before children."""
        left = self.ordered()[::-1]
        while left:
            node = left.pop()
            yield node
            left.extend(reversed(node.ordered()))

    def add(self, path: Iterable[str], stream: _Stream | None) -> None:
        """Add a stream at the end of a path below this node, with the nodes that are missing."""
        node = self
        for level in path:
            node.streams_within += stream is not None
            node = node.children.setdefault(level, _Node(level, node, node.depth + 1))
        if stream is not None:
            node.streams_within += 1
            node.streams.append(stream)


@attrs.frozen(kw_only=True)
class _Found:
    """The tree and all else that is printed."""

    root: _Node
    generations: list[GenerationInfo]
    unlearned: dict[int, str]
    """The generations whose layouts have learned nothing, and why."""
    shards: int


@click.command("learned-topics")
@click.argument("path", type=PATH)
@click.option("--generation", type=click.IntRange(min=1), metavar="N", help="Of this one alone.  [default: of all]")
@click.option("--filter", "topic_filter", metavar="FILTER", help="Only what may hold topics that match.")
@json_option
def learned_topics(path: Path, *, generation: int | None, topic_filter: str | None, as_json: bool) -> None:
    """Show what the layouts in PATH learned of the topics: the levels, and which of them vary.

    The first tokens of a level have streams of their own, as many as the layout's option `thresholds` says;
    all other tokens share +, or #, which also matches the levels after them. Below $, the first level is $+.
    The same levels of several shards and generations are shown as one, and of many beside each other the first
    five; --json has all. Layouts that learn nothing are named.
    """
    from topicstore.cli.terminal import display

    found = _find(path, generation, topic_filter)
    if as_json:
        display.print_json(_document(found, path, topic_filter))
        return
    _print_tree(found, path)
    if topic_filter is not None and not found.root.children:
        click.echo(f"no topics match {display.visible(topic_filter)}")


def _find(path: Path, generation: int | None, topic_filter: str | None) -> _Found:
    with opened(path, "r") as db:
        generations = [one for one in db.generations() if generation in (None, one.number)]
        if not generations:
            raise topicstore.InvalidArgumentError(f"there is no generation {generation}")
        learned = db.learned_topics(generation)
        wanted = None if topic_filter is None else {(s.shard, s.generation, s.number) for s in db.streams(topic_filter)}
        archived, shards = {one.generation for one in db.archives}, db.manifest.shards
    root = _Node()
    for slab, nodes in learned.items():
        for node in nodes:
            stream = None if node.stream is None else (*slab, node.stream)
            if wanted is None or stream in wanted:
                root.add(node.path, stream)
    known = {number for _, number in learned}
    unlearned = {one.number: _why_unlearned(one, archived) for one in generations if one.number not in known}
    return _Found(root=root, generations=generations, unlearned=unlearned, shards=shards)


def _why_unlearned(generation: GenerationInfo, archived: set[int]) -> str:
    if generation.number in archived:
        return "it lies in an export, which has no tree of topics"
    return f"layout {generation.layout!r} learns nothing of topics" if generation.messages else "it holds no messages"


def _document(found: _Found, path: Path, topic_filter: str | None) -> dict[str, object]:
    return {
        "path": str(path),
        "filter": topic_filter,
        "generations": [one.number for one in found.generations],
        "unlearned": list(found.unlearned),
        "nodes": [
            {
                "path": node.path,
                "streams": [{"shard": shard, "generation": number, "stream": n} for shard, number, n in node.streams],
                "streams_within": node.streams_within,
            }
            for node in found.root.below()
        ],
    }


@attrs.frozen
class _Row:
    """A line of the tree: a node, or the summary of siblings that are left out."""

    depth: int
    label: str
    streams: str
    wild: bool = False


def _rows(root: _Node) -> Iterator[_Row]:
    """Yield the lines of the tree, parents before children; wide nodes have a few children and a summary."""
    from topicstore.cli.terminal.display import count_of, visible

    left = _groups(root)[::-1]
    while left:
        node, *others = group = left.pop()
        streams = count_of(sum(one.streams_within for one in group), "stream")
        if others:
            yield _Row(node.depth, f"… {len(group):,} more", streams)
            continue
        label = f"{node.level} {_MEANINGS[node.level]}" if node.wild else visible(node.level) or '""'
        yield _Row(node.depth, label, streams, node.wild)
        left.extend(reversed(_groups(node)))


def _groups(node: _Node) -> list[list[_Node]]:
    """Group the children of a node: one by one, with those that are too many in one group, before the wildcard."""
    children = node.ordered()
    own = sum(not child.wild for child in children)
    shown = own if own <= _SHOWN + 1 else _SHOWN
    groups = [[child] for child in children[:shown]], [children[shown:own]], [[child] for child in children[own:]]
    return [group for part in groups for group in part if group]


def _print_tree(found: _Found, path: Path) -> None:
    from topicstore.cli.terminal.display import count_of, visible

    where = f"{count_of(len(found.generations), 'generation')} of {count_of(found.shards, 'shard')}"
    title = f"{visible(str(path))}, {where}: {count_of(found.root.streams_within, 'stream')}"
    rows = list(_rows(found.root))
    if sys.stdout.isatty():
        _print_branches(title, rows)
    else:
        click.echo(title)
        for row in rows:
            click.echo(f"{'  ' * row.depth}{row.label}  {row.streams}")
    if any(row.wild for row in rows):
        click.echo(_WILDCARDS)
    for number, why in found.unlearned.items():
        click.echo(f"generation {number}: {why}")


def _print_branches(title: str, rows: Iterable[_Row]) -> None:
    from rich.text import Text
    from rich.tree import Tree

    from topicstore.cli.terminal.display import console

    branches = [Tree(Text(title))]
    for row in rows:
        del branches[row.depth :]
        label = Text.assemble((row.label, "bold cyan" if row.wild else ""), "  ", (row.streams, "dim"))
        branches.append(branches[-1].add(label))
    console().print(branches[0])
