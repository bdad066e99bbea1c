"""A configuration is read exactly as written, and every mistake is named on one line."""

from pathlib import Path

import pytest

from torchrec_ext import OptimType
from torchrec_ext.command.config_file import dump_config, load_config
from torchrec_ext.command.errors import UserError
from torchrec_ext.train.config import Config

CONFIGS = Path(__file__).parents[2] / "configs"
BASE = """
name: run
data: {dataset: synthetic}
model: {type: linear}
optimizer: {type: ftrl, learning_rate: 1e-1, l1_reg: 2}
"""


@pytest.fixture
def base(tmp_path: Path) -> str:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return str(path)


def _error(path: str, *overrides: str) -> str:
    with pytest.raises(UserError) as raised:
        load_config(Config, path, overrides)
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_values_are_read_and_defaults_filled_in(base: str) -> None:
    config = load_config(Config, base)
    assert config.optimizer.ours == OptimType.FTRL
    assert config.optimizer.hyperparameters == {
        "learning_rate": 0.1,
        "ftrl_beta": 0.0,
        "l1_reg": 2.0,
        "l2_reg": 0.0,
        "learning_rate_power": -0.5,
        "preserve_initial_weight": False,
        "l2_shrinkage_reg": 0.0,
        "multiply_linear_by_lr": False,
        "l21_reg": 0.0,
        "initial_accumulator_value": 0.0,
    }
    assert config.train.batch_size == 512


SHIPPED = sorted(path for path in CONFIGS.glob("*.yaml") if not path.name.startswith("parity_"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configurations_are_legal_and_survive_a_round_trip(
    path: Path, tmp_path: Path
) -> None:
    config = load_config(Config, str(path))
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config))
    assert load_config(Config, str(copy)) == config


def test_no_shipped_configuration_is_missed() -> None:
    assert len(list(CONFIGS.glob("*.yaml"))) >= 5


def test_compared_configurations_differ_in_the_optimizers_of_tables_alone() -> None:
    ours = load_config(Config, str(CONFIGS / "movielens_wide_deep_ftrl.yaml"))
    fbgemm = load_config(Config, str(CONFIGS / "movielens_wide_deep_fbgemm_adagrad.yaml"))
    different = {"name", "optimizer", "deep_optimizer"}
    assert ours.model_dump(exclude=different) == fbgemm.model_dump(exclude=different)


def test_overrides_are_applied_in_order_and_create_sections(base: str) -> None:
    overrides = ["optimizer.l1_reg=1", "optimizer.l1_reg=0", "train.epochs=7", "name=other"]
    config = load_config(Config, base, overrides)
    assert config.optimizer.hyperparameters["l1_reg"] == 0.0
    assert config.train.epochs == 7
    assert config.name == "other"


def test_texts_that_look_like_numbers_survive_a_round_trip(base: str, tmp_path: Path) -> None:
    config = load_config(Config, base, ['name="1e5"'])
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config))
    assert load_config(Config, str(copy)).name == "1e5"


def test_aliases_of_hyperparameters_are_accepted(base: str) -> None:
    config = load_config(Config, base, ["optimizer={type: ftrl, ftrl_l1_reg: 3}"])
    assert config.optimizer.hyperparameters["l1_reg"] == 3.0


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.batchsize=3", "train.batchsize: unknown key; did you mean train.batch_size?"),
        ("optimiser.type=ftrl", "optimiser: unknown key; did you mean optimizer?"),
        ("data.pth=x", "data.pth: unknown key"),
        ("optimizer.l1=0", "optimizer.l1: unknown key"),
        ("optimizer.l1=0", "did you mean l1_reg?"),
        ("optimizer.eps=0", "optimizer.eps: unknown key"),
        ("optimizer.type=ftlr", "optimizer.type: 'ftlr' is not one of exact_sgd"),
        ("optimizer.type=ftlr", "did you mean ftrl?"),
        ("optimizer.l1_reg=-1", "optimizer: FTRL: l1_reg=-1 is not legal"),
        (
            "optimizer.learning_rate=1e39",
            "optimizer.learning_rate: 1e+39 is not a finite number of",
        ),
        ("optimizer.learning_rate=.nan", "optimizer: FTRL: learning_rate=nan is not legal"),
        ("optimizer={type: fbgemm_exact_sgd, learning_rate: 1e39}", "1e+39 is not a finite number"),
        ("optimizer={type: fbgemm_exact_sgd, learning_rate: .nan}", "nan is not a finite number"),
        ("seed=4294967296", "seed: input should be less than or equal to 2147483647"),
        ("optimizer.l1_reg=yes", "optimizer: FTRL: l1_reg=True is not legal"),
        ("optimizer.lr=.1", "learning_rate and lr are two names of the same"),
        ("optimizer={type: fbgemm_exact_sgd, eps: 1}", "optimizer.eps: unknown key"),
        ("optimizer={type: fbgemm_exact_adagrad, eps: -1}", "optimizer.eps: -1 is not a finite"),
        ("optimizer={}", "optimizer.type: missing"),
        ("optimizer=ftrl", "optimizer: input should be a valid dictionary"),
        ("data.dataset=movielens", "data.dataset: 'movielens' is not one of movielens-100k"),
        ("data.dataset=movielens", "did you mean movielens-100k?"),
        ("data={}", "data.dataset: missing"),
        ("data={dataset: criteo-tsv}", "data.path: missing"),
        ("data.test_fraction=1", "data.test_fraction: input should be less than 1, got 1"),
        ("dense_optimizer.learning_rate=.inf", "dense_optimizer.learning_rate: input should be le"),
        ("dense_optimizer.learning_rate=.nan", "dense_optimizer.learning_rate: input should be"),
        ("train.epochs=1.5", "train.epochs: input should be a valid integer, got 1.5"),
        ("train.epochs='2'", "train.epochs: input should be a valid integer, got '2'"),
        ("seed=yes", "seed: input should be a valid integer, got True"),
        ("train.shuffle=1", "train.shuffle: input should be a valid boolean, got 1"),
        ("model.wide_dim=0", "model.wide_dim: input should be greater than or equal to 1, got 0"),
        ("model.wide_dim=2049", "model.wide_dim: input should be less than or equal to 2048"),
        (
            "model={type: factorization_machine}",
            "deep_optimizer: missing; model.type factorization_machine needs one",
        ),
        ("model={type: wide_deep, hidden: [8, a]}", "model.hidden[1]: input should be a valid int"),
        ("model={type: wide_deep}", "deep_optimizer: missing; model.type wide_deep needs one"),
        ("deep_optimizer.type=ftrl", "deep_optimizer: has no effect with model.type linear"),
        ("model.wide_start=ones", "model.wide_start: input should be 'zeros' or 'uniform', got"),
        ("sharding.types=[row]", "sharding.types[0]: input should be 'table_wise'"),
        ("sharding.tables.wide_f0=row", "sharding.tables.wide_f0: input should be 'table_wise'"),
        ("checkpoint={}", "checkpoint.every_steps: missing"),
        ("checkpoint.every_steps=0", "checkpoint.every_steps: input should be greater than or"),
        ("checkpoint={every_steps: 1, keep: 0}", "checkpoint.keep: input should be greater than"),
        ("checkpoint={every_step: 1}", "unknown key; did you mean checkpoint.every_steps?"),
        ("name=a/b", "name: string should match pattern"),
        ("name", "--set name: expected path.to.key=value"),
        ("=1", "--set =1: expected path.to.key=value"),
        ("name.x=1", "--set name.x=1: name is not a section"),
        ("seed=[1", "--set seed=[1:1:3: not valid YAML"),
    ],
)
def test_mistakes_are_named_with_their_path(base: str, override: str, expected: str) -> None:
    assert expected in _error(base, override)


@pytest.mark.parametrize(
    ("model", "key", "width"),
    [
        ("{type: linear, wide_dim: 6}", "wide_dim", 6),
        ("{type: wide_deep, wide_dim: 4, deep_dim: 5}", "deep_dim", 5),
        ("{type: factorization_machine, wide_dim: 4, factor_dim: 7}", "factor_dim", 7),
        ("{type: factorization_machine}", "wide_dim", 1),
    ],
)
def test_widths_that_fbgemms_optimizers_do_not_take_are_named(
    base: str, model: str, key: str, width: int
) -> None:
    overrides = [f"model={model}", "optimizer={type: fbgemm_exact_sgd}"]
    if "linear" not in model:
        overrides.append("deep_optimizer={type: fbgemm_exact_sgd}")
    expected = (
        f"model.{key}: {width} columns, but the tables of fbgemm_exact_sgd have multiples of 4"
    )
    assert expected in _error(base, *overrides)
    ours = [text.replace("fbgemm_exact_sgd", "exact_sgd") for text in overrides]
    assert getattr(load_config(Config, base, ours).model, key) == width


def test_pairwise_dots_have_one_optimizer_and_no_wide_tables(base: str) -> None:
    model = "model={type: pairwise_dots, factor_dim: 6}"
    assert load_config(Config, base, [model]).optimizer_of_factors.ours == OptimType.FTRL
    expected = "deep_optimizer: has no effect with model.type pairwise_dots; remove it"
    assert expected in _error(base, model, "deep_optimizer={type: ftrl}")
    assert "model.wide_dim: unknown key" in _error(base, model, "model.wide_dim=4")
    expected = "model.factor_dim: 6 columns, but the tables of fbgemm_exact_sgd have multiples"
    assert expected in _error(base, model, "optimizer={type: fbgemm_exact_sgd}")


def test_every_mistake_is_named(base: str) -> None:
    text = _error(base, "train.epochs=0", "optimizer.l1=0", "sed=1")
    assert "train.epochs: " in text
    assert "optimizer.l1: " in text
    assert "sed: unknown key; did you mean seed?" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: [", "base.yaml:1:8: not valid YAML"),
        (BASE + "seed: 1\nseed: 2\n", "base.yaml:7:1: not valid YAML: the key 'seed' occurs twice"),
        (BASE + "3: x\n", "base.yaml:6:1: not valid YAML: the key 3 is not text"),
        (BASE + "seed: 2001-99-99\n", "not valid YAML"),
        ("- a\n", "expected a mapping"),
        ("", "expected a mapping"),
    ],
)
def test_a_file_that_is_no_mapping_is_named(base: str, text: str, expected: str) -> None:
    Path(base).write_text(text)
    assert expected in _error(base)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "none.yaml")
    assert f"cannot read the configuration {path}: No such file" in _error(path)


def test_a_file_that_is_no_text_is_named(base: str) -> None:
    Path(base).write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in _error(base)
