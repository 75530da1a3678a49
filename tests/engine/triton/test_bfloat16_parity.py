"""The demo model in bfloat16 on a GPU, through the whole start-up, against transformers in float32 on the CPU.

Tokens are greedy, and the reference evaluates each one after the same tokens: its best logit may be larger only within
bfloat16's precision, and the log-probabilities must agree. In bfloat16 on a CPU, the same comparison found 0.047 and,
for the log-probabilities, 0.11 at most and 0.013 on average.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire_engine.config import CacheOptions, DeviceOptions, EngineConfig, ModelOptions, ServerOptions
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.ports import LoadedModel
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import make_engine
from quire_engine.runner import load_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="bfloat16 needs a GPU")]

DEMO_MODEL = Path(__file__).resolve().parents[3] / "examples" / "models" / "quire-demo"
ANSWER = 48
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 128, 200)
NEAR_TIE = 0.15
"""The difference between two logits of the reference."""
LOGPROB_ERROR = 0.25
MEAN_LOGPROB_ERROR = 0.04


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    return model.requires_grad_(False)


@pytest.fixture(scope="module", params=[False, True], ids=["as-served", "deterministic"])
def config(request: pytest.FixtureRequest) -> EngineConfig:
    return configuration("cuda", "bfloat16", deterministic=request.param)


def configuration(device: str, dtype: str, *, deterministic: bool = False) -> EngineConfig:
    return EngineConfig(
        model=ModelOptions(path=DEMO_MODEL, dtype=dtype, max_model_len=512),  # type: ignore[arg-type]
        cache=CacheOptions(kv_cache_memory_bytes=256 << 20),
        scheduler=SchedulerOptions(max_num_seqs=16, max_num_batched_tokens=128),
        server=ServerOptions(),
        device=DeviceOptions(device=device, deterministic=deterministic),  # type: ignore[arg-type]
        threads=1,
    )


@pytest.fixture(scope="module")
def model(config: EngineConfig) -> Iterator[LoadedModel]:
    loaded = load_model(config)
    yield loaded
    loaded.runner.close()


def answers(config: EngineConfig, model: LoadedModel, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Return tokens and their log-probabilities, with all prompts in one batch."""
    engine = make_engine(model, scheduler=config.scheduler)
    for key, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, logprobs=1)
        assert engine.add(Request(key=key, prompt_token_ids=prompt, params=params, seed=key)) is None
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    while engine.has_work:
        step = engine.step()
        if step is None or step.logprobs is None:
            continue
        for key, token, reported in zip(step.keys, step.token_ids, step.logprobs, strict=True):
            assert reported is not None
            found[key][0].append(token)
            found[key][1].append(reported.logprobs[0])
    return found


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The comparison of answers. Column i is token i of an answer."""

    behind: list[float]
    """The distance to the reference's best logit after the same tokens; 0 if both chose the same."""
    errors: list[float]
    """The error of the token's log-probability."""


def compare(reference: PreTrainedModel, prompt: list[int], tokens: list[int], logprobs: list[float]) -> Compared:
    logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()  # [ANSWER, vocabulary]
    chosen = torch.tensor(tokens).unsqueeze(1)
    behind = logits.max(dim=1).values - logits.gather(1, chosen).squeeze(1)
    expected = logits.log_softmax(-1).gather(1, chosen).squeeze(1)
    return Compared(behind=behind.tolist(), errors=(torch.tensor(logprobs) - expected).abs().tolist())


def test_tokens_and_probabilities_equal_float32_on_the_cpu(
    config: EngineConfig, model: LoadedModel, reference: PreTrainedModel
) -> None:
    chance = Random(7)
    prompts = [[chance.randrange(3, model.vocab_size) for _ in range(length)] for length in LENGTHS]
    behind: list[float] = []
    errors: list[float] = []
    for prompt, (tokens, logprobs) in zip(prompts, answers(config, model, prompts), strict=True):
        assert len(tokens) == ANSWER
        compared = compare(reference, prompt, tokens, logprobs)
        behind += compared.behind
        errors += compared.errors
    assert max(behind) < NEAR_TIE and sum(value > 0.0 for value in behind) < len(behind) / 20
    assert max(errors) < LOGPROB_ERROR and sum(errors) / len(errors) < MEAN_LOGPROB_ERROR
