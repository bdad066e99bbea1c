"""Runs a function on gloo ranks with nothing around them: what one does, the others must notice.

Unlike in ``ranks.py`` a rank that is done ends, and one that fails is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

# Far more than any rank takes, far less than gloo's half hour.
PATIENCE_SECONDS = 45.0


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code and what it wrote; the code is None if it lingered."""

    code: int | None
    text: str


def run_alone(
    world_size: int, function: Callable[[], None], folder: Path, lingering: int | None = None
) -> list[Ended]:
    """Calls a function on every rank and gives what became of each.

    Args:
        world_size: The number of ranks; rank 0 hosts the store.
        function: Runs in a fork. An exception ends the rank with code 1.
        folder: For what the ranks write.
        lingering: A rank whose process stays when the function has ended, so that the connections
            to it stay.

    Raises:
        TimeoutError: A rank did not end.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = []
    for rank in range(world_size):
        arguments = (rank, world_size, port, function, folder / str(rank), rank == lingering)
        processes.append(context.Process(target=_rank, args=arguments))
        processes[-1].start()
    try:
        for rank, process in enumerate(processes):
            if rank != lingering:
                process.join(PATIENCE_SECONDS)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    hanging = [rank for rank, code in enumerate(codes) if code is None and rank != lingering]
    if hanging:
        raise TimeoutError(f"ranks {hanging} of {world_size} hang")
    texts = [(folder / str(rank)).read_text() for rank in range(world_size)]
    return [Ended(code, text) for code, text in zip(codes, texts, strict=True)]


def _rank(
    rank: int, world_size: int, port: int, function: Callable[[], None], log: Path, lingers: bool
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    code = 0
    try:
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        function()
    except BaseException:  # noqa: BLE001  (it is what the test looks at)
        traceback.print_exc()
        code = 1
    if lingers:
        time.sleep(2 * PATIENCE_SECONDS)
    os._exit(code)
