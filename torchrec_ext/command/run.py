"""How a subcommand runs: arguments, ranks, the configuration, and one line for every mistake."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from torchrec_ext.command.config_file import Kind, load_config
from torchrec_ext.command.errors import AgreedError, UserError
from torchrec_ext.command.ranks import Ranks, connected
from torchrec_ext.distributed.failures import EXIT_CODE, RankFailedError, lost_connection

LOGGER = logging.getLogger(__name__)
PACKAGE_LOGGER = logging.getLogger("torchrec_ext")
EXIT_USER_ERROR = 2
EXIT_LOST_RANK = EXIT_CODE


def config_parser(prog: str, description: str, example: str) -> argparse.ArgumentParser:
    """Build a parser for ``CONFIG.yaml`` and ``--set KEY=VALUE``.

    Args:
        prog: Name of the program for help and errors.
        description: What the subcommand does.
        example: A ``KEY=VALUE`` for the help of ``--set``.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("config", help="YAML file, see configs/")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help=f"replace one value of the file, e.g. --set {example}; may be repeated",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="how long a rank waits for one that does not answer before it gives up, by default "
        "half an hour; one that ends is noticed at once",
    )
    return parser


def _seconds(text: str) -> timedelta:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return timedelta(seconds=seconds)


def run(kind: type[Kind], arguments: argparse.Namespace, work: Callable[[Kind, Ranks], int]) -> int:
    """Read the configuration on every rank and do the work.

    Args:
        kind: What the configuration holds.
        arguments: Of ``config_parser``.
        work: Called on every rank; gives the exit code. ``UserError`` must be raised as
            ``AgreedError``, see ``Ranks.agree``.

    Returns:
        The exit code of ``work``, 2 after an error that the user can correct, or 3 if another
        rank ended or does not answer.

    Raises:
        KeyboardInterrupt: If interrupted outside of ``work``.
    """
    _configure_logging()
    try:
        with connected(arguments.timeout) as ranks:
            return _run_on(ranks, kind, arguments, work)
    except UserError as error:
        LOGGER.error("%s", error)
        return EXIT_USER_ERROR
    except RuntimeError as error:
        problem = str(error) if isinstance(error, RankFailedError) else lost_connection(error)
        if problem is None:
            raise
        LOGGER.error("another rank ended or does not answer, so this one ends: %s", problem)
        return EXIT_LOST_RANK


def run_alone(work: Callable[[], int]) -> int:
    """Do work that takes one process and no configuration.

    Args:
        work: Gives the exit code.

    Returns:
        The exit code of ``work``, or 2 after an error that the user can correct.
    """
    _configure_logging()
    PACKAGE_LOGGER.setLevel(logging.INFO)
    try:
        return work()
    except UserError as error:
        LOGGER.error("%s", error)
        return EXIT_USER_ERROR


def _run_on(
    ranks: Ranks,
    kind: type[Kind],
    arguments: argparse.Namespace,
    work: Callable[[Kind, Ranks], int],
) -> int:
    PACKAGE_LOGGER.setLevel(logging.INFO if ranks.first else logging.ERROR)
    try:
        config = ranks.agree(lambda: load_config(kind, arguments.config, arguments.overrides))
        return work(config, ranks)
    except AgreedError as error:
        if ranks.first:
            LOGGER.error("%s", error)
        # torchrun ends all ranks when the first one fails: let rank 0 speak before that.
        dist.barrier()
        return EXIT_USER_ERROR


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
