#!/usr/bin/env bash
# Resolves every *.in: dev first, the others under its choices, so that one version of a package serves everywhere.
set -euo pipefail
cd "$(dirname "$0")"
export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}"
compile() { "../${BIN:?}/uv" pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header "$@"; }
compile -c pins.txt dev.in -o dev.lock
compile clients.in -o clients.lock
compile --no-deps triton-3.6.in -o triton-3.6.lock
for name in bootstrap kernels engine gateway operator cli runtime; do compile -c pins.txt -c dev.lock "$name.in" -o "$name.lock"; done
