"""`open`, which opens or creates a database, and variants of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import attrs

from .contract.arguments import Length, check_path
from .contract.errors import (
    DatabaseNotFoundError,
    InvalidArgumentError,
    ManifestMismatchError,
    NotADatabaseError,
    StorageFullError,
    UnsupportedError,
    WrongDatabaseError,
)
from .database import Database
from .lifecycle.archives import open_archive
from .plugins import registry
from .queues.queues import DIRECTORY, Queues
from .runtime.clocks import Clocks, now
from .runtime.closing import Closer
from .storage.directory.ballast import give_up_ballast
from .storage.directory.files import OWNER_ONLY, permissions_of
from .storage.directory.manifest import (
    DEFAULT_BACKEND,
    Durability,
    Late,
    Manifest,
    Timestamps,
    check_same,
    existing_manifest,
    finished_manifest,
    merged_options,
    new_manifest,
    read_manifest,
    shared_fields,
    wanted_fields,
    write_manifest,
)
from .storage.generations import check_shared, live_records
from .storage.opening import RECOVERIES, OpenSettings, Recovery, ShardOpener, open_storage
from .storage.storage import Storage

if TYPE_CHECKING:
    from .replication.objects import ClusterDocument, GenerationPlan
    from .replication.settings import Cluster
    from .replication.site import Site

__all__ = ["begin_cluster", "copy_shard", "open", "open_lazily", "shared_manifest"]

_NO_SITE = "begin"
"""The name under which the bases of a new cluster are written, before it has a site."""
_READER = "reader"
"""The name of a process that reads a cluster's logs without being a site, and writes nothing."""

Mode: TypeAlias = Literal["a", "x", "r+", "r"]


def open(  # noqa: A001 - the usual name in other libraries
    path: str | Path,
    mode: Mode = "a",
    *,
    backend: str | None = None,
    layout: str | None = None,
    shards: int | None = None,
    durability: Durability | None = None,
    timestamps: Timestamps | None = None,
    late: Late | None = None,
    max_skew: Length | None = None,
    plugins: Sequence[str] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    auto_compact: bool = True,
    recovery: Recovery = "strict",
    permissions: int = OWNER_ONLY,
    allow_ancient: bool = False,
    clock: Callable[[], int] = now,
    monotonic: Callable[[], int] | None = None,
    cluster: str | Cluster | None = None,
    site: str | None = None,
) -> Database:
    """Open the database in the directory ``path``; by default, create it if it doesn't exist.

    The arguments from ``backend`` to ``plugins`` are recorded in the database's manifest when it is created. At later
    openings they may be omitted; an argument that contradicts the manifest raises `ManifestMismatchError`.

    mode:       ``"a"`` (default): open for writing, creating the database if it doesn't exist. ``"x"``: create; raises
                `NotADatabaseError` if it exists. ``"r+"``: open for writing; raises `DatabaseNotFoundError` if it
                doesn't exist. ``"r"``: open for reading, and change nothing on disk; shows the database as of the
                opening or the last `Database.refresh`. Backends with the capability ``concurrent_readers``
                (``rocksdb``) read without a lock while another process writes; with other backends, no process may
                have the database open for writing at the same time.
    backend:    name of an installed backend; default ``"rocksdb"``.
    layout:     name of an installed layout; default ``"block"``.
    shards:     number of shards, 1 to 4,096; the client id of a message decides its shard; default 1.
    durability: ``"commit"`` (default): stored messages survive the death of the process.
                ``"sync"``: each write is fsynced, so stored messages survive power loss.
    timestamps: ``"commit"`` (default): positions, and so time ranges, follow the time of storing.
                ``"message"``: they follow the messages' own timestamps.
    late:       with ``timestamps="message"``, the treatment of a message older than the last one of its shard:
                ``"raise"`` (default) raises `LateMessageError`; ``"lift"`` gives it the next free position.
    max_skew:   with ``timestamps="message"``, the maximum by which a message's timestamp may be ahead of the clock: a
                timedelta or seconds; default 60.
    plugins:    names of plugins that wrap the data path, outermost first. Names that are added at a later opening
                apply to that opening only.
    options:    options by name of the plugin: ``{"rocksdb": {...}, "block": {...}}``. A backend's options may differ
                at every opening; a layout's options are stored with each generation.
    auto_compact: whether to compact and count messages in the background (`Database.compact`) while few are stored;
                may differ at every opening.
    recovery:   how to open a shard with missing or damaged writes. ``"strict"`` (default): truncate the engine's log at
                the first write that a power failure left missing or damaged, with a `RuntimeWarning` if a later write
                is readable; raise `DataLossError` or `CorruptionError`, and change nothing, if a missing write was
                known to be on disk. ``"point_in_time"``: open the shard as it was before the first missing or damaged
                write. ``"salvage"``: the same, and then store the later messages that are completely readable again,
                at their positions; a warning reports how many were and were not. State, sessions, retained messages,
                deletes and generations stay as they were before the damage, so a session may deliver salvaged messages
                again. ``"point_in_time"`` and ``"salvage"`` discard the rest for good, even if the call is
                interrupted: copy the directory first.
    permissions: mode bits of the directory when it is created, less the umask; by default only its owner has access.
                Existing directories keep theirs; queues and checkpoints get the same.
    allow_ancient: whether to accept times in the first two months of 1970, in messages and as arguments. By default
                they are refused, because they are probably seconds or milliseconds. May differ at every opening.
    clock:      function that returns the current time in microseconds since the epoch.
    monotonic:  function that returns microseconds since an arbitrary moment and never jumps; all durations are measured
                with it. The default is the machine's monotonic clock, or ``clock`` if that is given.
    cluster:    URL of a log store, or a `Cluster`, through which several sites share the database. The first site to
                open it creates the cluster; ``path`` is each site's own directory, a copy of the store's shards. A
                store returns once the log store has the messages; ``durability`` is not given. The sites have the
                same shards, layouts, timestamps and cursors; the backend may differ.
    site:       name of this process among the sites of the cluster. A later process of the same name replaces an
                earlier one.

    A database belongs to the process that opened it. A forked child can't use it. With ``rocksdb`` or ``leveldb``, the
    child of a process that has opened a database can't open another one (`ForkedProcessError`): start the child with
    ``spawn`` or ``forkserver``. If the C library is not glibc, a forked child of a process that uses ``rocksdb`` must
    end with `os._exit`.

    Raises `InvalidArgumentError`, also for a path that isn't UTF-8, `FileSystemError` if the directory can't be used,
    `DatabaseLockedError`, `NotADatabaseError`, `NewerFormatError`, `UnknownPluginError`,
    `BackendUnavailableError`, `IncompatibleError`, `InvalidOptionError`, `StorageFullError`, `TooManyOpenFilesError`,
    `CorruptionError`; with ``cluster`` also `StorageUnavailableError`, `LogStoreRefusedError`, `NotConditionalError`
    (`topicstore.contract.log_store`), and `WrongDatabaseError` for a directory of another cluster.
    """
    if mode not in get_args(Mode):
        raise InvalidArgumentError(f"mode is one of {', '.join(get_args(Mode))}, not {mode!r}")
    wanted = wanted_fields(
        backend=backend,
        layout=layout,
        shards=shards,
        durability=durability,
        timestamps=timestamps,
        late=late,
        max_skew=max_skew,
    )
    if recovery not in RECOVERIES:
        raise InvalidArgumentError(f"recovery is one of {', '.join(RECOVERIES)}, not {recovery!r}")
    settings = OpenSettings(
        open_archive=open_archive,
        options=options or {},
        plugins=plugins,
        clocks=Clocks.given(clock, monotonic),
        recovery=recovery,
        read_only=mode == "r",
        permissions=permissions,
        allow_ancient=allow_ancient,
    )
    if cluster is None and site is None:
        storage = _open_or_create(check_path(path), wanted, settings, mode)
    else:
        storage = _open_shared(check_path(path), wanted, settings, mode, cluster, site)
    settings = attrs.evolve(settings, plugins=storage.plugins)
    open_queue = functools.partial(_open_queue, storage.manifest, settings)
    queues = Queues(storage.path / DIRECTORY, open_queue, read_only=settings.read_only)
    with Closer() as closer:
        closer.add(storage.close)
        return Database(storage, queues, auto_compact=auto_compact and not settings.read_only)


def _open_shared(
    path: Path,
    wanted: dict[str, Any],
    settings: OpenSettings,
    mode: Mode,
    cluster: str | Cluster | None,
    site: str | None,
) -> Storage:
    """Open this site's copy of a database that several sites share; create it, or the cluster, if there is none."""
    from .replication.circuit_breaker import retry_unanswered
    from .replication.counted_store import CountedLogStore
    from .replication.site import Site

    if cluster is None or site is None:
        raise InvalidArgumentError(
            "cluster and site are given together: the shared store, and this process's name in it"
        )
    if mode != "a":
        raise InvalidArgumentError(f"a site is opened with mode='a', not {mode!r}; without cluster, 'r' reads its copy")
    if "durability" in wanted:
        raise InvalidArgumentError(
            "durability is not given for a cluster: what is stored is as durable as its log store"
        )
    if "persistent" not in registry().backend(wanted.get("backend", DEFAULT_BACKEND)).capabilities:
        raise InvalidArgumentError(f"a site needs a persistent backend; {wanted['backend']!r} keeps nothing")
    how = _cluster_of(cluster)
    with Closer() as closer:
        store = retry_unanswered(functools.partial(CountedLogStore.open, how.url, how.options), how.store_timeout)
        closer.add(store.close)
        here = Site(how, site, store)
        closer.add(here.close)
        find = functools.partial(_shared_manifest, path, here, wanted, settings)
        manifest = retry_unanswered(find, how.store_timeout)
        return _open_or_create(path, wanted, attrs.evolve(settings, site=here), shared=manifest)


def _cluster_of(cluster: str | Cluster) -> Cluster:
    from .replication.settings import Cluster

    how = Cluster(cluster) if isinstance(cluster, str) else cluster
    if not isinstance(how, Cluster):
        raise InvalidArgumentError(f"cluster is a URL or a topicstore.Cluster, not a {type(cluster).__name__}")
    return how


def _shared_manifest(path: Path, site: Site, wanted: dict[str, Any], settings: OpenSettings) -> Manifest:
    """Return the manifest of a site's directory; create the cluster if there is none."""
    from .replication.objects import GenerationPlan

    there, document, place = read_manifest(path), site.find(), site.store.place
    if there is not None and there.cluster is None:
        raise ManifestMismatchError(
            f"{path} holds a database of its own, which does not belong to the cluster {place}. Give the site an empty "
            "directory; or make the database the first one of a new cluster: topicstore cluster begin"
        )
    if there is not None and document is None:
        raise DatabaseNotFoundError(
            f"{path} is a copy of a shared database, and {place} holds none: look at the URL, and whether the store "
            "was emptied"
        )
    if document is None:
        new = new_manifest(wanted, settings.plugins, settings.options)
        check_shared(new.layout)
        shared = shared_fields(new)
        first = GenerationPlan(1, new.layout, shared["options"].get(new.layout, {}))
        document = site.found(site.claim(bytes.fromhex(new.id)), new.shards, shared, (first,))
    if there is None:
        return _manifest_of(document, place, wanted.get("backend", DEFAULT_BACKEND), settings.options)
    if there.id != document.database.hex():
        raise WrongDatabaseError(
            f"{path} is a copy of database {there.id}, and {place} holds {document.database.hex()}"
        )
    return there


def _manifest_of(
    document: ClusterDocument, place: str, backend: str, options: Mapping[str, Mapping[str, Any]]
) -> Manifest:
    """Return the manifest of a copy that does not exist yet, with ``options`` of its backend."""
    fields = document.settings | {"plugins": tuple(document.settings["plugins"])}
    own = {name: dict(values) for name, values in options.items() if name == backend}
    return Manifest(
        id=document.database.hex(),
        backend=backend,
        shards=len(document.shards),
        durability="sync",
        cluster=place,
        **fields | {"options": fields["options"] | own},
    )


def shared_manifest(cluster: Cluster) -> Manifest:
    """Return the manifest with which a process that isn't a site opens copies of a cluster's database.

    Nothing is written. Raises `DatabaseNotFoundError` if the log store has no cluster, `InvalidArgumentError`,
    `UnknownPluginError`, `BackendUnavailableError`, `InvalidOptionError`, `StorageUnavailableError`,
    `LogStoreRefusedError` and `CorruptionError`.
    """
    from .replication.documents import Documents
    from .replication.log_stores import open_for_reading

    with closing(open_for_reading(cluster.url, cluster.options)) as store:
        _, document = Documents(store, lambda _: None).newest()
        if document is None:
            raise DatabaseNotFoundError(f"{store.place} holds no cluster: look at the URL, and open a site first")
        return _manifest_of(document, store.place, DEFAULT_BACKEND, {})


def copy_shard(cluster: Cluster, manifest: Manifest, number: int, path: Path) -> bool:
    """Copy a shard of a cluster from its log store to an empty directory, which `open_lazily` then reads.

    The copy has everything that was acknowledged before the call; it is not fsynced, and the directory has no other
    shard. Nothing is written to the log store. ``manifest`` is that of `shared_manifest`. Returns False if the shard
    has no log yet, so that there is nothing to read. Raises the errors of `shared_manifest`, and `StorageFullError`.
    """
    from .replication.log_stores import open_for_reading
    from .replication.replica import Replica

    manifest = attrs.evolve(manifest, complete=True)
    settings = OpenSettings(open_archive=open_archive, options=manifest.options, ballast=False)
    with Closer() as closer:
        store = open_for_reading(cluster.url, cluster.options)
        closer.add(store.close)
        write_manifest(path, manifest)
        shard = ShardOpener.of(path, manifest, settings).open(number, create=True)
        closer.add(shard.close)
        replica = Replica(shard, store, _READER)
        closer.add(replica.log.close)
        replica.follow()
        closer.release()
        return replica.progress.next > 0


def begin_cluster(path: str | Path, cluster: str | Cluster, *, instead: bool = False) -> None:
    """Make the database in the directory ``path`` the first copy of a new cluster; nothing may have it open.

    ``cluster`` is the URL of an empty log store, or a `Cluster` with its options. All messages, state, sessions and
    generations are copied to the log store. Afterwards, open the directory with ``cluster`` and a ``site``; other sites
    join with empty directories. If the call is interrupted, repeat it.

    instead: whether the directory may be a copy of a database that another cluster shares, such as a checkpoint of a
             site, and is the first copy of the new cluster instead. The other cluster is not changed.

    Raises `DatabaseNotFoundError`, `DatabaseLockedError`, `ManifestMismatchError` for a directory that belongs to
    another cluster unless ``instead``, `WrongDatabaseError` if the log store has another database, `UnsupportedError`
    for a copy that lacks a shard and for what a cluster does not have (queues, archived generations, the layout
    ``table``, a backend that keeps nothing), and the errors of `topicstore.open` with a cluster.

    Each step can be repeated after an interruption. The log store is reserved for the database. Each shard gets a base
    (a snapshot) and a cut (the index where replicas begin to read its log), and stores the progress of the base. The
    manifest names the cluster, so that the directory is no longer written without it. The first cluster document is
    created.
    """
    from .replication.counted_store import CountedLogStore
    from .replication.replica import begin_log, check_copied
    from .replication.site import Site

    how, path = _cluster_of(cluster), check_path(path)
    manifest = finished_manifest(path)
    if "persistent" not in registry().backend(manifest.backend).capabilities:
        raise UnsupportedError(f"a cluster needs a persistent backend; {manifest.backend!r} keeps nothing")
    if any((path / DIRECTORY).glob("*")):
        raise UnsupportedError(f"{path} has queues, which a cluster does not have: drop them first")
    with closing(CountedLogStore.open(how.url, how.options)) as store:
        site = Site(how, _NO_SITE, store)
        elsewhere = manifest.cluster not in (None, store.place)
        if elsewhere and not instead:
            raise ManifestMismatchError(
                f"{path} is shared through {manifest.cluster} already, not through {store.place}. If it is a "
                "checkpoint, begin another cluster with it instead: --instead, or instead=True"
            )
        document = site.find()
        if document is not None:
            _check_begun(path, manifest, document, store.place)
            return
        settings = OpenSettings(
            open_archive=open_archive, options=manifest.options, plugins=manifest.plugins, ballast=False
        )
        with closing(open_storage(path, attrs.evolve(manifest, cluster=None), settings)) as storage:
            plans = _plans(storage)
            for shard in storage.shards if elsewhere else ():
                check_copied(shard)
            site.claim(storage.id, begun=True)
            for shard in storage.shards:
                begin_log(shard, store, _NO_SITE)
            storage.flush()
            shared = attrs.evolve(manifest, cluster=store.place, durability="sync")
            write_manifest(path, shared)
        document = site.found(storage.id, len(storage.shards), shared_fields(shared), plans)
        _check_begun(path, shared, document, store.place)


def _check_begun(path: Path, manifest: Manifest, document: ClusterDocument, place: str) -> None:
    """Raise `WrongDatabaseError` unless a cluster's document is the one that an earlier call has created."""
    if document.database.hex() != manifest.id or manifest.cluster is None:
        raise WrongDatabaseError(
            f"{place} holds a cluster already, of database {document.database.hex()}: give {path} another prefix"
        )


def _plans(storage: Storage) -> tuple[GenerationPlan, ...]:
    """Return all generations up to the current one. Raises `UnsupportedError` for parts that clusters can't have."""
    from .replication.objects import GenerationPlan

    live = live_records(storage.shards)
    for number, records in live.items():
        check_shared(records[0].layout)
        if any(record.archive is not None for record in records):
            raise UnsupportedError(
                f"generation {number} lies in an export, which other sites can't read: drop it, or import it, first"
            )
    return tuple(
        GenerationPlan(number, live[number][0].layout, dict(live[number][0].options))
        if number in live
        else GenerationPlan(number, storage.manifest.layout, {}, dropped=True)
        for number in range(1, max(live) + 1)
    )


def open_lazily(path: Path) -> Storage:
    """Open a database read-only, with each shard opened on first use. Raises the errors of `open`."""
    manifest = existing_manifest(check_path(path))
    settings = OpenSettings(
        open_archive=open_archive, options=manifest.options, plugins=manifest.plugins, read_only=True, lazily=True
    )
    return open_storage(path, manifest, settings)


def _open_or_create(
    path: Path, wanted: dict[str, Any], settings: OpenSettings, mode: Mode = "a", shared: Manifest | None = None
) -> Storage:
    """Open or create the database of a directory; of a database that a cluster shares, with the manifest ``shared``.

    Raises `ManifestMismatchError` for arguments that contradict the manifest.
    """
    # The manifest is read once: another process may create the database at any moment.
    manifest = shared or {"r": finished_manifest, "r+": existing_manifest}.get(mode, read_manifest)(path)
    if mode == "x" and manifest is not None and manifest.complete:
        raise NotADatabaseError(f"there is a database at {path} already")
    if manifest is None:
        manifest = new_manifest(wanted, settings.plugins, settings.options)
        return open_storage(path, manifest, attrs.evolve(settings, options=manifest.options, plugins=manifest.plugins))
    if manifest.cluster is not None and settings.site is None and not settings.read_only:
        raise ManifestMismatchError(
            f"{path} is a copy of a database that is shared through {manifest.cluster}: open it with cluster and site, "
            "or with mode='r'"
        )
    check_same(path, manifest, wanted, settings.options)
    more = tuple(name for name in settings.plugins if name not in manifest.plugins)
    settings = attrs.evolve(
        settings, options=merged_options(manifest, settings.options), plugins=manifest.plugins + more
    )
    try:
        return open_storage(path, manifest, settings)
    except StorageFullError:
        if settings.read_only or not give_up_ballast(path):
            raise
    return open_storage(path, manifest, settings)


def _open_queue(of: Manifest, settings: OpenSettings, path: Path, *, read_only: bool = False) -> Storage:
    """Open or create the database of a queue; use its owner's layout if that has ``position_order``, else the default.

    Without that capability messages become visible late and out of order. Raises `UnsupportedError` on a site of a
    cluster, where a queue would be this site's alone.
    """
    if of.cluster is not None:
        raise UnsupportedError("a database that is shared through a cluster has no queues")
    layout = of.layout if "position_order" in registry().layout(of.layout).capabilities else None
    wanted = wanted_fields(backend=of.backend, layout=layout, shards=1, durability=of.durability)
    settings = attrs.evolve(
        settings,
        options={name: values for name, values in of.options.items() if name in (of.backend, layout)},
        permissions=permissions_of(path.parents[1]),  # the mode bits of the database's directory
        read_only=read_only,
        ballast=False,
    )
    return _open_or_create(path, wanted, settings, "r" if read_only else "a")
