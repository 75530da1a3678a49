#!/usr/bin/env python3
"""Run vLLM's command line with the CPU features of one level only, in vLLM's environment.

  BENCHMARK_CPU_LEVEL=avx2|avx512|avx512-bf16|amx <peer's python> vllm_at_level.py serve MODEL ...

vLLM loads its library for AVX2, AVX512 or AVX512-BF16 by the features that torch reports, and no variable limits that
report. This program removes the features above the level from it. The processes that vLLM spawns import the main module
again, so they are limited too. Variables of oneDNN, torch and MKL limit what those libraries use.
"""

import os
import sys

import torch

_AVX512 = {"avx512_f", "avx512_cd", "avx512_dq", "avx512_bw", "avx512_vl"}
_BF16 = {"avx512_bf16"}
_AMX = {"amx_tile", "amx_bf16", "amx_int8", "amx_fp16"}
_ABOVE = {"avx2": _AVX512 | {"avx512_vnni"} | _BF16 | _AMX, "avx512": _BF16 | _AMX, "avx512-bf16": _AMX, "amx": set()}

_reported = dict(torch.cpu.get_capabilities())
_limited = {name: has and name not in _ABOVE[os.environ["BENCHMARK_CPU_LEVEL"]] for name, has in _reported.items()}
torch.cpu.get_capabilities = lambda: _limited  # type: ignore[assignment]


if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main  # type: ignore[import-not-found]

    sys.exit(main())
