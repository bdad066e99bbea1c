"""``python -m benchmarks.ftrl_curves``: what FTRL's extensions do to models on MovieLens-100k.

Trains the configurations below, each in this process on one rank, prints the tables of docs/ftrl.md
and draws docs/ftrl_preserve.png and docs/ftrl_l21.png. Nothing depends on the clock; other machines
round differently, which moves an AUC in the fourth digit.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from torchrec_ext.command.config_file import load_config
from torchrec_ext.command.ranks import Ranks, StopRequest, connected
from torchrec_ext.train.config import Config
from torchrec_ext.train.data import Split, load
from torchrec_ext.train.distribute import distribute
from torchrec_ext.train.loop import Trainer
from torchrec_ext.train.model import build_model
from torchrec_ext.train.tables import local_shards

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
class Outcome:
    """What a run gave: AUC after every epoch, and the share of zero rows among touched ones."""

    auc: list[float]
    zero_rows: float


_ADAGRAD = "optimizer={type: exact_adagrad, eps: 0.0, initial_accumulator_value: 0.1}"
PRESERVE = (
    Contender("FTRL", "pairwise_dots", ("optimizer.preserve_initial_weight=false",)),
    Contender("FTRL, preserve_initial_weight", "pairwise_dots"),
    Contender("EXACT_ADAGRAD, eps 0", "pairwise_dots", (_ADAGRAD,)),
)
LEARNING_RATES = (0.01, 0.03, 0.1, 0.3)
_FACTORS = "deep_optimizer={type: ftrl, learning_rate: %s, initial_accumulator_value: 0.1, %s}"
_L1 = ("optimizer.l21_reg=0", "optimizer.l1_reg=0.00075")
_FLAG = "preserve_initial_weight"
#: Without preservation and, in the next line, with it.
PAIRS = (
    *(
        Contender(
            f"factorization machine, {rate}", "factorization_machine", (_FACTORS % (rate, x),)
        )
        for rate in (0.03, 0.3, 3.0)
        for x in (f"{_FLAG}: false", f"{_FLAG}: true")
    ),
    Contender("linear", "linear_l21", _L1),
    Contender("linear, preserved", "linear_l21", (*_L1, f"optimizer.{_FLAG}=true")),
    Contender("linear, from zeros", "linear_l21", (*_L1, "model.wide_start=zeros")),
    Contender("dots, tuned", "pairwise_dots_l21", ("optimizer.l21_reg=0",)),
    Contender(
        "dots, tuned, preserved",
        "pairwise_dots_l21",
        ("optimizer.l21_reg=0", f"optimizer.{_FLAG}=true"),
    ),
    Contender(
        "dots, beta = accum = 0", "pairwise_dots", ("optimizer={type: ftrl, learning_rate: 0.03}",)
    ),
    Contender(
        "dots, beta = accum = 0, preserved",
        "pairwise_dots",
        ("optimizer={type: ftrl, learning_rate: 0.03, preserve_initial_weight: true}",),
    ),
)
FRONTIERS = {
    "pairwise dots": Contender("", "pairwise_dots_l21", ("optimizer.l21_reg=0",)),
    "linear, random start": Contender("", "linear_l21", ("optimizer.l21_reg=0",)),
}


def configuration(contender: Contender, *overrides: str) -> Config:
    """The configuration of a contender, with further overrides."""
    path = str(ROOT / "configs" / f"movielens_{contender.config}.yaml")
    return load_config(Config, path, [*contender.overrides, *overrides])


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
        touched, zero, rows = trainer.touched(), 0, 0
        for shard in local_shards(distributed.model):
            weights = shard.weight[touched[shard.table.partition("_")[2]]]
            zero, rows = zero + int((weights == 0).all(dim=1).sum()), rows + len(weights)
        quality = [evaluation.quality.auc for evaluation in history.evaluations]
        return Outcome([auc for auc in quality if auc is not None], zero / rows)


def preserve(runner: Runner) -> Figure:
    """Pairwise dots: AUC per epoch of FTRL with and without preservation, and of Adagrad."""
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    axes = figure.subplots()
    print("\n| | learning rate | " + " | ".join(f"epoch {k + 1}" for k in range(6)) + " |")
    for contender, style in zip(PRESERVE, ("o-", "s-", "x--"), strict=True):
        for rate in LEARNING_RATES:
            outcome = runner.run(contender, f"optimizer.learning_rate={rate}")
            figures = " | ".join(f"{auc:.4f}" for auc in outcome.auc)
            print(f"| {contender.label} | {rate} | {figures} |", flush=True)
            if rate == 0.03:
                axes.plot(range(1, len(outcome.auc) + 1), outcome.auc, style, label=contender.label)
    axes.axhline(0.5, color="lightgrey", zorder=0)
    axes.set(title="Pairwise dots, learning rate 0.03", xlabel="epoch", ylabel="test AUC")
    axes.legend(fontsize=8)
    return figure


def pairs(runner: Runner) -> None:
    """Models with and without preservation: AUC after the last epoch, and zero rows."""
    print("\n| | test AUC | zero rows |")
    for contender in PAIRS:
        _print_row(contender.label, runner.run(contender))


def frontiers(runner: Runner) -> Figure:
    """AUC against zero rows under l1_reg alone and l21_reg alone."""
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    for name, axes in zip(FRONTIERS, figure.subplots(1, len(FRONTIERS)), strict=True):
        _frontier(runner, name, axes)
    return figure


def _frontier(runner: Runner, name: str, axes: Axes) -> None:
    def both(*overrides: str) -> tuple[Outcome, Outcome]:
        held_out = [f"data.evaluate_on={part}" for part in ("validation", "test")]
        validation, test = (runner.run(FRONTIERS[name], part, *overrides) for part in held_out)
        return validation, test

    print(f"\n| {name} | validation AUC | zero rows | test AUC | zero rows |")
    free = both()
    _print_row("no threshold", *free)
    allowed = free[0].auc[-1] - ALLOWED_LOSS
    for key, colour in COLOURS.items():
        scale = 0.125 if name.startswith("linear") else 1.0
        points = {value: both(f"optimizer.{key}={value * scale}") for value in THRESHOLDS}
        for value, point in points.items():
            _print_row(f"`{key}` {value * scale:g}", *point)
        tests = [test for _, test in points.values()]
        x, y = [100 * test.zero_rows for test in tests], [test.auc[-1] for test in tests]
        axes.plot(x, y, "o-", color=colour, label=f"{key} alone")
        legal = {v: p for v, p in points.items() if p[0].auc[-1] >= allowed}
        if legal:
            chosen = max(legal, key=lambda value: legal[value][0].zero_rows)
            axes.plot(
                100 * points[chosen][1].zero_rows,
                points[chosen][1].auc[-1],
                "o",
                markersize=12,
                fillstyle="none",
                color=colour,
            )
            for seed in SEEDS:
                again = both(f"optimizer.{key}={chosen * scale}", f"seed={seed}")
                _print_row(f"chosen: `{key}` {chosen * scale:g}, seed {seed}", *again)
    axes.axhline(free[1].auc[-1], color="lightgrey", zorder=0, label="no threshold")
    axes.set(title=name, xlabel="touched rows that are zero, %", ylabel="test AUC")
    axes.legend(fontsize=8)


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
