#!/usr/bin/env bash
# Installs one lock file: one resolver run, every archive checked against its hash, progress shown.
# With TORCH_SPEC set, torch comes from there (a wheel's path, or a specifier), without the packages that only its CUDA build needs.
set -euo pipefail
lock=$1
# The machine's own certificates, as its other tools use: an index behind a company's mirror is trusted too.
export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}"
install() { "${UV:-$(dirname "$PYTHON")/uv}" pip install --python "$PYTHON" "$@"; }
if [ -z "${TORCH_SPEC:-}" ]; then
  note=""
  if grep -q '^torch==' "$lock"; then note=" (torch's CUDA build is about 4.7 GB unpacked; README, 'A smaller torch', has the alternative)"; fi
  echo "==> installing $lock$note"
  install --require-hashes -r "$lock"
else
  echo "==> installing $lock with $TORCH_SPEC in place of its torch"
  # A requirement is its line and the hash lines indented under it.
  awk '/^[a-z]/ {skip = /^(torch|triton|nvidia-|cuda-)/} !skip' "$lock" > "$lock.without-torch"
  trap 'rm -f "$lock.without-torch"' EXIT
  install --no-deps --require-hashes -r "$lock.without-torch"
  install --no-deps "$TORCH_SPEC"
fi
