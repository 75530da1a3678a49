"""An engine in this process that serves adapters, and its answers to requests for them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire_parity.cases import ANSWER
from quire_parity.engines import Heard, config_of, start

from quire_engine.config import AdapterOptions, CacheOptions
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import Engine


def started(
    folder: Path,
    *,
    slots: int = 2,
    adapters: Sequence[Path],
    sequences: int = 16,
    step_tokens: int = 64,
    **device: Any,
) -> Engine:
    """Return an engine that has read the adapters, with the numbers from 1 on.

    ``device`` has fields of ``DeviceOptions``.
    """
    config = config_of(
        folder,
        max_model_len=96,
        scheduler=SchedulerOptions(max_num_seqs=sequences, max_num_batched_tokens=step_tokens),
        cache=CacheOptions(kv_cache_memory_bytes=4 << 20),
    )
    options = AdapterOptions(enabled=True, max_loras=slots, max_lora_rank=16, max_cpu_loras=max(4, slots))
    config = replace(config, adapters=options, device=replace(config.device, **device))
    engine = start(config)
    for number, adapter in enumerate(adapters, start=1):
        engine.load_adapter(number, str(adapter))
    read = []
    while len(read) < len(adapters):
        engine.add_prepared()
        read += engine.take_adapter_events()
        time.sleep(0.001)
    refused = [event.message for event in read if event.reason]
    assert not refused, "; ".join(refused)
    return engine


def answers(
    engine: Engine, prompts: Mapping[int, tuple[list[int], int | None]], *, max_tokens: int = ANSWER
) -> dict[int, Heard]:
    """Return the greedy answers to prompts with their adapters, all requested at once."""
    heard = {key: Heard() for key in prompts}
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    for key, (prompt, adapter) in prompts.items():
        request = Request(key=key, prompt_token_ids=prompt, params=params, seed=0, adapter=adapter)
        assert engine.add(request) is None
    ended: set[int] = set()
    while ended != set(prompts):
        engine.add_prepared()
        step = engine.step() if engine.has_work else None
        if step is None:
            continue
        engine.check_integrity()
        logprobs = step.logprobs or []
        for key, token_id, logprob in zip(step.keys, step.token_ids, logprobs, strict=True):
            assert logprob is not None
            heard[key].token_ids.append(token_id)
            heard[key].logprobs.append(logprob.logprobs[0])
        ended |= {finished.key for finished in step.finished}
    return heard
