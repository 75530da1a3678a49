#!/usr/bin/env bash
# Packs what a GPU machine without a network needs, as one archive: our sources as they are in this checkout, and pytest.
#
#   benchmarks/gpu_bundle.sh [out/gpu-bundle.tar.gz]
#
# There: tar xzf gpu-bundle.tar.gz && bash gpu-bundle/benchmarks/on_gpu.sh all
set -euo pipefail
cd "$(dirname "$0")/.."
BIN=${BIN:-.venv/bin}
archive=${1:-out/gpu-bundle.tar.gz}
limit=$((64 * 1024 * 1024))
staging=$(mktemp -d)
trap 'rm -rf "$staging"' EXIT
bundle=$staging/gpu-bundle
mkdir -p "$bundle" "$(dirname "$archive")"
git ls-files -z --cached --others --exclude-standard -- \
  kernels/src engine/src benchmarks tests/kernels tests/engine/triton tests/support/adapter_support tests/support/quire_parity tests/support/logit_edits.py tests/support/fixed_drafts.py tests/support/sampling_settings.py tests/cluster/quire_cluster/ports.py examples/models/quire-demo pyproject.toml LICENSE |
  tar --null --files-from=- --create | tar --extract --directory "$bundle"
# Pure Python, for any version: what pytest is made of, in the versions that the tests here run with.
for name in pytest _pytest pluggy iniconfig packaging pygments; do
  cp -r "$("$BIN/python" -c "import $name, pathlib; print(pathlib.Path($name.__file__).parent)")" "$bundle/site.$name"
done
mkdir "$bundle/site"
for copied in "$bundle"/site.*; do mv "$copied" "$bundle/site/${copied##*/site.}"; done
for name in pytest pluggy iniconfig packaging pygments; do
  cp -r "$BIN"/../lib/python*/site-packages/"$name"-*.dist-info "$bundle/site/"
done
find "$bundle" -name __pycache__ -prune -exec rm -rf {} +
tar --create --gzip --file "$archive" --directory "$staging" gpu-bundle
size=$(stat --format %s "$archive")
unpacked=$(du --summarize --bytes "$bundle" | cut -f1)
printf '%s: %s MiB (%s MiB unpacked)\n' "$archive" $((size / 1048576)) $((unpacked / 1048576))
if [ "$unpacked" -gt "$limit" ]; then
  echo "unpacked it is over 64 MiB: something large was added to what it holds" >&2
  exit 1
fi
