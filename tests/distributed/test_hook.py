"""install() and uninstall(): what they change, and what they leave alone."""

import functools
import subprocess
import sys

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.distributed import embedding, embeddingbag
from torchrec.distributed.batched_embedding_kernel import (
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)

import torchrec_ext
from torchrec_ext import OptimType
from torchrec_ext.distributed import UnsupportedTorchRecError, hook
from torchrec_ext.tbe import TableBatchedEmbeddingBags

from . import models
from .ranks import run_on_ranks


def _functions() -> list[object]:
    return [seam.current() for seam in hook.SEAMS]


def test_install_is_idempotent_and_uninstall_restores_the_same_objects():
    before = _functions()
    torchrec_ext.install()
    once = _functions()
    torchrec_ext.install()
    assert all(a is b for a, b in zip(once, _functions(), strict=True))
    assert all(a is not b for a, b in zip(once, before, strict=True))
    torchrec_ext.uninstall()
    assert all(a is b for a, b in zip(before, _functions(), strict=True))
    torchrec_ext.uninstall()
    assert all(a is b for a, b in zip(before, _functions(), strict=True))


@pytest.mark.parametrize("index", range(len(hook.SEAMS)))
def test_an_unknown_signature_is_refused_and_nothing_is_changed(monkeypatch, index):
    seam = hook.SEAMS[index]
    before = _functions()

    def changed(self, config, something_new):
        raise AssertionError("never called")

    monkeypatch.setattr(seam.owner, seam.name, changed)
    with pytest.raises(UnsupportedTorchRecError, match=f"{seam.name}.*something_new"):
        torchrec_ext.install()
    monkeypatch.undo()
    assert all(a is b for a, b in zip(before, _functions(), strict=True))


def test_a_missing_function_is_refused(monkeypatch):
    seam = hook.SEAMS[0]
    monkeypatch.delattr(seam.owner, seam.name)
    with pytest.raises(UnsupportedTorchRecError, match="does not exist"):
        torchrec_ext.install()


def _wrapped(function):
    @functools.wraps(function)
    def wrapper(*arguments, **keywords):
        return function(*arguments, **keywords)

    return wrapper


def test_a_wrapper_put_on_before_ours_stays(monkeypatch):
    seam = hook.SEAMS[0]
    theirs = _wrapped(seam.current())
    monkeypatch.setattr(seam.owner, seam.name, theirs)
    torchrec_ext.install()
    assert seam.current() is not theirs
    torchrec_ext.uninstall()
    assert seam.current() is theirs


def test_a_wrapper_put_on_after_ours_is_not_thrown_away():
    seam = hook.SEAMS[0]
    torchrec_ext.install()
    ours = seam.current()
    theirs = _wrapped(ours)
    setattr(seam.owner, seam.name, theirs)
    try:
        torchrec_ext.install()
        assert seam.current() is theirs, "a second install() must not wrap twice"
        with pytest.raises(RuntimeError, match="wrapped by someone else"):
            torchrec_ext.uninstall()
        assert hook.in_place()
    finally:
        setattr(seam.owner, seam.name, ours)


def test_a_wrapper_that_hides_ours_is_an_error():
    seam = hook.SEAMS[0]
    torchrec_ext.install()
    ours = seam.current()

    def theirs(self, config, device, pg, sharding_type, env):
        return ours(self, config, device, pg, sharding_type, env)

    setattr(seam.owner, seam.name, theirs)
    try:
        for change in (torchrec_ext.install, torchrec_ext.uninstall):
            with pytest.raises(RuntimeError, match=r"replaced by .*theirs .* functools.wraps"):
                change()
            assert seam.current() is theirs
    finally:
        setattr(seam.owner, seam.name, ours)


def test_what_torchrec_had_is_wrapped_again(monkeypatch):
    seam = hook.SEAMS[0]
    torchrecs = seam.current()
    monkeypatch.setattr(seam.owner, seam.name, _wrapped(torchrecs))
    torchrec_ext.install()
    monkeypatch.setattr(seam.owner, seam.name, torchrecs)  # somebody took it off, and ours with it
    torchrec_ext.install()
    assert hook.in_place()
    torchrec_ext.uninstall()
    assert seam.current() is torchrecs


def test_importing_the_package_imports_neither_fbgemm_nor_torchrec():
    program = (
        "import sys, torchrec_ext, torchrec_ext.optim;"
        "torchrec_ext.OptimType.FTRL, torchrec_ext.install, torchrec_ext.__version__;"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'fbgemm_gpu', 'torchrec'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def _stock(pooled: bool, optimizer: object, kernel: str | None = None, steps: int = 2):
    """Kernels and weights after some steps with TorchRec's own sharder."""
    sharder_type = (
        embeddingbag.EmbeddingBagCollectionSharder
        if pooled
        else embedding.EmbeddingCollectionSharder
    )
    tables = models.BAG_TABLES[:2] if pooled else models.SEQUENCE_TABLES[:2]
    sharder = sharder_type({"optimizer": optimizer, "learning_rate": 0.1})
    model = models.Model(tables, pooled)
    plan = models.plan_for(model, [sharder], "table_wise", tables)
    for sharding in next(iter(plan.plan.values())).values():
        sharding.compute_kernel = kernel or sharding.compute_kernel
    sharded = models.shard(model, [sharder], plan)
    models.write_weights(sharded, models.initial_weights(tables))
    for step in models.batches(steps, tables):
        sharded(step.of_rank(0, 1)).backward()
    kernels = [(type(k), type(k.emb_module)) for k in models.kernels_of(sharded)]
    return kernels, models.read_weights(sharded)


@pytest.mark.parametrize("pooled", [True, False])
def test_fbgemms_optimizers_keep_torchrecs_kernels_and_their_bits(pooled):
    (without,) = run_on_ranks(1, _stock, pooled, EmbOptimType.EXACT_ADAGRAD)
    torchrec_ext.install()
    (with_hook,) = run_on_ranks(1, _stock, pooled, EmbOptimType.EXACT_ADAGRAD)
    expected = BatchedFusedEmbeddingBag if pooled else BatchedFusedEmbedding
    assert set(with_hook[0]) == {(expected, SplitTableBatchedEmbeddingBagsCodegen)}
    assert with_hook[0] == without[0]
    before, after = models.assemble([without[1]]), models.assemble([with_hook[1]])
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("pooled", [True, False])
def test_fbgemms_optimizers_may_still_be_dense(pooled):
    torchrec_ext.install()
    kernels, _ = run_on_ranks(1, _stock, pooled, EmbOptimType.EXACT_ADAGRAD, "dense", 0)[0]
    assert kernels
    assert all("Dense" in kernel.__name__ for kernel, _ in kernels)


@pytest.mark.parametrize("pooled", [True, False])
def test_our_optimizers_get_our_module_in_a_subclass_of_torchrecs_kernel(pooled):
    torchrec_ext.install()
    kernels, _ = run_on_ranks(1, _stock, pooled, OptimType.FTRL)[0]
    assert kernels
    expected = BatchedFusedEmbeddingBag if pooled else BatchedFusedEmbedding
    for kernel, module in kernels:
        assert issubclass(kernel, expected)
        assert module is TableBatchedEmbeddingBags
