"""The command ``topicstore learned-topics``, which prints the learned structure of topics as one tree."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import attrs
import click

import topicstore
from topicstore.cli.command import Answer, answers
from topicstore.cli.connecting import AnyDatabase
from topicstore.cli.terminal.display import count_of, natural, visible
from topicstore.storage.generations import GenerationInfo

if TYPE_CHECKING:
    from rich.tree import Tree

__all__ = ["learned_topics"]

_SHOWN = 5
"""The number of a node's children that are shown, besides its wildcards."""
_MEANINGS = {"+": "(all other)", "$+": "(all other)", "#": "(all other, and what follows)"}
"""The wildcard levels of learned topics, with their explanations."""
_WILDCARDS = "A level's first tokens (thresholds) keep streams of their own; + and # take the rest"

_Stream = tuple[int, int, int]
"""A shard, a generation and the number of a stream."""


@click.command("learned-topics")
@answers("r")
@click.option("--generation", type=click.IntRange(min=1), metavar="N", help="Of this one alone.  [default: of all]")
@click.option("--filter", "topic_filter", metavar="FILTER", help="Only what may hold topics that match.")
def learned_topics(db: AnyDatabase, *, generation: int | None, topic_filter: str | None) -> Answer:
    """Show what the layouts in PATH learned of the topics: the levels, and which of them vary.

    The first tokens of a level have separate streams, up to the number in the layout's option `thresholds`; all
    other tokens share the stream +, or #, which also matches the levels below. For topics that begin with $, the
    first level is $+. Equal levels of several shards and generations are shown once, and of many siblings only
    the first five; --json has all. Layouts that learn nothing are listed.
    """
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
    unlearned = [one for one in generations if one.number not in {number for _, number in learned}]
    yield {
        "filter": topic_filter,
        "generations": [one.number for one in generations],
        "unlearned": [one.number for one in unlearned],
        "nodes": list(root.below()),
    }
    where = f"{count_of(len(generations), 'generation')} of {count_of(shards, 'shard')}"
    path = visible(str(click.get_current_context().params["path"]))  # the path as the user wrote it
    title, rows = f"{path}, {where}: {count_of(root.streams_within, 'stream')}", list(_rows(root))
    if sys.stdout.isatty():
        yield _branches(title, rows)
    else:
        yield title
        yield from (f"{'  ' * row.depth}{row.label}  {row.streams}" for row in rows)
    if any(row.wild for row in rows):
        yield _WILDCARDS
    for one in unlearned:
        yield f"generation {one.number}: {_why_unlearned(one, archived)}"
    if topic_filter is not None and not root.children:
        yield f"no topics match {visible(topic_filter)}"


def _why_unlearned(generation: GenerationInfo, archived: set[int]) -> str:
    if generation.number in archived:
        return "it lies in an export, which has no tree of topics"
    return f"layout {generation.layout!r} learns nothing of topics" if generation.messages else "it holds no messages"


@attrs.define(eq=False)
class _Node:
    """A node of the topic tree, merged over all shown shards and generations."""

    children: dict[str, _Node] = attrs.field(factory=dict)
    streams: list[_Stream] = attrs.field(factory=list)
    """The streams of the topic pattern that ends at this node."""
    streams_within: int = 0
    """The number of streams of this node and of all nodes below it."""

    def ordered(self) -> list[tuple[str, _Node]]:
        """Return the children with their levels, sorted naturally, wildcards last."""
        return sorted(self.children.items(), key=lambda item: (item[0] in _MEANINGS, natural(item[0])))

    def add(self, path: Iterable[str], stream: _Stream | None) -> None:
        """Add a stream at the end of a path below this node, and create missing nodes on the way."""
        node = self
        node.streams_within += stream is not None
        for level in path:
            node = node.children.setdefault(level, _Node())
            node.streams_within += stream is not None
        if stream is not None:
            node.streams.append(stream)

    def below(self) -> Iterator[dict[str, object]]:
        """Yield the nodes below this one as objects for JSON, parents before children."""
        left: list[tuple[tuple[str, ...], _Node]] = [((), self)]
        while left:
            path, node = left.pop()
            left.extend(((*path, level), child) for level, child in reversed(node.ordered()))
            if not path:
                continue
            streams = [dict(zip(("shard", "generation", "stream"), stream, strict=True)) for stream in node.streams]
            yield {"path": path, "streams": streams, "streams_within": node.streams_within}


@attrs.frozen
class _Row:
    """A line of the tree: a node, or a summary of siblings that are not shown."""

    depth: int
    label: str
    streams: str
    wild: bool = False


def _rows(root: _Node) -> Iterator[_Row]:
    """Yield the lines of the tree, parents before children. Of many children, the first few and a summary are shown."""
    left = _groups(root, 1)
    while left:
        depth, group = left.pop()
        level, node = group[0]
        streams = count_of(sum(one.streams_within for _, one in group), "stream")
        if len(group) > 1:
            yield _Row(depth, f"… {len(group):,} more", streams)
            continue
        wild = level in _MEANINGS
        yield _Row(depth, f"{level} {_MEANINGS[level]}" if wild else visible(level) or '""', streams, wild)
        left.extend(_groups(node, depth + 1))


def _groups(node: _Node, depth: int) -> list[tuple[int, list[tuple[str, _Node]]]]:
    """Return the children of a node as groups for lines, last group first.

    Each group has one child, except that the children beyond the first `_SHOWN` form a single group.
    """
    children = node.ordered()
    own = sum(level not in _MEANINGS for level, _ in children)
    shown = own if own <= _SHOWN + 1 else _SHOWN
    groups = [*([one] for one in children[:shown]), children[shown:own], *([one] for one in children[own:])]
    return [(depth, group) for group in reversed(groups) if group]


def _branches(title: str, rows: Iterable[_Row]) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    branches = [Tree(Text(title))]
    for row in rows:
        del branches[row.depth :]
        label = Text.assemble((row.label, "bold cyan" if row.wild else ""), "  ", (row.streams, "dim"))
        branches.append(branches[-1].add(label))
    return branches[0]
