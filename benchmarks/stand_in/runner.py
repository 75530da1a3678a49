"""The device runner with a model without weights, and batches for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire_engine.core.batch import Admission, Batch, BlockUpdates
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.model.config import ModelConfig, parse_config
from quire_engine.model.families import FAMILIES
from quire_engine.model.linear import LinearBackend
from quire_engine.model.weightless import build_weightless
from quire_engine.runner.device.accelerator import Accelerator, InterpretedAccelerator
from quire_engine.runner.device.graphs import GraphSizes
from quire_engine.runner.device_runner import DeviceRunner
from quire_engine.runner.device_steps import DeviceParts
from quire_kernels.kv_cache import allocate_kv_cache

BLOCK_SIZE = 16
CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Llama-3.2-1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class EmptyGraph:
    """A graph whose replay costs the host nothing, as on a GPU it costs little."""

    def replay(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class EmptyGraphs(InterpretedAccelerator):
    """An accelerator whose graphs are empty: kernels run nothing here anyway."""

    def capture(self, work: Callable[[], None]) -> EmptyGraph:  # type: ignore[override]
        work()
        return EmptyGraph()


def model_config(name: str) -> ModelConfig:
    problems: list[str] = []
    config = parse_config({**_LLAMA, **MODELS[name]}, {}, tuple(FAMILIES), problems)
    assert config is not None, problems
    return config


def make_layout(config: ModelConfig, *, max_rows: int, max_model_len: int) -> KVCacheLayout:
    """Return blocks for ``max_rows`` sequences of ``max_model_len`` tokens."""
    blocks = max_rows * -(-max_model_len // BLOCK_SIZE)
    group = KVCacheGroup(layers=tuple(range(config.num_layers)), num_blocks=blocks, window=None)
    return KVCacheLayout(block_size=BLOCK_SIZE, groups=(group,))


@torch.inference_mode()
def make_runner(
    config: ModelConfig,
    *,
    max_rows: int,
    max_tokens: int,
    max_model_len: int,
    graph_sizes: GraphSizes,
    accelerator: Accelerator | None = None,
    backend: LinearBackend | None = None,
) -> DeviceRunner:
    """Return a runner with captured graphs. Memory is allocated, and hardly touched.

    backend  of linear layers; without one they compute and launch nothing, as if they were the library's
    """
    layout = make_layout(config, max_rows=max_rows, max_model_len=max_model_len)
    blocks = layout.groups[0].num_blocks
    caches = tuple(
        allocate_kv_cache(
            num_blocks=blocks + 1,
            block_size=BLOCK_SIZE,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.bfloat16,
            device=CPU,
        )
        for _ in range(config.num_layers)
    )
    return DeviceRunner(
        DeviceParts(
            model=build_weightless(config, torch.bfloat16, max_model_len, backend),
            caches=caches,
            layout=layout,
            num_heads=config.num_heads,
            max_rows=max_rows,
            max_tokens=max_tokens,
            max_model_len=max_model_len,
            device=CPU,
            accelerator=accelerator,
        ),
        vocab_size=config.vocab_size,
        graph_sizes=graph_sizes,
    )


def batch(scheduled: Sequence[int], *, context: int, params: SamplingParams, admits: bool) -> Batch:
    """Return a step in which sequence i computes ``scheduled[i]`` tokens after ``context`` ones, and samples.

    admits  the sequences get their rows and blocks in this step
    """
    rows = list(range(len(scheduled)))
    blocks = [-(-(context + count + 1) // BLOCK_SIZE) for count in scheduled]
    most = max(blocks)
    updates = BlockUpdates()
    if admits:
        updates = BlockUpdates(
            rows=[row for row in rows for _ in range(blocks[row])],
            positions=[place for row in rows for place in range(blocks[row])],
            blocks=[row * most + place for row in rows for place in range(blocks[row])],
        )
    return Batch(
        step=0,
        rows=rows,
        num_computed=[context] * len(rows),
        num_scheduled=list(scheduled),
        token_ids=[1] * sum(scheduled),
        samples=[True] * len(rows),
        feedback_tokens=[],
        admitted=[
            Admission(
                row=row,
                prompt_token_ids=[1] * (context + count),
                output_token_ids=[],
                params=params,
                seed=row,
                eos_token_ids=(0,),
            )
            for row, count in zip(rows, scheduled, strict=True)
        ]
        if admits
        else [],
        block_updates=(updates,),
        released_rows=[],
    )
