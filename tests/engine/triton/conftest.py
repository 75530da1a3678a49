"""The device runner with whole tiny models: on a GPU if there is one, else on the CPU in Triton's interpreter.

Triton chooses when a kernel is defined, so these tests have their own process: `make kernels-interpreted`.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from fixed_drafts import use_every_draft
from quire_parity import cases
from quire_parity.answering import Answering
from quire_parity.cases import Case
from quire_parity.reference import Answer, generate, load_reference

from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.options import ModelTraits, PolicyName, PreemptionMode, SchedulerOptions
from quire_engine.core.ports import Runner
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.speculation.proposers import NgramSettings, ngram_proposers
from quire_engine.core.speculation.speculation import Speculation
from quire_engine.engine import Engine
from quire_engine.model.candidate import BuildOptions
from quire_engine.model.config import ModelConfig
from quire_engine.model.family import CausalLM
from quire_engine.model.linear import TorchLinearBackend
from quire_engine.model.loader import find_native_candidate
from quire_engine.runner.accelerator import Accelerator, CpuAccelerator, make_accelerator
from quire_engine.runner.captured import GraphSizes
from quire_engine.runner.model_runner import ModelRunner, RunnerParts
from quire_kernels import dispatch
from quire_kernels.dispatch import INTERPRETED
from quire_kernels.kv_cache import KVCache, allocate_kv_cache

BLOCK_SIZE = 16
MAX_MODEL_LEN = 96


def pytest_configure() -> None:
    if not INTERPRETED and not torch.cuda.is_available():
        raise pytest.UsageError("no GPU here: set TRITON_INTERPRET=1, or use `make kernels-interpreted`")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu") if INTERPRETED else torch.device("cuda", torch.cuda.current_device())


CASES = {
    "llama": Case(family="llama", fields={"head_dim": 32}),
    "qwen3": Case(family="qwen3", fields={"head_dim": 32}),
    "gemma2": Case(
        family="gemma2",
        fields={
            "head_dim": 32,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
            "query_pre_attn_scalar": 32,
        },
    ),
    "mixtral": Case(family="mixtral", fields={"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    folder: Path
    shape: ModelConfig


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Return a cache of the checkpoints of the families in ``CASES``."""
    made: dict[str, Checkpoint] = {}

    def make(family: str) -> Checkpoint:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            cases.save(CASES[family], folder)
            candidate = find_native_candidate(folder).limited_to(MAX_MODEL_LEN)
            assert isinstance(candidate.shape, ModelConfig)
            made[family] = Checkpoint(folder=folder, shape=candidate.shape)
        return made[family]

    return make


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The settings of a test's engine."""

    family: str = "llama"
    num_blocks: int = 40
    num_swap_blocks: int = 0
    max_rows: int = 6
    budget: int = 64
    overlap: bool = True
    graph_sizes: GraphSizes = GraphSizes(decode=(1, 2, 4, 6), mixed=(32,))
    caching: bool = True
    policy: PolicyName = "fcfs"
    preemption_mode: PreemptionMode = "auto"
    deterministic: bool = False
    drafts: int = 0
    """The most drafts of a sequence, found by prompt lookup; 0 runs without speculation."""

    def speculation(self) -> Speculation | None:
        """Return speculation with every draft that is found, as if drafts cost nothing."""
        if not self.drafts:
            return None
        found = ngram_proposers(NgramSettings(shortest=1, longest=3))
        speculation = Speculation(found, max_tokens=self.drafts, most_drafts=self.most_drafts, costs=None)
        use_every_draft(speculation)
        return speculation

    @property
    def most_drafts(self) -> int:
        return self.drafts * self.max_rows

    def layout(self, shape: ModelConfig) -> KVCacheLayout:
        groups = tuple(
            KVCacheGroup(
                layers=tuple(layer for layer, own in enumerate(shape.windows) if own == window),
                num_blocks=self.num_blocks,
                window=window,
                num_swap_blocks=self.num_swap_blocks,
            )
            for window in shape.kv_groups
        )
        return KVCacheLayout(block_size=BLOCK_SIZE, groups=groups)

    def scheduler(self, layout: KVCacheLayout) -> Scheduler:
        options = SchedulerOptions(
            max_num_seqs=self.max_rows,
            max_num_batched_tokens=self.budget,
            policy=self.policy,
            enable_prefix_caching=self.caching,
            preemption_mode=self.preemption_mode,
        )
        return Scheduler(options, ModelTraits(max_model_len=MAX_MODEL_LEN), layout, speculation=self.speculation())


@dataclass
class Running(Answering):
    runner: Runner = field(kw_only=True)


def _build(checkpoint: Checkpoint, device: torch.device) -> CausalLM:
    options = BuildOptions(
        load_format="safetensors",
        seed=0,
        dtype=torch.float32,
        backend=TorchLinearBackend(torch.float32),
        device=device,
    )
    with torch.inference_mode():
        return find_native_candidate(checkpoint.folder).limited_to(MAX_MODEL_LEN).build(options).model


def _caches(layout: KVCacheLayout, shape: ModelConfig, device: torch.device, *, spare: int) -> tuple[KVCache, ...]:
    blocks = {layer: group.num_blocks for group in layout.groups for layer in group.layers}
    return tuple(
        allocate_kv_cache(
            num_blocks=blocks[layer] + spare,
            block_size=BLOCK_SIZE,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=torch.float32,
            device=device,
        )
        for layer in range(shape.num_layers)
    )


@pytest.fixture(scope="session")
def device_model(checkpoint: Callable[[str], Checkpoint], device: torch.device) -> Callable[[str], CausalLM]:
    return functools.cache(lambda family: _build(checkpoint(family), device))


@pytest.fixture
def start(
    checkpoint: Callable[[str], Checkpoint], device_model: Callable[[str], CausalLM], device: torch.device
) -> Iterator[Callable[..., Running]]:
    """Return a factory of engines with the device runner and captured graphs; their caches are NaN at first."""
    runners: list[ModelRunner] = []

    def make(world: World, accelerator: Accelerator | None = None) -> Running:
        shape = checkpoint(world.family).shape
        layout = world.layout(shape)
        caches = _caches(layout, shape, device, spare=1)
        for cache in caches:
            cache.keys.fill_(torch.nan)
            cache.values.fill_(torch.nan)
        runner = ModelRunner(
            RunnerParts(
                model=device_model(world.family),
                caches=caches,
                layout=layout,
                num_heads=shape.num_heads,
                max_rows=world.max_rows,
                max_tokens=world.budget,
                max_model_len=MAX_MODEL_LEN,
                most_drafts=world.most_drafts,
                deterministic=world.deterministic,
                accelerator=accelerator or make_accelerator(device),
                graph_sizes=world.graph_sizes,
            ),
            vocab_size=shape.vocab_size,
        )
        runner.capture_graphs()
        runners.append(runner)
        overlap = world.overlap and not world.drafts
        return Running(Engine(scheduler=world.scheduler(layout), runner=runner, overlap=overlap), runner=runner)

    yield make
    for runner in runners:
        runner.close()


@pytest.fixture
def on_the_cpu_path(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., AbstractContextManager[Running]]:
    """Return a context manager for the same engine with the runner and kernels of a CPU."""
    pytest.importorskip("numba")

    @contextmanager
    def make(world: World) -> Iterator[Running]:
        with monkeypatch.context() as patched:
            patched.setattr(dispatch, "INTERPRETED", False)
            dispatch.implementation.cache_clear()
            try:
                shape = checkpoint(world.family).shape
                layout = world.layout(shape)
                cpu = torch.device("cpu")
                parts = RunnerParts(
                    model=_build(checkpoint(world.family), cpu),
                    caches=_caches(layout, shape, cpu, spare=0),
                    layout=layout,
                    num_heads=shape.num_heads,
                    max_rows=world.max_rows,
                    max_tokens=world.budget,
                    max_model_len=MAX_MODEL_LEN,
                    accelerator=CpuAccelerator(),
                )
                runner = ModelRunner(parts, vocab_size=shape.vocab_size)
                yield Running(Engine(scheduler=world.scheduler(layout), runner=runner), runner=runner)
            finally:
                dispatch.implementation.cache_clear()

    return make


@pytest.fixture(scope="session")
def transformers_says(checkpoint: Callable[[str], Checkpoint]) -> Callable[[str, tuple[int, ...]], Answer]:
    """Return a function with transformers' greedy answer to a prompt in float32."""
    references = functools.cache(lambda family: load_reference(checkpoint(family).folder, CASES[family].attention))

    @functools.cache
    def answer(family: str, prompt: tuple[int, ...]) -> Answer:
        return generate(references(family), list(prompt))

    return answer


@pytest.fixture
def world() -> World:
    """Return settings to be changed by ``dataclasses.replace``."""
    return World()
