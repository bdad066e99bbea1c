"""Where one rank fails, the others end and say which one and why.

Nothing here measures time: without ``abort_together`` the ranks would hang until gloo's timeout,
which is far beyond the harness's patience.
"""

from __future__ import annotations

import datetime
import functools
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder
from torchrec_ext.distributed.failures import EXIT_CODE, RankFailedError, abort_together

from . import models
from .lone_ranks import run_alone
from .ranks import run_on_ranks

SECONDS = 3.0
RANKS = pytest.mark.parametrize("world_size", [2, 4])


def _sum() -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


def _raise_in_step(failing: int, error: Exception) -> None:
    """What a user's loss does on one rank; the others are in the next collective."""
    with abort_together(SECONDS):
        for step in range(3):
            _sum()
            if step == 1 and dist.get_rank() == failing:
                raise error


def _look_up_minus_one() -> None:
    sharder = EmbeddingBagCollectionSharder({"optimizer": OptimType.FTRL, "learning_rate": 0.1})
    model = models.Model(models.SUM_TABLES)
    plan = models.plan_for(model, [sharder], "table_wise", models.SUM_TABLES)
    sharded = models.shard(model, [sharder], plan)
    with abort_together(SECONDS):
        for number, step in enumerate(models.batches(3, models.SUM_TABLES)):
            if number == 1:
                step.rows["f1"][0] = [-1]
                step.weights["f1"][0] = [1.0]
            batch = step.of_rank(dist.get_rank(), dist.get_world_size())
            sharded(batch).backward()


@RANKS
@pytest.mark.parametrize("lingers", [False, True], ids=["ends", "lingers"])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_on_one_rank(world_size, lingers, failing, tmp_path):
    function = functools.partial(_raise_in_step, failing, KeyError("my loss"))
    ended = run_alone(world_size, function, tmp_path, failing if lingers else None)
    for rank, each in enumerate(ended):
        if rank == failing:
            assert each.code == (None if lingers else 1)
            assert "KeyError: 'my loss'" in each.text and "RankFailedError" not in each.text
        else:
            # By itself, with an exception, where gloo noticed; ended by the thread where not.
            assert each.code in ((EXIT_CODE,) if lingers else (1, EXIT_CODE))
            assert f"rank {failing} failed: KeyError: 'my loss'" in each.text
            assert "in _raise_in_step" in each.text, "where it was raised"
            assert (each.code == 1) == ("RankFailedError: rank" in each.text)


@RANKS
def test_a_bad_index_on_the_owning_rank(world_size, tmp_path):
    ended = run_alone(world_size, _look_up_minus_one, tmp_path)
    owners = [rank for rank, each in enumerate(ended) if "RankFailed" not in each.text[-3000:]]
    owners = [rank for rank in owners if f"rank {rank} ends, blocked" not in ended[rank].text]
    assert len(owners) == 1 and ended[owners[0]].code == 1
    message = "RuntimeError: table 't1' has 11 rows here, but indices["
    assert message in ended[owners[0]].text
    for rank, each in enumerate(ended):
        if rank != owners[0]:
            assert each.code in (1, EXIT_CODE)
            assert f"rank {owners[0]} failed: {message}" in each.text


def _die_in_step(dying: int) -> None:
    with abort_together(SECONDS):
        for step in range(3):
            _sum()
            if step == 1 and dist.get_rank() == dying:
                os.kill(os.getpid(), signal.SIGKILL)


@RANKS
@pytest.mark.parametrize("dying", [0, 1], ids=["the store's host", "another"])
def test_a_rank_that_is_killed(world_size, dying, tmp_path):
    ended = run_alone(world_size, functools.partial(_die_in_step, dying), tmp_path)
    for rank, each in enumerate(ended):
        if rank == dying:
            assert each.code == -signal.SIGKILL
        else:
            assert each.code in (1, EXIT_CODE)
            assert f"rank {dying}" in each.text and "ended without an error" in each.text
            assert "look for a signal" in each.text


def _train_twice() -> None:
    for _ in range(2):
        with abort_together(SECONDS):
            assert _sum() == dist.get_world_size()
    half = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        with abort_together(SECONDS, half):
            dist.barrier(half)
    dist.barrier()


@RANKS
def test_nothing_happens_where_nothing_fails(world_size, tmp_path):
    assert {(each.code, each.text) for each in run_alone(world_size, _train_twice, tmp_path)} == {
        (0, "")
    }


def test_a_slow_rank_is_no_failure(tmp_path):
    def train() -> None:
        with abort_together(0.2):
            for _ in range(2):
                if dist.get_rank() == 1:
                    time.sleep(0.6)
                _sum()
            if dist.get_rank() == 0:  # the store's host is done long before the other
                return
            time.sleep(0.6)

    assert [(each.code, each.text) for each in run_alone(2, train, tmp_path)] == [(0, "")] * 2


def test_what_all_know_is_raised_by_each():
    def fail() -> str:
        with (
            pytest.raises(KeyError, match="both"),
            abort_together(SECONDS, known_to_all=(KeyError,)),
        ):
            raise KeyError("both")
        return "own"

    assert run_on_ranks(2, fail) == ["own"] * 2


def test_a_failure_after_the_block_of_another_rank_ends_is_raised_there():
    def fail() -> str:
        try:
            with abort_together(SECONDS):
                if dist.get_rank() == 1:
                    raise KeyError("late")
        except RankFailedError as error:
            return str(error).partition("\n")[0]
        except KeyError:
            return "own"
        return "nothing"

    assert run_on_ranks(2, fail) == ["rank 1 failed: KeyError: 'late'", "own"]


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "10"])
def test_other_timeouts_are_refused(seconds, tmp_path: Path):
    with pytest.raises(ValueError, match="timeout_seconds="), abort_together(seconds):
        pass


def test_one_rank_needs_nobody():
    def fail() -> None:
        with abort_together():
            raise KeyError("alone")

    with pytest.raises(KeyError, match="alone"):
        run_on_ranks(1, fail)


def _wait_for_the_other() -> str:
    group = dist.new_group(timeout=datetime.timedelta(seconds=SECONDS))
    if dist.get_rank() == 1:  # has failed, but lives on: in a debugger, in a handler
        time.sleep(2 * SECONDS)
        return ""
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(1), group=group)
    return str(caught.value)


def test_without_it_the_others_wait_for_the_groups_timeout():
    waited, _ = run_on_ranks(2, _wait_for_the_other)
    assert "Timed out waiting 3000ms" in waited
