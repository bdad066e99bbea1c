"""``python -m benchmarks``: our backward and whole step against FBGEMM's and torch's, on the CPU.

The two contenders of a pair take turns in one process, on the same fresh batch, so that whatever
else the machine does falls on both. Only ratios mean something: the median, over the batches, of
rival / ours on one batch, which a burst of other work on the machine leaves alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from benchmarks.contenders import Contender, TorchSparse, fbgemm, ours
from benchmarks.memory import report_memory
from benchmarks.shapes import SHAPES, ZIPF_EXPONENT, Indices, Shape
from torchrec_ext import _C, OptimType

WARM_UP = 3


@dataclass(frozen=True)
class Pair:
    """Ours and a rival; a target is the least ratio of backwards, rival / ours."""

    name: str
    ours: Callable[[Shape], Contender]
    rival: Callable[[Shape], Contender]
    target: float | None = None


PAIRS = (
    Pair(
        "FTRL / FBGEMM EXACT_ADAGRAD",
        ours(OptimType.FTRL),
        fbgemm(EmbOptimType.EXACT_ADAGRAD),
        3.5,
    ),
    Pair(
        "EXACT_ADAGRAD / FBGEMM's",
        ours(OptimType.EXACT_ADAGRAD),
        fbgemm(EmbOptimType.EXACT_ADAGRAD),
        3.5,
    ),
    Pair(
        "EXACT_ROWWISE_ADAGRAD / FBGEMM's",
        ours(OptimType.EXACT_ROWWISE_ADAGRAD),
        fbgemm(EmbOptimType.EXACT_ROWWISE_ADAGRAD),
        3.5,
    ),
    Pair(
        "EXACT_ROWWISE_ADAGRAD / FBGEMM's, shared tables",
        ours(OptimType.EXACT_ROWWISE_ADAGRAD, shared=True),
        fbgemm(EmbOptimType.EXACT_ROWWISE_ADAGRAD, shared=True),
        3.5,
    ),
    Pair(
        "FTRL / FBGEMM EXACT_SGD",
        ours(OptimType.FTRL),
        fbgemm(EmbOptimType.EXACT_SGD),
        1.0 / 1.5,
    ),
    Pair(
        "FTRL / torch.optim.Adagrad, sparse",
        ours(OptimType.FTRL),
        functools.partial(TorchSparse, optimizer=torch.optim.Adagrad),
    ),
    Pair(
        "ADAM / FBGEMM EXACT_ADAGRAD",
        ours(OptimType.ADAM),
        fbgemm(EmbOptimType.EXACT_ADAGRAD),
        3.5,
    ),
    Pair(
        "ADAM / torch.optim.SparseAdam",
        ours(OptimType.ADAM),
        functools.partial(TorchSparse, optimizer=torch.optim.SparseAdam),
    ),
    Pair(
        "ADAM / ADAM dense",
        ours(OptimType.ADAM),
        ours(OptimType.ADAM, sparse_mode="dense"),
    ),
)


@dataclass(frozen=True)
class Result:
    """Medians over the batches: times in milliseconds, and ratios rival / ours."""

    pair: str
    shape: str
    distribution: str
    target: float | None
    ours_backward: float
    rival_backward: float
    ours_step: float
    rival_step: float
    backward_ratio: float
    step_ratio: float


def measure(pair: Pair, shape: Shape, distribution: str, repetitions: int) -> Result:
    """Run a pair in turns."""
    contenders = (pair.ours(shape), pair.rival(shape))
    indices, offsets = Indices(shape, distribution), shape.offsets()
    gradient = torch.randn(shape.batch_size, shape.tables * shape.dim)
    backwards: tuple[list[float], list[float]] = ([], [])
    steps: tuple[list[float], list[float]] = ([], [])
    for repetition in range(WARM_UP + repetitions):
        batch = indices.draw()
        for k in (0, 1) if repetition % 2 else (1, 0):
            begin = time.perf_counter()
            output = contenders[k].forward(batch, offsets)
            middle = time.perf_counter()
            contenders[k].backward(output, gradient)
            end = time.perf_counter()
            if repetition >= WARM_UP:
                backwards[k].append((end - middle) * 1e3)
                steps[k].append((end - begin) * 1e3)
    medians = [statistics.median(times) for times in (*backwards, *steps)]
    medians += [
        statistics.median(rival / own for own, rival in zip(*times, strict=True))
        for times in (backwards, steps)
    ]
    return Result(pair.name, str(shape), distribution, pair.target, *medians)


def format_results(results: list[Result]) -> str:
    """The table, and geometric means by pair."""
    lines = []
    for name in dict.fromkeys(result.pair for result in results):
        own = [result for result in results if result.pair == name]
        target = own[0].target
        lines.append("")
        lines.append(name + (f" (target {target:.2f})" if target else ""))
        lines.append(
            f"  {'tables x rows x dim, batch x pooling':38}{'indices':9}{'ours ms':>9}"
            f"{'rival ms':>10}{'ratio':>8}{'step':>8}"
        )
        for r in own:
            mark = " below target" if target and r.backward_ratio < target else ""
            lines.append(
                f"  {r.shape:38}{r.distribution:9}{r.ours_backward:9.2f}{r.rival_backward:10.2f}"
                f"{r.backward_ratio:8.2f}{r.step_ratio:8.2f}{mark}"
            )
        mean = math.exp(statistics.fmean(math.log(r.backward_ratio) for r in own))
        lines.append(f"  {'geometric mean of the ratios':66}{mean:8.2f}")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--capability", choices=["default", "avx2", "avx512"])
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))))
    parser.add_argument("--pairs", nargs="+", help="parts of the names of the pairs to run")
    parser.add_argument("--quick", action="store_true", help="small tables, to see that it runs")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    return parser.parse_args()


def main() -> None:
    """Run all pairs on all shapes."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    if arguments.capability:
        _C.set_cpu_capability(arguments.capability)
    shapes = [SHAPES[number] for number in arguments.shapes]
    if arguments.quick:
        shapes = [Shape(s.tables, 10_000, s.dim, 256, s.pooling) for s in shapes]
    pairs = [p for p in PAIRS if not arguments.pairs or any(n in p.name for n in arguments.pairs)]
    build = _C.build_information()
    print(
        f"{arguments.threads} threads, {build['cpu_capability']}, compiler {build['compiler']}, "
        f"torch {torch.__version__}; medians of {arguments.repetitions} fresh batches; zipf: "
        f"exponent {ZIPF_EXPONENT}, hot rows spread at random"
    )
    results = []
    runs = [(p, s, d) for p in pairs for s in shapes for d in ("zipf", "uniform")]
    for number, (pair, shape, distribution) in enumerate(runs, start=1):
        print(f"[{number}/{len(runs)}] {pair.name}: {shape}, {distribution}", file=sys.stderr)
        results.append(measure(pair, shape, distribution, arguments.repetitions))
    print(format_results(results))
    memory = report_memory()
    print(memory.text)
    if arguments.json:
        content = {
            "threads": arguments.threads,
            "build": build,
            "torch": torch.__version__,
            "results": [asdict(result) for result in results],
            "extra_memory_bytes": memory.figures,
        }
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
        print(f"Written to {arguments.json}")


if __name__ == "__main__":
    main()
