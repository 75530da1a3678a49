#!/usr/bin/env python3
"""Install transformers into its own environment, in ~/.cache/quire/peers ($XDG_CACHE_HOME).

  python -m benchmarks.peers.install_transformers

It is about 5 GB, nearly all of it torch, which is linked from uv's cache if quire's own environment is on the same
disk; then it takes half a minute. TORCH_SPEC names another torch, as for `make setup`. `transformers_generate.py` runs
there.
"""

import os

from benchmarks.peers.peer_catalogue import TORCH, TRANSFORMERS
from benchmarks.peers.peer_environments import Step, Workshop, command_line


def _install(shop: Workshop) -> None:
    shop.create_environment()
    torch = os.environ.get("TORCH_SPEC") or f"torch=={TORCH}"
    # Its continuous batching requires accelerate and psutil.
    shop.install(f"transformers=={TRANSFORMERS.version}", torch, "accelerate", "psutil")


def _try_it(shop: Workshop) -> None:
    shop.run(shop.peer.python, "-c", "from transformers import AutoModelForCausalLM, ContinuousBatchingConfig")


STEPS = (
    Step(what="transformers and torch", do=_install),
    Step(what="a first import", do=_try_it),
)

if __name__ == "__main__":
    command_line(__doc__, {"transformers": (TRANSFORMERS, STEPS)})
