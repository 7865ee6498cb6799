"""Shared subscriptions, ``$share/<name>/<filter>``: each message goes to one of the members (MQTT 5, section 4.8.2).

The sessions that share a subscription are a *group*, each session a member. The messages of a group are divided
into *partitions*: the topics of one shard that have the same hash modulo 64. A partition is assigned to one member at a
time. Its place is one position, with every layout and across generations. The messages of a publisher to a topic keep
their order. Streams can't be the partitions: a database may have only one stream, and one member would get all
messages.

A member's places are part of its session, written in the same engine write as the packet ids of its deliveries. The
group stores places too, in the shard of its name: when a partition is reassigned, its place is written there before the
new member gets the partition. So after a crash, the place of a partition is the highest place recorded for it.

The messages that a member has in flight stay with its session, which sends them again when its client reconnects. If
the session ends instead, or its client stays disconnected for long, messages of QoS 1 go back to the group and to
another member; those of QoS 2 don't [MQTT-4.8.2-5]. One engine write moves them from the session to a separate key in
the same shard (*revoked*). Then they are written to the group's records (*returned*), and the separate key is
removed. Only then can a member get them, as an *assignment*. So no message is ever in two places.

Messages that a member reads but that its ``allow`` refuses go back in the same way, revoked by the write that
commits the member's places. They are offered to the other members; while no member may receive them, the group keeps
them. Refused messages of an assignment are removed from the assignment instead, before any of it is handed out.

`topicstore.sessions.shared.stored_group` describes how assignments pass between the sites of a cluster.
"""
