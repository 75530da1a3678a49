#!/usr/bin/env bash
# Create /opt/quire in an image and install one lock file into it. The Dockerfile mounts the required tools, so that no layer
# contains the resolver, its downloads or index addresses.
set -euo pipefail
tools=$(dirname "$0")
. "$tools/environment"
export UV="$tools/bin/uv" PYTHON=/opt/quire/bin/python UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy
[ -x "$PYTHON" ] || python3 -m venv --without-pip /opt/quire
"$tools/install.sh" "$1"
