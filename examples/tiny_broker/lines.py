"""The lines of the protocol, which README.md lists. A client's line is parsed into a tuple: its verb, then values."""

from __future__ import annotations

from topicstore.sessions import Publish, PubRel

__all__ = ["BadLineError", "Request", "check_length", "packet_line", "parse"]

MAX_LINE = 65_536
"""Maximum length of a line in bytes."""
Request = tuple  # ("SUBSCRIBE", "home/#", 1)


class BadLineError(ValueError):
    """Raised for a line that the protocol doesn't allow; the text says why."""


def check_length(line: bytes) -> None:
    """Raise `BadLineError` if a line, or the received part of a line, is too long."""
    if len(line) > MAX_LINE:
        raise BadLineError(f"a line has at most {MAX_LINE} bytes")


def parse(line: bytes) -> Request:
    """Return the request in a client's line. Raises `BadLineError`."""
    check_length(line)
    match line.split(b" "):
        case [b"CONNECT", client_id, b"never", keep_alive]:
            return "CONNECT", _text(client_id), None, _number(keep_alive, 0, 65_535)
        case [b"CONNECT", client_id, expiry, keep_alive]:
            return "CONNECT", _text(client_id), _number(expiry, 0, 2**32), _number(keep_alive, 0, 65_535)
        case [b"SUBSCRIBE", topic_filter, qos]:
            return "SUBSCRIBE", _text(topic_filter), _number(qos, 0, 2)
        case [b"UNSUBSCRIBE", topic_filter]:
            return "UNSUBSCRIBE", _text(topic_filter)
        case [b"PUBLISH", b"0", b"0", topic, *payload]:
            return "PUBLISH", 0, 0, _text(topic), b" ".join(payload)
        case [b"PUBLISH", qos, packet_id, topic, *payload]:
            return "PUBLISH", _number(qos, 1, 2), _number(packet_id, 1, 65_535), _text(topic), b" ".join(payload)
        case [b"PUBACK" | b"PUBREC" | b"PUBREL" | b"PUBCOMP" as verb, packet_id]:
            return verb.decode(), _number(packet_id, 1, 65_535)
        case [b"PING" | b"DISCONNECT" as verb]:
            return (verb.decode(),)
    raise BadLineError("the protocol has no such line")


def packet_line(packet: Publish | PubRel) -> bytes:
    """Return the line that sends a packet to a client."""
    if isinstance(packet, PubRel):
        return b"PUBREL %d" % packet.packet_id
    again, topic = b"again" if packet.dup else b"new", packet.message.topic.encode()
    return b"MESSAGE %d %d %b %b %b" % (packet.qos, packet.packet_id, again, topic, packet.message.payload)


def _text(word: bytes) -> str:
    try:
        return word.decode()
    except UnicodeDecodeError:
        raise BadLineError("a name is not UTF-8") from None


def _number(word: bytes, least: int, most: int) -> int:
    if not word.isdigit() or len(word) > 10 or not least <= int(word) <= most:
        raise BadLineError(f"a number from {least} to {most} is expected, not {word[:20].decode(errors='replace')!r}")
    return int(word)
