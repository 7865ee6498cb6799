"""Learned topic structure: a trie that turns many topics into few streams.

The trie grows a node a topic level. Once a node has as many children as the threshold of its
depth allows, it gets a child ``+``, and every token not seen before goes there. A token that
has a node of its own keeps it, so a topic never moves to another stream. Each node at which
topics end is a stream. Topics that begin with ``$`` grow from a root of their own, because
filters that begin with a wildcard must not see them. Levels beyond the 32nd are not learned:
they all end in a child ``#``.

Source of the method: the learned topic structure of EMQX's durable storage (EIP 0023).

Stored form, version 1 (keyspace ``meta``; keys begin with the generation, u32; integers are
big-endian)::

    generation 0x01 node:u32 token:utf-8 -> child:u32     token is a level, "+" or "#"
    generation 0x02 node:u32             -> stream:u32    topics end at the node

All values are sealed (see `topicstore.sealing`). Nodes 0 and 1 are the roots, the second that of
``$``; others and streams count from 2 and 1.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence

from topicstore.engine import META, Reader, WriteBatch, encode_generation
from topicstore.errors import CorruptionError
from topicstore.sealing import seal, unseal
from topicstore.topics import TopicFilter

__all__ = ["LearnedTopics"]

_EDGE, _LEAF = b"\x01", b"\x02"
_U32 = struct.Struct(">I")
_ROOT, _DOLLAR_ROOT, _FIRST_NODE = 0, 1, 2
_FIRST_STREAM = 1
_PLUS, _REST = "+", "#"
MAX_LEVELS = 32


class LearnedTopics:
    """The trie of one slab. One writer at a time; readers in any thread.

    ``thresholds``: most children of their own that nodes at each depth get, the last one for all
    deeper ones; 0 makes ``+`` at once.
    """

    def __init__(self, generation: int, thresholds: Sequence[int]) -> None:
        self._prefix = encode_generation(generation)
        self._thresholds = tuple(thresholds)
        self._children: dict[int, dict[str, int]] = {_ROOT: {}, _DOLLAR_ROOT: {}}
        self._parents: dict[int, tuple[int, str]] = {}
        self._streams: dict[int, int] = {}
        self._nodes: dict[int, int] = {}
        self._next_node = _FIRST_NODE
        self._unsaved: list[tuple[bytes, bytes]] = []
        self._lock = threading.Lock()  # readers walk dictionaries that the writer adds to

    # --- keeping ---

    @classmethod
    def load(cls, reader: Reader, generation: int, thresholds: Sequence[int]) -> LearnedTopics:
        """Return the trie as it was saved."""
        trie = cls(generation, thresholds)
        prefix = trie._prefix
        for key, value in _pairs(reader, prefix + _EDGE):
            parent, child = _unpack(key[5:9]), _unpack(value)
            # A node is younger than its parent, and has one: so a loaded trie is a tree, without cycles.
            if parent not in trie._children or child <= max(parent, _DOLLAR_ROOT) or child in trie._parents:
                raise CorruptionError(f"node {child} can't be a child of node {parent}", place="learned topics")
            trie._link(parent, _token(key[9:]), child)
            trie._next_node = max(trie._next_node, child + 1)
        for key, value in _pairs(reader, prefix + _LEAF):
            node, stream = _unpack(key[5:9]), _unpack(value)
            if node not in trie._parents or stream < _FIRST_STREAM or stream in trie._nodes:
                raise CorruptionError(f"node {node} can't have stream {stream}", place="learned topics")
            trie._streams[node], trie._nodes[stream] = stream, node
        if max(trie._nodes, default=0) != len(trie._nodes):
            raise CorruptionError("there are gaps between the streams", place="learned topics")
        return trie

    def save(self, write: WriteBatch) -> None:
        """Add to ``write`` all that is not known to be saved; `saved` says that it is."""
        for key, value in self._unsaved:
            write.put(META, key, seal(key, value))

    def saved(self) -> None:
        """The last `save` was committed."""
        self._unsaved.clear()

    def inherit(self, parent: LearnedTopics) -> None:
        """Take over the learned wildcards of ``parent``, and only the nodes on the way to them."""
        copies = {_ROOT: _ROOT, _DOLLAR_ROOT: _DOLLAR_ROOT}

        def copy(node: int) -> None:
            missing: list[int] = []
            while node not in copies:
                missing.append(node)
                node = parent._parents[node][0]
            for child in reversed(missing):
                above, token = parent._parents[child]
                copies[child] = self._children[copies[above]].get(token) or self._grow(copies[above], token)

        with parent._lock:
            for wildcard in [kids[_PLUS] for kids in parent._children.values() if _PLUS in kids]:
                copy(wildcard)

    def _link(self, parent: int, token: str, child: int) -> None:
        self._children.setdefault(parent, {})[token] = child
        self._children.setdefault(child, {})
        self._parents[child] = (parent, token)

    def _grow(self, parent: int, token: str) -> int:
        child = self._next_node
        self._next_node += 1
        self._link(parent, token, child)
        self._unsaved.append((self._prefix + _EDGE + _U32.pack(parent) + token.encode(), _U32.pack(child)))
        return child

    # --- learning ---

    def learn(self, topic: str) -> int:
        """Return the stream of a topic, growing the trie where it is new."""
        with self._lock:
            node = _root_of(topic)
            for depth, token in enumerate(topic.split("/")):
                if depth == MAX_LEVELS:
                    node = self._children[node].get(_REST) or self._grow(node, _REST)
                    break
                node = self._step(node, token, depth)
            stream = self._streams.get(node)
            if stream is None:
                stream = len(self._streams) + _FIRST_STREAM
                self._streams[node], self._nodes[stream] = stream, node
                self._unsaved.append((self._prefix + _LEAF + _U32.pack(node), _U32.pack(stream)))
            return stream

    def find(self, topic: str) -> int | None:
        """Return the stream of a topic without learning it; None if it leads nowhere."""
        with self._lock:
            node: int | None = _root_of(topic)
            for depth, token in enumerate(topic.split("/")):
                children = self._children[node] if node is not None else {}
                node = children.get(_REST) if depth == MAX_LEVELS else children.get(token) or children.get(_PLUS)
                if node is None or depth == MAX_LEVELS:
                    break
            return None if node is None else self._streams.get(node)

    def _step(self, node: int, token: str, depth: int) -> int:
        children = self._children[node]
        child = children.get(token) or children.get(_PLUS)
        if child is not None:
            return child
        threshold = self._thresholds[min(depth, len(self._thresholds) - 1)]
        if threshold == 0:
            return self._grow(node, _PLUS)
        child = self._grow(node, token)
        if len(children) - (_REST in children) >= threshold:
            self._grow(node, _PLUS)
        return child

    # --- asking ---

    def __len__(self) -> int:
        """Return the number of streams."""
        return len(self._streams)

    @property
    def nodes(self) -> int:
        """How many nodes there are, the roots among them."""
        return len(self._children)

    def __contains__(self, stream: int) -> bool:
        return stream in self._nodes

    def pattern(self, stream: int) -> str:
        """Return the topic filter that describes a stream.

        A ``+`` in the first level below the root of ``$`` reads ``$+``: MQTT has no filter for that.
        """
        node, tokens = self._nodes[stream], []
        while node in self._parents:
            node, token = self._parents[node]
            tokens.append("$+" if node == _DOLLAR_ROOT and token == _PLUS else token)
        return "/".join(reversed(tokens))

    def match(self, topic_filter: TopicFilter) -> list[int]:
        """Return the streams whose topics may match, in order of their numbers."""
        with self._lock:
            return sorted(self._streams[node] for node in self._ends(topic_filter) if node in self._streams)

    def _ends(self, topic_filter: TopicFilter) -> Iterator[int]:
        nodes = [_root_of(topic_filter.text)]
        for depth, level in enumerate(topic_filter.levels):
            if level == _REST:
                yield from self._below(nodes)
                return
            if depth == MAX_LEVELS:
                yield from (self._children[node][_REST] for node in nodes if _REST in self._children[node])
                return
            nodes = [child for node in nodes for child in self._matching_children(node, level)]
        yield from nodes

    def _matching_children(self, node: int, level: str) -> list[int]:
        children = self._children[node]
        if level == _PLUS:
            return [child for token, child in children.items() if token != _REST]
        child = children.get(level) or children.get(_PLUS)
        return [] if child is None else [child]

    def _below(self, nodes: list[int]) -> Iterator[int]:
        while nodes:
            node = nodes.pop()
            yield node
            nodes.extend(self._children[node].values())


def _root_of(text: str) -> int:
    return _DOLLAR_ROOT if text[0] == "$" else _ROOT


def _unpack(data: bytes) -> int:
    if len(data) != 4:
        raise CorruptionError(f"{len(data)} bytes where a number of 4 was expected", place="learned topics")
    number: int = _U32.unpack(data)[0]
    return number


def _token(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as bad:
        raise CorruptionError(f"{data[:80]!r} is not UTF-8", place="learned topics") from bad


def _pairs(reader: Reader, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    for chunk in reader.scan(META, prefix, prefix[:-1] + bytes((prefix[-1] + 1,))):
        for key, stored in chunk:
            try:
                yield key, unseal(key, stored)
            except CorruptionError as bad:
                raise CorruptionError(bad.reason, place=f"learned topics, key {key[5:].hex()}") from bad
