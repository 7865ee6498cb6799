"""Replication of shards: a log in an object store orders the changes of each shard for all sites.

A **log store** creates an object only if its name is free (`topicstore.contract.log_store`). All agreement rests on
this compare-and-set: the site that creates entry *n* of a shard's log has written that entry, and every other site
finds the name taken. There is no election and no quorum, and correctness depends on no clock. Entries hold logical
changes: messages with their positions, state and generations. Each site encodes them with its own engine and layout.

An **epoch** is a fencing token: it grows with each change of owner. A **fence** is the first entry of an epoch. A
**cluster document** lists the sites, and the owner and replicas of each shard. A **base** is a snapshot of a shard. A
**cut** is an object that says below which index entries may have been deleted. A **beat** is a site's heartbeat. A
**claim** reserves a store for the database whose first document is about to be created. An existing database begins
with a base and a cut of each shard, at the same index, and no entries.

**The owner** prepares changes under the shard's lock and queues them. Their positions and conditions take account of
both the applied and the pending changes. One PUT is in flight; when it is answered, the changes that were queued
meanwhile become the next entry, up to a bound in bytes. An entry in the log is applied, together with its index, in one
engine write, and then acknowledged; the next PUT is in flight meanwhile. If the index is taken, the owner reads the
entry there. Its own entry means that an answer was lost. An entry of a lower epoch is void, and the owner continues
with the next index. An entry of a higher epoch means that another site owns the shard; all pending changes then fail.

**A site takes over** in four steps: it creates the next cluster document, whose number is its epoch; reads the log to
its end; creates a fence there; and looks for cuts once more. **A follower** asks for the entries after those it has
applied by their indexes, and looks for cuts afterwards if it found any. **Truncation** writes a base, which lists the
fences, then a cut at or below the base's index, and then deletes the entries below the cut. A sealed generation is
written once, and all bases share it.

**Applying a fence** ends the range of messages that the owner before has marked as stored only for sessions
(`topicstore.shard.interest_records`), at the last position before the fence, on every replica alike. So such a range
never covers a message of a later owner.

The rules. If one of the first five is broken, acknowledged entries can be lost (`topicstore_conformance.replication`
shows how):

1. Fences are never deleted. An owner that was paused continues with the index of the fence that followed its last
   entry, and must find the fence there (`truncating.may_delete`). Only a fence in the place of a deleted entry (rule 3)
   may be deleted.
2. A base records the highest epoch of its entries. A site that starts from the base, and has a lower epoch, gives up
   (`taking_over.after_reading`).
3. After creating its fence, a site looks for cuts. A cut above the fence shows that the index was not the log's end,
   because its entry had been deleted. The site then starts again from the base (`taking_over.after_look`).
4. A reader of a log looks for cuts after reading, and discards the entries it read if a cut lies above the index where
   it began (`reading.where_to_read`). Looking afterwards is enough: a cut is created before anything below it is
   deleted. A reader that finds nothing looks for cuts now and then too, because its next entry may have been deleted.
5. A PUT without an answer is repeated with the same id at the same index (`owning.again`). "Taken" with no object to
   read counts as no answer: stores report this for races whose winner failed.
6. An entry of a lower epoch than an earlier entry is void (`reading.apply`). It can only be the fence of a site whose
   takeover failed, so ignoring it changes nothing; the rule is a second safeguard.
7. An epoch belongs to one run of one process. A restarted process takes a new epoch and creates a new fence, because
   its predecessor may be paused rather than dead. Two processes with the same site id count as two sites.
8. A cluster document counts if no higher number exists when its creator looks afterwards (`transitions.after_create`):
   old documents are deleted. The log doesn't depend on this: if two sites both believe they are the owner, one of them
   finds the other's fence in the log.

Entries form a hash chain: each holds the checksum of the entry before it, and the range of its own positions. So every
reader checks that no entry is missing, that positions rise, and that the log is the one it has applied
(`reading.apply`, `reading.check_reaches`).

Reads on a replica see a prefix of the log; so do reads on a deposed owner that has not noticed yet. A reader that needs
certainty asks for the index after the last entry, and then looks for cuts (`LogReader.read`). An owner needs no cuts:
fences are never deleted, so only a site that finds nothing there owns the shard.

The decisions are pure functions in `owning`, `taking_over`, `reading`, `truncating` and `transitions`. The model
checker calls the same functions as the program. A second checker runs the program itself, over a store that stops at
every call (`topicstore_conformance.replication`).
"""
