"""``torchrec-ext train``: from a configuration file to a run folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm.contrib.logging import logging_redirect_tqdm

from torchrec_ext import __version__
from torchrec_ext.command.errors import AgreedError
from torchrec_ext.command.ranks import Ranks, StopRequest
from torchrec_ext.command.run import PACKAGE_LOGGER, config_parser, run
from torchrec_ext.distributed.failures import abort_together
from torchrec_ext.distributed.planner import plan_table
from torchrec_ext.text_table import format_table
from torchrec_ext.train.checkpoint import Checkpoints
from torchrec_ext.train.checkpoint_folder import CHECKPOINTS
from torchrec_ext.train.config import Config
from torchrec_ext.train.data import Split, load
from torchrec_ext.train.distribute import Distributed, describe_plan, distribute
from torchrec_ext.train.loop import Trainer, check_batch_size, total_steps
from torchrec_ext.train.model import build_model
from torchrec_ext.train.report import (
    format_results,
    make_run_folder,
    write_config,
    write_results,
)
from torchrec_ext.train.resume import ResumePoint, check_resumable, find_resume_point

LOGGER = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None, prog: str = "torchrec-ext train") -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; None for those of the process.
        prog: Name of the program for help and errors.

    Returns:
        Exit code: 0, 2 after an error that the user can correct, 3 if another rank was lost, 128
        plus the signal's number after an interruption.

    Raises:
        KeyboardInterrupt: If interrupted before training began.
    """
    parser = config_parser(
        prog,
        "Train a sharded model. Start it with torchrun for several ranks.",
        "optimizer.l1_reg=0",
    )
    parser.add_argument(
        "--output", metavar="FOLDER", help="run folder, by default runs/<name>-<date>-<time>"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="go on from the newest checkpoint of this run folder, by default of --output, or from "
        "this single checkpoint",
    )
    arguments = parser.parse_args(argv)

    def work(config: Config, ranks: Ranks) -> int:
        with abort_together(config.train.abort_seconds, known_to_all=(AgreedError,)):
            return train(config, ranks, arguments.output, arguments.resume)

    return run(Config, arguments, work)


def train(config: Config, ranks: Ranks, output: str | None, resume: str | None = None) -> int:
    """Train, report and write the run folder.

    Args:
        config: The run's configuration.
        ranks: All ranks, each of which makes this call.
        output: The run folder, None for the default.
        resume: As in ``find_resume_point``; None to begin anew.

    Returns:
        The exit code, see ``main``.

    Raises:
        UserError: See ``data.load``, ``distribute``, ``Trainer``, ``find_resume_point`` and
            ``checkpoint``.
    """
    split = ranks.agree(lambda: load(config.data))
    ranks.agree(
        lambda: check_batch_size(config.train.batch_size, len(split.train), ranks.world_size)
    )
    point = ranks.on_first(lambda: _resume_point(config, split, output, resume))
    torch.manual_seed(config.seed)
    distributed = distribute(build_model(config.model, split.train), config, ranks)
    folder = Path(ranks.on_first(lambda: _run_folder(config, output, point)))
    if ranks.first:
        _print_plan(config, split, distributed, ranks)
    stop = StopRequest()
    with stop.listening(), logging_redirect_tqdm([PACKAGE_LOGGER]):
        checkpoints = _checkpoints(folder, config, split, distributed, ranks)
        trainer = Trainer(config, split, distributed, ranks, stop, checkpoints)
        if point is not None:
            trainer.resume(point.folder, point.progress)
            LOGGER.info("resumed %s after step %d", point.folder, point.progress.step)
        # Only now, so that a checkpoint that does not fit leaves the run's folder as it was.
        ranks.on_first(lambda: write_config(folder, config))
        history = trainer.run()
        facts = {
            "name": config.name,
            "interrupted": stop.signal is not None,
            "world_size": ranks.world_size,
            "versions": {"torchrec_ext": __version__, "torch": torch.__version__},
        }
        if point is not None:
            facts["resumed_after_step"] = point.progress.step
        ranks.on_first(lambda: write_results(folder, config, history, facts))
    if ranks.first:
        if stop.signal is not None:
            LOGGER.warning("interrupted after step %d", len(history.losses))
        print(format_results(config, history, list(split.train.features)))
        print(f"Written to {folder}", flush=True)
    return stop.exit_code


def _print_plan(config: Config, split: Split, distributed: Distributed, ranks: Ranks) -> None:
    print(f"Sharding plan for {ranks.world_size} rank(s)")
    print(format_table(describe_plan(distributed.plan, config)))
    print("Memory of the plan in bytes")
    print(plan_table(distributed.memory), flush=True)
    LOGGER.info(
        "%d training examples, %d %s examples",
        len(split.train),
        len(split.held_out),
        config.data.evaluate_on,
    )


def _resume_point(
    config: Config, split: Split, output: str | None, resume: str | None
) -> ResumePoint | None:
    if resume is None:
        return None
    point = find_resume_point(resume, output)
    steps = total_steps(config.train, len(split.train))
    check_resumable(point, config, split.fingerprint(), steps)
    return point


def _checkpoints(
    folder: Path, config: Config, split: Split, distributed: Distributed, ranks: Ranks
) -> Checkpoints | None:
    if config.checkpoint is None:
        return None
    return Checkpoints(folder / CHECKPOINTS, config, split, distributed, ranks)


def _run_folder(config: Config, output: str | None, point: ResumePoint | None) -> str:
    if point is not None and point.run is not None:
        return str(point.run)
    return str(make_run_folder(output, config.name))
