"""Checks that the extension has CUDA kernels, which PyTorch's CUDA build shows without a GPU."""

import sys

import torch

import torchrec_ext.ops  # noqa: F401  its import registers the kernels

OPS = ("fused_update", "per_sample_weight_grad", "lookup")

missing = [
    op
    for op in OPS
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"torchrec_ext::{op}", "CUDA")
]
if missing:
    sys.exit(f"torchrec_ext was built without CUDA kernels for {', '.join(missing)}")
print(f"CUDA kernels are registered for {', '.join(OPS)} (torch {torch.__version__})")
