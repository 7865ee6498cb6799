"""Shared subscriptions, ``$share/<name>/<filter>``: each message goes to one of the members (MQTT 5, section 4.8.2).

The messages of a group are divided into *slices*: the topics of one shard that have the same hash
modulo 64. A slice is leased to one member at a time, and a place in it is one position, on every
layout and across generations; what a publisher sends to a topic stays in its order. Streams can't be divided instead: a
database may have a single one, and one member would get everything.

A member's places are part of its own session: written in the same engine write as the packet ids of
what it is sent. The group keeps places too, in the shard of its name, as of the last time that slices were moved: the
place of a slice that leaves a member is written there before another member gets the slice. So the place of a slice is
the highest that is recorded for it, whenever a crash came.

The messages that a member has in flight stay with its session, which sends them again when its client is back. If the
session ends instead, or its client stays away for long, messages of QoS 1 go back to the group and to another member;
those of QoS 2 don't [MQTT-4.8.2-5]. They leave the session in one engine write, under a key of their own in the same
shard (*handed back*), then they are written to the group (*returned*), then the first of the two keys is removed, and
only then can a member get them. So they are never in two places.

What a member reads and its client may not be sent goes back in the same way, handed back by the write that commits the
member's places, and is offered to the other members; while none of them may have it, the group keeps it. What was lent
to a member is parted from its loan instead, before anything of it is handed out.
"""
