"""A bare module beside training: compiled, copied, saved, built on meta."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from torchrec_ext import OptimType
from torchrec_ext.tbe import TableBatchedEmbeddingBags

from .modules import (
    HYPERPARAMETERS,
    assert_same_bits,
    fill,
    make_module,
    random_batch,
    random_tables,
    run_forward,
    snapshot,
)

SHAPES = [(20, 8), (10, 8)]
CASES: dict[str, tuple[OptimType, dict[str, Any]]] = {
    "FTRL": (OptimType.FTRL, HYPERPARAMETERS[OptimType.FTRL]),
    "ADAM": (OptimType.ADAM, HYPERPARAMETERS[OptimType.ADAM]),
    "ADAM dense": (OptimType.ADAM, {**HYPERPARAMETERS[OptimType.ADAM], "sparse_mode": "dense"}),
}
ALL = pytest.mark.parametrize("case", CASES)


def _module(case: str, **keywords: Any) -> TableBatchedEmbeddingBags:
    optimizer, hyperparameters = CASES[case]
    return make_module(optimizer, SHAPES, **hyperparameters, **keywords)


def _fbgemms(device: torch.device | None = None) -> SplitTableBatchedEmbeddingBagsCodegen:
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in SHAPES],
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=0.1,
        device=device,
    )


def _train(module: Any, updates: int, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for _ in range(updates):
        run_forward(module, random_batch([20, 10], 4, 2)).square().sum().backward()


class _Net(torch.nn.Module):
    def __init__(self, tables: torch.nn.Module) -> None:
        super().__init__()
        self.tables = tables
        torch.manual_seed(1)
        self.linear = torch.nn.Linear(16, 1)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.relu(self.tables(indices, offsets)))


def _compiled(module: Any, how: str, backend: str) -> tuple[list[torch.Tensor], list[Any]]:
    """Outputs of some steps of a module, alone or in a net, and its weights and states."""
    torch.compiler.reset()
    net = _Net(module) if "net" in how else module
    function = torch.compile(net, backend=backend) if backend else net
    torch.manual_seed(2)
    outputs = []
    for _ in range(3):
        batch = random_batch([20, 10], 4, 3)
        outputs.append(function(batch.indices, batch.offsets))
        outputs[-1].square().sum().backward()
    return [output.detach() for output in outputs], snapshot(module)


@pytest.mark.parametrize("how, backend", [("alone", "eager"), ("in a net", "aot_eager")])
@ALL
def test_compiled_modules_train_as_eager_ones(case, how, backend) -> None:
    eager, compiled = _module(case), _module(case)
    tables = random_tables(SHAPES)
    for module in (eager, compiled):
        fill(module, tables)
    expected, found = _compiled(eager, how, ""), _compiled(compiled, how, backend)
    assert all(map(torch.equal, expected[0], found[0]))
    assert_same_bits(expected[1], found[1])
    assert int(compiled.iter) == 3


def test_fbgemms_module_compiles_too() -> None:
    eager, compiled = _fbgemms(), _fbgemms()
    compiled.load_state_dict(eager.state_dict())
    torch.compiler.reset()
    _train(eager, 3)
    _train(torch.compile(compiled, backend="eager"), 3)
    weights = zip(eager.split_embedding_weights(), compiled.split_embedding_weights(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)


class _Scheduled:
    def __init__(self) -> None:
        self.param_groups = [{"lr": 0.1}]


@ALL
def test_a_copy_has_everything_and_is_independent(case) -> None:
    module = _module(case)
    scheduled = _Scheduled()
    module.follow_learning_rate(scheduled)
    fill(module, random_tables(SHAPES))
    _train(module, 3)
    scheduled.param_groups[0]["lr"] = 0.05  # no update has seen it
    module.update_hyper_parameters({"weight_decay": 0.25} if "ADAM" in case else {"l2_reg": 0.5})
    copied = copy.deepcopy(module)
    assert dict(copied.hyperparameters) == {**module.hyperparameters, "learning_rate": 0.05}
    assert int(copied.iter) == 3
    scheduled.param_groups[0]["lr"] = 0.02
    copied_again = copy.deepcopy(copied)
    for each in (copied, copied_again):
        _train(each, 2, seed=3)
    assert copied.get_learning_rate() == 0.05
    before = snapshot(copied)
    _train(module, 2, seed=3)
    assert module.get_learning_rate() == 0.02 and int(module.iter) == int(copied.iter) == 5
    assert_same_bits(before, snapshot(copied))
    assert_same_bits(before, snapshot(copied_again))
    assert not torch.equal(before[0], snapshot(module)[0])


def test_rows_that_sleep_wake_in_a_copy() -> None:
    module = _module("ADAM dense")
    fill(module, random_tables(SHAPES))
    _train(module, 5)
    copied = copy.deepcopy(module)  # while rows sleep
    assert_same_bits(snapshot(module), snapshot(copied))
    assert_same_bits(snapshot(copied), snapshot(copy.deepcopy(copied)))


def test_rows_that_were_written_count_as_awake_in_a_copy() -> None:
    module = _module("ADAM dense")
    _train(module, 5)
    weights = module.split_embedding_weights()[0]
    _train(module, 2)
    weights.fill_(0.75)  # as a load does
    copied = copy.deepcopy(module)
    for each in (module, copied):
        assert (each.split_embedding_weights()[0] == 0.75).all()


@ALL
def test_state_dicts_load_with_weights_only(case) -> None:
    module, loaded = _module(case), _module(case)
    fill(module, random_tables(SHAPES))
    _train(module, 3)
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    loaded.load_state_dict(torch.load(saved, weights_only=True))
    assert int(loaded.iter) == 3
    for each in (module, loaded):
        _train(each, 2, seed=3)
    assert_same_bits(snapshot(module), snapshot(loaded))


@ALL
def test_a_module_on_meta_has_shapes_alone(case) -> None:
    module = _module(case, device=torch.device("meta"))
    states = [state for table in module.split_optimizer_states() for state in table]
    tensors = [*module.split_embedding_weights(), *states]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert [tuple(weight.shape) for weight in module.split_embedding_weights()] == SHAPES
    if module._sleeping is not None:
        assert module._sleeping.row_steps.is_meta


@pytest.mark.parametrize("ours", [True, False])
def test_a_lookup_on_meta_is_fbgemms_error(ours) -> None:
    meta = torch.device("meta")
    module = _module("FTRL", device=meta) if ours else _fbgemms(meta)
    with pytest.raises(RuntimeError, match="must be a CPU or MTIA tensor; it is currently on devi"):
        module(*(torch.zeros(3, dtype=torch.int64, device=meta) for _ in range(2)))


@ALL
def test_a_default_device_of_meta_does_not_move_a_module_for_the_cpu(case) -> None:
    plain = _module(case)
    with torch.device("meta"):
        module = _module(case)
    _train(plain, 2)
    _train(module, 2)
    assert_same_bits(snapshot(plain), snapshot(module))
