"""What FBGEMM's own module does where ours is compared with it in docs/features.md."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

INDICES, OFFSETS = torch.tensor([3, 3, 7]), torch.tensor([0, 2, 3])


def _module(**settings) -> SplitTableBatchedEmbeddingBagsCodegen:
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(10, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=0.1,
        eps=1e-8,
        **settings,
    )


def _states(module: SplitTableBatchedEmbeddingBagsCodegen) -> list[torch.Tensor]:
    (states,) = module.split_optimizer_states()
    return [*module.split_embedding_weights(), *states]


def test_a_copy_is_independent() -> None:
    module = _module()
    module(INDICES, OFFSETS).sum().backward()
    other = copy.deepcopy(module)
    before = [state.clone() for state in _states(module)]
    other(INDICES, OFFSETS).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, _states(module), strict=True))
    module(INDICES, OFFSETS).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(_states(other), _states(module), strict=True))


def test_state_dicts_load_with_weights_only() -> None:
    module, other = _module(), _module()
    module(INDICES, OFFSETS).sum().backward()
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    other.load_state_dict(torch.load(saved, weights_only=True))
    assert torch.equal(other.split_embedding_weights()[0], module.split_embedding_weights()[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_a_cast_takes_the_states_along(dtype: torch.dtype) -> None:
    assert {state.dtype for state in _states(_module().to(dtype))} == {dtype}


def test_hyperparameters_change_by_fbgemms_names() -> None:
    module = _module()
    module.update_hyper_parameters({"lr": 0.5})
    assert module.get_learning_rate() == 0.5
    with pytest.raises(NotImplementedError, match="Setting hyper-parameter learning_rate"):
        module.update_hyper_parameters({"learning_rate": 0.5})


@pytest.mark.parametrize(("output", "bag"), [(SparseType.FP32, 1.0), (SparseType.FP16, 2.0)])
def test_weighted_means_of_float16_are_sums(output: SparseType, bag: float) -> None:
    module = _module(pooling_mode=PoolingMode.MEAN, output_dtype=output)
    module.split_embedding_weights()[0].fill_(1.0)
    pooled = module(INDICES, OFFSETS, per_sample_weights=torch.ones(3))
    assert pooled[0].tolist() == [bag] * 4
