#!/usr/bin/env python3
"""Measure the speed of decoding with low-rank adapters (LoRA).

  base      an engine without adapters
  enabled   an engine with slots for adapters, and requests for the base model only
  adapters  the same engine, with requests for different adapters

All three decode one step each in turn, and neighbouring steps are compared.
"""

import argparse
import os
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep

from benchmarks.models.variants import write_random_adapters
from benchmarks.report import DEMO_MODEL, at_least_one, parser, save, show_table, usable_cpus
from quire_engine.config import AdapterOptions, CacheOptions, EngineConfig, ModelOptions, ServerOptions
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import Engine, make_engine
from quire_engine.ipc.process import compute_environment

_PROMPT = 16


@dataclass(frozen=True, kw_only=True)
class Decoding:
    name: str
    tokens_per_second: float
    ratio: float
    """The speed compared with an engine without adapters, as the median over neighbouring steps."""
    quickest_ratio: float
    """The same for the quickest tenth of the steps of each, which a busy machine disturbs least."""


def config_of(arguments: argparse.Namespace, *, slots: int, in_memory: int) -> EngineConfig:
    return EngineConfig(
        model=ModelOptions(path=arguments.model, dtype=arguments.dtype),
        cache=CacheOptions(kv_cache_memory_bytes=2**29),
        scheduler=SchedulerOptions(
            max_num_seqs=max(arguments.sequences, 16), max_generation_stall_seconds=0.0, enable_prefix_caching=False
        ),
        server=ServerOptions(),
        threads=arguments.threads,
        adapters=AdapterOptions(
            enabled=slots > 0,
            max_loras=max(1, slots),
            max_lora_rank=arguments.rank,
            max_cpu_loras=max(1, in_memory),
        ),
    )


def load_all(engine: Engine, folders: list[Path]) -> None:
    """Load the adapters with the numbers from 1 on, and wait until all are checked."""
    for number, folder in enumerate(folders, start=1):
        engine.load_adapter(number, str(folder))
    read = 0
    while read < len(folders):
        engine.add_prepared()
        for event in engine.take_adapter_events():
            if event.reason is not None:
                raise SystemExit(event.message)
            read += 1
        sleep(0.001)


def request_of(key: int, length: int, adapter: int | None) -> Request:
    params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
    prompt = [3 + (key + place) % 1000 for place in range(_PROMPT)]
    return Request(key=key, prompt_token_ids=prompt, params=params, seed=0, adapter=adapter)


def start_decoding(engine: Engine, sequences: int, tokens: int, adapters: int) -> None:
    """Run the prompts of ``sequences`` requests for ``adapters`` different adapters in turn, or for the base model."""
    for key in range(sequences):
        refusal = engine.add(request_of(key, tokens, 1 + key % adapters if adapters else None))
        if refusal is not None:
            raise SystemExit(refusal)
    engine.add_prepared()
    while (now := engine.gauges()).num_waiting or now.prefilling_tokens:
        engine.step()


def timed_step(engine: Engine) -> float:
    began = perf_counter()
    engine.step()
    return perf_counter() - began


def measure_decoding(arguments: argparse.Namespace, folders: list[Path]) -> list[Decoding]:
    """Decode with each engine in turn, step by step, so that all see the same machine."""
    from quire_engine.runner import load_model

    kinds = {"base": (0, 0), "enabled": (arguments.adapters, 0), "adapters": (arguments.adapters, arguments.adapters)}
    engines = {}
    for name, (slots, _) in kinds.items():
        config = config_of(arguments, slots=slots, in_memory=arguments.adapters)
        engines[name] = make_engine(load_model(config), scheduler=config.scheduler)
        if slots:
            load_all(engines[name], folders)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(arguments.rounds + 1):
        for name, (_, adapters) in kinds.items():
            start_decoding(engines[name], arguments.sequences, arguments.tokens, adapters)
        while all(engine.has_work for engine in engines.values()):
            for name, engine in engines.items():
                step = timed_step(engine)
                if number:  # the first round is not counted
                    seconds[name].append(step)
        assert not any(engine.has_work for engine in engines.values())
    for used in engines.values():
        used.close()
    return [
        Decoding(
            name=name,
            tokens_per_second=arguments.sequences / statistics.median(own),
            ratio=statistics.median(base / one for one, base in zip(own, seconds["base"], strict=True)),
            quickest_ratio=quickest(seconds["base"]) / quickest(own),
        )
        for name, own in seconds.items()
    ]


def quickest(seconds: list[float]) -> float:
    """Return the time of a step from which no other process takes a core: a tenth of the steps are quicker."""
    return statistics.quantiles(seconds, n=10)[0]


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument(
        "--model", type=Path, default=DEMO_MODEL, help="the folder of a native model (default: the demo)"
    )
    options.add_argument("--adapters", type=at_least_one, default=8, help="different adapters per batch (default 8)")
    options.add_argument("--rank", type=at_least_one, default=8, help="the rank of every adapter (default 8)")
    options.add_argument("--sequences", type=at_least_one, default=16, help="sequences at once (default 16)")
    options.add_argument("--tokens", type=at_least_one, default=256, help="tokens of each answer (default 256)")
    options.add_argument("--rounds", type=at_least_one, default=3, help="rounds of decoding (default 3)")
    options.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    options.add_argument("--threads", type=at_least_one, default=len(usable_cpus()))
    return options.parse_args()


def main() -> None:
    arguments = parse_arguments()
    os.environ.update(compute_environment(arguments.threads, {}))
    with tempfile.TemporaryDirectory(prefix="quire-adapters-") as name:
        folders = write_random_adapters(Path(name), arguments.model, count=arguments.adapters, rank=arguments.rank)
        decoding = measure_decoding(arguments, folders)
    show_table(
        f"{arguments.adapters} adapters of rank {arguments.rank}, {arguments.sequences} sequences",
        ["requests", "tokens/s", "ratio", "of the quickest"],
        [
            [each.name, f"{each.tokens_per_second:,.0f}", f"{each.ratio:.3f}", f"{each.quickest_ratio:.3f}"]
            for each in decoding
        ],
    )
    save(arguments.json, [asdict(each) for each in decoding])


if __name__ == "__main__":
    main()
