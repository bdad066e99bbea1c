"""The factorization machine: pairs of features, trained like the other models."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_on_ranks
from torchrec_ext.train.config import Config
from torchrec_ext.train.data import Bags, Examples, Split
from torchrec_ext.train.distribute import describe_plan, distribute
from torchrec_ext.train.loop import History
from torchrec_ext.train.model import FactorizationMachine, PairwiseDots, build_model

from .test_training import _assembled, _config, _ranks, _train

FACTORS = {"type": "factorization_machine", "factor_dim": 3}
ADAGRAD = {"type": "exact_adagrad", "learning_rate": 0.1}


def _machine(**changed: Any) -> Config:
    return _config(**{"model": FACTORS, "deep_optimizer": ADAGRAD, **changed})


def _dots(**changed: Any) -> Config:
    model = {"type": "pairwise_dots", "factor_dim": 3}
    return _config(**{"model": model, "optimizer": ADAGRAD, **changed})


def test_logits_are_the_sums_over_all_pairs_of_features() -> None:
    """Every pair one by one; rows of one bag are not paired, and crosses are not."""
    examples = Examples(
        {
            "a": Bags.from_lists([[0], [1, 2], []], 3),
            "b": Bags.from_lists([[3], [0], [1, 1]], 4),
            "c": Bags.from_lists([[1], [], [0]], 2),
            "a_x_b": Bags.from_lists([[5], [7], []], 12),
        },
        torch.zeros(3, 0),
        torch.zeros(3),
        crossed=frozenset({"a_x_b"}),
    )
    model = build_model(_machine().model, examples).to_empty(device="cpu")
    assert isinstance(model, FactorizationMachine)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    batch = examples.batch(torch.arange(3), 3)
    with torch.no_grad():
        found = model(batch.sparse, batch.dense)
    wide, factors = model.linear.wide.embedding_bags, model.factors.embedding_bags
    assert set(factors) == {"factor_a", "factor_b", "factor_c"}
    assert {tuple(table.weight.shape[1:]) for table in wide.values()} == {(1,)}
    for example in range(3):
        rows = {}
        for name, bags in examples.features.items():
            begin, end = bags.offsets[example : example + 2].tolist()
            rows[name] = bags.values[begin:end]
        logit = model.linear.bias.double()
        for name, of_feature in rows.items():
            logit = logit + wide[f"wide_{name}"].weight.double()[of_feature].sum()
        for left, right in itertools.combinations("abc", 2):
            for i, j in itertools.product(rows[left].tolist(), rows[right].tolist()):
                one = factors[f"factor_{left}"].weight.double()[i]
                logit = logit + one @ factors[f"factor_{right}"].weight.double()[j]
        torch.testing.assert_close(found[example].double(), logit[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
def test_two_ranks_give_the_weights_of_one(sharding_type: str) -> None:
    one = run_on_ranks(1, _train, _machine())
    two = run_on_ranks(2, _train, _machine(sharding={"types": [sharding_type]}))
    assert two[0][0].losses == two[1][0].losses
    expected, found = _assembled(one), _assembled(two)
    assert expected.keys() == found.keys()
    assert expected["wide_f0"].shape == (40, 1) and expected["factor_f0"].shape == (40, 3)
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=1e-5, atol=1e-5)
    assert one[0][0].zeros == two[0][0].zeros
    assert 0 < one[0][0].zeros["wide_f0"].touched_zeros < one[0][0].zeros["wide_f0"].touched


def test_each_part_has_its_optimizer() -> None:
    def optimizers() -> dict[str, str]:
        config = _machine()
        features = {name: Bags.from_lists([[0]], 3) for name in ("a", "b")}
        examples = Examples(features, torch.zeros(1, 0), torch.zeros(1))
        model = build_model(config.model, examples)
        distributed = distribute(model, config, _ranks())
        tables = {
            key.split(".")[-2]: sorted(
                name.rpartition(".")[2] for name in states if not name.endswith("_hyperparameters")
            )
            for key, states in distributed.model.fused_optimizer.state_dict()["state"].items()
        }
        assert tables["wide_a"] == ["accum", "momentum1"]
        assert tables["factor_a"] == ["momentum1"]
        return {row[0]: row[3] for row in describe_plan(distributed.plan, config)[1:]}

    assert run_on_ranks(1, optimizers) == [
        {
            "wide_a": "ftrl",
            "wide_b": "ftrl",
            "factor_a": "exact_adagrad",
            "factor_b": "exact_adagrad",
        }
    ]


def _pairs() -> Split:
    """Positive where two rows have the same parity: neither row alone says anything."""
    generator = torch.Generator().manual_seed(0)

    def examples(count: int) -> Examples:
        a, b = (torch.randint(0, 6, (count,), generator=generator) for _ in range(2))
        features = {"a": Bags.single(a, 6), "b": Bags.single(b, 6)}
        return Examples(features, torch.zeros(count, 0), ((a + b) % 2 == 0).float())

    return Split(examples(2000), examples(500))


def test_it_learns_what_no_linear_model_can() -> None:
    train = {"batch_size": 50, "epochs": 5}
    free = {"type": "ftrl", "learning_rate": 0.3}

    def auc(config: Config) -> float:
        history: History = run_on_ranks(1, _train, config, _pairs())[0][0]
        quality = history.evaluations[-1].quality
        assert quality.auc is not None
        return quality.auc

    assert auc(_config(model={"type": "linear", "wide_dim": 1}, optimizer=free, train=train)) < 0.6
    assert auc(_machine(optimizer=free, train=train)) > 0.99


def test_pairwise_dots_are_the_machine_without_its_linear_part() -> None:
    features = {name: Bags.from_lists([[0, 1], [2]], 3) for name in ("a", "b", "a_x_b")}
    examples = Examples(features, torch.zeros(2, 0), torch.zeros(2), crossed=frozenset({"a_x_b"}))
    machine = build_model(_machine().model, examples).to_empty(device="cpu")
    dots = build_model(_dots().model, examples).to_empty(device="cpu")
    assert isinstance(machine, FactorizationMachine) and isinstance(dots, PairwiseDots)
    for parameter in machine.parameters():
        torch.nn.init.normal_(parameter)
    dots.factors.load_state_dict(machine.factors.state_dict())
    with torch.no_grad():
        for table in machine.linear.wide.parameters():
            table.zero_()
        dots.bias.copy_(machine.linear.bias)
        batch = examples.batch(torch.arange(2), 2)
        found = dots(batch.sparse, batch.dense)
        assert torch.equal(found, machine(batch.sparse, batch.dense))
    assert found.abs().min() > 0.1
    assert set(dict(dots.named_parameters())) == {
        "bias",
        "factors.embedding_bags.factor_a.weight",
        "factors.embedding_bags.factor_b.weight",
    }


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
def test_pairwise_dots_train_alike_on_two_ranks(sharding_type: str) -> None:
    changed = {"optimizer": {**ADAGRAD, "type": "ftrl", "preserve_initial_weight": True}}
    one = run_on_ranks(1, _train, _dots(**changed))
    two = run_on_ranks(2, _train, _dots(**changed, sharding={"types": [sharding_type]}))
    expected, found = _assembled(one), _assembled(two)
    assert expected.keys() == found.keys() == {"factor_f0", "factor_f1", "bias"}
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=1e-5, atol=1e-5)


def test_the_plan_of_pairwise_dots_names_their_optimizer() -> None:
    def optimizers() -> list[str]:
        config = _dots()
        examples = Examples({"a": Bags.from_lists([[0]], 3)}, torch.zeros(1, 0), torch.zeros(1))
        distributed = distribute(build_model(config.model, examples), config, _ranks())
        return [row[3] for row in describe_plan(distributed.plan, config)[1:]]

    assert run_on_ranks(1, optimizers) == [["exact_adagrad"]]
