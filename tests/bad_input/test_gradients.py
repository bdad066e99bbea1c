"""NaN and infinity in the gradient: they stay in the rows that the batch looks up."""

from __future__ import annotations

import math

import pytest
import torch

from torchrec_ext import OptimType

from ..modules import snapshot
from .harness import GOOD, GOOD_ROWS, build, changed_rows

GROUPS = ("NaN in the gradient", "infinity in the gradient", "NaN that max_gradient meets")
# Each state of its kind reads one column of the gradient; the others the mean square of a row.
ROW_OPTIMIZERS = (
    OptimType.EXACT_ROWWISE_ADAGRAD,
    OptimType.PARTIAL_ROWWISE_ADAM,
    OptimType.LAMB,
)


def _train(optimizer: OptimType, value: float, **settings):
    """One bad element: column 1 of user's bag. The module, and what it was before and is."""
    module = build(optimizer, **settings)
    before = snapshot(module)
    gradient = torch.ones(1, 8)
    gradient[0, 1] = value
    module(**GOOD).backward(gradient)
    return module, before, snapshot(module)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)
def test_only_looked_up_rows_are_poisoned(optimizer, value) -> None:
    module, before, after = _train(optimizer, value)
    assert changed_rows(before, after) == GOOD_ROWS, "all other rows keep their bits"
    weights = module.split_embedding_weights()
    assert weights[1].isfinite().all(), "item had a good gradient"
    user = weights[0]
    states = module.split_optimizer_states()[0]
    poisoned = [*range(4)] if optimizer in ROW_OPTIMIZERS else [1]
    for row in (2, 3):
        bad = (~user[row].isfinite()).nonzero().flatten().tolist()
        assert set(bad) <= set(poisoned)
        if math.isnan(value):
            assert bad == poisoned, "every weight that the element has a part in"
            assert user[row, poisoned].isnan().all()
            for state in states:
                assert not state[row].isfinite().all(), "and the states"


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        # The step is g / sqrt(g^2): infinity over infinity is NaN.
        (OptimType.EXACT_ADAGRAD, "nan"),
        (OptimType.ADAM, "nan"),
        (OptimType.FTRL, "nan"),
        (OptimType.EXACT_SGD, "inf"),
        (OptimType.EXACT_ROWWISE_ADAGRAD, "nan"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_what_infinity_leaves(optimizer, expected) -> None:
    module, _, _ = _train(optimizer, math.inf)
    found = module.split_embedding_weights()[0][2, 1]
    assert bool(found.isnan()) == (expected == "nan") and not found.isfinite()
    for state in module.split_optimizer_states()[0]:
        assert not state[2].isfinite().all()


@pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)
def test_clipping_makes_infinity_finite_and_leaves_nan(optimizer) -> None:
    clipped = {"gradient_clipping": True, "max_gradient": 1.0}
    _, _, after = _train(optimizer, math.inf, **clipped)
    assert all(tensor.isfinite().all() for tensor in after)
    module, before, after = _train(optimizer, math.nan, **clipped)
    assert module.split_embedding_weights()[0][2, 1].isnan()
    assert changed_rows(before, after) == GOOD_ROWS


@pytest.mark.parametrize("optimizer", [OptimType.FTRL, OptimType.ADAM], ids=lambda o: o.name)
def test_a_poisoned_row_is_mended_by_new_weights_and_reset_states(optimizer) -> None:
    module, _, _ = _train(optimizer, math.nan)
    bad = (~module.split_embedding_weights()[0].isfinite()).any(1).nonzero().flatten()
    assert bad.tolist() == [2, 3]
    module.split_embedding_weights()[0][bad] = 0.0
    module.reset_optimizer_states("user", bad)
    module(**GOOD).sum().backward()
    assert all(tensor.isfinite().all() for tensor in snapshot(module))
