#!/usr/bin/env bash
# Everything that needs a GPU, one part at a time: tests, kernels, serving; or all of them.
#
#   bash benchmarks/on_gpu.sh [tests|kernels|serving|all] ...
#
# Runs from a checkout with nothing installed but Python, torch, Triton, transformers and numpy (pytest for the tests):
# the HTTP stack is not needed. Each part ends within PART_SECONDS (540); kernels and serving leave their results
# in OUT (out/gpu) after each case, so a part that is cut short still tells. Fails if a part failed.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-out/gpu}
PART_SECONDS=${PART_SECONDS:-540}
BUDGET=$((PART_SECONDS - 100)) # for measuring; a case that has started is finished
here=$PWD
# What gpu_bundle.sh carries for machines without pytest comes last.
export PYTHONPATH="$here/kernels/src:$here/engine/src:$here/tests/support${PYTHONPATH:+:$PYTHONPATH}:$here/site"
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
unset TRITON_INTERPRET
mkdir -p "$OUT"

# pyproject.toml names plugins that a bare machine lacks, and upper conftests start servers.
run_pytest() {
  timeout "$PART_SECONDS" "$PYTHON" -m pytest -c benchmarks/on_gpu.ini --rootdir "$here" -p no:cacheprovider "$@"
}

part_tests() {
  if ! "$PYTHON" -c 'import pytest' 2>/dev/null; then
    echo "pytest is not installed here: the tests are skipped (benchmarks/gpu_bundle.sh carries it)"
    return 0
  fi
  local failed=0
  run_pytest --confcutdir tests/kernels tests/kernels/ops tests/kernels/triton || failed=1
  if [ -d tests/engine/triton ]; then
    run_pytest --confcutdir tests/engine/triton tests/engine/triton || failed=1
  fi
  return $failed
}

part_kernels() {
  timeout "$PART_SECONDS" "$PYTHON" -m benchmarks.kernels.run --seconds "$BUDGET" --json "$OUT/kernels.json"
}

part_serving() {
  timeout "$PART_SECONDS" "$PYTHON" -m benchmarks.serving.on_device --seconds "$BUDGET" --json "$OUT/serving.json"
}

parts=("$@")
if [ ${#parts[@]} -eq 0 ] || [ "${parts[0]}" = all ]; then parts=(tests kernels serving); fi
for part in "${parts[@]}"; do
  case $part in
  tests | kernels | serving) ;;
  *)
    echo "$0: there is no part '$part'; there are tests, kernels, serving, all" >&2
    exit 2
    ;;
  esac
done
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "$0: $PYTHON sees no GPU here (torch.cuda.is_available() is false, or there is no torch)" >&2
  exit 2
fi
failed=()
for part in "${parts[@]}"; do
  echo "==> $part"
  began=$SECONDS
  "part_$part" || failed+=("$part")
  echo "==> $part took $((SECONDS - began)) s"
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
