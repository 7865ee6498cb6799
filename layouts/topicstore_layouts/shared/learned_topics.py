"""Learned topic structure: a trie that maps many topics to few streams.

The trie has a node for each topic level. Once a node has as many children as the threshold of its
depth allows, it gets a child ``+``, which takes every token not seen before. A token that
has a node of its own keeps it, so a topic never moves to another stream. Each node at which
topics end is a stream. Topics that begin with ``$`` have a root of their own, because
filters that begin with a wildcard must not match them.

Two limits keep the trie small. Levels beyond the 32nd are not learned, and there is room for 65,536 nodes;
a node counts once more for each 64 bytes of its token. Where a new node would be beyond the 32nd level, or has no room,
the parent gets a child ``#`` instead. From then on all unknown topics below that parent end at the ``#``, however many
levels they have. So a flood of unrelated topics makes at most twice as many nodes and streams as there is room for.
After that, unknown topics share the streams of the ``#``. Reads of these streams stay exact, but examine more messages
that a narrow filter doesn't match. The next generation begins with at least half of the room free.

A node has at most one of ``+`` and ``#``, and gets no other child after it. A token's own node takes
precedence over ``+`` and ``#``.

Source of the method: the learned topic patterns of EMQX's durable storage, EIP 0023
(https://github.com/emqx/eip/blob/main/implemented/0023-rocksdb-message-persistence.md).

Stored form, version 1 (keyspace ``meta``; keys begin with the generation, u32; integers are
big-endian)::

    generation 0x01 node:u32 token:utf-8 -> child:u32     token is a level, "+" or "#"
    generation 0x02 node:u32             -> stream:u32    topics end at the node

All values have a checksum (see `topicstore.contract.checksums`). Nodes 0 and 1 are the roots; node 1 is that of
``$``. Other nodes count from 2 and streams from 1, without gaps.
"""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs
from topicstore.contract.checksums import add_checksum, strip_checksum
from topicstore.contract.engine import META, Reader, WriteBatch, encode_generation
from topicstore.contract.errors import CorruptionError
from topicstore.contract.layout import TopicNode
from topicstore.contract.topics import TopicFilter

__all__ = ["CAPACITY", "MAX_LEVELS", "LearnedTopics", "check_thresholds", "covers"]

MAX_LEVELS = 32
"""The number of levels of a topic that are learned."""
CAPACITY = 65_536
"""The number of nodes that a trie has room for. Nodes for ``#`` don't count."""
_TOKEN_BYTES = 64
"""A node counts once more for each of this many bytes of its token."""
_MEMO_BYTES = 64 << 20
"""The approximate bytes of memory that the cached streams of topics may take."""
_TOPIC_BYTES = 80
"""The approximate bytes of memory that a cached topic takes besides its text."""
_LONGEST_KNOWN = 128
"""The most characters of a cached topic: longer topics would take too much memory."""
_REST_FACTOR = 8
"""After a time in which most topics came only once, this many times as many topics aren't cached."""
_LARGEST_THRESHOLD = (1 << 32) - 1

_EDGE, _LEAF = b"\x01", b"\x02"
_U32 = struct.Struct(">I")
_FIRST_NODE, _FIRST_STREAM = 2, 1
_PLUS, _REST = "+", "#"
_DOLLAR_PLUS = "$+"
_DOLLAR_WILD = {_PLUS: (_DOLLAR_PLUS,), _REST: (_DOLLAR_PLUS, _REST)}
"""Paths of the wildcards below the root of ``$``. MQTT has no wildcard for such a first level."""


class _Node:
    """A node of the trie. Only ``children``, ``wild`` and ``stream`` change, the last two once."""

    __slots__ = ("children", "number", "parent", "path", "stream", "varying", "wild")

    def __init__(self, number: int, parent: _Node | None, path: tuple[str, ...], varying: tuple[int, ...]) -> None:
        self.number = number
        self.parent = parent
        self.path = path
        self.varying = varying
        """The indexes of the levels of the path that are ``+`` or ``$+``."""
        self.children: dict[str, _Node] = {}
        """The children by token. The wildcard child, of which there is at most one, is the last."""
        self.wild: _Node | None = None
        """The child for tokens without a child of their own. A ``#`` refers to itself: it takes all further levels."""
        self.stream = 0
        """The stream of topics that end here; 0 if none does."""


@attrs.define
class _Memo:
    """A cache of the streams of topics, bounded in bytes. The lock of its `LearnedTopics` guards it.

    It has two halves. When the younger one is full, it replaces the older one; topics that are looked up move to the
    younger one. If most topics of a full half came only once, both halves are dropped, and nothing is cached for a
    time, so that a flood of unique topics costs little.
    """

    _young: dict[str, int] = attrs.field(factory=dict, init=False)
    _old: dict[str, int] = attrs.field(factory=dict, init=False)
    _filled: int = attrs.field(default=0, init=False)
    """The bytes that the younger half takes."""
    _found: int = attrs.field(default=0, init=False)
    """The number of topics found since the younger half was begun."""
    _resting: int = attrs.field(default=0, init=False)
    """The number of topics that are still to be skipped."""

    @property
    def memory(self) -> int:
        """The approximate bytes of memory that the cache takes."""
        return _size_of(self._young) + _size_of(self._old)

    def rests(self, topics: int) -> bool:
        """Return whether caching is suspended at present, and count the topics that are skipped."""
        if not self._resting:
            return False
        self._resting = max(self._resting - topics, 0)
        return True

    def of(self, topics: list[str]) -> list[int | None]:
        """Return the stream of each topic, or None if it isn't cached."""
        found: list[int | None] = list(map(self._young.get, topics))
        self._found += len(topics) - found.count(None)
        return found

    def older(self, topic: str) -> int | None:
        """Return the stream of a topic in the older half, or None."""
        stream = self._old.get(topic)
        self._found += stream is not None
        return stream

    def add(self, streams: dict[str, int]) -> None:
        """Cache the streams of topics that the younger half doesn't have."""
        if max(map(len, streams)) > _LONGEST_KNOWN:
            streams = {topic: stream for topic, stream in streams.items() if len(topic) <= _LONGEST_KNOWN}
        size = _size_of(streams)
        if self._filled + size > _MEMO_BYTES // 2:
            if self._found < len(self._young):
                self._resting = _REST_FACTOR * len(self._young)
                self._young = {}
            self._old, self._young = self._young, {}
            self._found = self._filled = 0
        if size <= _MEMO_BYTES // 2 and not self._resting:
            self._young.update(streams)
            self._filled += size


def _size_of(topics: Iterable[str]) -> int:
    return sum([_TOPIC_BYTES + size for size in map(sys.getsizeof, topics)])


class LearnedTopics:
    """The trie of one slab. One writer at a time; readers in any thread.

    ``thresholds`` has, for each depth, the number of children after which a node gets ``+``; the last number is
    for all deeper levels, and 0 allows only ``+``. ``capacity`` is the number of nodes that there is room for. It
    may change from one load to the next: no stored topic moves to another stream.
    """

    def __init__(self, generation: int, thresholds: Sequence[int], capacity: int = CAPACITY) -> None:
        self._prefix = encode_generation(generation)
        self._thresholds = tuple(thresholds)
        self._root, self._dollar = _Node(0, None, (), ()), _Node(1, None, (), ())
        self._nodes = [self._root, self._dollar]
        """The nodes by number."""
        self._ends: list[_Node] = []
        """The nodes at which topics end, by stream."""
        self._capacity = self._room = capacity
        self._memo = _Memo()
        self._unsaved: list[tuple[bytes, bytes]] = []
        self._saving = 0
        """The number of unsaved entries that the last `save` wrote."""
        self._lock = threading.Lock()  # held by the writer, and by readers that walk the trie

    # --- storing ---

    @classmethod
    def load(
        cls, reader: Reader, generation: int, thresholds: Sequence[int], capacity: int = CAPACITY
    ) -> LearnedTopics:
        """Load the trie of a generation. Raises `CorruptionError` if its entries are damaged or contradictory."""
        trie = cls(generation, thresholds, capacity)
        nodes = dict(enumerate(trie._nodes))
        for number, token, child in _entries(reader, trie._prefix + _EDGE):
            parent = nodes.get(number)
            # Each node has one parent with a lower number, so a loaded trie is a tree without cycles.
            if parent is None or child <= max(number, _FIRST_NODE - 1) or child in nodes:
                raise _damaged(f"node {child} can't be a child of node {number}")
            if parent.wild is not None and (parent.wild is parent or token in (_PLUS, _REST)):
                raise _damaged(f"node {number} can't have a child {token[:80]!r} besides its wildcard")
            if len(parent.path) > MAX_LEVELS:
                raise _damaged(f"node {child} is too deep")
            nodes[child] = trie._link(parent, token, child)
        trie._nodes = _in_order(nodes, 0, "nodes")
        ends: dict[int, _Node] = {}
        for number, _, stream in _entries(reader, trie._prefix + _LEAF):
            if number < _FIRST_NODE or number not in nodes or stream in ends:
                raise _damaged(f"node {number} can't have stream {stream}")
            ends[stream] = nodes[number]
            nodes[number].stream = stream
        trie._ends = _in_order(ends, _FIRST_STREAM, "streams")
        return trie

    def save(self, write: WriteBatch) -> None:
        """Add all uncommitted entries to ``write``. The caller calls `saved` after the commit."""
        self._saving = len(self._unsaved)
        for key, value in self._unsaved:
            write.put(META, key, add_checksum(key, value))

    def saved(self) -> None:
        """Mark the entries of the last `save` as committed."""
        del self._unsaved[: self._saving]
        self._saving = 0

    def inherit(self, parent: LearnedTopics) -> None:
        """Copy the learned ``+`` nodes of ``parent``, with only the nodes on their paths, into this empty trie.

        At most half of the capacity is used; the deepest ``+`` nodes are left out if necessary.
        """
        with parent._lock:
            wildcards = [node for node in parent._nodes if node.path and node.path[-1] in (_PLUS, _DOLLAR_PLUS)]
        heirs: dict[_Node | None, _Node] = {parent._root: self._root, parent._dollar: self._dollar}
        for wildcard in sorted(wildcards, key=lambda node: len(node.path)):
            missing, node = [], wildcard
            while node not in heirs and node.parent is not None:
                missing.append(node)
                node = node.parent
            if sum(_size(_token(node)) for node in missing) <= self._room - self._capacity // 2:
                for node in reversed(missing):
                    heirs[node] = self._add(heirs[node.parent], _token(node))

    def pass_on(self, generation: int, thresholds: Sequence[int], write: WriteBatch) -> None:
        """Write the initial trie of another generation, which inherits from this one."""
        heir = LearnedTopics(generation, thresholds)
        heir.inherit(self)
        heir.save(write)

    def _link(self, parent: _Node, token: str, number: int) -> _Node:
        """Add a complete node to its parent, where readers see it from then on."""
        depth = len(parent.path)
        path = (*parent.path, token)
        if parent is self._dollar:
            path = _DOLLAR_WILD.get(token, path)
        varying = parent.varying if path[depth] not in (_PLUS, _DOLLAR_PLUS) else (*parent.varying, depth)
        node = _Node(number, parent, path, varying)
        if token == _REST:
            node.wild = node
        else:
            self._room -= _size(token)
        parent.children[token] = node
        if token in (_PLUS, _REST):
            parent.wild = node
        return node

    def _add(self, parent: _Node, token: str) -> _Node:
        """Add a node to its parent and to the unsaved entries; return the node."""
        node = self._link(parent, token, len(self._nodes))
        self._nodes.append(node)
        key = self._prefix + _EDGE + _U32.pack(parent.number) + token.encode()
        self._unsaved.append((key, _U32.pack(node.number)))
        return node

    # --- learning ---

    def learn(self, topic: str) -> int:
        """Return the stream of a topic; add nodes to the trie if the topic is new."""
        return self.learn_all([topic])[0]

    def learn_all(self, topics: Iterable[str]) -> list[int]:
        """Return the stream of each topic; add nodes to the trie for new topics."""
        return self._streams(topics, self._learn)

    def learn_uncached(self, topics: Iterable[str]) -> list[int]:
        """Return the streams as `learn_all` does, without caching them, for a caller that keeps the streams itself."""
        with self._lock:
            return list(map(self._learn, topics))

    def _streams(self, topics: Iterable[str], find: Callable[[str], int]) -> list[int]:
        """Return the stream of each topic, calling ``find`` for topics that are not cached."""
        names = list(topics)
        with self._lock:
            if self._memo.rests(len(names)):
                return list(map(find, names))
            known = self._memo.of(names)
            if None not in known:
                return known  # type: ignore[return-value]
            missing = dict.fromkeys([name for name, stream in zip(names, known, strict=True) if stream is None])
            streams = {name: self._memo.older(name) or find(name) for name in missing}
            self._memo.add(streams)
        return [stream or streams[name] for name, stream in zip(names, known, strict=True)]

    def _learn(self, topic: str) -> int:
        """Return the stream of a topic that may be new."""
        node = self._dollar if topic[0] == "$" else self._root
        for token in topic.split("/", MAX_LEVELS):
            node = node.children.get(token) or node.wild or self._grow(node, token)
        return node.stream or self._begin(node)

    def _grow(self, node: _Node, token: str) -> _Node:
        """Return a new child for a token that has none."""
        depth = len(node.path)
        threshold = self._thresholds[min(depth, len(self._thresholds) - 1)]
        if len(node.children) >= threshold:
            token = _PLUS
        if depth == MAX_LEVELS or self._room < _size(token):
            return self._add(node, _REST)
        child = self._add(node, token)
        if len(node.children) >= threshold and token != _PLUS and self._room > 0:
            self._add(node, _PLUS)
        return child

    def _begin(self, node: _Node) -> int:
        """Return a new stream for a node at which no topic ended before."""
        self._ends.append(node)
        node.stream = len(self._ends)
        self._unsaved.append((self._prefix + _LEAF + _U32.pack(node.number), _U32.pack(node.stream)))
        return node.stream

    def find(self, topic: str) -> int | None:
        """Return the stream of a topic without learning it; None if it has none."""
        node = self._root_of(topic)
        for token in topic.split("/", MAX_LEVELS):
            child = node.children.get(token) or node.wild
            if child is None:
                return None
            node = child
        return node.stream or None

    def find_all(self, topics: Iterable[str]) -> list[int]:
        """Return the streams of topics that were stored, learning nothing.

        Raises `CorruptionError` naming a topic without a stream: its learned structure was lost.
        """
        return self._streams(topics, self._found)

    def _found(self, topic: str) -> int:
        stream = self.find(topic)
        if stream is None:
            raise CorruptionError(f"topic {topic[:80]!r} leads to no stream")
        return stream

    # --- queries ---

    def __len__(self) -> int:
        """Return the number of streams."""
        return len(self._ends)

    @property
    def nodes(self) -> int:
        """The number of nodes, including the roots."""
        return len(self._nodes)

    def __contains__(self, stream: int) -> bool:
        return _FIRST_STREAM <= stream <= len(self._ends)

    def pattern(self, stream: int) -> str:
        """Return the topic filter that describes a stream.

        A varying first level below the root of ``$`` is written ``$+``, because MQTT has no filter for it.
        """
        return "/".join(self._end(stream).path)

    def levels(self, stream: int) -> tuple[str, ...]:
        """Return the levels of a stream's topics: tokens, ``+``, and a last ``#`` for any number of further levels."""
        path = self._end(stream).path
        return (_PLUS, *path[1:]) if path[0] == _DOLLAR_PLUS else path

    def path(self, stream: int) -> tuple[str, ...]:
        """Return the levels of `pattern`."""
        return self._end(stream).path

    def varying(self, stream: int) -> tuple[int, ...]:
        """Return the indexes of the levels that are ``+``."""
        return self._end(stream).varying

    def _end(self, stream: int) -> _Node:
        if stream not in self:
            raise KeyError(stream)
        return self._ends[stream - _FIRST_STREAM]

    def describe(self) -> Iterator[TopicNode]:
        """Yield all nodes except the roots, parents before children."""
        with self._lock:
            nodes = self._nodes[_FIRST_NODE:]
        for node in nodes:
            # The node's parent is the root of `$`, but the node's path has two levels.
            if node.path == _DOLLAR_WILD[_REST]:
                yield TopicNode(path=(_DOLLAR_PLUS,), stream=None)
            yield TopicNode(path=node.path, stream=node.stream or None)

    def match(self, topic_filter: TopicFilter) -> list[int]:
        """Return the streams whose topics may match, in order of their numbers."""
        with self._lock:
            if topic_filter.text == _REST:  # all streams except those below `$`: only that part is walked
                hidden = {node.stream for node in _below([self._dollar])}
                return [stream for stream in range(_FIRST_STREAM, len(self) + _FIRST_STREAM) if stream not in hidden]
            return sorted([node.stream for node in self._matching(topic_filter) if node.stream])

    def _matching(self, topic_filter: TopicFilter) -> list[_Node]:
        """Return the nodes at which matching topics may end."""
        nodes = [self._root_of(topic_filter.text)]
        found: list[_Node] = []
        for level in topic_filter.levels:
            if level == _REST:
                return found + _below(nodes)
            if level == _PLUS:
                nodes = _children(nodes)
            else:
                nodes = [child for node in nodes if (child := node.children.get(level) or node.wild)]
            found += [node for node in nodes if node.wild is node]
            nodes = [node for node in nodes if node.wild is not node]
            if not nodes:
                break
        return found + nodes

    def _root_of(self, text: str) -> _Node:
        return self._dollar if text[0] == "$" else self._root


def covers(topic_filter: TopicFilter, learned: Sequence[str]) -> bool:
    """Return whether a filter that matches some topics of a stream with these levels matches all of them."""
    wanted = topic_filter.levels
    for want, level in zip(wanted, learned, strict=False):
        if want == "#":
            return True
        if level == "#" or want not in ("+", level):
            return False
    return len(wanted) == len(learned) or wanted[len(learned) :] == ("#",)


def _children(nodes: list[_Node]) -> list[_Node]:
    return [child for node in nodes for child in node.children.values()]


def _below(nodes: list[_Node]) -> list[_Node]:
    """Return nodes and all their descendants."""
    found: list[_Node] = []
    while nodes:
        found += nodes
        nodes = _children(nodes)
    return found


def _token(node: _Node) -> str:
    """Return the token that leads to a node from its parent."""
    token = node.path[-1]
    return _PLUS if token == _DOLLAR_PLUS else token


def _size(token: str) -> int:
    """Return the room that a node with this token takes."""
    return 1 + len(token.encode()) // _TOKEN_BYTES


def _entries(reader: Reader, prefix: bytes) -> Iterator[tuple[int, str, int]]:
    """Yield the node, the token and the number in each entry of one kind."""
    for chunk in reader.scan(META, prefix, prefix[:-1] + bytes((prefix[-1] + 1,))):
        for key, stored in chunk:
            try:
                yield _U32.unpack(key[5:9])[0], key[9:].decode(), _U32.unpack(strip_checksum(key, stored))[0]
            except (CorruptionError, struct.error, UnicodeDecodeError) as bad:
                reason = bad.reason if isinstance(bad, CorruptionError) else str(bad)
                raise CorruptionError(reason, place=f"learned topics, key {key[5:].hex()}") from bad


def _in_order(numbered: dict[int, _Node], first: int, what: str) -> list[_Node]:
    """Return nodes in order of their numbers. Raises `CorruptionError` if the numbers have gaps."""
    try:
        return [numbered[number] for number in range(first, first + len(numbered))]
    except KeyError as gap:
        raise _damaged(f"there are gaps between the {what}") from gap


def _damaged(reason: str) -> CorruptionError:
    return CorruptionError(reason, place="learned topics")


def check_thresholds(_: object, field: attrs.Attribute[tuple[int, ...]], value: tuple[int, ...]) -> None:
    """Validate a layout's option ``thresholds``: for each depth, the number of children before a node gets ``+``."""
    if not value or not all(0 <= threshold <= _LARGEST_THRESHOLD for threshold in value):
        raise ValueError(f"{field.name} is one number or more, each from 0 to {_LARGEST_THRESHOLD}")
