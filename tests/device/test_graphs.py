"""A captured step follows the learning rate and the clock of each replay."""

from __future__ import annotations

import pytest
import torch

from torchrec_ext import OptimType, ops
from torchrec_ext.optimizers import spec_of

from ..hyperparameters import HYPERPARAMETERS
from .cases import Case

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)
def test_replays_equal_eager_steps(optimizer) -> None:
    case = Case(
        optimizer,
        weight_dtype=torch.float16,
        hot=3000,
        options={"stochastic_rounding": True},
    )
    device = torch.device("cuda")
    tensors, keywords = case.tensors("cuda"), case.keywords()
    keywords["tables"] = ops.device_layout(case.layout, case.features, device)
    scalars = keywords["scalars"] = ops.step_scalars(case.kernel_hyperparameters, 0, device)
    updated = [tensors[1], *tensors[2]]
    before = [each.clone() for each in updated]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a first run outside of the graph, as torch asks for
        ops.fused_update(*tensors, **keywords)
    torch.cuda.current_stream().wait_stream(side)
    for each, start in zip(updated, before, strict=True):
        each.copy_(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.fused_update(*tensors, **keywords)

    spec = spec_of(optimizer)
    expected = case.tensors("cpu")
    for step, learning_rate in enumerate((0.1, 0.05, 0.3)):
        values = spec.kernel_values(
            spec.resolve({**HYPERPARAMETERS[optimizer], "learning_rate": learning_rate})
        )
        scalars.copy_(ops.step_scalars(values, step, device))
        graph.replay()
        ops.fused_update(*expected, **{**case.keywords(), "hyperparameters": values, "step": step})
        for found, each in zip(updated, [expected[1], *expected[2]], strict=True):
            assert torch.equal(found.cpu(), each)
