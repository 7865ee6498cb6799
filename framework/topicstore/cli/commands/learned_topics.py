"""The command ``topicstore learned-topics``, which prints what the layouts learned of the topics, as one tree."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

import topicstore
from topicstore.cli.connecting import opened
from topicstore.cli.terminal.options import PATH, json_option
from topicstore.contract.layout import TopicNode
from topicstore.contract.topics import TopicFilter
from topicstore.storage.generations import GenerationInfo
from topicstore.storage.learned_counts import counts_by_slab

if TYPE_CHECKING:
    from topicstore.client.remote_database import RemoteDatabase

    _Opened = topicstore.Database | RemoteDatabase

__all__ = ["learned_topics"]

_SHOWN = 5
"""The number of a node's children that are shown unless all are asked for; a wildcard is always shown."""
_PLUS, _REST, _DOLLAR_PLUS = "+", "#", "$+"
_MEANINGS = {_PLUS: "(all other)", _DOLLAR_PLUS: "(all other)", _REST: "(all other, and what follows)"}
_WILDCARDS = "A level's first tokens (thresholds) keep streams of their own; + and # take the rest"

_Slab = tuple[int, int]
"""A shard and a generation."""
_Learned = Mapping[_Slab, list[TopicNode]]


@attrs.define(eq=False)
class _Node:
    """One level of topics, of all the shards and generations shown."""

    level: str
    parent: _Node | None = None
    children: dict[str, _Node] = attrs.field(factory=dict)
    streams: list[tuple[int, int, int]] = attrs.field(factory=list)
    """The streams of topics that end here, each as its shard, generation and stream."""
    messages: int = 0
    topics: int = 0
    streams_within: int = 0
    """The number of streams here and below; the next two numbers count here and below as well."""
    messages_within: int = 0
    topics_within: int = 0

    @property
    def wild(self) -> bool:
        return self.level in (_PLUS, _REST, _DOLLAR_PLUS)

    @property
    def path(self) -> list[str]:
        return [node.level for node in reversed(list(self.upwards()))][1:]

    def upwards(self) -> Iterator[_Node]:
        """Yield the node and its ancestors, the root last."""
        node: _Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def within(self) -> Iterator[_Node]:
        """Yield the node and those below it, parents before children, wildcards after other levels."""
        left = [self]
        while left:
            node = left.pop()
            yield node
            left.extend(reversed(node.ordered()))

    def ordered(self) -> list[_Node]:
        from topicstore.cli.terminal.display import natural

        return sorted(self.children.values(), key=lambda child: (child.wild, natural(child.level)))

    def add(self, path: Iterable[str]) -> _Node:
        """Return the node at the end of a path, making missing ones."""
        node = self
        for level in path:
            if level not in node.children:
                node.children[level] = _Node(level, node)
            node = node.children[level]
        return node

    def place(self, topic: str) -> _Node | None:
        """Return the node where a topic ends: a level's own node is preferred to ``+``, and that to ``#``."""
        node, wild = self, _DOLLAR_PLUS if topic.startswith("$") else _PLUS
        for level in topic.split("/"):
            child = node.children.get(level) or node.children.get(wild)
            if child is None:
                return None if wild == _DOLLAR_PLUS else node.children.get(_REST)
            node, wild = child, _PLUS
        return node if node.streams else node.children.get(_REST)


@attrs.frozen(kw_only=True)
class _Found:
    """The tree and all else that is printed."""

    root: _Node
    generations: list[GenerationInfo]
    unlearned: list[GenerationInfo]
    """The generations whose layouts have learned nothing."""
    archived: Collection[int]
    """The numbers of generations that lie in an export."""
    shards: int
    counted: bool


@click.command("learned-topics")
@click.argument("path", type=PATH)
@click.option("--generation", type=click.IntRange(min=1), metavar="N", help="Of this one alone.  [default: of all]")
@click.option("--filter", "topic_filter", metavar="FILTER", help="Only what may hold topics that match.")
@click.option("--count", "counted", is_flag=True, help="Read all these messages, and count them and their topics.")
@click.option("--all", "whole", is_flag=True, help=f"Show every level, not just {_SHOWN} below each.")
@click.option("--dot", is_flag=True, help="Print a graph for Graphviz instead.")
@json_option
def learned_topics(
    path: Path,
    *,
    generation: int | None,
    topic_filter: str | None,
    counted: bool,
    whole: bool,
    dot: bool,
    as_json: bool,
) -> None:
    """Show what the layouts in PATH learned of the topics: the levels, and which of them vary.

    The first tokens of a level have streams of their own, as many as the layout's option `thresholds` says;
    all other tokens share +, or #, which also matches the levels after them. Below $, the first level is $+.
    The same levels of several shards and generations are shown as one. Layouts that learn nothing are named.

    With --count, the levels with the most messages come first, and those without any are left out.
    """
    from topicstore.cli.terminal import display

    if dot and as_json:
        raise click.UsageError("--dot and --json are two forms of the same: choose one")
    with opened(path, "r") as db:
        found = _find(db, generation, topic_filter, counted=counted)
    if as_json:
        _print_json(found, path, topic_filter)
    elif dot:
        click.echo("\n".join(_dot(found, path, None if whole else _SHOWN)))
    else:
        _print_tree(found, path, None if whole else _SHOWN)
        if topic_filter is not None and not found.root.children:
            click.echo(f"no topics match {display.visible(topic_filter)}")


# --- finding ------------------------------------------------------------------------


def _find(db: _Opened, generation: int | None, topic_filter: str | None, *, counted: bool) -> _Found:
    generations = [one for one in db.generations() if generation in (None, one.number)]
    if not generations:
        raise topicstore.InvalidArgumentError(f"there is no generation {generation}")
    learned = db.learned_topics(generation)
    wanted = None if topic_filter is None else {(s.shard, s.generation, s.number) for s in db.streams(topic_filter)}
    root = _Node("")
    for slab, nodes in learned.items():
        _merge(root, slab, nodes, wanted)
    if counted:
        filters, total = _filters(root, topic_filter), sum(one.messages for one in generations)
        _count(db, generation, root, learned, filters, total)
    for node in root.within():
        for above in node.upwards():
            above.streams_within += len(node.streams)
            above.messages_within += node.messages
    known = {number for _, number in learned}
    unlearned = [one for one in generations if one.number not in known]
    return _Found(
        root=root,
        generations=generations,
        unlearned=unlearned,
        archived={one.generation for one in db.archives},
        shards=db.manifest.shards,
        counted=counted,
    )


def _merge(root: _Node, slab: _Slab, nodes: Iterable[TopicNode], wanted: set[tuple[int, int, int]] | None) -> None:
    """Add a slab's learned topics to a tree, or only the wanted streams among them."""
    for node in nodes:
        stream = None if node.stream is None else (*slab, node.stream)
        if wanted is None or stream in wanted:
            merged = root.add(node.path)
            if stream is not None:
                merged.streams.append(stream)


def _filters(root: _Node, topic_filter: str | None) -> list[str]:
    """Return filters that together match each message once, except messages that no filter can match."""
    if topic_filter is not None:
        return [topic_filter]
    if _DOLLAR_PLUS in root.children:
        click.echo("warning: no filter matches what is below $+: it is not counted", err=True)
    dollar = [level for level in root.children if level.startswith("$") and level != _DOLLAR_PLUS]
    return ["#", *(f"{level}/#" for level in dollar)]


def _count(db: _Opened, generation: int | None, root: _Node, learned: _Learned, filters: list[str], total: int) -> None:
    """Count the messages of the slabs at the nodes where their topics end."""
    ends: dict[str, set[_Node]] = {}
    for slab, found in _counts(db, generation, learned, filters, total):
        tree = _Node("")
        _merge(tree, slab, learned.get(slab, ()), None)
        for topic, messages in found.items():
            end = tree.place(topic)
            node = root if end is None else root.add(end.path)
            node.messages += messages
            ends.setdefault(topic, set()).add(node)
    for places in ends.values():
        for node in places:
            node.topics += 1
        for above in {above for node in places for above in node.upwards()}:
            above.topics_within += 1


def _counts(
    db: _Opened, generation: int | None, learned: _Learned, filters: list[str], total: int
) -> Iterator[tuple[_Slab, Mapping[str, int]]]:
    """Yield each slab with the number of messages of each topic."""
    from topicstore.cli.terminal.display import bar

    with bar("counting") as progress:
        if isinstance(db, topicstore.Database):
            parsed = map(TopicFilter, filters)
            yield from counts_by_slab(db.storage, learned, parsed, lambda done: progress.update(done, total, done))
        else:
            yield from db.learned_counts(generation, filters).items()


# --- showing ------------------------------------------------------------------------


def _print_json(found: _Found, path: Path, topic_filter: str | None) -> None:
    from topicstore.cli.terminal.display import print_json

    document = {
        "path": str(path),
        "filter": topic_filter,
        "generations": [one.number for one in found.generations],
        "unlearned": [one.number for one in found.unlearned],
        "nodes": [_document(node, counted=found.counted) for node in found.root.within() if node is not found.root],
    }
    print_json(document)


def _document(node: _Node, *, counted: bool) -> dict[str, object]:
    streams = [{"shard": shard, "generation": generation, "stream": n} for shard, generation, n in node.streams]
    document: dict[str, object] = {"path": node.path, "streams": streams, "streams_within": node.streams_within}
    if counted:
        document |= {"messages": node.messages, "messages_within": node.messages_within}
        document |= {"topics": node.topics, "topics_within": node.topics_within}
    return document


@attrs.frozen
class _Row:
    """A line of the tree: a node, or the summary of siblings that are left out."""

    depth: int
    level: str
    numbers: str
    wild: bool = False

    @property
    def label(self) -> str:
        """The level's name, or words if it stands for many."""
        return f"{self.level} {_MEANINGS[self.level]}" if self.wild else self.level


def _rows(found: _Found, most: int | None) -> Iterator[_Row]:
    """Yield the lines of the tree, parents before children; wide nodes have ``most`` children and a summary."""
    from topicstore.cli.terminal.display import visible

    counted = found.counted
    left: list[tuple[int, list[_Node]]] = [(0, group) for group in reversed(_groups(found.root, most, counted=counted))]
    while left:
        depth, group = left.pop()
        if len(group) > 1:
            yield _Row(depth, f"… {len(group):,} more", _numbers(group, counted=counted))
            continue
        [node] = group
        yield _Row(depth, visible(node.level) or '""', _numbers(group, counted=counted), node.wild)
        left.extend((depth + 1, below) for below in reversed(_groups(node, most, counted=counted)))


def _groups(node: _Node, most: int | None, *, counted: bool) -> list[list[_Node]]:
    """Group the children of a node: one by one, with those that are too many in one group, before the wildcard."""
    children = node.ordered()
    if counted:
        held = (child for child in children if child.messages_within)
        children = sorted(held, key=lambda child: (child.wild, -child.messages_within))
    own = [child for child in children if not child.wild]
    shown = len(own) if most is None or len(own) <= most + 1 else most
    groups = [[child] for child in children]
    return [*groups[:shown], *([own[shown:]] if own[shown:] else []), *groups[len(own) :]]


def _numbers(nodes: list[_Node], *, counted: bool) -> str:
    from topicstore.cli.terminal.display import count_of

    streams = count_of(sum(node.streams_within for node in nodes), "stream")
    if not counted:
        return streams
    messages = count_of(sum(node.messages_within for node in nodes), "message")
    return f"{streams}, {messages} of {count_of(sum(node.topics_within for node in nodes), 'topic')}"


def _print_tree(found: _Found, path: Path, most: int | None) -> None:
    from topicstore.cli.terminal.display import count_of, visible

    where = f"{count_of(len(found.generations), 'generation')} of {count_of(found.shards, 'shard')}"
    title = f"{visible(str(path))}, {where}: {_numbers([found.root], counted=found.counted)}"
    rows = list(_rows(found, most))
    if sys.stdout.isatty():
        _print_branches(title, rows)
    else:
        click.echo(title)
        for row in rows:
            click.echo(f"{'  ' * (row.depth + 1)}{row.label}  {row.numbers}")
    if any(row.wild for row in rows):
        click.echo(_WILDCARDS)
    for one in found.unlearned:
        why = f"layout {one.layout!r} learns nothing of topics" if one.messages else "it holds no messages"
        if one.number in found.archived:
            why = "it lies in an export, which has no tree of topics"
        click.echo(f"generation {one.number}: {why}")


def _print_branches(title: str, rows: Iterable[_Row]) -> None:
    from rich.text import Text
    from rich.tree import Tree

    from topicstore.cli.terminal.display import console

    branches = [Tree(Text(title))]
    for row in rows:
        del branches[row.depth + 1 :]
        label = Text.assemble((row.label, "bold cyan" if row.wild else ""), "  ", (row.numbers, "dim"))
        branches.append(branches[row.depth].add(label))
    console().print(branches[0])


def _dot(found: _Found, path: Path, most: int | None) -> Iterator[str]:
    """Yield the lines of a graph in Graphviz's language."""
    from topicstore.cli.terminal.display import visible

    yield "digraph topics {"
    yield "  rankdir=LR;"
    yield "  node [shape=box, fontname=monospace];"
    yield f"  n0 [label={_quoted(visible(str(path)), _numbers([found.root], counted=found.counted))}];"
    above = [0]
    for number, row in enumerate(_rows(found, most), 1):
        del above[row.depth + 1 :]
        style = ", style=bold" if row.wild else ""
        yield f"  n{number} [label={_quoted(row.level, row.numbers)}{style}];"
        yield f"  n{above[row.depth]} -> n{number};"
        above.append(number)
    yield "}"


def _quoted(*lines: str) -> str:
    """Return lines of a label as one string, in which backslashes are doubled because they begin escapes."""
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'
