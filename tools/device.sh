#!/usr/bin/env bash
# Builds the CUDA kernels for this machine's device, tests them there and measures them.
# Needs a CUDA build of torch, nvcc, pybind11, ninja, setuptools, pytest and hypothesis; what needs
# FBGEMM or TorchRec is skipped where they are not installed. Reads PYTHON and OUT, the folder for
# results.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/device}
mkdir -p "$OUT"
status=0

architecture=$("$PYTHON" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
echo "== build for sm_$architecture"
USE_CUDA=1 CUDA_ARCHITECTURES=$architecture "$PYTHON" setup.py --quiet build_ext --inplace \
  >"$OUT/build.log" 2>&1 || { tail -n 40 "$OUT/build.log" && exit 1; }
"$PYTHON" -c '
import torch, torchrec_ext.cuda
print(torch.__version__, torch.cuda.get_device_name(), torchrec_ext.cuda.load() or "kernels loaded")'

echo "== tests"
"$PYTHON" -m pytest -q -rs -p no:cacheprovider -m "cuda and not managed" tests/device \
  2>&1 | tee "$OUT/tests.log" | tail -n 30 || status=1

if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    echo "== compute-sanitizer $tool"
    timeout 150 compute-sanitizer --tool "$tool" --error-exitcode 1 "$PYTHON" -m pytest -q \
      -p no:cacheprovider -m cuda tests/device/test_ops.py -k "sanitized" \
      >"$OUT/$tool.log" 2>&1 || { echo "$tool failed" && status=1; }
    tail -n 4 "$OUT/$tool.log"
  done
else
  echo "== compute-sanitizer: not installed, not run"
fi

echo "== benchmark"
"$PYTHON" -m benchmarks.gpu --json "$OUT/gpu.json" 2>&1 | tee "$OUT/gpu.log" || status=1
exit "$status"
