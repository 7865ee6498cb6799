"""`Site`: this process as a member of a cluster. One thread sends heartbeats, watches other sites, and moves shards.

Every `beat_interval` the thread sends a heartbeat, lists those of all sites, and reads a new document. It then does
what `topicstore.replication.duties` decides: it creates the next document, takes shards over, releases them or follows
them.
"""

from __future__ import annotations

import secrets
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
import msgspec

from topicstore._version import __version__
from topicstore.contract.errors import (
    ClusterNotReadyError,
    GenerationError,
    InvalidArgumentError,
    RecoverableError,
    ShardElsewhereError,
    ShardMovedError,
    TopicstoreError,
)
from topicstore.contract.log_store import ObjectExistsError, ObjectNotFoundError, StorageUnavailableError
from topicstore.runtime.background import BackgroundTask
from topicstore.runtime.closing import close_all
from topicstore.shard.shard import Shard
from topicstore.shard.writer import AddGeneration, DropGeneration

from . import duties, names
from .bases import cut_log, highest
from .circuit_breaker import CircuitBreaker, retry_unanswered
from .counted_store import CountedLogStore
from .documents import Documents
from .duties import Duty, Known
from .info import ClusterInfo, cluster_info
from .objects import BEATS, CLAIMS, Beat, Claim, ClusterDocument, GenerationPlan, ShardPlace
from .replica import Replica
from .settings import Cluster, check_site
from .watching import BackOff, OwnersProgress, Silences

__all__ = ["ReplicaLag", "ShardOwner", "Site"]

_KEPT = 16
"""The number of documents that are kept for sites that read one at the moment."""
_BASE_BYTES = 256 << 20
"""The bytes of changes after which the owner writes a base."""
_END = 1 << 63
"""An index behind every entry."""
_TRIES = 3
"""The number of consecutive heartbeats that a reader tries to get, because a site deletes the earlier ones."""


@attrs.frozen
class ShardOwner:
    """The site that owns a shard, and the addresses at which it is reached."""

    site: str
    address: str
    """The site's `Cluster.address`; empty if it has none."""
    http_address: str
    """The site's `Cluster.http_address`; empty if it has none."""


@attrs.frozen
class ReplicaLag:
    """The lag of this site's replica of a shard behind the shard's owner."""

    shard: int
    owner: str
    """The site that owns the shard."""
    entries: int
    """The entries of the log that the owner has applied, as of its last heartbeat, and this site has not."""
    seconds: float
    """The seconds since this site last had all entries; 0 for the owner."""


class Site:
    """A site of a cluster, run by this process. `start` joins the cluster with a database; `close` leaves it."""

    def __init__(self, cluster: Cluster, name: str, store: CountedLogStore) -> None:
        self.cluster = cluster
        self.name = check_site(name)
        self.store = store
        self.replicas: Sequence[Replica] = ()
        """The replicas of all shards, in order."""
        self.failure: str | None = None
        """The error of the background thread's last round (see `look`); None if it succeeded. Reading needs no lock."""
        self.ended: str | None = None
        """The reason why this process has stopped taking part in the cluster; None while it does."""
        self._incarnation = secrets.token_bytes(16)
        self._documents = Documents(store, self._back_off)
        self._current: tuple[int, ClusterDocument] | None = None
        """The last document that was read, and its number. Replaced as a whole."""
        self._breaker = CircuitBreaker()
        """Opens when the log store doesn't answer this site; shared by the logs of all shards."""
        self._silences = Silences()
        self._silent: Mapping[str, float] = {}
        self._owners_progress = OwnersProgress(cluster.takeover_after + cluster.poll_interval)
        self._after_failures = BackOff(cluster.takeover_after)
        self._beat_number = 0
        self._certain = float("-inf")
        """The time (`time.monotonic`) until which no other site takes over this site's shards: other sites wait for
        `Cluster.takeover_after` after they have seen its last heartbeat."""
        self._next_beat = self._next_poll = float("-inf")
        """The times (`time.monotonic`) of the next heartbeat, and of the next request for entries of other owners."""
        self._changing = threading.Lock()
        """Held while an owner's shards are brought to the document's generations."""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._removing = BackgroundTask("removal of what is not kept", self._remove_dropped)
        self._truncating = BackgroundTask("truncation of logs", self._truncate)

    # --- the document ---

    @property
    def document(self) -> ClusterDocument:
        """The last document that this site has read."""
        return self._numbered()[1]

    def _numbered(self) -> tuple[int, ClusterDocument]:
        if self._current is None:
            raise ValueError("the site has not entered the cluster")
        return self._current

    def find(self) -> ClusterDocument | None:
        """Return the current document; None if there is no cluster yet. Raises the errors of `Documents.newest`."""
        return self._documents.newest()[1]

    def claim(self, database: bytes, *, begun: bool = False) -> bytes:
        """Reserve the log store for a new cluster, of the database with this id; return the id that it is reserved for.

        Several sites may create an empty cluster at the same time: they get the same id. With ``begun``, the store is
        reserved for an existing database. Raises `ClusterNotReadyError` if the store is reserved by a call of the other
        kind, or for another existing database.
        """
        wanted = Claim(database=database, begun=begun)
        try:
            self.store.create(names.CLAIM, CLAIMS.encode(names.CLAIM, wanted))
        except ObjectExistsError:
            there = CLAIMS.decode(names.CLAIM, self.store.get(names.CLAIM), self.store.place)
            if begun != there.begun or (begun and there.database != database):
                remedy = "repeat 'topicstore cluster begin' with it" if there.begun else "open its first site"
                raise ClusterNotReadyError(
                    f"{self.store.place} is reserved for database {there.database.hex()}, whose cluster is not "
                    f"complete: {remedy}, or use another prefix"
                ) from None
            return there.database
        return database

    def found(
        self, database: bytes, shards: int, settings: Mapping[str, Any], generations: Sequence[GenerationPlan]
    ) -> ClusterDocument:
        """Create the first document, whose shards have no owner yet; return the current one if another site was faster.

        The log store is reserved for the database: see `claim`.
        """
        document = ClusterDocument(
            id=secrets.token_bytes(16),
            database=database,
            sites={},
            shards=(ShardPlace("", 0, b"", ()),) * shards,
            settings=dict(settings),
            generations=tuple(generations),
        )
        _, current = self._documents.change(lambda _, there: document if there is None else None)
        return document if current is None else current

    def enter(self) -> None:
        """Take part in the cluster, in place of an earlier process of this site. Raises the errors of `find`."""
        self._beat_number = (highest(self.store, names.beats(self.name)) or 0) + 1
        token = secrets.token_bytes(32)
        self._change(lambda number, there: self._entered(number, there, token))

    def _entered(self, number: int, document: ClusterDocument, token: bytes) -> ClusterDocument:
        """Return the document in which this process takes part; the first one has the cluster's token from here."""
        how = self.cluster
        document = duties.entered(document, number, self.name, self._incarnation, how.address, how.replication_factor)
        me = msgspec.structs.replace(document.sites[self.name], http_address=how.http_address)
        sites = {**document.sites, self.name: me}
        return msgspec.structs.replace(document, sites=sites, token=document.token or token)

    def _change(self, make: Callable[[int, ClusterDocument], ClusterDocument | None]) -> tuple[int, ClusterDocument]:
        """Create the next document, with an id of its own; return the current one with its number."""

        def made(number: int, document: ClusterDocument | None) -> ClusterDocument | None:
            following = None if document is None else make(number, document)
            return None if following is None else msgspec.structs.replace(following, id=secrets.token_bytes(16))

        number, document = self._documents.change(made)
        if document is None:
            raise StorageUnavailableError(f"{self.store.place} has no document of the cluster any more")
        if number > _KEPT and number % _KEPT == 0:
            self._documents.forget(_KEPT)
        self._look_at(number, document)
        return number, document

    def _look_at(self, number: int, document: ClusterDocument) -> None:
        if self._current is not None and self._current[0] >= number:
            return  # another thread has read this document or a later one
        self._current = number, document
        missing = max(self.cluster.n_sites - max(document.most_sites, len(document.sites)), 0)
        for replica, place in zip(self.replicas, document.shards, strict=False):
            replica.missing = missing
            owner = document.sites.get(place.owner)
            replica.owner = (place.owner, "" if owner is None else owner.address)

    def _back_off(self, tries: int) -> None:
        pause = min(1.0, 0.02 * 2 ** min(tries, 10))
        if self._stopping.wait(pause) or tries * pause > self.cluster.store_timeout:
            raise StorageUnavailableError(f"{self.store.place} did not answer; a document may have been created")

    # --- beginning and ending ---

    def start(self, shards: Sequence[Shard]) -> None:
        """Enter the cluster, follow the logs of all shards, take over those that this site is to own, start the thread.

        Each step is repeated for `Cluster.store_timeout` while the store gives no answer. Raises
        `StorageUnavailableError` after that time, `CorruptionError`, and the errors of creating a generation.
        """
        timeout, patience = self.cluster.store_timeout, self.cluster.flush_interval
        breaker = self._breaker
        self.replicas = [
            Replica(shard, self.store, self.name, timeout, patience, breaker, self._settle) for shard in shards
        ]
        begins = [partial(self._begin, replica) for replica in self.replicas]
        steps: list[Callable[[], object]] = [self.enter, *begins, self._beat]
        for step in steps:
            retry_unanswered(step, timeout)
        self._removing.wake()
        self._thread = threading.Thread(target=self._run, name=f"topicstore-site-{self.name}", daemon=True)
        self._thread.start()

    def _begin(self, replica: Replica) -> None:
        self._do(replica)
        if replica.kept and not replica.log.owned:
            replica.follow(meanwhile=self._beat)

    def close(self) -> None:
        """Release this site's shards, pass them on to other sites, and stop. This is idempotent.

        Queued changes are written first, unless the store does not answer within `Cluster.store_timeout`.
        """
        self._stopping.set()
        close_all((self._release, *(replica.log.close for replica in self.replicas), self._end_threads, self._pass_on))
        self.replicas = ()

    def _release(self) -> None:
        deadline = time.monotonic() + self.cluster.store_timeout
        self._join(self.cluster.store_timeout)
        for replica in self.replicas:
            replica.closing = True
            replica.log.leave()
        for replica in self.replicas:
            replica.log.release(max(deadline - time.monotonic(), 0))

    def _join(self, timeout: float | None = None) -> None:
        """Wait until the site's thread has ended. In the thread itself, return immediately."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _end_threads(self) -> None:
        self._join()
        for task in (self._removing, self._truncating):
            task.stop()
        for task in (self._removing, self._truncating):
            task.join()

    def _pass_on(self) -> None:
        if self._current is not None:
            takeover_after = self.cluster.takeover_after
            with suppress(RecoverableError):  # if it fails, other sites take over after a while
                known = self._known_by(self._last(self._beats()))
                self._change(lambda number, document: duties.abdicated(document, number, known, takeover_after))
        self.store.close()

    # --- the thread ---

    def _run(self) -> None:
        while not self._stopping.wait(max(min(self._next_beat, self._next_poll) - time.monotonic(), 0)):
            try:
                self.look()
                failures = [replica.failure for replica in self.replicas if replica.failure is not None]
                self._failed(failures[0] if failures else None)
            except Exception as error:  # noqa: BLE001 - reported in `failure`; it must not end the thread
                self._failed(str(error) or type(error).__name__)
                self._stopping.wait(self.cluster.beat_interval / 10)
            if self.ended is not None:
                return

    def _failed(self, failure: str | None) -> None:
        known, self.failure = self.failure, failure
        if failure is not None and failure != known:
            with suppress(RuntimeWarning):  # if warnings are errors, `failure` still reports it
                warnings.warn(f"site {self.name}: {failure}", RuntimeWarning, stacklevel=1)

    def look(self) -> None:
        """Do one round: send a heartbeat if it is due, watch the other sites, and do the next action of each shard."""
        if time.monotonic() >= self._next_beat:
            self._beat()
            self._watch()
        poll = time.monotonic() >= self._next_poll
        if poll:
            self._next_poll = time.monotonic() + self.cluster.poll_interval
        for replica in self.replicas:
            if self._stopping.is_set() or self.ended is not None:
                return
            try:
                self._do(replica, poll=poll)
                replica.failure = self._failure_of(replica)
            except TopicstoreError as error:  # the round continues with the other shards
                replica.failure = f"shard {replica.shard.number}: {error}"

    def _failure_of(self, replica: Replica) -> str | None:
        """Return why a shard's copy takes no writes, and which site writes the shard; None if the copy takes writes."""
        shard, failure = replica.shard.number, replica.shard.writer.failure
        if failure is None:
            return None
        owner = self.document.shards[shard].owner
        writer = "no other site has taken it over" if owner == self.name else f"site {owner} owns it"
        return f"shard {shard} takes no writes on this site until it is opened again ({failure}); {writer}"

    def _beat(self) -> None:
        """Create the next heartbeat object if it is due."""
        now = time.monotonic()
        if now < self._next_beat or self.ended is not None:
            return
        self._next_beat = now + self.cluster.beat_interval
        name, failed = names.beat(self.name, self._beat_number), self._own_failed()
        beat = Beat(
            site=self.name,
            incarnation=self._incarnation,
            address=self.cluster.address,
            program=__version__,
            applied=self._progress(),
            failed=failed,
            back_off=self._after_failures.look(bool(failed), now),
        )
        # An existing heartbeat is this process's own, whose answer was lost, or that of another process of this site.
        # The document says which of the two processes acts as the site, and the next heartbeat shows that it is alive.
        with suppress(ObjectExistsError):
            self.store.create(name, BEATS.encode(name, beat))
            self._certain = now + self.cluster.takeover_after
        self._breaker.reset()
        self._beat_number += 1
        if self._beat_number > 2:
            self.store.delete(names.beat(self.name, self._beat_number - 2))

    def _end(self, reason: str) -> None:
        """Stop taking part: the process that replaces this one owns the shards."""
        self.ended = f"{reason}; this one has stopped writing"
        self._failed(self.ended)
        for replica in self.replicas:
            replica.log.close()

    def _settle(self) -> None:
        """Release the shards that other sites have taken over, if this site's last heartbeat is old enough for that.

        Called before other sites' entries are applied. Such an entry may remove messages that no session of the new
        owner needs, but that an in-memory session here still needs. The release ends these sessions first. Raises
        `StorageUnavailableError`.
        """
        if time.monotonic() < self._certain or not any(replica.log.owned for replica in self.replicas):
            return
        self._look_for_document()
        document, known = self.document, self._known({})
        for replica in self.replicas:
            lost = replica.log.owned and (
                duties.duty(document, replica.shard.number, known, replica.epoch, owned=True) is Duty.RELEASE
            )
            if lost and not replica.log.release(self.cluster.store_timeout):
                raise StorageUnavailableError(f"shard {replica.shard.number} has moved{replica.log.reason}")

    def _look_for_document(self) -> None:
        newer = self._documents.newer(self._numbered()[0])
        if newer is not None:
            self._look_at(*newer)

    def _watch(self) -> None:
        """Read the heartbeats of all sites and the current document; create the next document if one is due."""
        beats = self._beats()
        self._look_for_document()
        document = self.document
        found = {name: (one.incarnation, max(beats.get(name, [0]))) for name, one in document.sites.items()}
        self._silent = self._silences.look(found, time.monotonic())
        me = document.sites.get(self.name)
        if me is None or me.incarnation != self._incarnation:
            self._end(f"another process runs as site {self.name}" if me else f"site {self.name} was removed")
            return
        everything = dict.fromkeys(document.sites, dict.fromkeys(range(len(document.shards)), _END))
        if self._following(document, self._known(everything), 1 << 62) is not None:
            known = self._known_by(self._last(beats))
            known = attrs.evolve(known, earlier=self._owners_progress.look(known.ends(document), time.monotonic()))
            if self._following(document, known, 1 << 62) is not None:
                self._change(lambda number, current: self._following(current, known, number))

    def _following(self, document: ClusterDocument, known: Known, number: int) -> ClusterDocument | None:
        cluster = self.cluster
        return duties.next_document(document, number, known, cluster.takeover_after, cluster.replication_factor)

    def _known(self, applied: Mapping[str, Mapping[int, int]], last: Mapping[str, Beat] | None = None) -> Known:
        """Return the inputs of this site's decisions; ``last`` has the sites' last heartbeats, if they were read."""
        released = {replica.shard.number: replica.progress.epoch for replica in self.replicas if replica.released}
        now = time.monotonic()
        lost = {
            replica.shard.number: replica.epoch
            for replica in self.replicas
            if replica.epoch and not replica.log.owned and now >= replica.retry
        }
        own, last = self._own_failed(), last or {}
        failed = {**{site: beat.failed for site, beat in last.items()}, self.name: own}
        back_offs = {site: beat.back_off for site, beat in last.items()}
        back_offs[self.name] = self._after_failures.look(bool(own), now)
        return Known(
            self.name,
            self._incarnation,
            self._silent,
            lost,
            released,
            applied,
            failed=failed,
            back_offs=back_offs,
        )

    def _known_by(self, last: Mapping[str, Beat]) -> Known:
        """Return the inputs of this site's decisions, with the progress and failures in each site's last heartbeat."""
        return self._known(self._applied(last), last)

    def _beats(self) -> dict[str, list[int]]:
        """Return the numbers of all heartbeats, by site."""
        found: dict[str, list[int]] = {}
        for chunk in self.store.names(names.BEATS):
            for name in chunk:
                found.setdefault(names.site_of(name), []).append(names.number_of(name))
        return found

    def _last(self, beats: Mapping[str, list[int]]) -> dict[str, Beat]:
        """Return the last heartbeat of each site, without the sites that have replaced it several times meanwhile."""
        last: dict[str, Beat] = {}
        for site, numbers in beats.items():
            for number in range(max(numbers), max(numbers) + _TRIES):
                name = names.beat(site, number)
                with suppress(ObjectNotFoundError):  # the site has deleted this heartbeat after the next one
                    last[site] = BEATS.decode(name, self.store.get(name), self.store.place)
                    break
        return last

    def _applied(self, last: Mapping[str, Beat]) -> dict[str, Mapping[int, int]]:
        """Return the progress that each site has reported in its last heartbeat."""
        return {**{site: beat.applied for site, beat in last.items()}, self.name: self._progress()}

    def _own_failed(self) -> tuple[int, ...]:
        """Return the shards whose copy on this site takes no writes since one failed."""
        return tuple(replica.shard.number for replica in self.replicas if replica.kept and replica.failed)

    def _progress(self) -> dict[int, int]:
        """Return the progress of this site, by shard, of the shards that it keeps."""
        return {replica.shard.number: replica.progress.next for replica in self.replicas if replica.kept}

    # --- the shards ---

    def _do(self, replica: Replica, *, poll: bool = True) -> None:
        """Take the next action for a shard (`duties.duty`)."""
        number = replica.shard.number
        what = duties.duty(self.document, number, self._known({}), replica.epoch, owned=replica.log.owned)
        if what is not Duty.NOTHING and not replica.kept and not replica.keep():
            return  # the next round looks again
        if replica.failed and what in (Duty.TAKE_OVER, Duty.FOLLOW):
            return  # a failed copy can't apply entries, not even its own fence, until it is reopened
        if what is Duty.TAKE_OVER:
            if replica.take_over(self.document.shards[number].epoch, self._beat):
                self._reach(replica)
        elif what is Duty.OWN:
            self._reach(replica)
            if poll and (replica.base or replica.base_due or replica.grown >= _BASE_BYTES):
                self._truncating.wake()
        elif what is Duty.RELEASE:
            replica.log.leave()
        elif what is Duty.FOLLOW and poll:
            replica.follow(certain=False, meanwhile=self._beat)
            self._removing.wake()
        elif what is Duty.NOTHING and replica.refuse():
            self._removing.wake()

    def _reach(self, replica: Replica) -> None:
        """Add and drop generations of an owned shard until it has those of the document."""
        generations, writer = replica.shard.generations, replica.shard.writer
        with self._changing:
            plans = self.document.generations
            for plan in plans:  # add all before a drop, which must not drop the current one
                if plan.number > generations.current:
                    change = AddGeneration(plan.number, plan.layout, plan.options, writer.policy.now())
                    writer.finish_commit(writer.submit(generations.pending_add(change)))
            for plan in plans:
                record = generations.records.get(plan.number)
                if plan.dropped and record is not None and not record.dropped:
                    writer.finish_commit(writer.submit(generations.pending_drop(DropGeneration(plan.number))))
        self._removing.wake()

    def _remove_dropped(self, _: bool) -> None:
        for replica in self.replicas:
            if not replica.kept:
                replica.drop()
            if any(record.dropped for record in list(replica.shard.generations.records.values())):
                replica.shard.generations.remove_dropped()
                replica.shard.generations.reclaim_removed()

    def _truncate(self, _: bool) -> None:
        """Write a base of each owned shard whose log has grown, and cut the log once the other replicas have it."""
        for replica in self.replicas:
            if replica.log.owned and (replica.base_due or replica.grown >= _BASE_BYTES):
                replica.write_base()
        applied = self._applied(self._last(self._beats()))
        for replica in self.replicas:
            if replica.base and replica.log.owned and self._oldest_reader(replica, applied) >= replica.base:
                cut_log(self.store, replica.shard.number, self.name, replica.base)
                replica.base = 0

    def _oldest_reader(self, replica: Replica, applied: Mapping[str, Mapping[int, int]]) -> int:
        """Return the lowest index that a replica reads next, except replicas unresponsive for the log retention."""
        number, retention = replica.shard.number, self.cluster.log_retention
        place = self.document.shards[number]
        waited = [site for site in (*place.replicas, *place.joining) if self._silent.get(site, 0.0) < retention]
        return min((applied.get(site, {}).get(number, 0) for site in waited if site != self.name), default=_END)

    # --- for the database ---

    def refresh(self, shards: Collection[int] | None = None) -> None:
        """Wait until this site has everything in ``shards`` (None: all) that was acknowledged before the call.

        Replicas read their logs to the end. For a shard that this site owns, it looks for the next entry. Shards that
        this site doesn't keep are left out. Raises `StorageUnavailableError`.
        """
        for shard, replica in enumerate(self.replicas):
            if replica.kept and (shards is None or shard in shards):
                replica.confirm()

    def follow(self, shards: Collection[int]) -> None:
        """Read the logs of these shards, if this site has a whole copy, without waiting for the next poll.

        Raises the errors of `Replica.follow`.
        """
        for shard, replica in enumerate(self.replicas):
            whole = replica.kept and not replica.failed and not replica.shard.writer.elsewhere
            if whole and shard in shards:
                replica.follow(certain=False)

    def add_generation(self, layout: str, options: Mapping[str, Any]) -> int:
        """Begin a new generation in all shards, immediately in those that this site owns. Return its number."""
        added = 0

        def change(generations: Sequence[GenerationPlan]) -> Sequence[GenerationPlan]:
            nonlocal added
            added = len(generations) + 1
            return (*generations, GenerationPlan(added, layout, dict(options)))

        self._plan(change)
        return added

    def drop_generation(self, number: int) -> bool:
        """Drop a sealed generation in all shards; return False if it was dropped before.

        The shards that this site owns drop it before the call returns, the others later. Raises `GenerationError`.
        """
        dropped = False

        def change(generations: Sequence[GenerationPlan]) -> Sequence[GenerationPlan]:
            nonlocal dropped
            if not 0 < number <= len(generations):
                raise GenerationError(f"there is no generation {number}")
            if number == len(generations):
                raise GenerationError(f"generation {number} is the current one; add another before dropping it")
            dropped = not generations[number - 1].dropped
            return [msgspec.structs.replace(one, dropped=one.dropped or one.number == number) for one in generations]

        self._plan(change)
        return dropped

    def _plan(self, change: Callable[[Sequence[GenerationPlan]], Sequence[GenerationPlan]]) -> None:
        self._change(lambda _, document: duties.with_generations(document, change))
        for replica in self.replicas:
            if replica.log.owned:
                with suppress(ShardElsewhereError, ShardMovedError):  # the shard's next owner makes the change
                    self._reach(replica)

    def owns(self, shard: int) -> bool:
        """Return whether this site owns a shard, that is, orders its writes. Sends no request to the log store."""
        replicas = self.replicas
        return shard < len(replicas) and replicas[shard].owned

    def owner(self, shard: int) -> ShardOwner | None:
        """Return the other site that owns a shard according to the last document; None if no other site does.

        The owner may have ended meanwhile, or may not have begun to write. Sends no request to the log store.
        """
        document = self.document
        name = document.shards[shard].owner
        site = document.sites.get(name)
        if site is None or name == self.name:
            return None
        return ShardOwner(name, site.address, site.http_address)

    def keepers(self, shard: int) -> list[ShardOwner]:
        """Return the other sites that keep a shard by the last document: its owner first, unresponsive sites last.

        Some may not have a whole copy. Sends no request to the log store.
        """
        document, silent, most = self.document, self._silent, self.cluster.takeover_after
        place = document.shards[shard]
        names = [name for name in dict.fromkeys((place.owner, *place.replicas)) if name != self.name]
        names.sort(key=lambda name: silent.get(name, 0.0) >= most)
        found = {name: document.sites[name] for name in names if name in document.sites}
        return [ShardOwner(name, site.address, site.http_address) for name, site in found.items()]

    @property
    def token(self) -> bytes:
        """The secret of the cluster, by which its sites recognize each other's connections."""
        return self.document.token

    def lag(self) -> list[ReplicaLag]:
        """Return how far each replica of this site is behind its shard's owner. Raises `StorageUnavailableError`.

        Shards that this site doesn't keep are left out.
        """
        applied, now, lags = self._applied(self._last(self._beats())), time.monotonic(), []
        for replica in filter(lambda replica: replica.kept, self.replicas):
            number, owner = replica.shard.number, replica.owner[0]
            behind = max(applied.get(owner, {}).get(number, 0) - replica.progress.next, 0)
            seconds = 0.0 if replica.log.owned else now - replica.caught_up
            lags.append(ReplicaLag(number, owner, behind, seconds))
        return lags

    # --- for the cluster ---

    def set_replicas(self, shard: int | None, sites: Sequence[str]) -> None:
        """Assign the sites that are to keep a shard, or all shards if ``shard`` is None.

        Returns once the cluster's document says so. Copies are moved in the background, while the shards are written
        and read: a site is a replica once it has caught up, and only then do other sites release theirs. `info` shows
        the progress. If ``sites`` is empty, the cluster chooses `Cluster.replication_factor` sites. Every site that
        keeps any shard keeps shard 0 too, because shard 0 has the settings of the database.

        Raises `InvalidArgumentError` for a shard that doesn't exist, `UnknownSiteError`, `ReplicasRefusedError` for a
        site that is leaving, and `StorageUnavailableError`.
        """
        shards = range(len(self.document.shards))
        if isinstance(sites, str) or not isinstance(sites, Sequence):
            raise InvalidArgumentError(f"sites are a sequence of names, not {sites!r}")
        if shard is not None and (isinstance(shard, bool) or not isinstance(shard, int) or shard not in shards):
            raise InvalidArgumentError(f"there is no shard {shard!r}; they go from 0 to {len(shards) - 1}")
        chosen = shards if shard is None else [shard]
        self._change(lambda _, document: duties.assigned(document, chosen, list(sites)))

    def leave(self, site: str | None = None) -> None:
        """Let a site, by default this one, pass all its shards on to others; it keeps none afterwards.

        Returns once the cluster's document says so. The copies move in the background, as in `set_replicas`; the site
        writes a shard until another site has it. When `info` shows no shard at the site, close it, which
        removes it from the cluster. `join` ends the leave.

        Raises `UnknownSiteError`, `ReplicasRefusedError` if no other site may keep one of the shards, and
        `StorageUnavailableError`.
        """
        self._change(lambda _, document: duties.leaving(document, self.name if site is None else site))

    def join(self, site: str | None = None) -> None:
        """Let a site, by default this one, keep shards again after `leave`.

        Raises `UnknownSiteError` and `StorageUnavailableError`.
        """
        self._change(lambda _, document: duties.leaving(document, self.name if site is None else site, leaves=False))

    def forget(self, site: str) -> None:
        """Remove a site that is gone for ever; other sites take its place. It may join again as a new site.

        Shards that only that site kept are copied from the log store to this site. Raises `UnknownSiteError`,
        `ReplicasRefusedError` for a site whose last heartbeat is younger than `Cluster.takeover_after`, as seen from
        here, and `StorageUnavailableError`.
        """
        known, takeover_after = self._known({}), self.cluster.takeover_after
        self._change(lambda number, document: duties.forgotten(document, number, site, known, takeover_after))
        for chunk in self.store.names(names.beats(site)):
            for name in chunk:
                self.store.delete(name)

    def info(self) -> ClusterInfo:
        """Return the cluster's sites and shards, read from the log store. Raises `StorageUnavailableError`."""
        self._look_for_document()
        (number, document), known = self._numbered(), self._known_by(self._last(self._beats()))
        return cluster_info(number, document, known, self.cluster.takeover_after, self.cluster.replication_factor)

    def __repr__(self) -> str:
        return f"<Site {self.name} of {self.store.place}>"
