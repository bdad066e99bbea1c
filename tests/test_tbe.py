"""The module: pooling, per-sample weights, tables without rows, states, clock, bad arguments."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice

from torchrec_ext import OptimType
from torchrec_ext.autograd import LookedUp
from torchrec_ext.optimizers import HyperparameterError
from torchrec_ext.tbe import TableBatchedEmbeddingBags

from . import reference
from .modules import (
    assert_same_bits,
    fill,
    make_module,
    random_batch,
    random_tables,
    relative_error,
    run_forward,
    single_step,
    snapshot,
)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("required", [None, [1, 0, 1]])
@pytest.mark.parametrize("dims", [(4, 36), (1, 7), (131, 2)])
def test_gradient_of_per_sample_weights(pooling, required, dims) -> None:
    shapes, feature_tables = [(7, dims[0]), (5, dims[1])], [0, 1, 0]
    module = make_module(OptimType.EXACT_SGD, shapes, pooling, feature_table_map=feature_tables)
    tables = random_tables(shapes)
    fill(module, tables)
    batch = random_batch([7, 5, 7], 4, 5, pooling=pooling, weighted=True)
    assert batch.weights is not None
    weights = batch.weights.clone().requires_grad_()
    exact = batch.weights.double().requires_grad_()
    needed = None if required is None else torch.tensor(required, dtype=torch.int32)
    output = module(batch.indices, batch.offsets, weights, feature_requires_grad=needed)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    columns = []
    bags = batch.bags(3)
    for table, feature_bags in zip(feature_tables, bags, strict=True):
        for begin, end in feature_bags:
            rows = tables[table].double()[batch.indices[begin:end]]
            length = max(end - begin, 1) if pooling == "mean" else 1
            columns.append((exact[begin:end, None] * rows).sum(0) / length)
    # Bag by bag, the features' columns of the gradient.
    examples = len(bags[0])
    first, loss = 0, torch.zeros((), dtype=torch.float64)
    for feature, table in enumerate(feature_tables):
        dim = shapes[table][1]
        for example in range(examples):
            part = gradient[example, first : first + dim].double()
            loss = loss + (columns[feature * examples + example] * part).sum()
        first += dim
    (expected,) = torch.autograd.grad(loss, exact)
    if required is not None:
        expected[bags[1][0][0] : bags[1][-1][1]] = 0.0
    assert weights.grad is not None
    assert relative_error(weights.grad, expected) <= 1e-5


@pytest.mark.parametrize("output", [SparseType.FP32, SparseType.FP16], ids=str)
@pytest.mark.parametrize("weights", [SparseType.FP32, SparseType.FP16], ids=str)
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_features_in_another_order_than_their_tables(pooling, weights, output) -> None:
    shapes, feature_tables = [(3, 8), (20, 8), (7, 8)], [1, 0, 2, 1]
    module = make_module(
        OptimType.EXACT_SGD,
        shapes,
        pooling,
        feature_table_map=feature_tables,
        weights_precision=weights,
        output_dtype=output,
    )
    tables = random_tables(shapes)
    fill(module, tables)
    batch = random_batch([20, 3, 7, 20], 5, 4, pooling=pooling)
    expected = reference.lookup([table.double() for table in tables], feature_tables, batch)
    # A half has 11 bits, its rounding error is at most 2^-11 of the value.
    tolerance = 1e-6 if output == SparseType.FP32 else 2**-11
    assert relative_error(run_forward(module, batch).detach(), expected) <= tolerance


def test_weighted_mean_divides_in_both_directions() -> None:
    module = make_module(OptimType.EXACT_SGD, [(2, 4)], "mean", learning_rate=1.0)
    weights = torch.tensor([0.5, 3.0])
    module(torch.tensor([0, 1]), torch.tensor([0, 2]), weights).sum().backward()
    assert module.split_embedding_weights()[0][:, 0].tolist() == [-0.25, -1.5]


@pytest.mark.parametrize("form", ["expanded", "transposed", "half output"])
def test_forms_of_the_output_gradient(form) -> None:
    keywords = {"output_dtype": SparseType.FP16} if form == "half output" else {}
    module = make_module(OptimType.EXACT_SGD, [(3, 4)], learning_rate=1.0, **keywords)
    output = module(torch.tensor([0, 1]), torch.tensor([0, 1, 2]))
    if form == "expanded":
        output.sum().backward()
    elif form == "transposed":
        output.backward(torch.ones(4, 2).t())
    else:
        assert output.dtype == torch.float16
        output.backward(torch.ones_like(output))
    assert module.split_embedding_weights()[0].tolist() == [[-1.0] * 4, [-1.0] * 4, [0.0] * 4]


@pytest.mark.parametrize(
    "rows", [[0, 3, 2], [3, 0, 2], [3, 2, 0], [0, 0, 2], [2, 0, 0], [0, 0, 0], [1, 0, 1]]
)
@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_tables_without_rows(rows, pooling) -> None:
    shapes = [(n, 4) for n in rows]
    module = make_module(OptimType.FTRL, shapes, pooling, learning_rate=0.1, ftrl_beta=1.0)
    tables = [table.double() for table in random_tables(shapes)]
    fill(module, tables)
    batch = random_batch(rows, 3, 4, pooling=pooling)
    for _ in range(2):
        output = run_forward(module, batch)
        assert relative_error(output.detach(), reference.lookup(tables, [0, 1, 2], batch)) <= 1e-6
        output.sum().backward()
        tables = [weight.double() for weight in module.split_embedding_weights()]
    assert int(module.iter) == 2


@pytest.mark.parametrize("rows", [[0, 3], [3, 0], [0, 0]])
def test_lookups_in_tables_without_rows_are_refused(rows) -> None:
    module = make_module(OptimType.FTRL, [(n, 4) for n in rows], table_names=["a", "b"])
    empty = rows.index(0)
    offsets = torch.tensor([0, 1 - empty, 1])
    with pytest.raises(ValueError, match=f"table '{'ab'[empty]}' has no rows"):
        module(torch.tensor([0]), offsets)


def test_empty_batches() -> None:
    module = make_module(OptimType.FTRL, [(3, 4), (3, 8)], learning_rate=0.1)
    before = snapshot(module)
    none = torch.empty(0, dtype=torch.int64)
    for offsets in (torch.zeros(1, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)):
        output = module(none, offsets)
        assert output.shape == ((len(offsets) - 1) // 2, 12)
        output.sum().backward()
    assert_same_bits(before, snapshot(module))


def test_clock_counts_backwards_not_forwards() -> None:
    module = make_module(OptimType.FTRL, [(3, 4)])
    indices, offsets = torch.tensor([1]), torch.tensor([0, 1])
    first, second = module(indices, offsets), module(indices, offsets)
    with torch.no_grad():
        module(indices, offsets)
    module.eval()(indices, offsets)
    assert int(module.iter) == 0
    second.sum().backward()
    first.sum().backward()
    assert int(module.iter) == 2
    module.set_optimizer_step(7)
    assert int(module.iter) == 7
    with pytest.raises(ValueError, match="step=-1"):
        module.set_optimizer_step(-1)


@pytest.mark.parametrize("mode", ["WARNING", "IGNORE"])
def test_bad_indices_train_row_0_as_with_fbgemm(mode) -> None:
    module = make_module(
        OptimType.EXACT_SGD, [(3, 4)], learning_rate=1.0, bounds_check_mode=BoundsCheckMode[mode]
    )
    module(torch.tensor([9]), torch.tensor([0, 1])).sum().backward()
    assert module.split_embedding_weights()[0][:, 0].tolist() == [-1.0, 0.0, 0.0]


def test_bad_index_in_backward_names_the_table() -> None:
    module = make_module(OptimType.FTRL, [(3, 4)], table_names=["user"])
    before = snapshot(module)
    with pytest.raises(RuntimeError, match=r"tables \['user'\].*index -1 of feature 0"):
        batch = LookedUp(torch.tensor([-1]), torch.tensor([0, 1]), None, None, None, [])
        module._update(torch.ones(1, 4), batch)
    assert_same_bits(before, snapshot(module))
    assert int(module.iter) == 0


def test_states_have_their_names_and_views() -> None:
    module = make_module(OptimType.FTRL, [(3, 4), (2, 8)], initial_accumulator_value=0.1)
    states = module.get_optimizer_state()
    assert [list(table) for table in states] == [["linear", "accum"]] * 2
    assert states[1]["accum"].shape == (2, 8)
    single_step(module_one := make_module(OptimType.FTRL, [(3, 4)]), 1.0)
    assert module_one.get_optimizer_state()[0]["accum"][0].tolist() == [1.0] * 4
    states[1]["accum"].fill_(7.0)
    assert float(module.split_optimizer_states()[1][1][0, 0]) == 7.0
    assert make_module(OptimType.EXACT_SGD, [(3, 4)]).get_optimizer_state() == [{}]


def test_reset_of_states() -> None:
    module = make_module(
        OptimType.FTRL, [(3, 4), (2, 8)], table_names=["a", "b"], initial_accumulator_value=0.5
    )
    for table in module.split_optimizer_states():
        for state in table:
            state.fill_(9.0)
    module.update_hyper_parameters({"initial_accumulator_value": 0.25})
    module.reset_optimizer_states("b", rows=[1])
    (linear_a, accum_a), (linear_b, accum_b) = module.split_optimizer_states()
    assert (linear_a == 9.0).all() and (accum_a == 9.0).all()
    assert linear_b[:, 0].tolist() == [9.0, 0.0] and accum_b[:, 0].tolist() == [9.0, 0.25]
    module.reset_optimizer_states(0)
    assert (accum_a == 0.25).all() and (linear_a == 0.0).all()
    module.reset_optimizer_states()
    assert (accum_b == 0.25).all()
    with pytest.raises(KeyError, match="'c'"):
        module.reset_optimizer_states("c")
    with pytest.raises(IndexError, match="rows 0 to 1"):
        module.reset_optimizer_states("b", rows=torch.tensor([2]))
    with pytest.raises(ValueError, match="needs a table"):
        module.reset_optimizer_states(rows=[0])


def test_pruned_rows_lose_weights_and_states() -> None:
    module = make_module(OptimType.EXACT_ADAGRAD, [(3, 4), (3, 4)], feature_table_map=[0, 0, 1])
    for tensor in [*module.split_embedding_weights(), *sum(module.split_optimizer_states(), [])]:
        tensor.fill_(1.0)
    rows, groups = torch.tensor([2, 1, 0]), torch.tensor([0, 1, 3])
    second_table, second_group = torch.tensor([2]), torch.tensor([1])  # by one of its features
    module.reset_embedding_weight_momentum(rows, groups, second_table, second_group)
    for first, second in (
        module.split_embedding_weights(),
        [states[0] for states in module.split_optimizer_states()],
    ):
        assert first[:, 0].tolist() == [1.0, 1.0, 1.0] and second[:, 0].tolist() == [0.0, 0.0, 1.0]
    with pytest.raises(IndexError, match="rows 0 to 2"):
        module.reset_embedding_weight_momentum(
            torch.tensor([3]), torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([0])
        )
    assert module.split_embedding_weights()[0][:, 0].tolist() == [1.0, 1.0, 1.0]


def test_learning_rate_round_trips_exactly() -> None:
    module = make_module(OptimType.EXACT_SGD, [(3, 4)], learning_rate=0.1)
    assert module.get_learning_rate() == 0.1
    module.set_learning_rate(0.3)
    assert module.get_learning_rate() == 0.3 == module.hyperparameters["learning_rate"]
    assert single_step(module, 1.0) == pytest.approx(-0.3)
    module.update_hyper_parameters({"lr": 0.2})
    assert single_step(module, 1.0) == pytest.approx(-0.5)


BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"learning_rate": 0.0}, "learning_rate=0.0 .*>= 1e-18.*eta_min"),
    ({"learning_rate": 1e-40}, "learning_rate=1e-40"),
    ({"l1_reg": 1e300}, "l1_reg=1e\\+300"),
    ({"learning_rate": 1e300, "l1_reg": 7.0}, "learning_rate=1e\\+300"),
    ({"learning_rate_power": -100.0}, "learning_rate_power=-100.0"),
    ({"learning_rate": math.nan}, "learning_rate=nan"),
    ({"lr": math.inf}, "lr=inf"),
    ({"learning_rate": "0.1"}, "learning_rate='0.1'"),
    ({"learning_rate": True}, "learning_rate=True"),
    ({"ftrl_beta": -1.0}, "ftrl_beta=-1.0 .* >= 0"),
    ({"l1_reg": -1e-9}, "l1_reg"),
    ({"ftrl_l2_reg": -1.0}, "ftrl_l2_reg=-1.0"),
    ({"learning_rate_power": 0.1}, "learning_rate_power=0.1 .* <= 0"),
    ({"learning_rate_power": -math.inf}, "learning_rate_power=-inf"),
    ({"l1_reg": 0.1, "ftrl_l1_reg": 0.1}, "two names"),
    ({"eps": 1e-8}, "no hyperparameter 'eps'"),
    ({"beta1": 0.9}, "no hyperparameter 'beta1'"),
    ({"ar_alpha": 0.1}, "no hyperparameter 'ar_alpha'"),
    ({"ema_beta": 0.9}, "no hyperparameter 'ema_beta'"),
    ({"min_shrinkage": 0.1}, "no hyperparameter 'min_shrinkage'"),
]


@pytest.mark.parametrize("given, message", BAD_VALUES, ids=[str(bad[0]) for bad in BAD_VALUES])
def test_bad_hyperparameters_change_nothing(given, message) -> None:
    with pytest.raises(HyperparameterError, match=message):
        make_module(OptimType.FTRL, [(3, 4)], **given)
    module = make_module(OptimType.FTRL, [(3, 4)])
    before = dict(module.hyperparameters)
    with pytest.raises(HyperparameterError, match=message):
        module.update_hyper_parameters({"initial_accumulator_value": 0.5, **given})
    assert module.hyperparameters == before
    if list(given) == ["learning_rate"]:
        with pytest.raises(HyperparameterError):
            module.set_learning_rate(given["learning_rate"])


def _specs(rows: int = 3, dim: int = 4, device: ComputeDevice = ComputeDevice.CPU) -> list[Any]:
    return [(rows, dim, EmbeddingLocation.HOST, device)]


def _on_cuda(*dims: int, last: EmbeddingLocation = EmbeddingLocation.DEVICE) -> list[Any]:
    locations = [EmbeddingLocation.DEVICE] * (len(dims) - 1) + [last]
    return [(3, dim, at, ComputeDevice.CUDA) for dim, at in zip(dims, locations, strict=True)]


@pytest.mark.parametrize(
    "specs, keywords, error, message",
    [
        (
            _specs(),
            {"optimizer": EmbOptimType.EXACT_SGD},
            TypeError,
            "not a torchrec_ext.OptimType",
        ),
        (_specs(), {"poolingmode": 1}, TypeError, "poolingmode=1 is neither"),
        (_specs(dim=0), {}, ValueError, "rows of dim 0"),
        (_specs(dim=-1), {}, ValueError, "rows of dim -1"),
        (
            _on_cuda(6, last=EmbeddingLocation.MANAGED),
            {"table_names": ["clicks"]},
            ValueError,
            "table 'clicks' is in MANAGED, but dim 6 .*'clicks' is no multiple.*embedding_dim=8",
        ),
        (
            _on_cuda(6, 8, last=EmbeddingLocation.MANAGED_CACHING),
            {"table_names": ["clicks", "users"]},
            ValueError,
            "table 'users' is in MANAGED_CACHING, but dim 6 of table 'clicks'.*DEVICE",
        ),
        (
            _on_cuda(4, 3),
            {"output_dtype": SparseType.INT8},
            ValueError,
            r"tables \['0', '1'\]: output_dtype=INT8, but dim 3 of table '1'.*'FP32', 'FP16'",
        ),
        ([], {}, ValueError, "at least one table"),
        (_specs(device=ComputeDevice.MTIA), {}, ValueError, "kernels for CPU and CUDA"),
        (_specs(), {"weights_precision": SparseType.BF16}, ValueError, "FP32 or FP16"),
        (_specs(), {"gradient_clipping": True, "max_gradient": -1.0}, ValueError, "max_gradient"),
        (_specs(), {"max_gradient": 0.5}, ValueError, "no effect without gradient_clipping=True"),
        (_specs(), {"gradient_clipping": "no"}, ValueError, "gradient_clipping='no'"),
        (_specs() * 2, {"table_names": ["a"]}, ValueError, "1 names for 2 tables"),
        (_specs() * 2, {"feature_table_map": [1]}, ValueError, "every one of the 2 tables"),
        (_specs() * 2, {"feature_table_map": [0, 5]}, ValueError, r"feature_table_map=\[0, 5\]"),
        (_specs(), {"rounding_seed": "a"}, ValueError, "rounding_seed='a'"),
    ],
)
def test_bad_constructor_arguments(specs, keywords, error, message) -> None:
    with pytest.raises(error, match=message):
        TableBatchedEmbeddingBags(specs, **{"optimizer": OptimType.FTRL, **keywords})


def test_what_a_forward_refuses() -> None:
    one, offsets = torch.tensor([1]), torch.tensor([0, 1])
    sequence = make_module(OptimType.FTRL, [(3, 4)], "none")
    with pytest.raises(ValueError, match="per_sample_weights need"):
        sequence(one, offsets, torch.ones(1))
    with pytest.raises(ValueError, match="batch_size_per_feature_per_rank needs"):
        sequence(one, offsets, batch_size_per_feature_per_rank=[[1]])
    pooled = make_module(OptimType.FTRL, [(3, 4)])
    for sizes, message in (
        ([[1], [0]], "for 2 features, expected 1"),
        ([[]], "for each rank"),
        ([[2, -1]], "below 0"),
        ([[2]], "adds up to 2 bags, but the offsets are those of 1"),
    ):
        with pytest.raises(ValueError, match=message):
            pooled(one, offsets, batch_size_per_feature_per_rank=sizes)
    two = make_module(OptimType.FTRL, [(3, 4), (3, 4)])
    with pytest.raises(ValueError, match=r"for \[1, 2\] ranks"):
        two(one, offsets, batch_size_per_feature_per_rank=[[1, 0], [0]])
    with pytest.raises(NotImplementedError, match="vbe_output is not supported"):
        pooled(one, offsets, batch_size_per_feature_per_rank=[[1]], vbe_output=torch.zeros(4))


def test_copies_and_state_dicts() -> None:
    module = make_module(OptimType.FTRL, [(3, 4)], learning_rate=0.1, ftrl_beta=1.0)
    single_step(module, 1.0)
    copied = copy.deepcopy(module)
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    loaded = make_module(OptimType.FTRL, [(3, 4)], learning_rate=0.1, ftrl_beta=1.0)
    loaded.load_state_dict(torch.load(saved))
    for other in (copied, loaded):
        assert_same_bits(snapshot(module), snapshot(other))
    for each in (module, copied, loaded):
        single_step(each, 0.5)
    assert_same_bits(snapshot(module), snapshot(copied))
    assert_same_bits(snapshot(module), snapshot(loaded))


@pytest.mark.parametrize("convert", [lambda m: m.half(), lambda m: m.to(torch.float16)])
def test_states_stay_float32_in_a_module_that_is_cast(convert) -> None:
    module = make_module(OptimType.ADAM, [(3, 4)], learning_rate=0.1, bias_correction="per_row")
    single_step(module, 1.0)
    before = [state.clone() for state in module.split_optimizer_states()[0]]
    convert(module)
    after = module.split_optimizer_states()[0]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert {state.dtype for state in after} == {torch.float32}
    assert module.split_embedding_weights()[0].dtype == torch.float16
