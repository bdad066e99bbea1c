"""The harness itself: results, failures and hangs come back."""

import os

import pytest
import torch
import torch.distributed as dist

from .ranks import run_on_ranks


def _sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return total.item()


def test_results_come_back_by_rank():
    assert run_on_ranks(2, _sum_of_ranks) == [3.0, 3.0]
    assert run_on_ranks(3, lambda: dist.get_rank()) == [0, 1, 2]


def test_a_failing_rank_is_raised_here_while_the_other_waits_in_a_collective():
    def fail_on_one() -> None:
        if dist.get_rank() == 1:
            raise KeyError("only rank one")
        _sum_of_ranks()

    with pytest.raises(KeyError, match="only rank one") as caught:
        run_on_ranks(2, fail_on_one)
    assert "fail_on_one" in str(caught.value.__cause__)


def test_a_rank_that_dies_is_named():
    with pytest.raises(RuntimeError, match="rank 0 died"):
        run_on_ranks(1, lambda: os._exit(3))


def test_a_hang_ends_at_the_timeout():
    def hang_on_one() -> None:
        if dist.get_rank() == 1:
            import time

            time.sleep(60)

    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2"):
        run_on_ranks(2, hang_on_one, timeout=1.0)


def test_an_exception_that_cannot_be_pickled_comes_back_as_text():
    def fail() -> None:
        class Local(Exception):
            pass

        raise Local("cannot travel")

    with pytest.raises(RuntimeError, match="cannot travel"):
        run_on_ranks(1, fail)
