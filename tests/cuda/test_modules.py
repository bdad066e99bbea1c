"""What a module on CUDA hands to the kernels: layouts, scalars and the clock of the device."""

from __future__ import annotations

import pytest
import torch

from torchrec_ext import OptimType
from torchrec_ext.optimizer_clock import OptimizerClock
from torchrec_ext.tbe import TableBatchedEmbeddingBags

from ..modules import (
    HYPERPARAMETERS,
    assert_same_bits,
    fill,
    make_module,
    random_batch,
    random_tables,
    run_forward,
    snapshot,
)
from . import kernels

SHAPES = [(7, 4), (1, 64), (12, 8), (40, 20)]
OPTIMIZERS = pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)


@pytest.fixture(autouse=True)
def shim():
    kernels.load()
    with kernels.in_place_of_the_cpu_kernels():
        yield


def as_on_a_device(
    module: TableBatchedEmbeddingBags, managed: tuple[int, ...] = ()
) -> TableBatchedEmbeddingBags:
    """Lets a module on the CPU take itself for one on a device.

    FBGEMM's forward goes on reading the flat buffer on the host; the others are views of it: the
    tables before the first managed one are the device's, the rest is in managed memory.
    """
    tables = len(module.embedding_specs)
    first = min(managed, default=tables)
    for prefix in ("weights", *(state.name for state in module._states)):
        host = getattr(module, f"{prefix}_host").detach()
        offsets = getattr(module, f"{prefix}_physical_offsets")
        begin = offsets[first] if first < len(offsets) else host.numel()
        for kind, part in (("dev", host[:begin]), ("uvm", host[begin:])):
            module._buffers.pop(f"{prefix}_{kind}", None)
            module._parameters.pop(f"{prefix}_{kind}", None)
            setattr(module, f"{prefix}_{kind}", part)
        setattr(
            module,
            f"{prefix}_physical_offsets",
            [offset - begin if offset >= begin and managed else offset for offset in offsets],
        )
        placements = [1 if table >= first else 0 for table in range(tables)]
        setattr(module, f"{prefix}_physical_placements", placements)
    module.use_cpu = False
    module._register_layout()
    OptimizerClock._start_clock(module)
    return module


def _train(module: TableBatchedEmbeddingBags, like: TableBatchedEmbeddingBags) -> None:
    """Three steps of both, each with another learning rate; ``like`` is on the CPU."""
    for step in range(3):
        batch = random_batch([rows for rows, _ in SHAPES], 6, 5, weighted=True)
        gradient = torch.randn(6, sum(dim for _, dim in SHAPES))
        for each in (module, like):
            each.set_learning_rate(0.1 / (step + 1))
            with kernels.those_of(each):
                run_forward(each, batch).backward(gradient)


def _pair(optimizer: OptimType, managed: tuple[int, ...] = (), **keywords):
    modules = [
        make_module(optimizer, SHAPES, **HYPERPARAMETERS[optimizer], **keywords) for _ in range(2)
    ]
    tables = random_tables(SHAPES)
    for module in modules:
        fill(module, tables)
    return as_on_a_device(modules[0], managed), modules[1]


@OPTIMIZERS
@pytest.mark.parametrize("managed", [(), (2, 3), (0, 1, 2, 3)])
def test_trains_with_the_cpus_bits(optimizer, managed) -> None:
    module, like = _pair(optimizer, managed)
    _train(module, like)
    assert_same_bits(_values(module), _values(like))
    assert int(module.iter) == 3


def _values(module: TableBatchedEmbeddingBags) -> list[torch.Tensor]:
    """Weights and states, read from the buffer on the host."""
    prefixes = ["weights", *(state.name for state in module._states)]
    return [getattr(module, f"{prefix}_host").detach() for prefix in prefixes]


def test_the_devices_clock_decides() -> None:
    """A graph's replay counts on the device; the host's number of the step is not read."""
    module, like = _pair(OptimType.ADAM)
    module.iter.fill_(5)
    like.set_optimizer_step(5)
    _train(module, like)
    assert_same_bits(_values(module), _values(like))


def test_hyperparameters_are_written_where_the_kernels_read_them() -> None:
    module, _ = _pair(OptimType.FTRL)
    address = module._scalars.data_ptr()
    module.update_hyper_parameters({"learning_rate": 0.75, "l1_reg": 0.25})
    values = module._scalars[1:].view(torch.float64).tolist()
    assert values == module._kernel_hyperparameters
    assert 0.75 in values and 0.25 in values
    assert module._scalars.data_ptr() == address


def test_views_of_managed_tables() -> None:
    module, like = _pair(OptimType.ADAM, (2, 3))
    _train(module, like)
    views = [state for table in module.split_optimizer_states() for state in table]
    for found, expected in zip(views, snapshot(like)[len(SHAPES) :], strict=True):
        assert torch.equal(found, expected)
