"""``python -m benchmarks.gpu``: the fused update on a CUDA device.

Needs neither FBGEMM nor TorchRec; where the package fbgemm-gpu is installed, FBGEMM's backward is
measured beside ours. Reported is the bandwidth: the bytes that a step has to move (docs/cuda.md),
over its time, as a share of what a copy within the device's memory moves in that time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.gpu_bytes import step_bytes
from benchmarks.shapes import Indices, Shape
from torchrec_ext import OptimType, ops
from torchrec_ext.optimizers import spec_of

#: Tables and batches that are several times larger than a second-level cache of 50 MB.
SHAPES = (
    Shape(4, 2_000_000, 64, 16_384, 20),
    Shape(8, 1_000_000, 128, 8_192, 20),
    Shape(26, 1_000_000, 16, 65_536, 1),
    Shape(1, 10_000_000, 64, 65_536, 20),
)
#: One feature with three values: every row has a third of the lookups.
SKEWED = Shape(1, 3, 64, 65_536, 1)
OPTIMIZERS = (
    OptimType.FTRL,
    OptimType.ADAM,
    OptimType.EXACT_ADAGRAD,
    OptimType.EXACT_ROWWISE_ADAGRAD,
)
WARM_UP, REPETITIONS, BATCHES = 5, 30, 4


@dataclass(frozen=True)
class Result:
    """One optimizer on one shape.

    Attributes:
        optimizer: Its name.
        shape: The shape.
        distribution: How indices are drawn.
        milliseconds: Median of a step.
        bytes_moved: What the step has to move.
        share_of_copy: Bytes over time, over the same of a copy.
        fbgemm: FBGEMM's median backward over ours, by FBGEMM's optimizer.
    """

    optimizer: str
    shape: str
    distribution: str
    milliseconds: float
    bytes_moved: int
    share_of_copy: float
    fbgemm: dict[str, float]


def median_milliseconds(run: Callable[[int], object]) -> float:
    """The median time of ``run(batch)`` on the device, by events."""
    for i in range(WARM_UP):
        run(i % BATCHES)
    times = []
    for i in range(REPETITIONS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run(i % BATCHES)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def copy_bytes_per_millisecond() -> float:
    """What a copy of 2 GiB reads and writes in a millisecond."""
    source = torch.ones(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_milliseconds(lambda _: target.copy_(source))


class Update:
    """Our op on a shape's tables.

    Args:
        shape: The shape.
        optimizer: Which update.
        batches: Indices, on the device.
        gradient: Of the output, on the device.
    """

    def __init__(
        self, shape: Shape, optimizer: OptimType, batches: list[Tensor], gradient: Tensor
    ) -> None:
        device = torch.device("cuda")
        spec = spec_of(optimizer)
        resolved = spec.resolve({"learning_rate": 0.01})
        self.states = spec.states_for(resolved)
        widths = [1 if state.rowwise else shape.dim for state in self.states]
        sizes = [shape.rows * width for width in (shape.dim, *widths)]
        layout = torch.tensor(
            [[shape.rows, shape.dim, *(t * size for size in sizes)] for t in range(shape.tables)]
        )
        features = torch.arange(shape.tables)
        offsets = shape.offsets().to(device)
        buffers = [torch.rand(shape.tables * size, device=device) for size in sizes]
        tables = ops.device_layout(layout, features, device)
        values = spec.kernel_values(resolved)
        scalars = ops.step_scalars(values, 0, device)

        def step(batch: int) -> None:
            ops.fused_update(
                gradient,
                buffers[0],
                buffers[1:],
                layout,
                features,
                batches[batch],
                offsets,
                None,
                pooling_mode=ops.POOLING_SUM,
                optimizer=optimizer,
                hyperparameters=values,
                tables=tables,
                scalars=scalars,
            )

        self.step = step


def fbgemm_milliseconds(shape: Shape, batches: list[Tensor], gradient: Tensor) -> dict[str, float]:
    """Median backwards of FBGEMM's optimizers; empty where there is no fbgemm-gpu."""
    try:
        from benchmarks.gpu_rivals import backward
    except ImportError:
        return {}
    return {
        name: median_milliseconds(backward(shape, name, batches, gradient))
        for name in ("EXACT_ADAGRAD", "ADAM")
    }


def measure(shape: Shape, distribution: str, copy: float) -> list[Result]:
    """All optimizers on one shape."""
    indices = Indices(shape, distribution)
    drawn = [indices.draw() for _ in range(BATCHES)]
    batches = [batch.to("cuda") for batch in drawn]
    gradient = torch.randn(shape.batch_size, shape.tables * shape.dim, device="cuda")
    rivals = fbgemm_milliseconds(shape, batches, gradient)
    results = []
    for optimizer in OPTIMIZERS:
        update = Update(shape, optimizer, batches, gradient)
        time = median_milliseconds(update.step)
        moved = statistics.mean(step_bytes(shape, batch, update.states) for batch in drawn)
        ratios = {name: rival / time for name, rival in rivals.items()}
        share = moved / time / copy
        results.append(
            Result(optimizer.name, str(shape), distribution, time, int(moved), share, ratios)
        )
        print(format_result(results[-1]), flush=True)
    return results


def format_result(result: Result) -> str:
    """One line."""
    ratios = ", ".join(f"FBGEMM {name} {ratio:.2f}x" for name, ratio in result.fbgemm.items())
    return (
        f"{result.shape:32} {result.distribution:8} {result.optimizer:22} "
        f"{result.milliseconds:8.3f} ms {result.bytes_moved / 1e6:9.1f} MB "
        f"{100 * result.share_of_copy:5.1f} % of a copy  {ratios}"
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("python -m benchmarks.gpu: there is no CUDA device; nothing was measured")
    torch.manual_seed(0)
    copy = copy_bytes_per_millisecond()
    print(f"{torch.cuda.get_device_name()}: a copy moves {copy / 1e9:.2f} TB/s", flush=True)
    results = []
    for shape in SHAPES:
        for distribution in ("zipf", "uniform"):
            results += measure(shape, distribution, copy)
    results += measure(SKEWED, "uniform", copy)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(result) for result in results], file, indent=1)


if __name__ == "__main__":
    main()
