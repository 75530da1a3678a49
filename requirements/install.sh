#!/usr/bin/env bash
# Install exactly the packages of one lock file. Every archive is checked against its hash.
# TORCH_SPEC (the path of a wheel, or a specifier) replaces torch and omits the packages that only its CUDA build needs.
# TRITON_SPEC, where it is given too, is the Triton of that torch: its build for ROCm has one of its own.
set -euo pipefail
lock=$1
# Use the machine's certificates, so that an index behind a company mirror is trusted too.
export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}"
install() { "${UV:-$(dirname "$PYTHON")/uv}" pip install --python "$PYTHON" --no-deps "$@"; }
if [ -z "${TORCH_SPEC:-}" ] || ! grep -qE '^(torch==|triton==|nvidia-|cuda-)' "$lock"; then
  note=""
  if grep -q '^torch==' "$lock"; then note=" (torch's CUDA build is about 4.7 GB unpacked; README, 'A smaller torch', has the alternative)"; fi
  echo "==> installing $lock$note"
  install --require-hashes -r "$lock"
  exit
fi
others=$(mktemp)
trap 'rm -f "$others"' EXIT
# A requirement consists of its line and the indented hash lines below it.
awk '/^[a-z]/ {skip = /^(torch==|triton==|nvidia-|cuda-)/} !skip' "$lock" > "$others"
if [ -s "$others" ]; then
  echo "==> installing $lock, torch and its CUDA libraries left out"
  install --require-hashes -r "$others"
fi
if grep -q '^torch==' "$lock"; then
  echo "==> installing $TORCH_SPEC in place of its torch"
  install "$TORCH_SPEC" ${TRITON_SPEC:+"$TRITON_SPEC"}
fi
