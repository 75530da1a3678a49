"""``--deterministic``: the same request gives bit-identical tokens and logprobs, whatever else runs.

Prompts are longer than attention's pieces of 256 tokens, and answers are sampled greedily and at random. The reference
is each request alone, with its prompt in one step.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from quire_common.errors import FlagsError
from quire_engine.config import DeviceOptions, EngineConfig
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import Engine, make_engine
from quire_engine.runner import load_model

VOCABULARY = 250
LENGTHS = (1, 17, 255, 300, 303, 530)
ANSWER = 8
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gemma2": {"head_dim": 24, "sliding_window": 100, "query_pre_attn_scalar": 24},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
}
# The blocks of the first four prompts without their answers; the longest possible sequence needs as many.
SCARCE_BLOCKS = 38


@dataclass
class Heard:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    prompt_logprobs: list[list[float]] = field(default_factory=list)


def requests(*, prompt_logprobs: int | None = None) -> list[Request]:
    """Return requests with beginnings of one text, to share prefixes; every other one is sampled at random."""
    numbers = random.Random(5)
    text = [numbers.randrange(3, VOCABULARY) for _ in range(max(LENGTHS))]
    greedy = SamplingParams(
        max_tokens=ANSWER, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=prompt_logprobs
    )
    drawn = replace(greedy, temperature=1.0, top_p=0.95, repetition_penalty=1.1)
    return [
        Request(key=key, prompt_token_ids=text[:length], params=drawn if key % 2 else greedy, seed=key)
        for key, length in enumerate(LENGTHS)
    ]


def answers(engine: Engine, batches: list[list[Request]]) -> dict[int, Heard]:
    heard: dict[int, Heard] = {}
    for batch in batches:
        for request in batch:
            assert engine.add(request) is None
            heard[request.key] = Heard()
        while engine.has_work:
            output = engine.step()
            assert output is not None
            for report in output.prompt_logprobs:
                heard[report.key].prompt_logprobs += [entry.logprobs for entry in report.entries]
            for i, key in enumerate(output.keys):
                heard[key].token_ids.append(output.token_ids[i])
                assert output.logprobs is not None and (entry := output.logprobs[i]) is not None
                heard[key].logprobs.append(entry.logprobs)
    return heard


def by_itself(wanted: list[Request]) -> list[list[Request]]:
    return [[request] for request in wanted]


def engine_over(config: EngineConfig) -> Engine:
    return make_engine(load_model(config), scheduler=config.scheduler)


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def configure(
    family: str, make_folder: Callable[..., Path], engine_config: Callable[..., EngineConfig]
) -> Callable[..., EngineConfig]:
    folder = make_folder(family, max_position_embeddings=1024, **MODELS[family])

    def make(*, tokens: int = 1024, sequences: int = 8, **changes: Any) -> EngineConfig:
        scheduler = SchedulerOptions(max_num_seqs=sequences, max_num_batched_tokens=tokens)
        changes = {"enable_prefix_caching": False, "kv_cache_memory_bytes": 8 << 20, **changes}
        config = engine_config(folder, scheduler=scheduler, max_model_len=600, **changes)
        return replace(config, device=DeviceOptions(deterministic=True), threads=1)

    return make


@pytest.fixture(scope="module")
def alone(configure: Callable[..., EngineConfig]) -> dict[int, Heard]:
    return answers(engine_over(configure()), by_itself(requests()))


@pytest.mark.parametrize("sequences", [2, 5, 8])
def test_output_is_bitwise_independent_of_the_batch(
    sequences: int, configure: Callable[..., EngineConfig], alone: dict[int, Heard]
) -> None:
    assert answers(engine_over(configure(sequences=sequences)), [requests()]) == alone


@pytest.mark.parametrize("tokens", [13, 64, 257])
def test_output_is_bitwise_independent_of_prompt_chunks(
    tokens: int, configure: Callable[..., EngineConfig], alone: dict[int, Heard]
) -> None:
    engine = engine_over(configure(tokens=tokens))
    assert answers(engine, [requests()]) == alone


def test_output_is_bitwise_independent_of_cached_prefixes(
    configure: Callable[..., EngineConfig], alone: dict[int, Heard]
) -> None:
    engine = engine_over(configure(tokens=200, enable_prefix_caching=True))
    for _ in range(2):
        assert answers(engine, [requests()]) == alone
    assert engine.counters.prefix_cache_hits > 1000


@pytest.mark.parametrize(("mode", "swap_blocks"), [("recompute", 0), ("swap", 100)])
def test_output_is_bitwise_independent_of_preemption(
    mode: str, swap_blocks: int, configure: Callable[..., EngineConfig], alone: dict[int, Heard]
) -> None:
    plenty = configure()
    block_bytes = sum(load_model(plenty).block_bytes)
    scarce = configure(
        kv_cache_memory_bytes=SCARCE_BLOCKS * block_bytes, swap_space_bytes=swap_blocks * block_bytes, tokens=300
    )
    engine = engine_over(replace(scarce, scheduler=replace(scarce.scheduler, preemption_mode=mode)))
    assert answers(engine, [requests()]) == alone
    assert sum(count for label, count in engine.counters.preemptions.items() if label.startswith(mode)) > 0


def test_prompt_logprobs_are_bitwise_deterministic(configure: Callable[..., EngineConfig]) -> None:
    wanted = requests(prompt_logprobs=2)
    whole = answers(engine_over(configure()), by_itself(wanted))
    assert len(whole[5].prompt_logprobs) == max(LENGTHS) - 1
    assert answers(engine_over(configure(tokens=100)), [wanted]) == whole


def test_sixteen_bit_output_is_bitwise_deterministic(configure: Callable[..., EngineConfig]) -> None:
    whole = answers(engine_over(configure(dtype="bfloat16")), by_itself(requests()))
    assert answers(engine_over(configure(dtype="bfloat16", tokens=13)), [requests()]) == whole


def test_transformers_model_is_refused(
    make_folder: Callable[..., Path], engine_config: Callable[..., EngineConfig]
) -> None:
    config = engine_config(make_folder(), model_impl="transformers")
    with pytest.raises(
        FlagsError, match="--deterministic is for quire's own model families, and this is transformers'"
    ):
        load_model(replace(config, device=DeviceOptions(deterministic=True)))


@pytest.mark.parametrize("num_sampled", [1, ANSWER - 1])
def test_continued_output_is_bitwise_equal(
    num_sampled: int, configure: Callable[..., EngineConfig], alone: dict[int, Heard]
) -> None:
    """Another engine computes the tokens of the answer as part of a prompt, and then samples those that follow."""
    begun = [replace(request, output_token_ids=alone[request.key].token_ids[:num_sampled]) for request in requests()]
    for key, heard in answers(engine_over(configure(enable_prefix_caching=True)), [begun]).items():
        assert heard.token_ids == alone[key].token_ids[num_sampled:]
        assert heard.logprobs == alone[key].logprobs[num_sampled:]
