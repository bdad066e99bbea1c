"""``python -m benchmarks.ftrl_curves``: what FTRL's extensions do to models on MovieLens-100k.

Trains the configurations below, each in this process on one rank, prints the tables of docs/ftrl.md
and draws docs/ftrl_preserve.png and docs/ftrl_l21.png. Nothing depends on the clock; other machines
round differently, which moves an AUC in the fourth digit.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from torchrec_ext.command.config_file import load_config
from torchrec_ext.command.ranks import Ranks, StopRequest, connected
from torchrec_ext.sparsity import nonzero_rows
from torchrec_ext.train.config import Config
from torchrec_ext.train.data import Split, load
from torchrec_ext.train.distribute import distribute
from torchrec_ext.train.loop import Trainer
from torchrec_ext.train.model import build_model
from torchrec_ext.train.tables import WIDE, local_shards

ROOT = Path(__file__).parents[1]
SEEDS = (1, 2)
#: Best validation AUC minus this is what a choice of a threshold may cost.
ALLOWED_LOSS = 0.003
THRESHOLDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.012)
COLOURS = {"l1_reg": "tab:blue", "l21_reg": "tab:red"}


@dataclass(frozen=True)
class Contender:
    """A line of a picture: a configuration with overrides as of ``--set``."""

    label: str
    config: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Frontier:
    """A panel of AUC against zero rows.

    Attributes:
        contender: The model without a threshold.
        section: Of the configuration, that takes the thresholds.
        scale: What thresholds are multiplied by: a mean over columns makes gradients smaller.
    """

    contender: Contender
    section: str = "optimizer"
    scale: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """What a run gave.

    Attributes:
        auc: After every epoch.
        zero_rows: Share of zero rows among touched ones, of the tables that are not wide; of the
            wide ones in a linear model.
    """

    auc: list[float]
    zero_rows: float


_ADAGRAD = (
    "optimizer={type: exact_adagrad, learning_rate: 0.03, eps: 0.0, initial_accumulator_value: 0.1}"
)
PRESERVE = (
    Contender("FTRL", "pairwise_dots", ("optimizer.preserve_initial_weight=false",)),
    Contender("FTRL, preserve_initial_weight", "pairwise_dots"),
    Contender("EXACT_ADAGRAD, eps 0", "pairwise_dots", (_ADAGRAD,)),
)
LEARNING_RATES = (0.01, 0.03, 0.1, 0.3)
DRAWN_RATES = LEARNING_RATES[:2]


def _ftrl(section: str, settings: str) -> str:
    return f"{section}={{type: ftrl, {settings}}}"


_SETTINGS = {
    "accumulator .1": "learning_rate: 0.03, initial_accumulator_value: 0.1",
    "accumulator .1, learning rate 3": "learning_rate: 3.0, initial_accumulator_value: 0.1",
    "accumulator 1e-6": "learning_rate: 0.03, initial_accumulator_value: 1.0e-6",
    "beta .001": "learning_rate: 0.03, ftrl_beta: 0.001",
    "beta = accumulator = 0": "learning_rate: 0.03",
}
_PAIRED = {
    "dots": ("pairwise_dots_l21", "optimizer"),
    "factorization machine": ("factorization_machine", "deep_optimizer"),
    "wide & deep": ("wide_deep_ftrl", "deep_optimizer"),
}
_L1 = ("optimizer.l21_reg=0", "optimizer.l1_reg=0.00075")
#: By section: what is trained without and with preservation by that section's optimizer.
PAIRS = (
    *(
        (section, Contender(f"{model}, {name}", config, (_ftrl(section, settings),)))
        for model, (config, section) in _PAIRED.items()
        for name, settings in _SETTINGS.items()
    ),
    ("optimizer", Contender("linear from random weights, l1", "linear_l21", _L1)),
    ("optimizer", Contender("linear from zeros", "linear_l21", (*_L1, "model.wide_start=zeros"))),
)
FRONTIERS = {
    "pairwise dots": Frontier(Contender("", "pairwise_dots_l21", ("optimizer.l21_reg=0",))),
    "factorization machine": Frontier(
        Contender(
            "", "factorization_machine", (_ftrl("deep_optimizer", _SETTINGS["accumulator 1e-6"]),)
        ),
        "deep_optimizer",
    ),
    "linear, random start": Frontier(
        Contender("", "linear_l21", ("optimizer.l21_reg=0",)), scale=0.125
    ),
}


def configuration(contender: Contender, *overrides: str) -> Config:
    """The configuration of a contender, with further overrides; rows are not cut into shards."""
    path = str(ROOT / "configs" / f"movielens_{contender.config}.yaml")
    whole_rows = "sharding.types=[table_wise]"
    return load_config(Config, path, [whole_rows, *contender.overrides, *overrides])


def zero_row_share(
    shards: Iterable[tuple[str, Tensor]], touched: Mapping[str, Tensor], model: str
) -> float:
    """The share of zero rows among touched ones; see ``Outcome``."""
    kept = []
    for table, weight in shards:
        if model == "linear" or not table.startswith(WIDE):
            kept.append(nonzero_rows(weight[touched[table.partition("_")[2]]]))
    return 1 - float(torch.cat(kept).float().mean())


class Runner:
    """Trains configurations one after the other; data are read once."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._splits: dict[str, Split] = {}

    def run(self, contender: Contender, *overrides: str) -> Outcome:
        config = configuration(contender, *overrides)
        part = config.data.evaluate_on
        if part not in self._splits:
            self._splits[part] = load(config.data)
        split = self._splits[part]
        torch.manual_seed(config.seed)
        distributed = distribute(build_model(config.model, split.train), config, self._ranks)
        trainer = Trainer(config, split, distributed, self._ranks, StopRequest())
        history = trainer.run()
        shards = [(shard.table, shard.weight) for shard in local_shards(distributed.model)]
        zero_rows = zero_row_share(shards, trainer.touched(), config.model.type)
        quality = [evaluation.quality.auc for evaluation in history.evaluations]
        return Outcome([auc for auc in quality if auc is not None], zero_rows)


def preserve(runner: Runner) -> Figure:
    """Pairwise dots: AUC per epoch of FTRL with and without preservation, and of Adagrad."""
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    panels = dict(zip(DRAWN_RATES, figure.subplots(1, len(DRAWN_RATES), sharey=True), strict=True))
    print("\n| | learning rate | " + " | ".join(f"epoch {k + 1}" for k in range(6)) + " |")
    for contender, style in zip(PRESERVE, ("o-", "s-", "x--"), strict=True):
        for rate in LEARNING_RATES:
            outcome = runner.run(contender, f"optimizer.learning_rate={rate}")
            figures = " | ".join(f"{auc:.4f}" for auc in outcome.auc)
            print(f"| {contender.label} | {rate} | {figures} |", flush=True)
            if rate in panels:
                epochs = range(1, len(outcome.auc) + 1)
                panels[rate].plot(epochs, outcome.auc, style, label=contender.label)
    for rate, axes in panels.items():
        axes.axhline(0.5, color="lightgrey", zorder=0)
        axes.set(title=f"pairwise dots, learning rate {rate}", xlabel="epoch", ylabel="test AUC")
        axes.legend(fontsize=8)
    return figure


def pairs(runner: Runner) -> None:
    """Models without and with preservation, on three seeds."""
    print("\n| | test AUC, plain | preserved | difference | zero rows |")
    for section, contender in PAIRS:
        outcomes = {
            flag: [
                runner.run(contender, f"{section}.preserve_initial_weight={flag}", f"seed={seed}")
                for seed in (0, *SEEDS)
            ]
            for flag in ("false", "true")
        }
        plain, preserved = outcomes.values()
        changes = [b.auc[-1] - a.auc[-1] for a, b in zip(plain, preserved, strict=True)]
        aucs = [mean(each.auc[-1] for each in of_seeds) for of_seeds in (plain, preserved)]
        zeros = [mean(each.zero_rows for each in of_seeds) for of_seeds in (plain, preserved)]
        print(
            f"| {contender.label} | {aucs[0]:.4f} | {aucs[1]:.4f} "
            f"| {min(changes):+.4f} to {max(changes):+.4f} | {zeros[0]:.1%}, {zeros[1]:.1%} |",
            flush=True,
        )


def frontiers(runner: Runner) -> Figure:
    """AUC against zero rows under l1_reg alone and l21_reg alone."""
    figure = Figure(figsize=(11.4, 3.4), layout="constrained")
    for name, axes in zip(FRONTIERS, figure.subplots(1, len(FRONTIERS)), strict=True):
        _frontier(runner, name, axes)
    return figure


Both = tuple[Outcome, Outcome]


def _frontier(runner: Runner, name: str, axes: Axes) -> None:
    frontier = FRONTIERS[name]

    def both(*overrides: str) -> Both:
        validation, test = (
            runner.run(frontier.contender, f"data.evaluate_on={part}", *overrides)
            for part in ("validation", "test")
        )
        return validation, test

    print("\n| | validation AUC | zero rows | test AUC | zero rows |")
    free = both()
    _print_row(f"{name}, no threshold", *free)
    for seed in SEEDS:
        _print_row(f"{name}, no threshold, seed {seed}", *both(f"seed={seed}"))
    for key, colour in COLOURS.items():
        points = {}
        for threshold in THRESHOLDS:
            value = threshold * frontier.scale
            points[value] = both(f"{frontier.section}.{key}={value}")
            _print_row(f"{name}, `{key}` {value:g}", *points[value])
        chosen = _chosen(points, free[0].auc[-1] - ALLOWED_LOSS)
        _draw([test for _, test in points.values()], axes, "o-", label=f"{key} alone", color=colour)
        if chosen is None:
            continue
        ring = {"markersize": 12, "fillstyle": "none", "color": colour}
        _draw([points[chosen][1]], axes, "o", **ring)
        for seed in SEEDS:
            again = both(f"{frontier.section}.{key}={chosen}", f"seed={seed}")
            _print_row(f"{name}, `{key}` {chosen:g}, seed {seed}", *again)
    axes.axhline(free[1].auc[-1], color="lightgrey", zorder=0, label="no threshold")
    axes.set(title=name, xlabel="touched rows that are zero, %", ylabel="test AUC")
    axes.legend(fontsize=8)


def _chosen(points: Mapping[float, Both], allowed: float) -> float | None:
    """The threshold with most zero rows among those with the validation AUC that is allowed."""
    legal = [value for value, (validation, _) in points.items() if validation.auc[-1] >= allowed]
    return max(legal, key=lambda value: points[value][0].zero_rows, default=None)


def _draw(tests: Sequence[Outcome], axes: Axes, style: str, **keywords: Any) -> None:
    shares = [100 * test.zero_rows for test in tests]
    axes.plot(shares, [test.auc[-1] for test in tests], style, **keywords)


def _print_row(label: str, *outcomes: Outcome) -> None:
    cells = (f"{outcome.auc[-1]:.4f} | {outcome.zero_rows:.1%}" for outcome in outcomes)
    print(f"| {label} | {' | '.join(cells)} |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="FTRL's extensions on MovieLens-100k")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="folder of the pictures")
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with connected() as ranks:
        runner = Runner(ranks)
        pairs(runner)
        for name, draw in (("ftrl_preserve", preserve), ("ftrl_l21", frontiers)):
            figure = draw(runner)
            FigureCanvasAgg(figure)
            figure.savefig(arguments.output / f"{name}.png", dpi=90)


if __name__ == "__main__":
    main()
