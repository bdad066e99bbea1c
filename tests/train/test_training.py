"""A model trains to the same weights on any number of ranks, and its zeros are counted right."""

from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.ranks import run_on_ranks
from torchrec_ext.command.errors import AgreedError, UserError
from torchrec_ext.command.ranks import Ranks, StopRequest
from torchrec_ext.optimizers import SPECS
from torchrec_ext.train.config import Config
from torchrec_ext.train.data import Bags, Examples, Split, load
from torchrec_ext.train.distribute import describe_plan, distribute
from torchrec_ext.train.loop import History, Trainer
from torchrec_ext.train.model import Linear, build_model
from torchrec_ext.train.tables import BLOCK_ROWS, TouchedRows, ZeroCount, count_zeros, local_shards

FTRL: dict[str, Any] = {"type": "ftrl", "learning_rate": 0.3, "ftrl_beta": 0.01, "l1_reg": 0.004}
Shard = tuple[str, int, int, torch.Tensor]


def _config(**changed: Any) -> Config:
    content: dict[str, Any] = {
        "name": "test",
        "data": {"dataset": "synthetic", "examples": 1000, "features": 2, "rows": 40},
        "model": {"type": "linear"},
        "optimizer": FTRL,
        "train": {"batch_size": 32, "epochs": 5, "max_steps": 50},
    }
    return Config.model_validate({**content, **changed})


def _wide_deep(deep: str = "exact_adagrad", **changed: Any) -> Config:
    return _config(
        model={"type": "wide_deep", "hidden": [8]},
        deep_optimizer={"type": deep, "learning_rate": 0.1},
        **changed,
    )


def _ranks() -> Ranks:
    size = torch.distributed.get_world_size()
    return Ranks(torch.distributed.get_rank(), size, size)


def _shards(model: torch.nn.Module) -> list[Shard]:
    return [
        (shard.table, shard.first_row, shard.first_column, shard.weight.clone())
        for shard in local_shards(model)
    ]


def _train(config: Config, split: Split | None = None) -> tuple[History, list[Shard], dict]:
    """Train on the ranks that call this; give history, table shards and dense parameters."""
    ranks = _ranks()
    split = split or load(config.data)
    torch.manual_seed(config.seed)
    distributed = distribute(build_model(config.model, split.train), config, ranks)
    history = Trainer(config, split, distributed, ranks, StopRequest()).run()
    dense = {
        name.removeprefix("module."): value.clone()
        for name, value in distributed.model.state_dict().items()
        if type(value) is torch.Tensor
    }
    return history, _shards(distributed.model), dense


def _assembled(results: list[tuple[History, list[Shard], dict]]) -> dict[str, torch.Tensor]:
    """Put the shards of all ranks together, and add the dense parameters."""
    shards = [shard for _, rank_shards, _ in results for shard in rank_shards]
    tables: dict[str, torch.Tensor] = {}
    for name in {table for table, *_ in shards}:
        parts = [shard for shard in shards if shard[0] == name]
        rows = max(first + weight.shape[0] for _, first, _, weight in parts)
        columns = max(first + weight.shape[1] for _, _, first, weight in parts)
        tables[name] = torch.full((rows, columns), torch.nan)
        for _, row, column, weight in parts:
            tables[name][row : row + weight.shape[0], column : column + weight.shape[1]] = weight
    return tables | results[0][2]


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
def test_two_ranks_give_the_weights_of_one_after_fifty_steps(sharding_type: str) -> None:
    one = run_on_ranks(1, _train, _wide_deep())
    two = run_on_ranks(2, _train, _wide_deep(sharding={"types": [sharding_type]}))
    assert len(one[0][0].losses) == len(two[0][0].losses) == 50
    assert two[0][0].losses == two[1][0].losses
    expected, found = _assembled(one), _assembled(two)
    assert expected.keys() == found.keys()
    assert {"wide_f0", "wide_f1", "deep_f0", "deep_f1"} < expected.keys()
    for name, weights in expected.items():
        error = (weights - found[name]).abs() / weights.abs().clamp(min=1)
        assert float(error.max()) <= 1e-5, name
    assert one[0][0].zeros == two[0][0].zeros
    assert 0 < one[0][0].zeros["wide_f0"].touched_zeros < one[0][0].zeros["wide_f0"].touched


@pytest.mark.parametrize("columns", [1, 3, 8])
def test_l1_scales_with_the_columns_as_documented(columns: int) -> None:
    """Twice the columns halves the gradient, so half of l1 and beta give the same weights."""
    scale = 4 / columns
    scaled = {**FTRL, "ftrl_beta": 0.01 * scale, "l1_reg": 0.004 * scale}
    config = _config(model={"type": "linear", "wide_dim": columns}, optimizer=scaled)
    narrow, wide = run_on_ranks(1, _train, _config())[0], run_on_ranks(1, _train, config)[0]
    for (_, _, _, expected), (_, _, _, found) in zip(narrow[1], wide[1], strict=True):
        assert found.shape[1] == columns
        # Sums over other numbers of columns round differently.
        torch.testing.assert_close(found[:, :1], expected[:, :1], rtol=0, atol=1e-5)
    for table, count in narrow[0].zeros.items():
        assert wide[0].zeros[table].touched_share == count.touched_share


@pytest.mark.parametrize("ours", ["exact_sgd", "exact_adagrad", "exact_rowwise_adagrad"])
def test_fbgemms_optimizers_run_behind_the_same_switch(ours: str) -> None:
    def config(prefix: str) -> Config:
        optimizer = {"type": prefix + ours, "learning_rate": 0.1}
        return _config(optimizer=optimizer, sharding={"types": ["table_wise"]})

    expected = _assembled(run_on_ranks(1, _train, config("fbgemm_")))
    found = _assembled(run_on_ranks(1, _train, config("")))
    assert expected["wide_f0"].abs().max() > 0.01
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [optim_type.name.lower() for optim_type in SPECS])
def test_every_optimizer_trains(name: str) -> None:
    config = _config(optimizer={"type": name}, train={"batch_size": 32, "max_steps": 3})
    ((_, shards, _),) = run_on_ranks(1, _train, config)
    assert all(weight.any() for *_, weight in shards)


def test_adams_weight_decay_is_the_configurations() -> None:
    def train(mode: str) -> dict[str, torch.Tensor]:
        settings = {"weight_decay": 0.5, "weight_decay_mode": mode, "beta1": 0.5}
        config = _config(optimizer={"type": "adam", **settings})
        return _assembled(run_on_ranks(1, _train, config))

    coupled, decoupled = train("L2"), train("DECOUPLE")
    assert not coupled["wide_f0"].equal(decoupled["wide_f0"])


def test_wide_tables_start_as_the_configuration_says() -> None:
    def initial(**model: str) -> list[torch.Tensor]:
        config = _config(model={"type": "linear", "wide_dim": 3, **model})
        built = build_model(config.model, load(config.data).train)
        distributed = distribute(built, config, _ranks())
        return [weight for *_, weight in _shards(distributed.model)]

    ((by_default, uniform),) = run_on_ranks(1, lambda: (initial(), initial(wide_start="uniform")))
    assert not any(weight.any() for weight in by_default)
    bound = 40**-0.5
    for weight in uniform:
        assert 0.9 * bound < float(weight.abs().max()) <= bound
        assert weight.unique().numel() == weight.numel() == 120
    assert not uniform[0].equal(uniform[1])


def test_columns_of_wide_tables_stay_equal() -> None:
    """So that the share of zero weights is the share of zero rows."""
    for _, _, _, weight in run_on_ranks(1, _train, _config())[0][1]:
        assert weight.equal(weight[:, :1].expand_as(weight))
        assert weight.any()


def test_initial_weights_do_not_depend_on_the_plan() -> None:
    rows = BLOCK_ROWS + 3
    data = {"dataset": "synthetic", "examples": 100, "features": 1, "rows": rows}

    def initial(sharding_type: str, seed: int = 0) -> tuple[None, list[Shard], dict]:
        config = _wide_deep(data=data, seed=seed, sharding={"types": [sharding_type]})
        model = build_model(config.model, load(config.data).train)
        return None, _shards(distribute(model, config, _ranks()).model), {}

    tables = [
        _assembled(run_on_ranks(count, initial, kind))  # type: ignore[arg-type]
        for count, kind in ((1, "table_wise"), (2, "row_wise"), (2, "column_wise"))
    ]
    other = _assembled(run_on_ranks(1, initial, "table_wise", 1))  # type: ignore[arg-type]
    bound = rows**-0.5
    for table in tables:
        assert table["wide_f0"].equal(torch.zeros(rows, 4))
        assert table["deep_f0"].equal(tables[0]["deep_f0"])
    deep = tables[0]["deep_f0"]
    assert deep.shape == (rows, 16)
    assert -bound <= float(deep.min()) < -0.99 * bound
    assert 0.99 * bound < float(deep.max()) <= bound
    # No two blocks of rows share their numbers.
    assert not deep[:3].equal(deep[BLOCK_ROWS:])
    assert not deep.equal(other["deep_f0"])


def test_zeros_are_counted_among_touched_and_among_all_weights() -> None:
    def work() -> dict[str, ZeroCount]:
        config, ranks = _config(sharding={"types": ["row_wise"]}), _ranks()
        split = load(config.data)
        model = distribute(build_model(config.model, split.train), config, ranks).model
        touched = TouchedRows(split.train.rows())
        # Each rank saw other rows, one of them both.
        touched.add("f0", torch.tensor([[0, 1, 1, 30], [30, 39]][ranks.rank]))
        for shard in local_shards(model):
            shard.weight.fill_(1.0)
            for row in {0: [0, 5], 20: [39 - 20]}[shard.first_row]:
                shard.weight[row] = 0.0
        return count_zeros(model, touched.on_any_rank(ranks), ranks)

    expected = {
        "wide_f0": ZeroCount(touched_zeros=8, touched=16, zeros=12, total=160),
        "wide_f1": ZeroCount(touched_zeros=0, touched=0, zeros=12, total=160),
    }
    assert run_on_ranks(2, work) == [expected] * 2
    assert expected["wide_f0"].touched_share == 0.5
    assert expected["wide_f1"].touched_share == 0.0


def test_untouched_rows_are_not_counted_as_touched() -> None:
    """Rows that occur only in the held-out part keep their zeros and do not count."""
    history = run_on_ranks(1, _train, _config(train={"batch_size": 8, "max_steps": 1}))[0][0]
    split = load(_config().data)
    seed_order = torch.randperm(len(split.train), generator=torch.Generator().manual_seed(0))
    batch = split.train.features["f0"].select(seed_order[:8])[0]
    assert history.zeros["wide_f0"].touched == batch.unique().numel() * 4
    assert history.zeros["wide_f0"].total == 40 * 4


def test_a_linear_model_adds_bias_and_the_mean_of_each_rows_columns() -> None:
    model = Linear({"a": 3, "b": 2}, wide_dim=4).to_empty(device="cpu")
    with torch.no_grad():
        model.bias.fill_(0.5)
        tables = model.wide.embedding_bags
        tables["wide_a"].weight.copy_(torch.arange(12.0).view(3, 4))
        tables["wide_b"].weight.copy_(torch.tensor([[4.0, 0, 0, 0], [0, 0, 0, 0]]))
    sparse = KeyedJaggedTensor.from_lengths_sync(
        ["a", "b"], torch.tensor([0, 2, 1, 0, 1]), torch.tensor([2, 1, 1, 1])
    )
    # Bags a: [0, 2], [1]; b: [0], [1]. Row means of a: 1.5, 5.5, 9.5.
    logits = model(sparse, torch.empty(2, 0))
    assert logits.tolist() == [0.5 + 1.5 + 9.5 + 1.0, 0.5 + 5.5 + 0.0]


def test_a_wide_deep_model_gives_one_logit_per_example_and_skips_crosses() -> None:
    examples = Examples(
        {"a": Bags.from_lists([[0], [], [1, 2]], 3), "a_x_a": Bags.from_lists([[0], [], [8]], 9)},
        torch.ones(3, 2),
        torch.zeros(3),
        crossed=frozenset({"a_x_a"}),
    )
    model = build_model(_wide_deep().model, examples).to_empty(device="cpu")
    batch = examples.batch(torch.arange(3), 3)
    assert model(batch.sparse, batch.dense).shape == (3,)
    names = {name for name, _ in model.named_parameters() if "embedding_bags" in name}
    assert {name.split(".")[-2] for name in names} == {"wide_a", "wide_a_x_a", "deep_a"}
    assert model.over_arch[0].in_features == 16 + 2


def test_dense_columns_reach_the_logit() -> None:
    examples = Examples({"a": Bags.from_lists([[0]], 3)}, torch.ones(1, 2), torch.zeros(1))
    config = _wide_deep()
    model = build_model(config.model, examples).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    batch = examples.batch(torch.arange(1), 1)
    difference = model(batch.sparse, batch.dense + 1) - model(batch.sparse, batch.dense)
    # Two dense columns, eight hidden units, all weights 1.
    assert difference.item() == 2 * 8


def test_the_plan_is_described_with_each_tables_optimizer() -> None:
    def work() -> list[list[str]]:
        config = _wide_deep(sharding={"types": ["row_wise"], "tables": {"deep_f1": "table_wise"}})
        model = build_model(config.model, load(config.data).train)
        return describe_plan(distribute(model, config, _ranks()).plan, config)

    header, *rows = run_on_ranks(2, work)[1]
    assert header == ["table", "rows", "dim", "optimizer", "sharding", "kernel", "ranks"]
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name["wide_f0"] == ["40", "4", "ftrl", "row_wise", "fused", "0,1"]
    assert by_name["deep_f0"] == ["40", "16", "exact_adagrad", "row_wise", "fused", "0,1"]
    assert by_name["deep_f1"][:5] == ["40", "16", "exact_adagrad", "table_wise", "fused"]
    assert len(rows) == 4


def test_the_plans_memory_has_the_states_of_ours_by_name_on_every_rank() -> None:
    def work() -> list[tuple[str, int, int, dict[str, int]]]:
        config = _wide_deep("ftrl", sharding={"types": ["row_wise"]})
        model = build_model(config.model, load(config.data).train)
        memory = distribute(model, config, _ranks()).memory
        return [(s.table, s.rank, s.weights, dict(s.states)) for s in memory]

    for memory in run_on_ranks(2, work):
        # 20 of 40 rows on each rank: 4 columns in wide tables, 16 in deep ones.
        for table, _, weights, states in memory:
            assert weights == 20 * 4 * (4 if table.startswith("wide_") else 16)
            assert states == {"linear": weights, "accum": weights}
        assert sorted((table, rank) for table, rank, _, _ in memory) == [
            (f"{kind}_f{feature}", rank)
            for kind in ("deep", "wide")
            for feature in (0, 1)
            for rank in (0, 1)
        ]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"sharding": {"tables": {"wide_f7": "row_wise"}}}, "wide_f7: the model has no such table"),
        (
            {
                "optimizer": {"type": "fbgemm_exact_adagrad"},
                "sharding": {"types": ["row_wise"]},
            },
            "sharding: no plan for 2 rank",
        ),
    ],
)
def test_impossible_plans_are_named_on_every_rank(changed: dict, expected: str) -> None:
    def work() -> str:
        try:
            _train(_config(**changed))
        except AgreedError as error:
            return str(error)
        return "no error"

    texts = run_on_ranks(2, work)
    assert texts[0] == texts[1]
    assert expected in texts[0]
    assert "\n" not in texts[0]


def test_tables_that_do_not_fit_into_memory_are_refused() -> None:
    labels = torch.zeros(2)
    bags = Bags(torch.zeros(2, dtype=torch.int64), torch.arange(3), rows=2**31 - 1)
    examples = Examples({f"f{n}": bags for n in range(200)}, torch.empty(2, 0), labels)

    def work() -> None:
        config = _config(sharding={"types": ["table_wise"]})
        distribute(build_model(config.model, examples), config, _ranks())

    with pytest.raises(UserError, match="sharding: no plan for 1 rank"):
        run_on_ranks(1, work)


def test_optimizer_states_that_do_not_fit_into_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    labels = torch.zeros(2)
    bags = Bags(torch.zeros(2, dtype=torch.int64), torch.arange(3), rows=50_000)
    examples = Examples({"f0": bags}, torch.empty(2, 0), labels)
    # Weights of 800,000 bytes, with FTRL's states 2,400,000.
    monkeypatch.setitem(distribute.__globals__, "_host_memory", lambda: 1_200_000)

    def work(optimizer: dict[str, Any]) -> int:
        config = _config(optimizer=optimizer)
        return len(distribute(build_model(config.model, examples), config, _ranks()).memory)

    assert run_on_ranks(1, work, {"type": "exact_sgd", "learning_rate": 0.1}) == [1]
    with pytest.raises(UserError, match="sharding: no plan for 1 rank.*insufficient storage"):
        run_on_ranks(1, work, FTRL)


def test_batches_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(UserError, match="train.batch_size 33 is not a multiple of the 2 ranks"):
        run_on_ranks(2, _train, _config(train={"batch_size": 33}))
    with pytest.raises(UserError, match="train.batch_size 801 exceeds the 800 training examples"):
        run_on_ranks(1, _train, _config(train={"batch_size": 801}))


def test_a_loss_that_is_no_number_ends_training() -> None:
    optimizer = {"type": "exact_sgd", "learning_rate": 1e18, "weight_decay": 1e18}
    config = _config(optimizer=optimizer)
    with pytest.raises(UserError, match="the loss became (inf|nan) in step"):
        run_on_ranks(1, _train, config)


def test_a_rank_told_to_stop_stops_all_after_the_same_step() -> None:
    def work() -> tuple[int, int, int]:
        config, ranks, stop = _config(), _ranks(), StopRequest()
        if ranks.rank == 1:
            stop.signal = 2
        split = load(config.data)
        distributed = distribute(build_model(config.model, split.train), config, ranks)
        history = Trainer(config, split, distributed, ranks, stop).run()
        return len(history.losses), len(history.evaluations), stop.exit_code

    assert run_on_ranks(2, work) == [(1, 0, 130)] * 2


def test_an_epoch_is_evaluated_and_max_steps_ends_within_one() -> None:
    config = _config(train={"batch_size": 100, "epochs": 3, "max_steps": 20})
    history = run_on_ranks(1, _train, config)[0][0]
    assert [evaluation.step for evaluation in history.evaluations] == [8, 16, 20]
    assert len(history.losses) == 20
    assert history.evaluations[-1].quality.examples == 200


def test_training_learns_what_held_out_examples_share() -> None:
    data = {"dataset": "synthetic", "examples": 5000, "features": 3, "rows": 30, "informative": 1}
    config = _config(
        data=data, optimizer={**FTRL, "l1_reg": 0}, train={"batch_size": 64, "epochs": 3}
    )
    quality = run_on_ranks(1, _train, config)[0][0].evaluations[-1].quality
    assert quality.auc is not None and quality.auc > 0.7
