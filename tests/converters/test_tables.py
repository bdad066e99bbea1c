"""Converted weights and states in tables, sharded and not."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType

from torchrec_ext import OptimType
from torchrec_ext.converters.tables import load_table, read_table
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder

from ..distributed import models
from ..distributed.ranks import run_on_ranks
from ..modules import assert_same_bits, make_module, snapshot
from .libraries import LIBRARIES
from .training import DIM, ROWS, initial_weights, module_for, steps, train_there

GIVEN = {"ftrl_alpha": 0.1, "ftrl_beta": 1.0, "l1": 0.05, "l2": 0.5}
OURS = {"learning_rate": 0.1, "ftrl_beta": 1.0, "l1_reg": 0.05, "l2_reg": 0.5}
TOLERANCE = 1e-6


def _trained_there(rows: int, dim: int) -> tuple:
    """A table of a Vowpal Wabbit model, as the converter gives it."""
    library = LIBRARIES["vowpal_wabbit"]
    state = library.start(initial_weights(rows, dim), GIVEN)
    train_there(library, state, GIVEN, steps(3, rows, dim))
    return library.to_ours(state, GIVEN)


TRAINED = {table.name: _trained_there(table.rows, table.dim) for table in models.SUM_TABLES}


def _gradients(weights: dict, batch: models.Lookups) -> dict:
    """Rows and float64 gradients of every table in one global batch."""
    result = {}
    for table in models.SUM_TABLES:
        leaf = torch.from_numpy(weights[table.name]).requires_grad_()
        loss = torch.zeros((), dtype=torch.float64)
        for feature in table.features:
            for bag in batch.rows[feature]:
                loss = loss + models.loss_of(leaf[bag].sum(0))
        (loss / models.BATCH_SIZE).backward()
        bags = [bag for feature in table.features for bag in batch.rows[feature]]
        rows = np.array(sorted({row for bag in bags for row in bag}), dtype=np.int64)
        result[table.name] = rows, leaf.grad.numpy()[rows]
    return result


def _goes_on_there(count: int) -> dict[str, np.ndarray]:
    library = LIBRARIES["vowpal_wabbit"]
    states = {}
    for table in models.SUM_TABLES:
        states[table.name] = library.start(initial_weights(table.rows, table.dim), GIVEN)
        train_there(library, states[table.name], GIVEN, steps(3, table.rows, table.dim))
    for batch in models.batches(count):
        gradients = _gradients({name: state["w"] for name, state in states.items()}, batch)
        for name, (rows, gradient) in gradients.items():
            library.step(states[name], rows, gradient, GIVEN)
    return {name: state["w"] for name, state in states.items()}


def _sharded(sharding_type: str, **fused_params: object) -> models.DistributedModelParallel:
    model = models.Model(models.SUM_TABLES)
    sharder = EmbeddingBagCollectionSharder({"optimizer": OptimType.FTRL, **OURS, **fused_params})
    return models.shard(model, [sharder], models.plan_for(model, [sharder], sharding_type))


def _goes_on_here(sharding_type: str, count: int) -> dict[str, tuple]:
    model = _sharded(sharding_type)
    for name, (weights, states, hyperparameters) in TRAINED.items():
        load_table(model, name, weights, states, hyperparameters)
    loaded = {name: read_table(model, name) for name in TRAINED}
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for batch in models.batches(count):
        model(batch.of_rank(rank, ranks)).backward()
    return {name: (loaded[name], read_table(model, name)) for name in TRAINED}


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise", "grid_shard"])
def test_training_goes_on_in_a_sharded_model(sharding_type: str) -> None:
    count = 4
    expected = _goes_on_there(count)
    for found in run_on_ranks(2, _goes_on_here, sharding_type, count):
        for name, (weights, states, _) in TRAINED.items():
            (loaded, loaded_states), (after, _) = found[name]
            assert torch.equal(loaded, torch.as_tensor(weights).float())
            assert all(torch.equal(loaded_states[key], states[key]) for key in states)
            difference = np.abs(after.double().numpy() - expected[name])
            assert (difference / np.maximum(1.0, np.abs(expected[name]))).max() <= TOLERANCE
            assert np.abs(loaded.numpy() - expected[name]).max() > 1e-3


def _refusals(optimizer: object, hyperparameters: dict) -> list[tuple[str, str]]:
    """What a sharded model says to bad arguments, and whether anything changed."""
    model = models.Model(models.SUM_TABLES)
    sharder = EmbeddingBagCollectionSharder({"optimizer": optimizer, **hyperparameters})
    model = models.shard(model, [sharder], models.plan_for(model, [sharder], "column_wise"))
    models.write_weights(model, models.initial_weights(models.SUM_TABLES))
    before = models.read_weights(model)
    weights, states, given = TRAINED["t0"]
    answers = []
    for arguments in (
        ("t9", weights, states, given),
        ("t0", weights[1:], {name: state[1:] for name, state in states.items()}, given),
        ("t0", weights, states, {**given, "l2_reg": 0.25}),
        ("t0", weights, states, given),
    ):
        try:
            load_table(model, *arguments)
            answers.append(("", ""))
        except (KeyError, ValueError) as error:
            answers.append((type(error).__name__, str(error)))
            after = models.read_weights(model)
            for name, parts in before.items():
                assert all(
                    torch.equal(a, b) for (_, a), (_, b) in zip(parts, after[name], strict=True)
                )
    return answers


def test_sharded_models_refuse_what_does_not_fit() -> None:
    for answers in run_on_ranks(2, _refusals, OptimType.FTRL, OURS):
        unknown, shape, hyperparameters, good = answers
        assert unknown[0] == "KeyError" and "'t9'; the tables are ['t0', 't1', 't2']" in unknown[1]
        assert "table 't0': weights and states have the shape [22, 8]" in shape[1]
        assert "the table has [23, 8]" in shape[1]
        assert (
            "table 't0' has l2_reg=0.5, but the states belong to l2_reg=0.25"
            in (hyperparameters[1])
        )
        assert good == ("", "")


@pytest.mark.parametrize(
    ("optimizer", "hyperparameters", "text"),
    [
        (OptimType.EXACT_SGD, {"learning_rate": 0.1}, "is trained by OptimType.EXACT_SGD"),
        (EmbOptimType.EXACT_SGD, {"learning_rate": 0.1}, "not trained by an optimizer of torch"),
    ],
)
def test_sharded_models_without_ftrl_are_refused(
    optimizer: object, hyperparameters: dict, text: str
) -> None:
    for answers in run_on_ranks(2, _refusals, optimizer, hyperparameters):
        assert all(text in answer[1] for answer in answers[2:])


def _in_data_parallel() -> str:
    model = models.Model(models.SUM_TABLES)
    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD})
    model = models.shard(model, [sharder], models.plan_for(model, [sharder], "data_parallel"))
    with pytest.raises(ValueError) as refused:
        load_table(model, "t0", *TRAINED["t0"])
    return str(refused.value)


def test_data_parallel_tables_are_refused() -> None:
    for text in run_on_ranks(2, _in_data_parallel):
        assert text.startswith("table 't0' is data_parallel: a plain parameter")


class _Two(torch.nn.Module):
    """Two collections with tables of the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.left = models.Model(models.SUM_TABLES)
        self.right = models.Model(models.SEQUENCE_TABLES, pooled=False)


def _in_two_collections() -> tuple[str, bool]:
    model = _Two()
    fused_params = {"optimizer": OptimType.FTRL, **OURS}
    sharders = [
        EmbeddingBagCollectionSharder(fused_params),
        EmbeddingCollectionSharder(fused_params),
    ]
    model = models.shard(model, sharders, models.plan_for(model, sharders, "row_wise"))
    weights, states, given = TRAINED["t0"]
    with pytest.raises(KeyError) as refused:
        load_table(model, "t0", weights, states, given)
    load_table(model.module.right, "t0", weights, states, given)
    loaded, _ = read_table(model.module.right, "t0")
    other, _ = read_table(model.module.left, "t0")
    expected = torch.as_tensor(weights).float()
    return str(refused.value), torch.equal(loaded, expected) and not torch.equal(other, expected)


def test_a_name_in_two_collections_needs_the_collection() -> None:
    for text, loaded_right_only in run_on_ranks(2, _in_two_collections):
        assert "there are tables 't0' in" in text
        assert "left.ebc" in text and "right.ec" in text
        assert loaded_right_only


def test_halves_are_rounded_and_states_are_not() -> None:
    weights, states, given = _trained_there(ROWS, DIM)
    module = make_module(
        OptimType.FTRL,
        [(5, 8), (ROWS, DIM)],
        table_names=["other", "t"],
        weights_precision=SparseType.FP16,
        **given,
    )
    other = module.split_embedding_weights()[0].fill_(0.5).clone()
    load_table(module, "t", weights, states, given)
    found, found_states = read_table(module, 1)
    assert torch.equal(found, torch.as_tensor(weights).half().float())
    assert all(torch.equal(found_states[name], states[name]) for name in states)
    assert torch.equal(module.split_embedding_weights()[0], other)


def test_weights_that_the_tables_dtype_cannot_hold_are_refused() -> None:
    module = make_module(
        OptimType.FTRL, [(2, 2)], table_names=["t"], weights_precision=SparseType.FP16, **OURS
    )
    before = snapshot(module)
    states = {"linear": torch.ones(2, 2), "accum": torch.ones(2, 2)}
    with pytest.raises(ValueError, match=r"table 't' is torch\.float16, .* weights up to 70000;"):
        load_table(module, "t", torch.tensor([[1.0, 2.0], [-7e4, 3.0]]), states, OURS)
    assert_same_bits(snapshot(module), before)


def _after_a_load_of_weights(preserve: bool) -> str:
    """What an update says to weights loaded before `load_table`, and then to ones loaded after."""
    given = {"preserve_initial_weight": preserve}
    model = _sharded("row_wise", **given)
    state_dict = copy.deepcopy(model.state_dict())
    model.load_state_dict(state_dict)
    for name, (weights, states, hyperparameters) in TRAINED.items():
        load_table(model, name, weights, states, {**hyperparameters, **given})
    if not preserve:
        _update(model)
    model.load_state_dict(state_dict)
    with pytest.raises(RuntimeError) as refused:
        _update(model)
    return str(refused.value)


def _update(model: models.DistributedModelParallel) -> None:
    model(models.batches(1)[0].of_rank(torch.distributed.get_rank(), 2)).backward()


@pytest.mark.parametrize("preserve", [False, True])
def test_loaded_tables_have_the_states_of_their_weights(preserve: bool) -> None:
    for text in run_on_ranks(2, _after_a_load_of_weights, preserve):
        assert "weights were loaded without their optimizer's states" in text


def test_marks_of_rows_that_were_never_updated_are_kept() -> None:
    given = {**OURS, "preserve_initial_weight": True}
    module, other = module_for(given), module_for(given)
    weights, states = read_table(module, "t")
    assert bool(states["linear"].signbit().all())
    other.get_optimizer_state()[0]["linear"].fill_(1.0)
    load_table(other, "t", weights, states, given)
    assert bool(read_table(other, "t")[1]["linear"].signbit().all())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"multiply_linear_by_lr": True}, "has multiply_linear_by_lr=True, but the states belong"),
        ({"learning_rate": 0.2}, "has learning_rate=0.2, but the states belong to learning_rate"),
        ({"l1_reg": 0.0}, "has l1_reg=0.0, but"),
    ],
)
def test_a_module_with_other_hyperparameters_is_refused(change: dict, text: str) -> None:
    weights, states, given = _trained_there(ROWS, DIM)
    module = module_for({**given, **change})
    before = snapshot(module)
    with pytest.raises(ValueError, match="build the model with fused_params") as refused:
        load_table(module, "t", weights, states, given)
    assert f"table 't' {text}" in str(refused.value)
    assert_same_bits(snapshot(module), before)


def test_hyperparameters_that_are_left_out_may_differ() -> None:
    weights, states, given = _trained_there(ROWS, DIM)
    module = module_for({**given, "learning_rate": 0.2})
    some = {name: value for name, value in given.items() if name != "learning_rate"}
    with pytest.warns(UserWarning, match="'t': the states stand for other weights in"):
        load_table(module, "t", weights, states, some)
    assert torch.equal(read_table(module, "t")[1]["accum"], states["accum"])
    # The form of the states is compared even so.
    multiplied = module_for({**given, "multiply_linear_by_lr": True})
    with pytest.raises(ValueError, match="multiply_linear_by_lr"):
        load_table(multiplied, "t", weights, states, {})


@pytest.mark.parametrize("dim", [4, 7])
def test_weights_that_states_do_not_stand_for_are_told_by_row(dim) -> None:
    weights, states, hyperparameters = _trained_there(ROWS, dim)
    module = make_module(OptimType.FTRL, [(ROWS, dim)], **hyperparameters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_table(module, 0, weights, states, hyperparameters)
    row = int((states["linear"] != 0).all(1).nonzero()[0])
    wrong = np.array(weights)
    wrong[row] += 0.5
    with pytest.warns(UserWarning, match=rf"table 0: .* in 1 rows.* row {row} has"):
        load_table(module, 0, wrong, states, hyperparameters)
    assert np.array_equal(module.split_embedding_weights()[0], wrong.astype(np.float32))
