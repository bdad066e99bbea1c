"""Runs the command on gloo ranks, each a process forked from the test, as torchrun starts them.

Unlike ``tests.distributed.ranks`` nothing is in between: a rank that is killed is just gone, and
the others have to notice by themselves.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from torchrec_ext.train import command, report

# Far more than a run takes: a rank that is alive after it hangs.
PATIENCE_SECONDS = 60.0


def run_command(
    world_size: int,
    arguments: list[str],
    log: Path,
    before: Callable[[int], None] = lambda rank: None,
) -> list[int]:
    """Runs ``torchrec-ext train`` on every rank and gives the exit codes by rank.

    Args:
        world_size: The number of ranks.
        arguments: Of the command.
        log: Rank r writes its output and errors to ``<log>.<r>``.
        before: Called in each process first, with its rank.

    Raises:
        TimeoutError: A rank did not end.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = []
    try:
        for rank in range(world_size):
            environment = (rank, world_size, port)
            process = context.Process(target=_rank, args=(environment, arguments, log, before))
            process.start()
            processes.append(process)
        for process in processes:
            process.join(PATIENCE_SECONDS)
        hanging = [rank for rank, process in enumerate(processes) if process.exitcode is None]
        if hanging:
            raise TimeoutError(f"ranks {hanging} of {world_size} hang")
        return [int(process.exitcode or 0) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(
    environment: tuple[int, int, int],
    arguments: list[str],
    log: Path,
    before: Callable[[int], None],
) -> None:
    rank, world_size, port = environment
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    # An OpenMP pool does not survive a fork: one thread needs none.
    torch.set_num_threads(1)
    stream = log.with_name(f"{log.name}.{rank}").open("w", buffering=1)
    sys.stdout = sys.stderr = stream
    report.draw_curves = lambda *_: None  # it takes longer than the training
    code = 1
    try:
        before(rank)
        code = command.main(arguments)
    except BaseException as error:
        stream.write(f"{type(error).__name__}: {error}\n")
        raise
    finally:
        stream.flush()
        # No interpreter shutdown: the fork must not run the parent's exit handlers.
        os._exit(code)
