"""``torchrec-ext train``: from a configuration file to a run folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm.contrib.logging import logging_redirect_tqdm

from torchrec_ext import __version__
from torchrec_ext.command.ranks import Ranks, StopRequest
from torchrec_ext.command.run import PACKAGE_LOGGER, config_parser, run
from torchrec_ext.distributed.planner import plan_table
from torchrec_ext.text_table import format_table
from torchrec_ext.train.config import Config
from torchrec_ext.train.data import load
from torchrec_ext.train.distribute import describe_plan, distribute
from torchrec_ext.train.loop import Trainer, check_batch_size
from torchrec_ext.train.model import build_model
from torchrec_ext.train.report import (
    format_results,
    make_run_folder,
    write_config,
    write_results,
)

LOGGER = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None, prog: str = "torchrec-ext train") -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; None for those of the process.
        prog: Name of the program for help and errors.

    Returns:
        Exit code: 0, 2 after an error that the user can correct, 128 plus the signal's number
        after an interruption.

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
    arguments = parser.parse_args(argv)
    return run(Config, arguments, lambda config, ranks: train(config, ranks, arguments.output))


def train(config: Config, ranks: Ranks, output: str | None) -> int:
    """Train, report and write the run folder.

    Args:
        config: The run's configuration.
        ranks: All ranks, each of which makes this call.
        output: The run folder, None for the default.

    Returns:
        The exit code, see ``main``.

    Raises:
        UserError: See ``data.load``, ``distribute`` and ``Trainer``.
    """
    split = ranks.agree(lambda: load(config.data))
    ranks.agree(
        lambda: check_batch_size(config.train.batch_size, len(split.train), ranks.world_size)
    )
    torch.manual_seed(config.seed)
    distributed = distribute(build_model(config.model, split.train), config, ranks)
    folder = Path(ranks.on_first(lambda: _start_folder(config, output)))
    if ranks.first:
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
    stop = StopRequest()
    with stop.listening(), logging_redirect_tqdm([PACKAGE_LOGGER]):
        trainer = Trainer(config, split, distributed, ranks, stop)
        history = trainer.run()
        facts = {
            "name": config.name,
            "interrupted": stop.signal is not None,
            "world_size": ranks.world_size,
            "versions": {"torchrec_ext": __version__, "torch": torch.__version__},
        }
        ranks.on_first(lambda: write_results(folder, config, history, facts))
    if ranks.first:
        if stop.signal is not None:
            LOGGER.warning("interrupted after step %d", len(history.losses))
        print(format_results(config, history, list(split.train.features)))
        print(f"Written to {folder}", flush=True)
    return stop.exit_code


def _start_folder(config: Config, output: str | None) -> str:
    folder = make_run_folder(output, config.name)
    write_config(folder, config)
    return str(folder)
