"""The filter that the demo replays."""

from __future__ import annotations

from collections.abc import Mapping

from topicstore import matches

__all__ = ["choose_filter"]


def choose_filter(counts: Mapping[str, int]) -> str:
    """Return a filter with wildcards that matches several topics and a significant part of the messages.

    The filter keeps the last level; levels before it that differ become ``+``: ``plant/+/temperature``.
    """
    plain = {topic: count for topic, count in counts.items() if not topic.startswith("$")}
    if not plain:
        return "#"
    depths: dict[int, list[str]] = {}
    for topic in plain:
        depths.setdefault(topic.count("/"), []).append(topic)
    split = [topic.split("/") for topic in max(depths.values(), key=len)]
    first = split[0]
    shape = [level if all(levels[n] == level for levels in split) else "+" for n, level in enumerate(first)]
    by_last: dict[str, list[int]] = {}
    for levels in split:
        by_last.setdefault(levels[-1], []).append(plain["/".join(levels)])
    total = sum(plain.values())
    good = {last: sum(many) for last, many in by_last.items() if len(many) > 1 and sum(many) <= total / 2}
    if good and "+" in shape[:-1]:
        return "/".join([*shape[:-1], max(good, key=lambda last: good[last])])
    chosen = "/".join(shape)
    return chosen if "+" in chosen and any(matches(chosen, topic) for topic in plain) else "#"
