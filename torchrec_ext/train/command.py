"""``torchrec-ext train``: from a configuration file to a run folder."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm.contrib.logging import logging_redirect_tqdm

from torchrec_ext import __version__
from torchrec_ext.train.config import Config
from torchrec_ext.train.config_file import load_config
from torchrec_ext.train.data import load
from torchrec_ext.train.distribute import describe_plan, distribute
from torchrec_ext.train.errors import AgreedError, UserError
from torchrec_ext.train.loop import Trainer, check_batch_size
from torchrec_ext.train.model import build_model
from torchrec_ext.train.ranks import Ranks, StopRequest, connected
from torchrec_ext.train.report import (
    format_results,
    format_table,
    make_run_folder,
    write_config,
    write_results,
)

LOGGER = logging.getLogger(__name__)
PACKAGE_LOGGER = logging.getLogger("torchrec_ext")
EXIT_USER_ERROR = 2


def parser(prog: str) -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    arguments = argparse.ArgumentParser(
        prog=prog,
        description="Train a sharded model. Start it with torchrun for several ranks.",
    )
    arguments.add_argument("config", help="YAML file, see configs/")
    arguments.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="replace one value of the file, e.g. --set optimizer.l1_reg=0; may be repeated",
    )
    arguments.add_argument(
        "--output", metavar="FOLDER", help="run folder, by default runs/<name>-<date>-<time>"
    )
    return arguments


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
    arguments = parser(prog).parse_args(argv)
    _configure_logging()
    try:
        with connected() as ranks:
            return _run_on(ranks, arguments)
    except UserError as error:
        LOGGER.error("%s", error)
        return EXIT_USER_ERROR


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
        print(format_table(describe_plan(distributed.plan, config)), flush=True)
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


def _run_on(ranks: Ranks, arguments: argparse.Namespace) -> int:
    PACKAGE_LOGGER.setLevel(logging.INFO if ranks.first else logging.ERROR)
    try:
        config = ranks.agree(lambda: load_config(arguments.config, arguments.overrides))
        return train(config, ranks, arguments.output)
    except AgreedError as error:
        if ranks.first:
            LOGGER.error("%s", error)
        # torchrun ends all ranks when the first one fails: let rank 0 speak before that.
        torch.distributed.barrier()
        return EXIT_USER_ERROR


def _start_folder(config: Config, output: str | None) -> str:
    folder = make_run_folder(output, config.name)
    write_config(folder, config)
    return str(folder)


def _configure_logging() -> None:
    """Log this package to stderr, and of the libraries below it only errors.

    TorchRec, FBGEMM and torch warn about their own internals on every run; nothing in these
    warnings is in the hands of the person who runs the command.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    PACKAGE_LOGGER.handlers[:] = [handler]
    PACKAGE_LOGGER.propagate = False
    for name in ("torchrec", "torch.fx", "root"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for module in ("torchrec", "fbgemm_gpu", "torch"):
        warnings.filterwarnings("ignore", module=rf"{module}\.")
