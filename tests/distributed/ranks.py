"""Runs a function on gloo ranks, each a process forked from the test.

Forking after TorchRec was imported is what makes a two-rank case cost half a second instead of ten.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

# A rank that failed leaves the others waiting in a collective; they get this long to finish too.
GRACE_SECONDS = 2.0


class RankFailure(Exception):
    """Carries the traceback of a rank into the parent's."""


def run_on_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 60.0,
    local_world_size: int | None = None,
    **keywords: Any,
) -> list[Any]:
    """Calls ``function(*arguments, **keywords)`` on every rank and returns the results by rank.

    Args:
        world_size: The number of ranks. ``torch.distributed`` is initialised in each.
        function: Any callable; it runs in a fork, so what it changes stays there.
        *arguments: Its arguments.
        timeout: Seconds until the ranks that have not answered are killed.
        local_world_size: ``LOCAL_WORLD_SIZE`` of the ranks; all on one host by default.
        **keywords: Its keyword arguments.

    Raises:
        TimeoutError: Names the ranks that did not answer.
        Exception: Whatever the first failing rank raised; its traceback there is the cause.
    """
    with tempfile.TemporaryDirectory() as directory:
        environment = (os.path.join(directory, "store"), world_size, local_world_size, timeout)
        with _forked(environment, lambda: function(*arguments, **keywords)) as ranks:
            answers = _collect(ranks, timeout)
    failures = [answer for _, answer in sorted(answers.items()) if answer[0] == "error"]
    if failures:
        _, error, text = min(failures, key=lambda failure: failure[3])[:3]
        # A cause, not a note: pytest.raises(match=...) searches notes too.
        raise error from RankFailure(text)
    silent = [rank for rank in range(world_size) if rank not in answers]
    if silent:
        raise TimeoutError(f"ranks {silent} of {world_size} did not answer within {timeout:g} s")
    return [answers[rank][1] for rank in range(world_size)]


@contextlib.contextmanager
def _forked(
    environment: tuple[str, int, int | None, float], call: Callable[[], Any]
) -> Iterator[dict[Connection, int]]:
    context = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = []
    ranks: dict[Connection, int] = {}
    try:
        for rank in range(environment[1]):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, environment, call, sender))
            process.start()
            sender.close()
            processes.append(process)
            ranks[receiver] = rank
        yield ranks
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for receiver in ranks:
            receiver.close()


def _collect(ranks: dict[Connection, int], timeout: float) -> dict[int, Any]:
    answers: dict[int, Any] = {}
    pending = dict(ranks)
    deadline = time.monotonic() + timeout
    while pending and (left := deadline - time.monotonic()) > 0:
        for receiver in wait(list(pending), timeout=left):
            rank = pending.pop(receiver)  # type: ignore[arg-type]
            try:
                answers[rank] = pickle.loads(receiver.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                died = RuntimeError(f"rank {rank} died without an answer")
                answers[rank] = ("error", died, "", time.monotonic())
            if answers[rank][0] == "error":
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return answers


def _rank(
    rank: int,
    environment: tuple[str, int, int | None, float],
    call: Callable[[], Any],
    sender: Connection,
) -> None:
    store, world_size, local_world_size, timeout = environment
    local_size = local_world_size or world_size
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank % local_size),
        LOCAL_WORLD_SIZE=str(local_size),
        GLOO_SOCKET_IFNAME="lo",
    )
    # An OpenMP pool does not survive a fork: one thread needs none.
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        answer = pickle.dumps(("result", call()))
    except BaseException as error:  # noqa: BLE001  (the parent raises it)
        answer = _pickled_failure(error)
        sender.send_bytes(answer)
        os._exit(1)
    sender.send_bytes(answer)
    # A rank that leaves early breaks the connections of one that is still working: stay until the
    # parent, which kills all ranks at the end, is satisfied or gone.
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.05)
    # No interpreter shutdown: the fork must not run the parent's exit handlers.
    os._exit(0)


def _pickled_failure(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        answer = pickle.dumps(("error", error, text, time.monotonic()))
        pickle.loads(answer)
    except Exception:  # noqa: BLE001  (an exception that cannot travel travels as text)
        answer = pickle.dumps(("error", RuntimeError(text), text, time.monotonic()))
    return answer
