"""The ranks of a run: the process group, agreement on errors, and stopping together."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchrec_ext.command.errors import AgreedError, UserError

T = TypeVar("T")

REQUIRED_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# How long to wait for the other ranks to start; they all start within the import of torch.
ARRIVAL_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Ranks:
    """This process among all that train one model.

    Attributes:
        rank: Its number, from 0.
        world_size: How many there are.
        local_world_size: How many run on this host.
    """

    rank: int
    world_size: int
    local_world_size: int

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def agree(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank and go on only if it succeeded everywhere.

        Without this a rank that stops alone would leave the others waiting in a collective.

        Raises:
            AgreedError: On every rank, if ``work`` raised ``UserError`` on any.
        """
        result: list[T] = []
        problem = None
        try:
            result.append(work())
        except UserError as error:
            problem = str(error)
        problems: list[str | None] = [None] * self.world_size
        dist.all_gather_object(problems, problem)
        for rank, text in enumerate(problems):
            if text is not None:
                raise AgreedError(text if rank == 0 else f"rank {rank}: {text}")
        return result[0]

    def on_first(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 and give its result, which must be picklable, to every rank.

        Raises:
            AgreedError: On every rank, if ``work`` raised ``UserError``.
        """
        result = self.agree(lambda: work() if self.first else None)
        shared: list[Any] = [result]
        dist.broadcast_object_list(shared, src=0)
        return shared[0]

    def sum(self, *numbers: float) -> list[float]:
        """Add up each number over all ranks, in float64."""
        values = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(values)
        return values.tolist()

    def gather(self, values: torch.Tensor, group: object = None) -> list[torch.Tensor]:
        """Give every rank the tensors of all ranks, whose sizes may differ.

        Args:
            values: This rank's tensor.
            group: Ignored; torchmetrics passes it, and the ranks are always all.
        """
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, values)
        return parts

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Combine ``[n]`` bool flags: true where they are true on any rank."""
        values = flags.to(torch.uint8)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.bool()


@contextmanager
def connected(timeout: timedelta | None = None) -> Iterator[Ranks]:
    """Join the process group that torchrun's variables describe, or be the only rank.

    Args:
        timeout: How long to wait for other ranks within a step; None for PyTorch's half hour.

    Raises:
        UserError: If the variables are incomplete or wrong, or other ranks do not arrive.
    """
    ranks = read_environment(os.environ)
    if ranks is None:
        ranks = Ranks(0, 1, 1)
        store: dist.Store = dist.HashStore()
    else:
        store = _meet(ranks)
    try:
        dist.init_process_group(
            "gloo", store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout
        )
    except RuntimeError as error:
        raise UserError(f"cannot connect the ranks over gloo: {_first_line(error)}") from error
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def read_environment(environment: os._Environ[str] | dict[str, str]) -> Ranks | None:
    """Read torchrun's variables.

    Returns:
        None if this process was not started by torchrun.

    Raises:
        UserError: If only some variables are set or one is out of range.
    """
    if not any(name in environment for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return None
    missing = [name for name in REQUIRED_VARIABLES if name not in environment]
    if missing:
        raise UserError(
            f"the environment sets some of torchrun's variables but not {', '.join(missing)}; "
            "start with torchrun, or unset RANK, WORLD_SIZE and LOCAL_RANK for a single rank"
        )
    rank, world_size, local_world_size, _ = (
        _integer(environment, name) for name in REQUIRED_VARIABLES if name != "MASTER_ADDR"
    )
    if not 0 <= rank < world_size:
        raise UserError(f"RANK={rank} is not in 0..WORLD_SIZE-1 with WORLD_SIZE={world_size}")
    if not 1 <= local_world_size <= world_size:
        raise UserError(f"LOCAL_WORLD_SIZE={local_world_size} is not in 1..WORLD_SIZE={world_size}")
    return Ranks(rank, world_size, local_world_size)


class StopRequest:
    """Remembers SIGINT and SIGTERM, so that all ranks can stop after the same step.

    torchrun passes the terminal's Ctrl-C on to workers that received it already: a second signal
    must not change what the first one started.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def agreed(self, ranks: Ranks) -> bool:
        """Ask all ranks whether any of them was told to stop."""
        self.settle(ranks.sum(float(self.signal or 0))[0])
        return self.signal is not None

    def settle(self, signals: float) -> None:
        """Take over the request of another rank.

        Args:
            signals: The sum of every rank's ``signal or 0``.
        """
        if signals and self.signal is None:
            self.signal = int(signal.SIGINT)

    @property
    def exit_code(self) -> int:
        """The shell's convention for a process that a signal ended, or 0."""
        return 128 + self.signal if self.signal is not None else 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals by remembering them; the previous handlers return afterwards."""
        previous = {
            number: signal.signal(number, self._remember)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number


def _meet(ranks: Ranks) -> dist.Store:
    """Open the store of ``MASTER_ADDR:MASTER_PORT`` and wait there for every rank."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        # The rendezvous would retry an unknown name until its timeout.
        socket.getaddrinfo(os.environ["MASTER_ADDR"], None)
        found = next(
            dist.rendezvous("env://", ranks.rank, ranks.world_size, timeout=ARRIVAL_TIMEOUT)
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"cannot reach the ranks at {address}: {_first_line(error)}") from error
    store: dist.Store = dist.PrefixStore("torchrec_ext", found[0])
    store.set(f"arrived/{ranks.rank}", "yes")
    try:
        store.wait([f"arrived/{rank}" for rank in range(ranks.world_size)], ARRIVAL_TIMEOUT)
    except RuntimeError as error:
        raise UserError(
            f"not all of {ranks.world_size} ranks arrived at {address} within "
            f"{ARRIVAL_TIMEOUT.seconds} s; start every rank with torchrun"
        ) from error
    return store


def _integer(environment: os._Environ[str] | dict[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError as error:
        raise UserError(f"{name}={environment[name]!r} is not an integer") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
