"""Modules on a device: twins against FBGEMM, and the CPU's bits. Needs the package fbgemm-gpu."""

from __future__ import annotations

import pytest
import torch

from torchrec_ext import OptimType

pytest.importorskip("fbgemm_gpu", reason="needs the package fbgemm-gpu")
if not hasattr(torch.ops.fbgemm, "lxu_cache_lookup"):
    pytest.skip("needs the package fbgemm-gpu, not its CPU build", allow_module_level=True)

from . import modules  # noqa: E402

pytestmark = pytest.mark.cuda
OPTIMIZERS = pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)
COUNTERPARTS = pytest.mark.parametrize(
    "optimizer", [each for each in OptimType if each.counterpart], ids=lambda o: o.name
)


@OPTIMIZERS
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize("weights_precision", ["fp32", "fp16"])
def test_the_cpus_bits(optimizer, pooling, weights_precision) -> None:
    modules.check_against_cpu(optimizer, pooling, weights_precision)


@OPTIMIZERS
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize("weights_precision", ["fp32", "fp16"])
def test_any_width(optimizer, pooling, weights_precision) -> None:
    modules.check_any_width(optimizer, pooling, weights_precision)


@OPTIMIZERS
def test_variable_batch_sizes(optimizer) -> None:
    modules.check_variable_batches(optimizer)


@OPTIMIZERS
def test_a_captured_training_step(optimizer) -> None:
    modules.check_captured_step(optimizer)


@COUNTERPARTS
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_twins(optimizer, pooling) -> None:
    assert modules.largest_difference(optimizer, pooling=pooling) <= 1e-5


@COUNTERPARTS
def test_weighted_twins_in_half_precision(optimizer) -> None:
    difference = modules.largest_difference(optimizer, weighted=True, weights_precision="fp16")
    assert difference <= 2e-3


@OPTIMIZERS
@pytest.mark.managed
@pytest.mark.parametrize("location", ["MANAGED", "MANAGED_CACHING"])
def test_tables_in_managed_memory(optimizer, location) -> None:
    modules.check_managed(optimizer, location)
