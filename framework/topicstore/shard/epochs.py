"""Epochs: layouts that don't order messages by position within an epoch hide the epoch that is being written.

A reader that wants all messages ends the epoch: once it is over, a commit of its own moves the shard's last position to
its end, so that no message can be stored before those that were read, whatever the clock does later.
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
"""Seconds after which a thread that waits for the end of an epoch checks whether the shard has failed, because a failed
flush doesn't notify it."""


class Epochs:
    """Ending the epoch that is being written, and waiting until a position is visible."""

    def __init__(self, log: CommitLog, generations: Generations) -> None:
        self._log = log
        self._generations = generations

    def end(self, generation: int, position: int, *, wait: bool, since: float | None = None) -> None:
        """Make everything up to ``position`` visible to readers of a generation.

        If the position lies in the epoch being written, that must be over. With ``wait``, wait for its end, at most
        for the length of an epoch after ``since`` (of `time.monotonic`), or after the call if that is None. Without
        it, do nothing if the epoch isn't over.
        """
        log, epoch = self._log, self._generations.slab(generation).epoch
        if epoch == 1 or log.read_only:
            return
        latest = (time.monotonic() if since is None else since) + time_of(epoch) / 1e6
        with log.lock:
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
            log.settle(ticket)  # another thread may have ended the epoch, and not have settled that yet

    def await_visible(self, position: int) -> None:
        """Return when readers may see everything up to a committed position: after its flush, and its epoch."""
        if self._log.policy.durability == "sync":
            self._log.flush()
        record, _ = self._generations.with_slabs()[-1]
        self.end(record.number, position, wait=True)

    def _is_open_locked(self, position: int, epoch: int) -> bool:
        """Return whether a position lies in the epoch being written."""
        last = self._log.tail.last_position
        end = last | (epoch - 1)
        return end - epoch < position and last < end

    def _left_locked(self, epoch: int, latest: float) -> float:
        """Return the seconds until the epoch being written is over.

        It is over when the clock has passed its end, where positions follow the clock; when its length has passed
        since the last commit; or, at the latest, when its length has passed since the wait began.
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
