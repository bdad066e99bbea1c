"""What a run leaves behind: printed tables, metrics.json, the configuration and the curves."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrec_ext.command.config_file import dump_config
from torchrec_ext.command.errors import UserError
from torchrec_ext.text_table import format_table
from torchrec_ext.train.config import Config
from torchrec_ext.train.loop import History
from torchrec_ext.train.tables import DEEP, FACTOR, WIDE, ZeroCount, total_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def make_run_folder(output: str | None, name: str) -> Path:
    """Create the folder of a run.

    Args:
        output: The folder to use; it may exist if it is empty. None for
            ``runs/<name>-<date>-<time>``, with a number behind it if that exists.
        name: The configuration's name.

    Raises:
        UserError: If the folder holds files or cannot be created.
    """
    try:
        if output is None:
            return _new_folder(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"the output folder {folder} is not empty; choose another --output")
        return folder
    except OSError as error:
        raise UserError(f"cannot create the output folder: {error}") from error


def write_config(folder: Path, config: Config) -> None:
    """Write the configuration with all defaults, ready to be run again."""
    _write(folder / "config.yaml", dump_config(config))


def write_results(folder: Path, config: Config, history: History, facts: Mapping[str, Any]) -> None:
    """Write ``metrics.json`` and ``curves.png``.

    Args:
        folder: The run's folder.
        config: The run's configuration.
        history: What happened, possibly cut short.
        facts: Further entries of ``metrics.json``.

    Raises:
        UserError: If a file cannot be written.
    """
    metrics = {**facts, **summarise(config, history)}
    _write(folder / "metrics.json", json.dumps(metrics, indent=2, allow_nan=False) + "\n")
    try:
        draw_curves(folder / "curves.png", config, history)
    except OSError as error:
        raise UserError(f"cannot write {folder / 'curves.png'}: {error}") from error


def summarise(config: Config, history: History) -> dict[str, Any]:
    """Turn a history into the content of ``metrics.json``.

    ``evaluation`` is the last one, of the final model unless the run was interrupted; ``zeros``
    are always those of the final model.
    """
    examples = len(history.losses) * config.train.batch_size
    evaluations = [
        {
            "step": evaluation.step,
            **asdict(evaluation.quality),
            "wide_zero_share_of_touched": total_of(evaluation.zeros, WIDE).touched_share,
        }
        for evaluation in history.evaluations
    ]
    return {
        "steps": len(history.losses),
        "examples": examples,
        "seconds": history.seconds,
        "examples_per_second": examples / history.seconds if history.seconds else None,
        "evaluate_on": config.data.evaluate_on,
        "evaluation": evaluations[-1] if evaluations else None,
        "evaluations": evaluations,
        "zeros": {
            table: {**asdict(count), **_shares(count)}
            for table, count in _with_totals(history.zeros).items()
        },
        "zero_shares": [
            {
                "step": each.step,
                "tables": {
                    table: _shares(count) for table, count in _with_totals(each.zeros).items()
                },
            }
            for each in history.zeros_over_steps()
        ],
        "losses": history.losses,
    }


def format_results(config: Config, history: History, order: Sequence[str]) -> str:
    """Lay out the final results for people.

    Args:
        config: The run's configuration.
        history: What happened.
        order: Feature names in the data set's order.
    """
    lines = []
    if history.evaluations:
        last = history.evaluations[-1]
        auc = "undefined" if last.quality.auc is None else f"{last.quality.auc:.4f}"
        lines.append(
            f"{config.data.evaluate_on} AUC {auc}, log loss {last.quality.log_loss:.4f} after step "
            f"{last.step} ({last.quality.examples} examples, "
            f"{last.quality.positive_share:.1%} positive)"
        )
    rows = [["exactly zero weights", "of touched", "", "of all", ""]]
    for prefix in (WIDE, DEEP, FACTOR):
        tables = [prefix + feature for feature in order if prefix + feature in history.zeros]
        rows += [_zero_row(table, history.zeros[table]) for table in tables]
        if tables:
            rows.append(_zero_row(f"all {prefix.rstrip('_')}", total_of(history.zeros, prefix)))
    return "\n".join([*lines, format_table(rows)])


def draw_curves(path: Path, config: Config, history: History) -> None:
    """Draw loss, held-out quality and wide sparsity over the steps as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, auc_axes, zero_axes = figure.subplots(1, 3)
    window = max(1, len(history.losses) // 100)
    means = [
        sum(chunk) / len(chunk)
        for chunk in (
            history.losses[start : start + window]
            for start in range(0, len(history.losses), window)
        )
    ]
    loss_axes.plot([window * (index + 1) for index in range(len(means))], means, label="training")
    steps = [evaluation.step for evaluation in history.evaluations]
    held_out = config.data.evaluate_on
    log_losses = [evaluation.quality.log_loss for evaluation in history.evaluations]
    loss_axes.plot(steps, log_losses, "o-", label=held_out)
    loss_axes.set(title="log loss", xlabel="step")
    loss_axes.legend()
    known = [e for e in history.evaluations if e.quality.auc is not None]
    auc_axes.plot([e.step for e in known], [e.quality.auc for e in known], "o-")
    auc_axes.set(title=f"{held_out} AUC", xlabel="step")
    draw_zeros(zero_axes, history)
    figure.suptitle(config.name)
    figure.savefig(path, dpi=120)


def draw_zeros(axes: Axes, history: History) -> None:
    """Draw the share of zeros among touched weights over the steps, a line for each kind of table.

    Args:
        axes: Where to draw.
        history: What happened.
    """
    counts = history.zeros_over_steps()
    for prefix, label in ((WIDE, "wide"), (DEEP, "deep"), (FACTOR, "factors")):
        totals = [total_of(count.zeros, prefix) for count in counts]
        if any(total.total for total in totals):
            shares = [total.touched_share for total in totals]
            axes.plot([count.step for count in counts], shares, "o-", label=label)
            axes.legend()
    axes.set(title="zeros among touched weights", xlabel="step", ylim=(-0.02, 1.02))


def _with_totals(zeros: Mapping[str, ZeroCount]) -> dict[str, ZeroCount]:
    """Add the totals of all kinds of tables that there are."""
    totals = {f"all_{kind.rstrip('_')}": total_of(zeros, kind) for kind in (WIDE, DEEP, FACTOR)}
    return {table: count for table, count in {**zeros, **totals}.items() if count.total}


def _shares(count: ZeroCount) -> dict[str, float]:
    return {"touched_share": count.touched_share, "share": count.share}


def _zero_row(name: str, count: ZeroCount) -> list[str]:
    return [
        name,
        f"{count.touched_zeros}/{count.touched}",
        f"{count.touched_share:.1%}",
        f"{count.zeros}/{count.total}",
        f"{count.share:.1%}",
    ]


def _new_folder(folder: Path) -> Path:
    for number in range(1, 1000):
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            continue
        return candidate
    raise UserError(f"a thousand folders named {folder}-* exist; choose one with --output")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
