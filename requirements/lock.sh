#!/usr/bin/env bash
# Resolve every *.in file. dev comes first and constrains the others, so that all use the same version of a package.
set -euo pipefail
cd "$(dirname "$0")"
export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}"
compile() { "../${BIN:?}/uv" pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header "$@"; }
compile -c pins.txt dev.in -o dev.lock
compile clients.in -o clients.lock
compile --no-deps triton-3.6.in -o triton-3.6.lock
compile --no-deps tokenizers.in -o tokenizers.lock
compile --no-deps schema-suite.in -o schema-suite.lock
compile --no-deps llama-cpp-source.in -o llama-cpp-source.lock
for name in bootstrap kernels engine gateway operator cli runtime; do compile -c pins.txt -c dev.lock "$name.in" -o "$name.lock"; done
