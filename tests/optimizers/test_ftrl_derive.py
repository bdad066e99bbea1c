"""``derive_optimizer_states``: FTRL's linear from weights that came without it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from torchrec_ext import OptimType, optimizer_states

from ..modules import assert_same_bits, fill, make_module, random_tables, relative_error, snapshot
from .test_ftrl_preserve import SETTINGS

SHAPES = [(5, 8), (4, 12)]
settings = pytest.mark.parametrize("given", SETTINGS.values(), ids=SETTINGS)


def _trained(**hyperparameters: Any):
    """Both tables trained, then given other weights."""
    module = make_module(
        OptimType.FTRL, SHAPES, table_names=["a", "b"], learning_rate=0.1, **hyperparameters
    )
    fill(module, random_tables(SHAPES))
    _touch(module, 1.0)
    loaded = random_tables(SHAPES)
    loaded[0][1] = 0.0
    fill(module, loaded)
    return module, loaded


def _touch(module, gradient: float = 0.0) -> list[torch.Tensor]:
    """Updates every row; the second table has an empty bag besides."""
    indices = torch.cat([torch.arange(rows) for rows, _ in SHAPES])
    output = module(indices, torch.tensor([*range(10), 9]))
    output.backward(torch.full_like(output, gradient))
    return module.split_embedding_weights()


@settings
@pytest.mark.parametrize("preserve", [False, True])
def test_the_next_update_starts_from_the_weights_that_are_there(given, preserve) -> None:
    module, loaded = _trained(**given, preserve_initial_weight=preserve)
    before = [states[1].clone() for states in module.split_optimizer_states()]
    with mock.patch.object(optimizer_states, "_ROWS_AT_ONCE", 3):
        module.derive_optimizer_states()
    if preserve:  # whose linear is that of the next update's learning rate
        module.set_learning_rate(0.03)
    assert_same_bits(before, [states[1] for states in module.split_optimizer_states()])
    assert_same_bits(module.split_embedding_weights(), loaded)
    for found, expected in zip(_touch(module), loaded, strict=True):
        assert relative_error(found, expected) <= 2e-6


@settings
def test_derived_at_once_or_in_the_next_update_it_is_the_same_up_to_rounding(given) -> None:
    states = []
    for preserve in (False, True):
        torch.manual_seed(1)
        module, _ = _trained(**given, preserve_initial_weight=preserve)
        module.derive_optimizer_states()
        _touch(module, 0.5)
        states.append(snapshot(module))
    for one, other in zip(*states, strict=True):
        assert relative_error(one, other) <= 5e-6


def test_one_table_or_some_rows() -> None:
    module, loaded = _trained(ftrl_beta=1.0, l1_reg=0.5)
    before = snapshot(module)
    module.derive_optimizer_states("b", rows=[2])
    after = snapshot(module)
    linear_b = len(SHAPES) + 2
    changed = [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert changed == [number == linear_b for number in range(len(before))]
    rows = (before[linear_b] != after[linear_b]).any(1)
    assert rows.tolist() == [False, False, True, False]
    found = _touch(module)[1]
    assert relative_error(found[2], loaded[1][2]) <= 2e-6
    assert relative_error(found[1], loaded[1][1]) > 0.1


def test_a_row_without_a_denominator_stays_new() -> None:
    module = make_module(OptimType.FTRL, [(1, 4)], learning_rate=0.1, l1_reg=0.5)
    fill(module, [torch.ones(1, 4)])
    module.derive_optimizer_states()
    linear = module.split_optimizer_states()[0][0]
    assert torch.equal(linear, torch.zeros(1, 4)) and not linear.signbit().any()


def test_what_is_refused() -> None:
    module, _ = _trained(ftrl_beta=1.0)
    before = snapshot(module)
    with pytest.raises(KeyError, match="'c'"):
        module.derive_optimizer_states("c")
    with pytest.raises(IndexError, match="table 'b' has rows 0 to 3"):
        module.derive_optimizer_states("b", rows=[4])
    with pytest.raises(ValueError, match="needs a table"):
        module.derive_optimizer_states(rows=[0])
    assert_same_bits(before, snapshot(module))
    adam = make_module(OptimType.ADAM, [(3, 4)], table_names=["user"])
    with pytest.raises(ValueError, match=r"\['user'\]: no state of ADAM follows"):
        adam.derive_optimizer_states()
