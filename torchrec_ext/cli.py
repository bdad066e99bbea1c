"""The program ``torchrec-ext``: one subcommand per task."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

# The shell's convention for a process that SIGINT ended.
EXIT_INTERRUPTED = 130
EXIT_NOT_INSTALLED = 2


class Command(NamedTuple):
    """A subcommand.

    Attributes:
        module: Imported only when the subcommand runs; has ``main(argv, prog) -> exit code``.
        summary: One line of help.
    """

    module: str
    summary: str


COMMANDS: dict[str, Command] = {
    "train": Command("torchrec_ext.train.command", "train a sharded model from a YAML file"),
    "sparsity": Command("torchrec_ext.train.sparsity", "say what of a checkpoint's tables is zero"),
    "export": Command("torchrec_ext.train.export", "write a checkpoint's rows that are not zero"),
    "parity": Command("torchrec_ext.twin.command", "train a twin of FBGEMM's module, and compare"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and give its exit code.

    Args:
        argv: Arguments without the program's name; None for those of the process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    summaries = "\n".join(f"  {name:8} {command.summary}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="torchrec-ext",
        description=f"commands:\n{summaries}",
        epilog="torchrec-ext COMMAND --help describes a command",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    # Only the first argument is read here, so that importing TorchRec can wait for the choice.
    command = parser.parse_args(given[:1]).command
    try:
        return _run(command, given[1:])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(command: str, argv: Sequence[str]) -> int:
    try:
        module = importlib.import_module(COMMANDS[command].module)
    except ModuleNotFoundError as error:
        print(
            f"torchrec-ext {command}: the package {error.name!r} is not installed; TorchRec and "
            "FBGEMM are needed (see the README), and pip install 'torchrec_ext[train]'",
            file=sys.stderr,
        )
        return EXIT_NOT_INSTALLED
    return module.main(argv, prog=f"torchrec-ext {command}")


if __name__ == "__main__":
    sys.exit(main())
