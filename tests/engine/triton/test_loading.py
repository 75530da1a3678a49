"""From a model folder to answers on the Triton path, through ``load_model`` as the server uses it."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quire_parity import cases
from quire_parity.cases import Case
from quire_parity.reference import generate, load_reference
from torch import Tensor, nn

from quire_common.errors import FlagsError
from quire_engine.config import CacheOptions, DeviceOptions, EngineConfig, ModelOptions, ServerOptions
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import make_engine
from quire_engine.model.candidate import BuildOptions
from quire_engine.model.linear import TorchLinearBackend
from quire_engine.model.loader import find_native_candidate
from quire_engine.runner import load_model
from quire_engine.runner.cache_size import CacheDemand
from quire_engine.runner.captured import GraphSizes
from quire_engine.runner.kv_cache import cache_groups
from quire_engine.runner.profiling import DeviceMemory
from quire_engine.runner.start_report import MemoryUse
from quire_engine.runner.start_runner import ModelInMemory, start_runner
from quire_kernels.dispatch import INTERPRETED
from quire_kernels.fp8_linear import SIZE_UNIT, reference

DEMO = Path(__file__).parents[3] / "examples" / "models" / "quire-demo"


def config_of(folder: Path, *, tokens: int = 32, max_model_len: int = 48, **device: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelOptions(path=folder, dtype="float32", max_model_len=max_model_len),
        cache=CacheOptions(kv_cache_memory_bytes=1 << 20),
        scheduler=SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=tokens, enable_prefix_caching=False),
        server=ServerOptions(),
        device=DeviceOptions(device="cpu" if INTERPRETED else "cuda", **{"enforce_eager": True, **device}),
        threads=1,
    )


@dataclass
class Heard:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)


def ask(config: EngineConfig, prompts: list[list[int]], *, max_tokens: int) -> list[Heard]:
    model = load_model(config)
    assert model.asynchronous and model.step_costs is not None
    engine = make_engine(model, scheduler=config.scheduler)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=2)
    heard = [Heard() for _ in prompts]
    for key, prompt in enumerate(prompts):
        assert engine.add(Request(key=key, prompt_token_ids=prompt, params=params, seed=0)) is None
    while engine.has_work:
        if (step := engine.step()) is None:
            continue
        for i, key in enumerate(step.keys):
            heard[key].token_ids.append(step.token_ids[i])
            assert step.logprobs is not None and (entry := step.logprobs[i]) is not None
            heard[key].logprobs.append(entry.logprobs)
    engine.close()
    return heard


def test_demo_model_equals_transformers() -> None:
    prompts = [[5, 6, 7, 8, 9], [40, 41, 42]]
    heard = ask(config_of(DEMO, tokens=8, max_model_len=16), prompts, max_tokens=2)
    reference = load_reference(DEMO, "eager")
    assert [each.token_ids for each in heard] == [generate(reference, prompt).token_ids[:2] for prompt in prompts]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    cases.save(Case(family="llama", fields={"num_hidden_layers": 1}), folder)
    return folder


@pytest.fixture
def products_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's matrix products independent of a row's place.

    It multiplies by NumPy, whose library gives a row other bits at another place of the same matrix, which a GPU's
    instructions do not. So here each element is summed separately.
    """

    def matmul(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
        return np.einsum("...ij,...jk->...ik", a, b, dtype=dtype)

    monkeypatch.setattr(np, "matmul", matmul)


@pytest.mark.usefixtures("products_by_row")
# Of 512 tokens, one fixed split is the longest sequence, and the block into which a step may run ahead starts another.
@pytest.mark.parametrize("longest", [48, 512])
def test_deterministic_answers_ignore_how_prompts_are_cut(small: Path, longest: int) -> None:
    prompt, other = [17, *range(3, 24)], [9, 8, 7]
    (whole,) = ask(config_of(small, max_model_len=longest, deterministic=True), [prompt], max_tokens=2)
    pieces = config_of(small, tokens=9, max_model_len=longest, deterministic=True)
    assert ask(pieces, [other, prompt], max_tokens=2)[1] == whole


def test_unsupported_heads_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    cases.save(Case(family="llama", fields={"num_hidden_layers": 1, "head_dim": 320}), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FlagsError, match="LlamaForCausalLM cannot be served on .*: head dim 320: up to 256 is needed"):
        load_model(config_of(tmp_path))


def in_fp8(config: EngineConfig) -> EngineConfig:
    dtype = "float32" if INTERPRETED else "bfloat16"
    return replace(config, model=replace(config.model, quantization="fp8", dtype=dtype))


class Rounded(nn.Module):
    """A linear layer of transformers with the rounding of an fp8 layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return reference.fp8_linear(rows, self.layer.weight, self.layer.bias).view(*x.shape[:-1], -1)


def test_fp8_answers_have_the_probabilities_of_rounded_layers(small: Path) -> None:
    prompt = [17, 3, 40, 9, 22, 6]
    (heard,) = ask(in_fp8(config_of(small)), [prompt], max_tokens=3)
    plain, rounded = load_reference(small, "eager"), load_reference(small, "eager")
    for name, module in list(rounded.named_modules()):
        if isinstance(module, nn.Linear) and not any(size % SIZE_UNIT for size in module.weight.shape):
            parent, _, own = name.rpartition(".")
            setattr(rounded.get_submodule(parent), own, Rounded(module))

    def error(model: nn.Module) -> float:
        logits = model(torch.tensor([prompt + heard.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(heard.token_ids)[:, None])[:, 0]
        return float((expected - torch.tensor([best for best, *_ in heard.logprobs])).abs().mean())

    # What remains is the rounding of products to bfloat16, which moves some activations to the next float8.
    assert error(rounded) < 0.02 and error(plain) > 2 * error(rounded)


def test_fp8_is_refused_for_mixtures_of_experts(tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    cases.save(Case(family="mixtral", fields=fields), tmp_path)
    with pytest.raises(FlagsError, match="does not quantize mixtures of experts, and MixtralForCausalLM has 4 experts"):
        load_model(in_fp8(config_of(tmp_path)))


@dataclass
class FakeMeter:
    """A GPU on which every reading finds a little less free memory, because the steps in between use some."""

    left: int = 512 << 20

    def free(self) -> int:
        self.left -= 1 << 20
        return self.left

    def settle(self) -> None:
        pass


def test_gpu_memory_is_profiled_and_divided(small: Path) -> None:
    config = config_of(small, enforce_eager=False, cudagraph_capture_sizes=(1, 2), deterministic=False)
    config = replace(config, cache=CacheOptions(swap_space_bytes=1 << 18), server=ServerOptions(max_logprobs=5))
    device = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)
    candidate = find_native_candidate(small).limited_to(48)
    built = candidate.build(
        BuildOptions(
            load_format="dummy",
            seed=1,
            dtype=torch.float32,
            backend=TorchLinearBackend(torch.float32),
            device=device,
        )
    )
    demand = CacheDemand(
        groups=cache_groups(candidate.shape, torch.float32, 16, device),
        block_size=16,
        sequence_tokens=48,
        must_hold_limit=True,
        max_sequences=2,
        max_batched_tokens=32,
    )
    model = ModelInMemory(
        built=built,
        shape=candidate.shape,
        dtype=torch.float32,
        cache_dtype=torch.float32,
        device=device,
        demand=demand,
    )
    memory = DeviceMemory(meter=FakeMeter(), total=1 << 30, free_before=512 << 20)
    sizes = GraphSizes(decode=(1, 2), mixed=(32,))
    warm = start_runner(config, model, sizes=sizes, memory=memory)
    assert warm.memory == MemoryUse(
        activations=1 << 20,
        graphs=(1 << 20) + 2 * (2 << 20),
        graph_sizes=(1, 2),
        mixed_graph_sizes=(32,),
        before=512 << 20,
        free=504 << 20,
    )
    assert warm.size.num_blocks == (2 * 3,), "what two sequences of 48 tokens can use, and no more"
    assert warm.measured.swap_bytes_per_second is not None
    warm.runner.close()
