#!/usr/bin/env bash
# Installs one lock into an image's /opt/quire, which it makes first. The Dockerfile mounts what it needs for that, so that
# neither the resolver nor its downloads nor the addresses of indexes are in any layer.
set -euo pipefail
tools=$(dirname "$0")
. "$tools/environment"
export UV="$tools/bin/uv" PYTHON=/opt/quire/bin/python UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy
[ -x "$PYTHON" ] || python3 -m venv --without-pip /opt/quire
"$tools/install.sh" "$1"
