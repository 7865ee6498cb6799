"""Shards whose order of changes is kept in an object store, so that several sites can hold them.

A **log store** can create an object only if its name is free (`topicstore.contract.log_store`). That is all the
agreement there is: whoever creates entry *n* of a shard's log has written it, and everybody else is told that it
exists. There is no election, no quorum and no clock on which anything rests. What is replicated are logical changes,
placed messages with their positions, state, generations; each site encodes them with its own engine and layout.

**The owner** prepares changes under the shard's lock, with positions and conditions behind what is applied and what is
pending, and queues them. One PUT is in flight; when it is answered, all that was queued meanwhile becomes the next
entry. An entry that is in the log is applied, together with its index, in one engine write, and then acknowledged. If
the index is taken, the owner reads the entry: its own means that an answer was lost; one of a lower epoch is void, and
is passed; one of a higher epoch means that another site owns the shard. Then all that is pending fails.

**A site takes over** by creating the next cluster document, whose number is its epoch; reading the log to its end;
creating a fence there; and looking for cuts once more. **A follower** reads what lies behind what it has applied, and
looks for cuts afterwards. **Truncation** writes a base, then a cut at or below it, and then deletes the entries below
the cut.

The rules. Without any of the first five acknowledged entries are lost (`topicstore_conformance.replication` shows how):

1. Fences are never deleted. An owner that was paused goes on with the index of the fence that followed its last entry,
   and must find it (`truncating.may_delete`).
2. A base carries the highest epoch in it, and a site that begins there with a lower one stops
   (`taking_over.after_reading`).
3. After its fence was created, a site looks for cuts. One above the fence says that the index was not the log's end but
   had been emptied; it begins anew at the base (`taking_over.after_look`).
4. Whoever reads a log looks for cuts after reading, and discards what it read if one lies above where it began
   (`reading.where_to_read`). A cut is created before anything below it is deleted, so looking afterwards is enough.
5. What had no answer is sent again with the same id to the same index (`owning.again`). "Taken" without anything to be
   read there is no answer either: stores say so of races whose winner failed.
6. An entry of a lower epoch than one before it is void (`reading.apply`). It can only be the fence of somebody who did
   not succeed, so this changes nothing; it is a second lock.
7. An epoch belongs to one start of one process. Whoever starts again takes a new one, and a new fence: nobody knows
   whether the process before it has ended or sleeps, so two with one site's id are two sites.
8. A document counts if none has a higher number when one looks after creating it (`transitions.after_create`): old ones
   are deleted. Nothing in the log rests on this; two sites that take themselves for the owner meet in the log.

Entries are chained: each has the checksum of the one before it, and gives the span of its positions. So everybody who
reads checks that nothing is missing, that positions rise, and that the log is the one that it has applied
(`reading.apply`, `reading.check_reaches`).

A replica's reads are a prefix of the log; so are those of an owner that was deposed and does not know yet. Whoever must
be certain asks for the index behind the last entry: since fences stay, nobody owns the shard but who finds nothing
there.

Decisions are pure functions in `owning`, `taking_over`, `reading`, `truncating` and `transitions`. The model checker
drives them as the program does.
"""
