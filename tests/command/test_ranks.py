"""Ranks agree on errors and on stopping; wrong environments are named."""

import os
import signal

import pytest
import torch

from tests.distributed.ranks import run_on_ranks
from torchrec_ext.command.errors import AgreedError, UserError
from torchrec_ext.command.ranks import Ranks, StopRequest, connected, read_environment

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def _here() -> Ranks:
    size = torch.distributed.get_world_size()
    return Ranks(torch.distributed.get_rank(), size, size)


def test_torchruns_variables_are_read() -> None:
    assert read_environment(TORCHRUN) == Ranks(rank=1, world_size=4, local_world_size=2)
    assert read_environment({"PATH": "x", "MASTER_ADDR": "127.0.0.1"}) is None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"MASTER_PORT": None}, "but not MASTER_PORT;"),
        ({"WORLD_SIZE": None, "MASTER_ADDR": None}, "but not WORLD_SIZE, MASTER_ADDR;"),
        ({"RANK": "4"}, "RANK=4 is not in 0..WORLD_SIZE-1 with WORLD_SIZE=4"),
        ({"RANK": "-1"}, "RANK=-1 is not in"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not an integer"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 is not in"),
    ],
)
def test_wrong_variables_are_named(changed: dict[str, str | None], expected: str) -> None:
    environment = {**TORCHRUN, **changed}
    given = {name: value for name, value in environment.items() if value is not None}
    with pytest.raises(UserError, match=expected):
        read_environment(given)


def test_an_unknown_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "MASTER_ADDR": "no-such-host.invalid"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="cannot reach the ranks at no-such-host.invalid:29500"):
        connected().__enter__()


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    def work() -> str:
        ranks = _here()

        def fail_on_second() -> None:
            if ranks.rank == 1:
                raise UserError("no data here")

        try:
            ranks.agree(fail_on_second)
        except AgreedError as error:
            return str(error)
        return "no error"

    assert run_on_ranks(2, work) == ["rank 1: no data here"] * 2


def test_agreed_results_are_each_ranks_own_and_first_results_are_shared() -> None:
    def work() -> tuple[int, int]:
        ranks = _here()
        return ranks.agree(lambda: ranks.rank), ranks.on_first(lambda: ranks.rank + 10)

    assert run_on_ranks(2, work) == [(0, 10), (1, 10)]


def test_flags_and_sums_and_tensors_of_unequal_size_are_combined() -> None:
    def work() -> tuple[list[bool], list[float], list[list[int]]]:
        ranks = _here()
        flags = ranks.any(torch.tensor([ranks.rank == 0, False, ranks.rank == 1]))
        parts = ranks.gather(torch.arange(ranks.rank * 2))
        return flags.tolist(), ranks.sum(1, ranks.rank), [part.tolist() for part in parts]

    assert run_on_ranks(2, work) == [([True, False, True], [2.0, 1.0], [[], [0, 1]])] * 2


def test_one_rank_told_to_stop_stops_all_and_handlers_return() -> None:
    def work() -> tuple[bool, bool, int, bool]:
        ranks, stop = _here(), StopRequest()
        before = signal.getsignal(signal.SIGINT)
        with stop.listening():
            unasked = stop.agreed(ranks)
            if ranks.rank == 1:
                # Twice: torchrun repeats the terminal's signal.
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGTERM)
            asked = stop.agreed(ranks)
        return unasked, asked, stop.exit_code, signal.getsignal(signal.SIGINT) is before

    assert run_on_ranks(2, work) == [(False, True, 130, True)] * 2
    assert StopRequest().exit_code == 0
