#!/usr/bin/env python3
"""Time transformers on prompts of token ids, in transformers' own environment (install_transformers.py).

  <peer's python> transformers_generate.py MODEL PROMPTS.json RESULTS.json --mode static|continuous

PROMPTS.json maps a workload's name to {"prompts": [[ids]], "output_tokens": N}; RESULTS.json maps it to the seconds
that all its prompts took together, greedy and to the full length. static is `generate` on one batch of all of them,
continuous is `generate_batch`, which schedules them over a paged cache.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

_WARM_UP_TOKENS = 4
_CACHE_SHARE = 0.2


def generate_static(model: Any, prompts: list[list[int]], output_tokens: int) -> int:
    """Return the number of generated tokens."""
    inputs = torch.tensor(prompts)
    greedy = {"do_sample": False, "max_new_tokens": output_tokens, "min_new_tokens": output_tokens}
    with torch.inference_mode():
        answers = model.generate(inputs, attention_mask=torch.ones_like(inputs), pad_token_id=0, **greedy)
    return int(answers[:, inputs.shape[1] :].numel())


def generate_continuous(model: Any, prompts: list[list[int]], output_tokens: int) -> int:
    # The library uses -1 for "no token ends an answer".
    config = GenerationConfig(do_sample=False, max_new_tokens=output_tokens, eos_token_id=-1, pad_token_id=0)
    # Its default cache uses nine tenths of the memory.
    cache = ContinuousBatchingConfig(max_memory_percent=_CACHE_SHARE)
    answers = model.generate_batch(
        inputs=prompts, generation_config=config, continuous_batching_config=cache, progress_bar=False
    )
    return sum(len(answer.generated_tokens) for answer in answers.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "prompts", "results"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--mode", choices=("static", "continuous"), required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype)
    generate = generate_static if arguments.mode == "static" else generate_continuous
    seconds = {}
    for name, asked in json.loads(arguments.prompts.read_text(encoding="utf-8")).items():
        generate(model, asked["prompts"], _WARM_UP_TOKENS)
        began = time.perf_counter()
        found = generate(model, asked["prompts"], asked["output_tokens"])
        seconds[name] = time.perf_counter() - began
        expected = len(asked["prompts"]) * asked["output_tokens"]
        if found != expected:
            raise SystemExit(f"{name}: {found} tokens came where {expected} were asked for")
    arguments.results.write_text(json.dumps(seconds) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
