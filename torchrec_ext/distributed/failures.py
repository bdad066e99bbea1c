"""When one rank fails, all ranks end soon and say why.

A rank that raises leaves the others waiting in a collective, with gloo's default for half an hour.
With :func:`abort_together` every rank looks into the process group's store for what failed:

.. code-block:: text

    a rank raises         it writes its error into the store, waits until the others have read it,
                          and raises what it raised
    the others            leave the collective with :class:`RankFailedError` where gloo notices that
                          the rank is gone, and are ended by the watching thread where it does not
    a rank is killed      gloo's connections to it break; who notices finds out whose thread has
                          stopped to count in the store, and writes that into the store
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

#: Exit code of a process that is ended because another rank failed.
EXIT_CODE = 3
_TRACEBACK_LINES = 12
_BEATS = 10  # of the watching thread within the timeout
_SLOWEST_BEAT = 0.5


class RankFailedError(RuntimeError):
    """Another rank failed; the message has its number, its error and where it was raised."""


@contextlib.contextmanager
def abort_together(
    timeout_seconds: float = 10.0,
    process_group: dist.ProcessGroup | None = None,
    known_to_all: tuple[type[BaseException], ...] = (),
) -> Iterator[None]:
    """Around a training loop: where one rank fails, the others end too.

    Every rank of the group makes this call, and as often as the others. At the end of the block a
    rank waits until the others are there, ``timeout_seconds`` at most. A rank that is merely slow,
    or stopped, is no failure; a host that vanishes is noticed after the process group's timeout.

    Args:
        timeout_seconds: Within this time of a failure every rank has ended or left the block.
        process_group: The ranks; None for all. With gloo or another backend of the CPU.
        known_to_all: Exceptions that every rank raises together; each just raises its own.

    Raises:
        RankFailedError: Another rank failed. A rank that is blocked in a collective cannot raise
            it; its process writes the message to stderr and ends with ``EXIT_CODE``.
        ValueError: ``timeout_seconds`` is not a number above 0.

    Example:
        >>> from torchrec_ext.distributed.failures import abort_together
        >>> def train(model, batches, optimizer):
        ...     with abort_together(timeout_seconds=10):
        ...         for batch in batches:
        ...             model(batch).backward()
        ...             optimizer.step()
    """
    if not isinstance(timeout_seconds, int | float) or not 0 < timeout_seconds < float("inf"):
        raise ValueError(f"timeout_seconds={timeout_seconds!r} is not legal; it must be above 0")
    group = process_group or dist.group.WORLD
    assert group is not None
    if group.size() == 1:
        yield
        return
    watch = _Watch(timeout_seconds, group)
    watch.start()
    try:
        yield
    except known_to_all:
        watch.stop()
        raise
    except BaseException as error:
        failure = watch.fail(error)
        if failure is None:
            raise
        raise RankFailedError(failure) from error
    else:
        failure = watch.finish()
        if failure is not None:
            raise RankFailedError(failure)
    finally:
        watch.stop()


def lost_connection(error: BaseException) -> str | None:
    """Says in one line what happened to the connection to another rank; None if nothing did.

    gloo has no exception of its own, but names its source files.
    """
    if not isinstance(error, RuntimeError):
        return None
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, dist.DistError) or "gloo/" in text or "Connection closed" in text:
        return text.partition(". ")[0]
    return None


class _Watch:
    """One rank's view of the others, and the thread that looks at them.

    Keys of the store, below a prefix for each use: ``claims`` counts failures, of which the first
    writes ``failure``; ``beat/<rank>`` counts while a rank lives; ``seen/<rank>`` and
    ``done/<rank>`` say that it has read the failure or left the block.
    """

    def __init__(self, timeout: float, group: dist.ProcessGroup) -> None:
        self._rank, self._world_size = group.rank(), group.size()
        self._timeout = timeout
        self._beat = min(timeout / _BEATS, _SLOWEST_BEAT)
        # A connection of its own: who waits for a key keeps others from using the same one.
        store: Any = dist.distributed_c10d._get_process_group_store(group)
        shared = store.clone()
        use = shared.add(f"torchrec_ext/failures/uses/{self._rank}", 1)
        self._store = dist.PrefixStore(f"torchrec_ext/failures/{use}", shared)
        self._lock = threading.Lock()  # the thread and the block share the connection
        self._left = threading.Event()  # the block has ended, in whatever way
        self._stopped = threading.Event()
        self._first_rank_is_done = False
        self._known: str | None = None
        self._thread = threading.Thread(target=self._run, name="abort_together", daemon=True)

    def start(self) -> None:
        """Starts to look."""
        self._thread.start()

    def stop(self) -> None:
        """Stops to look and to count: this rank is done."""
        self._left.set()
        if not self._stopped.is_set():
            self._stopped.set()
            with contextlib.suppress(RuntimeError):
                self._say("done")

    def finish(self) -> str | None:
        """Waits for the others at the end of the block; what failed, or None."""
        self.stop()
        return self._wait_for("done", self._timeout)

    def fail(self, error: BaseException) -> str | None:
        """Tells the others about this rank's error; what failed elsewhere if that was the cause."""
        self._left.set()
        try:
            if lost_connection(error) is not None:
                return self._find_cause(error)
            text = "".join(traceback.format_exception(error)).rstrip().splitlines()
            tail = "\n".join(text[-_TRACEBACK_LINES:])
            self._claim(f"rank {self._rank} failed: {_one_line(error)}\n{tail}")
        except RuntimeError as lost:  # the store
            return None if lost_connection(error) is None else self._store_is_gone(lost)
        return None

    def _claim(self, failure: str) -> None:
        """Writes a failure unless there is one, and waits until the others have read it."""
        with self._lock:
            first = self._store.add("claims", 1) == 1
        if first:
            with self._lock:
                self._store.set("failure", failure)
        with contextlib.suppress(RuntimeError):
            self._say("seen")
            self._wait_for("seen", self._timeout / 2)

    def _find_cause(self, error: BaseException) -> str | None:
        """What broke the connection: a failure in the store, or ranks that do not count on."""
        before = self._beats()
        deadline = time.monotonic() + self._timeout / 2
        while time.monotonic() < deadline:
            if (failure := self._failure()) is not None:
                return failure
            time.sleep(self._beat / 2)
        after = self._beats()
        silent = [rank for rank, beats in before.items() if after.get(rank) == beats]
        if not silent:
            own = f"rank {self._rank} failed: {_one_line(error)}"
            self._claim(own)
            return None if self._failure() == own else self._failure()
        names = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {silent}"
        self._claim(
            f"{names} ended without an error of its own; look for a signal, such as that of the "
            f"kernel when memory is short (rank {self._rank} noticed: {_one_line(error)})"
        )
        return self._failure()

    def _beats(self) -> dict[int, int]:
        """How far each of the other ranks that are not done has counted."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        return {rank: self._count(rank, 0) for rank in others if not self._has(f"done/{rank}")}

    def _wait_for(self, what: str, seconds: float) -> str | None:
        """Waits until every rank has said it, or a failure was written; gives the failure."""
        deadline = time.monotonic() + seconds
        failure = None
        try:
            while time.monotonic() < deadline:
                failure = self._failure()
                waiting = [
                    rank
                    for rank in range(self._world_size)
                    if not self._has(f"{what}/{rank}") and not self._has(f"done/{rank}")
                ]
                if not waiting or (failure is not None and what == "done"):
                    break
                time.sleep(self._beat / 4)
        except RuntimeError:  # the host of the store was done first
            return failure
        return failure

    def _run(self) -> None:
        """The thread: counts, and ends the process where the block does not end by itself."""
        failure = None
        try:
            while failure is None and not self._stopped.is_set():
                self._count(self._rank, 1)
                self._first_rank_is_done = self._first_rank_is_done or self._has("done/0")
                failure = None if self._left.is_set() else self._failure()
                if failure is None:
                    self._stopped.wait(self._beat)
            if failure is not None:
                self._say("seen")
        except RuntimeError as lost:
            failure = self._store_is_gone(lost)
        if failure is not None and not self._left.wait(self._timeout / 2):
            self._end_process(failure)

    def _store_is_gone(self, error: RuntimeError) -> str | None:
        """The failure that a lost store is, unless rank 0, which may host it, was done."""
        if self._known is not None or self._first_rank_is_done:
            return self._known
        return (
            "rank 0, or the process that hosts the store, ended without an error of its own: look "
            f"for a signal, such as that of the kernel when memory is short ({_one_line(error)})"
        )

    def _end_process(self, failure: str) -> None:
        sys.stdout.flush()
        sys.stderr.write(
            f"rank {self._rank} ends, blocked, because another rank failed: {failure}\n"
        )
        sys.stderr.flush()
        os._exit(EXIT_CODE)

    def _failure(self) -> str | None:
        """What is written in the store; read once, because its host may be the rank that failed."""
        if self._known is None and self._has("failure"):
            with self._lock:
                self._known = self._store.get("failure").decode()
        return self._known

    def _has(self, key: str) -> bool:
        with self._lock:
            return self._store.check([key])

    def _count(self, rank: int, step: int) -> int:
        with self._lock:
            return self._store.add(f"beat/{rank}", step)

    def _say(self, what: str) -> None:
        with self._lock:
            self._store.set(f"{what}/{self._rank}", "yes")


def _one_line(error: Any) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
