"""Epochs: layouts that order messages by something else within an epoch hide the epoch that is being written.

A reader who wants to see all there is has it ended: once it is over, the shard's last position moves to its end, in a
commit of its own, so that nothing can come before what was read, whatever the clock does later.
"""

from __future__ import annotations

import time

import msgspec

from topicstore.contract.engine import WriteBatch
from topicstore.contract.positions import time_of

from .commit_log import CommitLog
from .generations import Generations

__all__ = ["Epochs"]

_LOOK = 1.0
"""Seconds after which who waits for the end of an epoch looks whether the shard has failed: a flush can't tell it."""


class Epochs:
    """Ending the epoch that is written, and waiting until something is visible."""

    def __init__(self, log: CommitLog, generations: Generations) -> None:
        self._log = log
        self._generations = generations

    def end(self, generation: int, position: int, *, wait: bool, since: float | None = None) -> None:
        """See that readers of a generation may see everything up to ``position``.

        If that lies in the epoch being written, it must be over: with ``wait``, return when it is, at
        most an epoch after ``since``, of `time.monotonic`, or the call; else do nothing while it isn't.
        """
        log, epoch = self._log, self._generations.slab(generation).epoch
        if epoch == 1 or log.read_only:
            return
        latest = (time.monotonic() if since is None else since) + time_of(epoch) / 1e6
        with log.moved_on:
            while generation == self._generations.current and self._is_open_locked(position, epoch):
                seconds = self._left_locked(epoch, latest)
                if seconds <= 0 and (wait or log.failure is None):
                    self._commit_end_locked(epoch)
                    break
                if not wait:
                    return
                log.check_writable()
                log.moved_on.wait(min(seconds, _LOOK))
            ticket = log.last_ticket()
        if wait or log.failure is None:
            log.settle(ticket)  # somebody else may have ended it, and not be done with that

    def await_visible(self, position: int) -> None:
        """Return when readers may see everything up to a committed position: after its flush, and its epoch."""
        if self._log.policy.durability == "sync":
            self._log.flush()
        record, _ = self._generations.with_slabs()[-1]
        self.end(record.number, position, wait=True)

    def _is_open_locked(self, position: int, epoch: int) -> bool:
        """Say whether a position lies in the epoch being written."""
        last = self._log.tail.last_position
        end = last | (epoch - 1)
        return end - epoch < position and last < end

    def _left_locked(self, epoch: int, latest: float) -> float:
        """Return the seconds until the epoch being written is over.

        By the clock, where positions go by it; or when it has lasted for its length since the last
        commit; or at the latest, which is its length since somebody began to wait.
        """
        lasted = min(self._log.last_commit + time_of(epoch) / 1e6, latest) - time.monotonic()
        if self._log.policy.timestamps != "commit":
            return lasted
        after = (self._log.tail.last_position | (epoch - 1)) + 1
        return min(lasted, (time_of(after) - self._log.policy.now()) / 1e6)

    def _commit_end_locked(self, epoch: int) -> None:
        self._log.check_writable()
        write = WriteBatch()
        tail = msgspec.structs.replace(self._log.tail, last_position=self._log.tail.last_position | (epoch - 1))
        self._log.commit_locked(write, tail)
