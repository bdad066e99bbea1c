"""``torchrec-ext export``: a checkpoint's model without its zero rows, as files to ship.

The folder it writes has one file of ``torchrec_ext.sparse_model`` for each collection of tables,
named after the module that holds it; the model's other parameters; and the configuration.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from torchrec_ext.command.config_file import dump_config
from torchrec_ext.command.errors import UserError
from torchrec_ext.command.run import run_alone
from torchrec_ext.sparse_model import SparseCollection, SparseModelError, prune_table, write
from torchrec_ext.sparse_model.files import SUFFIX, write_tensors
from torchrec_ext.sparsity import TableSparsity, format_sparsity, measure
from torchrec_ext.train.data import load
from torchrec_ext.train.export_check import Comparison, compare
from torchrec_ext.train.exported import DENSE
from torchrec_ext.train.saved_run import SavedRun, open_run

LOGGER = logging.getLogger(__name__)
CONFIG = "config.yaml"
EXIT_DIFFERENT = 1
# A float32.
_WEIGHT_BYTES = 4


def main(argv: Sequence[str] | None = None, prog: str = "torchrec-ext export") -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; None for those of the process.
        prog: Name of the program for help and errors.

    Returns:
        Exit code: 0, 1 if the outputs differ, or 2 after an error that the user can correct.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Write the rows of a checkpoint's tables that are not zero, one file for each "
        "collection, and compare the outputs on the held-out examples with the whole model's.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="run folder of torchrec-ext train, for its newest checkpoint, or a single checkpoint",
    )
    parser.add_argument("out", metavar="OUT", help="folder to write; it must not exist")
    parser.add_argument(
        "--no-check",
        action="store_true",
        help="do not compare outputs, which takes the data and the memory of the whole model",
    )
    arguments = parser.parse_args(argv)
    return run_alone(
        lambda: export(Path(arguments.checkpoint), Path(arguments.out), not arguments.no_check)
    )


def export(checkpoint: Path, out: Path, check: bool) -> int:
    """Write the model and report; see ``main``.

    Args:
        checkpoint: What ``open_run`` takes.
        out: The folder to write, which appears when it is complete.
        check: Whether to compare outputs.

    Raises:
        UserError: ``out`` exists or cannot be written, or the checkpoint cannot be read.
    """
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists; remove it or choose another folder")
    run = open_run(checkpoint)
    with _new_folder(out) as partial:
        figures = _write(run, partial)
        print(f"{run.folder}, step {run.progress.step}")
        print(format_sparsity(figures))
        before = run.weights * _WEIGHT_BYTES
        after = sum(path.stat().st_size for path in partial.glob(f"*{SUFFIX}"))
        print(
            f"{before} bytes before (all weights as float32), {after} bytes after (files), "
            f"{after / before:.1%}"
        )
        comparison = _compare(run, partial) if check else None
        if comparison is not None:
            print(_described(comparison, run.config.data.evaluate_on))
            if not comparison.equal:
                LOGGER.error("the outputs without zero rows differ: nothing was written")
                return EXIT_DIFFERENT
        partial.rename(out)
    print(f"Written to {out}", flush=True)
    return 0


def _write(run: SavedRun, folder: Path) -> list[TableSparsity]:
    """Write all files; whole tables are in memory one at a time."""
    figures = []
    try:
        for collection, tables in groupby(run.tables, lambda table: table.collection):
            pruned = []
            for table in tables:
                weight = run.read_table(table)
                figures += measure({table.name: weight})
                optimizer = run.optimizer_of(table)
                pruned.append(prune_table(weight, table.name, (table.feature,), "sum", optimizer))
                del weight  # before the next one is read
            write(SparseCollection(tuple(pruned)), folder / f"{collection}{SUFFIX}")
        write_tensors(run.read_parameters(), folder / DENSE, {})
        (folder / CONFIG).write_text(dump_config(run.config), encoding="utf-8")
    except (OSError, SparseModelError) as error:
        raise UserError(f"cannot write {folder}: {error}") from error
    return figures


def _compare(run: SavedRun, folder: Path) -> Comparison | None:
    """Compare on the run's data; without it, say so."""
    try:
        split = load(run.config.data)
        if split.fingerprint() != run.progress.data:
            raise UserError("data: other examples than the run's")
    except UserError as error:
        LOGGER.warning("outputs were not compared: %s", error)
        return None
    return compare(run, folder, split)


def _described(comparison: Comparison, evaluate_on: str) -> str:
    whole, pruned = (
        "undefined" if auc is None else f"{auc:.6f}"
        for auc in (comparison.whole_auc, comparison.pruned_auc)
    )
    return (
        f"{evaluate_on}, {comparison.examples} examples: AUC {whole} whole, {pruned} without zero "
        f"rows; largest difference {comparison.embedding_difference:g} of pooled embeddings, "
        f"{comparison.logit_difference:g} of logits"
    )


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Give a folder to be renamed to ``out``; it goes where that does not happen."""
    partial = out.with_name(out.name + ".partial")
    try:
        partial.mkdir(parents=True)
    except FileExistsError as error:
        raise UserError(f"{partial} exists, left by an interrupted export; remove it") from error
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
