"""``torchrec-ext sparsity``: what of a checkpoint's tables is zero, as text and as a picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from torchrec_ext.command.errors import UserError
from torchrec_ext.command.run import run_alone
from torchrec_ext.sparsity import format_sparsity, measure
from torchrec_ext.train.history import CountedZeros
from torchrec_ext.train.saved_run import open_run
from torchrec_ext.train.sparsity_picture import draw_sparsity, norms_of_rows
from torchrec_ext.train.tables import count_zeros_of

PICTURE = "sparsity.png"


def main(argv: Sequence[str] | None = None, prog: str = "torchrec-ext sparsity") -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; None for those of the process.
        prog: Name of the program for help and errors.

    Returns:
        Exit code: 0, or 2 after an error that the user can correct.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Print what of a checkpoint's tables is zero, and draw the share of zeros over "
        "the steps and the norms of rows. Tables are read one at a time.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="run folder of torchrec-ext train, for its newest checkpoint, or a single checkpoint",
    )
    parser.add_argument(
        "--picture",
        metavar="FILE",
        help=f"PNG to write, by default {PICTURE} in the run folder, or for a single checkpoint in "
        "the current one",
    )
    arguments = parser.parse_args(argv)
    return run_alone(lambda: _report(Path(arguments.checkpoint), arguments.picture))


def _report(given: Path, picture: str | None) -> int:
    run = open_run(given)
    path = Path(picture or (PICTURE if run.folder == given else given / PICTURE))
    figures, norms, zeros = [], {}, {}
    for table in run.tables:
        weight = run.read_table(table)
        figures += measure({table.name: weight})
        norms[table.name] = norms_of_rows(weight)
        zeros[table.name] = count_zeros_of(weight, run.read_touched(table))
        del weight  # before the next one is read
    # The history ends before the evaluation that may follow the checkpoint.
    history = run.history
    history.counted.append(CountedZeros(run.progress.step, zeros))
    try:
        draw_sparsity(path, f"{run.config.name}, step {run.progress.step}", history, norms)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    print(f"{run.folder}, step {run.progress.step}")
    print(format_sparsity(figures))
    print(f"Written to {path}", flush=True)
    return 0
